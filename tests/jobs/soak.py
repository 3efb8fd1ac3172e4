"""Long runs of an elastic job under faults: `python -m tests.jobs.soak chaos|goodput [--minutes 30] [--json FILE]`.

chaos    kills, stops, preempts and cuts off ranks and hosts every few seconds, and checks that every sample was used
         exactly once in each epoch, that the loss is that of an undisturbed run, and that nothing hangs
goodput  kills ranks at regular intervals, and compares the finished steps with those of an undisturbed run

`make soak` runs both; tests/jobs/test_soak.py runs short ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.jobs.kit import HAS_SSH, RONDE, ROOT, SshHosts, kill, script

SUSPEND_S = 5.0
"""A stopped rank is left behind after so long, so that a run sees many of them."""
NUM_RANKS = 8
MIN_RANKS = 2
LOSS_TOLERANCE = 1e-3
START_S = 60.0
"""Before the first step: eight interpreters start."""
HANG_S = 90.0
"""A job that finishes no step for so long hangs."""


@dataclass
class SoakResult:
    name: str
    seconds: float
    faults: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    epochs: int = 0
    mean_size: float = 0.0
    num_restores: int = 0
    """How often all ranks were lost at once, so that others went on from the last checkpoint."""
    exact: bool = False
    loss: float = 0.0
    undisturbed_loss: float = 0.0
    goodput: float = 0.0
    """Finished steps per second and rank, divided by those of an undisturbed run. The CPU time that starting workers
    took is deducted from the seconds of both."""
    goodput_with_starts: float = 0.0
    """The same, with nothing deducted."""
    start_cpu_s: float = 0.0
    """CPU time that workers needed until they had built their models."""
    longest_pause_s: float = 0.0
    """Between two finished steps."""


class SoakJob:
    """`ronde run` with workers of scripts/soak.py; a context."""

    def __init__(
        self, folder: Path, words: Sequence[str], command: Sequence[str], *, worker_flags: Sequence[str]
    ) -> None:
        self.log = folder / f"log-{uuid.uuid4().hex[:8]}.jsonl"
        self.log.touch()
        self._mark = uuid.uuid4().hex
        self._offset = 0
        self.lines: list[dict[str, Any]] = []
        self.output = (folder / f"{self.log.stem}.txt").open("w+b")
        self.driver = subprocess.Popen(
            [
                *command,
                *words,
                "--env",
                f"SOAK_MARK={self._mark}",
                "--no-fold",
                *script("soak", "--log", str(self.log), *worker_flags),
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> SoakJob:
        return self

    def __exit__(self, *_: object) -> None:
        kill(self.driver)
        for process in self.workers():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.output.close()

    def read_log(self) -> list[dict[str, Any]]:
        """The lines that are new; all of them are in `lines`."""
        with self.log.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        new = [json.loads(line) for line in complete.splitlines()]
        self.lines += new
        return new

    def workers(self) -> list[psutil.Process]:
        """The processes of all workers that live."""
        found = []
        mark = f"SOAK_MARK={self._mark}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError, psutil.NoSuchProcess):
                variables = path.read_bytes().split(b"\0")
                process = psutil.Process(int(path.parent.name))
                if mark in variables and any(each.startswith(b"RONDE_WORKER=") for each in variables):
                    if "soak" in " ".join(process.cmdline()):
                        found.append(process)
        return found

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == "step"]

    def wait(self, timeout_s: float) -> int:
        return self.driver.wait(timeout_s)

    def printed(self, num_bytes: int = 6000) -> str:
        self.output.seek(0)
        return self.output.read()[-num_bytes:].decode(errors="replace")


def is_training(job: SoakJob, seconds: float) -> bool:
    """Whether no worker can have finished training yet. What is lost behind training fails the job: nobody makes up
    for it."""
    return bool(time.time() - job.lines[0]["at"] < seconds - 1.0)


# --- faults ------------------------------------------------------------------------------------------------------


def pick_workers(job: SoakJob, chance: random.Random, count: int) -> list[psutil.Process]:
    """Workers that may be disturbed: enough others stay for the smallest round."""
    running = [each for each in job.workers() if each.is_running() and each.status() != psutil.STATUS_STOPPED]
    chance.shuffle(running)
    return running[: max(0, min(count, len(running) - MIN_RANKS))]


def send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


class Faults:
    """What can be done to a job. Each returns after the fault has begun; heal() ends what lasts."""

    def __init__(self, job: SoakJob, chance: random.Random, hosts: SshHosts | None, hostfile: Path | None) -> None:
        self._job = job
        self._chance = chance
        self._hosts = hosts
        self._hostfile = hostfile
        self._heal_at: list[tuple[float, Callable[[], None]]] = []
        self.counts: Counter[str] = Counter()
        self.choices: dict[str, Callable[[], bool]] = {
            "kill": lambda: self._signal(1, signal.SIGKILL),
            "kill two": lambda: self._signal(2, signal.SIGKILL),
            "terminate": lambda: self._signal(1, signal.SIGTERM),
            "stop": lambda: self._stop(chance.uniform(0.5, 2.0)),
            "stop long": lambda: self._stop(chance.uniform(2 * SUSPEND_S, 3 * SUSPEND_S)),
        }
        if hosts is not None:
            self.choices["cut"] = lambda: self._cut(chance.uniform(0.5, 6.0))
        if hostfile is not None and hosts is not None:
            self.choices["remove host"] = lambda: self._remove_host(chance.uniform(3.0, 10.0))

    def cause_one(self) -> str:
        name = self._chance.choice(list(self.choices))
        if self.choices[name]():
            self.counts[name] += 1
            return name
        return ""

    def heal(self, *, everything: bool = False) -> None:
        now = time.monotonic()
        due = [each for each in self._heal_at if everything or each[0] <= now]
        self._heal_at = [each for each in self._heal_at if each not in due]
        for _, end in due:
            end()

    def _signal(self, count: int, number: signal.Signals) -> bool:
        chosen = pick_workers(self._job, self._chance, count)
        send(chosen, number)
        return len(chosen) == count

    def _stop(self, seconds: float) -> bool:
        chosen = pick_workers(self._job, self._chance, 1)
        send(chosen, signal.SIGSTOP)
        self._later(seconds, lambda: send(chosen, signal.SIGCONT))
        return bool(chosen)

    def _cut(self, seconds: float) -> bool:
        assert self._hosts is not None
        hosts, index = self._hosts, self._chance.choice([1, 2])
        hosts.cut(index)
        self._later(seconds, lambda: hosts.cut(index, "up"))
        return True

    def _remove_host(self, seconds: float) -> bool:
        assert self._hostfile is not None
        whole = self._hostfile.read_text()
        if len(whole.splitlines()) < 3:  # one is gone already
            return False
        gone = self._chance.choice([1, 2])
        self._hostfile.write_text("".join(line for index, line in enumerate(whole.splitlines(True)) if index != gone))
        hostfile = self._hostfile

        def add_again() -> None:
            hostfile.write_text(whole)

        self._later(seconds, add_again)
        return True

    def _later(self, seconds: float, end: Callable[[], None]) -> None:
        self._heal_at.append((time.monotonic() + seconds, end))


# --- runs --------------------------------------------------------------------------------------------------------


@contextmanager
def soak_hosts(folder: Path) -> Iterator[SshHosts | None]:
    """Three hosts with ssh, if they can be had."""
    if not HAS_SSH:
        yield None
        return
    with SshHosts(folder) as hosts:
        yield hosts


def job_words(*, hostfile: Path | None, num_ranks: int, min_ranks: int) -> list[str]:
    words = ["-np", str(num_ranks), "--min-np", str(min_ranks), "--max-np", str(NUM_RANKS), "--cooldown", "0.5", "4"]
    words += ["--suspend-s", str(SUSPEND_S)]
    return words if hostfile is None else [*words, "--hostfile", str(hostfile)]


def watch(job: SoakJob, seconds: float, on_tick: Callable[[], None]) -> None:
    """Call on_tick ten times a second until the time is over or the job has ended; TimeoutError when it hangs."""
    end = time.monotonic() + seconds
    last_step = time.monotonic()
    while time.monotonic() < end and job.driver.poll() is None:
        if any(line["event"] == "step" for line in job.read_log()):
            last_step = time.monotonic()
        if time.monotonic() - last_step > HANG_S:
            raise TimeoutError(f"no step was finished for {HANG_S:g} s\n{job.printed()}")
        on_tick()
        time.sleep(0.1)


def finish(job: SoakJob, result: SoakResult, timeout_s: float) -> SoakResult:
    """Wait for the end of the job and read what it has logged."""
    watch(job, timeout_s, lambda: None)
    code = job.wait(10.0) if job.driver.poll() is None else job.driver.returncode
    job.read_log()
    steps, ends = job.steps(), [line for line in job.lines if line["event"] == "end"]
    if code != 0 or not ends:
        raise AssertionError(f"the job ended with code {code}\n{job.printed()}")
    result.exact = all(not end["wrong"] for end in ends)
    result.loss = ends[0]["loss"]
    result.epochs, result.steps = ends[0]["epochs"], ends[0]["steps"]
    result.mean_size = sum(line["size"] for line in steps) / len(steps)
    result.longest_pause_s = max((b["at"] - a["at"] for a, b in itertools.pairwise(steps)), default=0.0)
    result.num_restores = sum(b["epoch"] < a["epoch"] for a, b in itertools.pairwise(steps))
    result.start_cpu_s = sum(line["cpu_s"] for line in job.lines if line["event"] == "built")
    return result


def run_chaos(folder: Path, seconds: float, seed: int, *, say: Callable[[str], None]) -> SoakResult:
    chance, result = random.Random(seed), SoakResult("chaos", seconds)
    with ExitStack() as opened:
        hosts = opened.enter_context(soak_hosts(folder))
        hostfile, command = None, [RONDE, "run"]
        if hosts is not None:
            hostfile = folder / "hosts"
            a, b, c = hosts.addresses
            hostfile.write_text(f"{a} slots=4\n{b} slots=2\n{c} slots=2\n")
            command = hosts.command()
        words = job_words(hostfile=hostfile, num_ranks=NUM_RANKS, min_ranks=MIN_RANKS)
        flags = ["--seconds", str(seconds)]
        job = opened.enter_context(SoakJob(folder, words, command, worker_flags=flags))
        faults = Faults(job, chance, hosts, hostfile)
        next_fault = time.monotonic()

        def disturb() -> None:
            nonlocal next_fault
            faults.heal()
            if job.steps() and is_training(job, seconds) and time.monotonic() >= next_fault:
                name = faults.cause_one()
                next_fault = time.monotonic() + chance.uniform(2.0, 10.0)
                last = job.steps()[-1]
                say(f"{name or 'nothing'}: step {last['step']}, {last['size']} ranks, {faults.counts.total()} faults")

        try:
            watch(job, START_S + seconds, disturb)
        finally:
            faults.heal(everything=True)
        finish(job, result, HANG_S)
        result.faults = dict(faults.counts)
    with SoakJob(
        folder, ["-np", "2"], [RONDE, "run"], worker_flags=["--epochs", str(result.epochs), "--sample-ms", "0"]
    ) as job:
        result.undisturbed_loss = finish(job, SoakResult("undisturbed", 0.0), HANG_S + seconds).loss
    return result


def run_goodput(folder: Path, seconds: float, seed: int, kills: int, *, say: Callable[[str], None]) -> SoakResult:
    """The undisturbed runs are before and after the disturbed one, and half as long together: so a machine that becomes
    faster or slower meanwhile changes little."""
    _, *before = _measure_rate(folder, seconds / 4, seed, 0, say=say)
    result, *disturbed = _measure_rate(folder, seconds, seed, kills, say=say)
    _, *after = _measure_rate(folder, seconds / 4, seed, 0, say=say)
    result.goodput, result.goodput_with_starts = (
        rate / ((first + last) / 2) for rate, first, last in zip(disturbed, before, after, strict=True)
    )
    return result


def _measure_rate(
    folder: Path, seconds: float, seed: int, kills: int, *, say: Callable[[str], None]
) -> tuple[SoakResult, float, float]:
    """Run a job in which so many workers are killed, one after the other. Returns its finished steps per second and
    rank (a smaller round takes longer for the same batch), too: without the time that all cores together need to start
    workers, and with it."""
    words = job_words(hostfile=None, num_ranks=NUM_RANKS, min_ranks=MIN_RANKS)
    with SoakJob(folder, words, [RONDE, "run"], worker_flags=["--seconds", str(seconds)]) as job:
        faults, interval = Faults(job, random.Random(seed), None, None), seconds / (kills + 1)

        def disturb() -> None:
            steps, num_killed = job.steps(), faults.counts["kill"]
            is_due = bool(steps) and time.time() - steps[0]["at"] >= (num_killed + 1) * interval
            if is_due and num_killed < kills and faults.choices["kill"]():
                faults.counts["kill"] += 1
                say(f"kill {num_killed + 1} of {kills}: {steps[-1]['size']} ranks")

        watch(job, START_S + seconds, disturb)
        result = finish(job, SoakResult("goodput", seconds, faults=dict(faults.counts)), HANG_S)
        steps = job.steps()
    # Without the start of the job and without its end, when nobody starts workers any more.
    inner = [line for line in steps if steps[0]["at"] + 1.0 <= line["at"] <= steps[0]["at"] + seconds]
    first, last = inner[0], inner[-1]
    rank_seconds = sum((after["at"] - before["at"]) * after["size"] for before, after in itertools.pairwise(inner))
    started = [line for line in job.lines if line["event"] == "built" and first["at"] < line["at"] < last["at"]]
    starting_s = sum(line["cpu_s"] for line in started) / len(os.sched_getaffinity(0))
    num_steps, seconds_measured = last["step"] - first["step"], last["at"] - first["at"]
    rate = num_steps / rank_seconds
    say(f"{num_steps} steps in {seconds_measured:.0f} s, starting workers took {starting_s:.1f} s of all cores")
    return result, rate / (1 - starting_s / seconds_measured), rate


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["chaos", "goodput"])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kills", type=int, default=62)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    print(f"{flags.what}: {flags.minutes:g} minutes, seed {flags.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak") as name:
        seconds = 60.0 * flags.minutes
        if flags.what == "chaos":
            result = run_chaos(Path(name), seconds, flags.seed, say=_say)
        else:
            result = run_goodput(Path(name), seconds, flags.seed, flags.kills, say=_say)
    text = json.dumps(asdict(result), indent=2)
    print(text)
    if flags.json:
        flags.json.write_text(text + "\n")
    return 0 if result.exact else 1


if __name__ == "__main__":
    sys.exit(main())
