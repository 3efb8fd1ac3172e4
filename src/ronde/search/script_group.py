"""Trials that are runs of a command: a script that reads its parameters as flags and prints its metric. Each trial is a
job of the launcher, with an interpreter of its own in every rank. Nothing of the script has to be changed."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ronde.exit_codes import LOST_CODE
from ronde.launch.driver.driver import Driver
from ronde.launch.driver.failure_report import JobResult
from ronde.launch.job import Job
from ronde.launch.protocol import StdStream
from ronde.net.event_loop import start_thread
from ronde.search.protocol import (
    DriverToWorker,
    Outcome,
    PruneDecision,
    ReportedValue,
    StartTrial,
    TrialEnded,
    WorkerReady,
)
from ronde.search.results import format_value
from ronde.search.space import Parameters
from ronde.search.trial_output import OUTPUT_FOLDER, TrialOutput, trial_file_name
from ronde.search.worker_group import OVER, GroupEvent, GroupLost, WorkerEvent, describe_loss, kill_driver
from ronde.text import shorten

MAX_LINE_BYTES = 64 * 1024
"""A longer line is no metric."""
MAX_REASON_CHARS = 500
MAX_SHOWN_CHARS = 60
PRUNED = "the trial is pruned"


class MetricReader:
    """Finds the values of a metric in the standard output of rank 0, line by line."""

    def __init__(self, pattern: str, key: str) -> None:
        """`pattern` is a regular expression; its first group, or all of it, is the number. `key` is that of a JSON
        object on a line of its own, which may have a `step`, too. ValueError unless exactly one of them is given."""
        if bool(pattern) == bool(key):
            raise ValueError("a command needs `metric`, a regular expression, or `metric_key`, the key of JSON lines")
        try:
            self._pattern = re.compile(pattern) if pattern else None
        except re.error as error:
            raise ValueError(f"metric {pattern!r} is no regular expression: {error}") from None
        self._key = key
        self._rest = b""
        self._next_step = 0
        self._no_number = ""  # what was found last in the place of a number

    def feed(self, data: bytes) -> list[tuple[int, float]]:
        """Return the (step, value) of each line that is complete now and has one. NaN is a value, too."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-MAX_LINE_BYTES:]
        return [found for line in lines if (found := self._read(line)) is not None]

    def finish(self) -> list[tuple[int, float]]:
        """Return what a last line without an end has."""
        return self.feed(b"\n")

    def explain_missing(self, printed: Path) -> str:
        """Say why no value was found in an output that is in this file."""
        if self._no_number and self._pattern is not None:
            return f"`metric` has found {self._no_number!r}, which is no number: put the number alone into a group (…)"
        if self._no_number:
            return f"{self._key!r} in its JSON lines is no number: {self._no_number!r}"
        if not printed.exists():
            return "it has printed nothing, so there is no metric"
        name = "metric" if self._pattern is not None else "metric_key"
        return f"the metric is in no line of its standard output; compare `{name}` with {printed}"

    def _read(self, line: bytes) -> tuple[int, float] | None:
        text = line.decode(errors="replace").strip()
        step = None
        if self._pattern is not None:
            matches = list(self._pattern.finditer(text))
            if not matches:
                return None
            found: object = matches[-1].group(1 if self._pattern.groups else 0)
        else:
            if not text.startswith("{"):
                return None
            try:
                fields = json.loads(text)
            except ValueError:
                return None
            if self._key not in fields:
                return None
            found, step = fields[self._key], fields.get("step")
        try:
            value = float(found)  # type: ignore[arg-type]  # what is no number raises
        except (TypeError, ValueError):
            self._no_number = shorten(str(found), MAX_SHOWN_CHARS)
            return None
        if isinstance(step, bool) or not isinstance(step, int) or step < self._next_step:
            step = self._next_step
        self._next_step = step + 1
        return step, value


def make_command(command: Sequence[str], params: Parameters) -> tuple[str, ...]:
    """Return the command of a trial: `{lr}` becomes the value of lr, and parameters that the command does not name that
    way are added as flags: --lr 0.1, or --lr=-0.1, which argparse would take for another flag."""
    named = set()

    def replace_name(match: re.Match[str]) -> str:
        named.add(match[1])
        return format_value(params[match[1]])

    pattern = re.compile(r"\{(" + "|".join(map(re.escape, params)) + r")\}")
    words = [pattern.sub(replace_name, word) for word in command]
    for name, value in params.items():
        if name not in named:
            text = format_value(value)
            words += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
    return tuple(words)


class ScriptGroup:
    """Runs the command, once for each trial. For the search driver it is a group of one rank."""

    def __init__(
        self,
        index: int,
        job: Job,
        folder: Path,
        post: Callable[[GroupEvent], None],
        *,
        slot: int,
        make_reader: Callable[[], MetricReader],
    ) -> None:
        """The job's command is that of the user, without parameters. `slot` is that of rank 0 (Trial.slot)."""
        self._index = index
        self._job = job
        self._folder = folder
        self._post = post
        self._slot = slot
        self._make_reader = make_reader
        self._incarnation = 0
        self._driver: Driver | None = None
        self._thread: threading.Thread | None = None

    def start(self, incarnation: int) -> None:
        self._kill("its trial is over")
        self._incarnation = incarnation
        self._post(WorkerEvent(self._index, incarnation, 0, WorkerReady()))

    def send(self, message: DriverToWorker) -> None:
        if isinstance(message, StartTrial):
            self._start_trial(message)
        elif isinstance(message, PruneDecision) and message.prune and self._driver is not None:
            self._driver.stop(PRUNED)

    def stop(self, *, now: bool) -> None:
        if self._driver is not None:
            self._driver.stop(OVER)

    def close(self) -> None:
        self._kill(OVER)

    def _kill(self, reason: str) -> None:
        driver, thread = self._driver, self._thread
        self._driver = self._thread = None
        if driver is not None and thread is not None and thread.is_alive():
            kill_driver(driver, thread, reason)

    def _start_trial(self, start: StartTrial) -> None:
        if self._thread is not None:
            self._thread.join()  # it has posted its last event
        incarnation, reader = self._incarnation, self._make_reader()
        values: list[float] = []
        errors: dict[int, bytes] = {}

        def report(found: list[tuple[int, float]]) -> None:
            for step, value in found:
                values.append(value)
                if not math.isnan(value):
                    report = ReportedValue(start.number, start.attempt, step, value)
                    self._post(WorkerEvent(self._index, incarnation, 0, report))

        def on_data(rank: int, stream: StdStream, data: bytes) -> None:
            if rank == 0 and stream == "out":
                report(reader.feed(data))
            elif stream == "err":
                errors[rank] = (errors.get(rank, b"") + data)[-MAX_REASON_CHARS:]

        num_ranks = self._job.num_ranks
        output = TrialOutput(self._folder, f"group-{self._index}.txt", num_ranks=num_ranks, on_data=on_data)
        output.begin_trial(start.number)
        variables = {
            "RONDE_TRIAL": str(start.number),
            "RONDE_TRIAL_SEED": str(start.seed),
            "RONDE_TRIAL_SLOT": str(self._slot),
        }
        command = make_command(self._job.command, start.params)
        job = replace(self._job, command=command, env={**self._job.env, **variables})
        driver = self._driver = Driver(job, output)

        def run() -> None:
            try:
                result = driver.run()
                report(reader.finish())
                if result.summary:
                    output.print_message(result.summary)
                event = self._decide_end(start, incarnation, result, values, errors, reader)
            except Exception as error:  # the edge of the thread: the search driver has to know
                event = GroupLost(self._index, incarnation, f"{type(error).__name__}: {error}")
            output.close()
            self._post(event)

        self._thread = threading.Thread(target=run, name=f"ronde-search-{self._index}", daemon=True)
        start_thread(self._thread)

    def _decide_end(
        self,
        start: StartTrial,
        incarnation: int,
        result: JobResult,
        values: list[float],
        errors: Mapping[int, bytes],
        reader: MetricReader,
    ) -> GroupEvent:
        """`errors` has the end of what each rank has written to standard error. A script that ends by itself, also with
        an error, has ended its trial; one that was killed is lost."""

        def ended(outcome: Outcome, value: float = 0.0, reason: str = "") -> WorkerEvent:
            message = TrialEnded(start.number, start.attempt, outcome, value, reason)
            return WorkerEvent(self._index, incarnation, 0, message)

        if result.stop_request is not None and result.stop_request.reason == PRUNED:
            return ended(Outcome.PRUNED)
        if result.exit_code != 0:
            first = result.first_failed_rank
            code = result.exit_codes.get(-1 if first is None else first, LOST_CODE)
            was_killed = code < 0 or code == LOST_CODE
            if was_killed or result.stop_request is not None:
                return GroupLost(self._index, incarnation, describe_loss(result))
            last = errors.get(first or 0, b"").decode(errors="replace").strip().rpartition("\n")[2]
            reason = describe_loss(result)
            return ended(Outcome.FAILED, reason=shorten(f"{reason} ({last})" if last else reason, MAX_REASON_CHARS))
        if not values:
            printed = self._folder / OUTPUT_FOLDER / trial_file_name(start.number)
            return ended(Outcome.FAILED, reason=reader.explain_missing(printed))
        if math.isnan(values[-1]):
            return ended(Outcome.FAILED, reason="its metric is NaN: the parameters do not work")
        return ended(Outcome.COMPLETE, values[-1])
