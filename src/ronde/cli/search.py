"""`ronde search`: reads the job file and the flags, runs the search, shows a live table, and writes the report."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ronde.cli.arguments import CommandParser, number, print_error, whole_number
from ronde.cli.run import add_host_options
from ronde.errors import RondeError
from ronde.exit_codes import INTERRUPTED_CODE
from ronde.launch.config import HOST_OPTIONS, explain_wrong_value, make_launch_config, read_section
from ronde.launch.job import Job
from ronde.launch.named_functions import module_folders
from ronde.text import format_compact_number, format_count, format_duration

if TYPE_CHECKING:
    from rich.table import Table

    from ronde.search.results import SearchResult, SearchStatus
    from ronde.search.run_search import SearchOptions

DESCRIPTION = """Search for hyper-parameters, as the section `search` of a job file says.

  ronde search job.yaml
  ronde search job.yaml --trials 100 --parallel 4
  ronde search job.yaml -H host1:4,host2:4

The search is kept in a folder (`output` in the file). The same command goes on
where a search has ended or was killed."""

LAUNCH_OPTIONS = (*HOST_OPTIONS, "cwd")
"""Options of `ronde run` that a search has, too; in the file they are in the section `run`."""
MAX_ROWS = 10
"""Trials that have ended in the live table: the best ones."""
REPORT_NAME = "report.html"


def search(arguments: Sequence[str]) -> int:
    parser = CommandParser("search", DESCRIPTION, usage="JOB.yaml [FLAGS]")
    parser.add_argument("file", metavar="JOB.yaml", help="Job file with a section `search`.")
    parser.add_flag("--trials", metavar="N", type=whole_number, help="How many trials there are.")
    parser.add_flag("--parallel", metavar="N", type=whole_number, help="How many run at a time.")
    parser.add_flag("--ranks-per-trial", metavar="N", type=whole_number, help="Ranks of each trial.")
    parser.add_flag("--direction", metavar="minimize|maximize", help="Which value is best.")
    parser.add_flag("--sampler", metavar="tpe|random|grid", help="What chooses the parameters.")
    parser.add_flag("--pruner", metavar="none|median|asha|hyperband", help="What ends trials that are not worth it.")
    parser.add_flag("--metric", metavar="REGEX", help="Of a command: finds the value in the lines that it prints.")
    parser.add_flag("--metric-key", metavar="KEY", help="Of a command: the value in the JSON lines that it prints.")
    parser.add_flag("--seed", metavar="N", type=int, help="Of the sampler and of the trials.")
    parser.add_flag("--retries", metavar="N", type=int, help="How often a trial may lose ranks and be run again.")
    help = "Replace the workers of an objective after so many trials, if it leaks memory."
    parser.add_flag("--trials-per-worker", metavar="N", type=whole_number, help=help)
    help = "A trial that takes longer has failed."
    parser.add_flag("--trial-s", metavar="SECONDS", type=number(minimum=0.0), help=help)
    parser.add_flag("--output", metavar="DIR", help="Folder of the search.")
    parser.add_argument("--overwrite", action="store_true", help="Begin anew: remove the search in that folder.")
    parser.add_argument("--json", action="store_true", help="Print the result as JSON.")
    add_host_options(parser, "cwd")
    flags = {name: value for name, value in vars(parser.parse(arguments)).items() if value is not None}
    path, overwrite, as_json = flags.pop("file"), flags.pop("overwrite"), flags.pop("json")
    launch_flags = {name: flags.pop(name) for name in LAUNCH_OPTIONS if name in flags}
    try:
        options = read_options(path, flags)
        job = make_base_job(path, launch_flags)
        return run_search(options, job, job_file=path, overwrite=overwrite, as_json=as_json)
    except (ValueError, TypeError, ModuleNotFoundError) as error:
        return print_error(parser.prog, _explain(error))
    except (RondeError, OSError) as error:
        print_error(parser.prog, error)
        return 1
    except KeyboardInterrupt:
        print_error(parser.prog, "interrupted; the same command goes on from here")
        return INTERRUPTED_CODE


def read_options(path: str, flags: dict[str, Any]) -> SearchOptions:
    """Return the section of the file, with these flags in the place of its keys. ValueError names file and key."""
    from ronde.search.run_search import SearchOptions, check_options

    options = read_section(path, "search", SearchOptions)
    values = {name: getattr(options, name) for name in options.__struct_fields__}
    for name in ("metric", "metric_key"):
        if name in flags:  # they exclude each other
            values["metric"] = values["metric_key"] = ""
    given = {**values, **flags}
    try:
        options = msgspec.convert(given, SearchOptions)
    except msgspec.ValidationError as error:
        name, _, rest = explain_wrong_value(SearchOptions, given, error).partition(" ")
        raise ValueError(f"--{name.replace('_', '-')} {rest}" if name in flags else f"{name} {rest}") from None
    try:
        check_options(options)
    except ValueError as error:
        raise ValueError(f"{path}: search: {error}") from None
    return options


def make_base_job(path: str, flags: dict[str, Any]) -> Job:
    """Return a job with the hosts, ssh options, environment and settings of the section `run` and of these flags."""
    job = make_launch_config({**flags, "config": path}, ["search"]).job
    return Job(
        command=(),
        num_ranks=1,
        hosts=job.hosts,
        ssh=job.ssh,
        python=job.python,
        env=job.env,
        cwd=job.cwd,
        settings=job.settings,
    )


def run_search(
    options: SearchOptions, job: Job, *, job_file: str, overwrite: bool = False, as_json: bool = False
) -> int:
    """Run a search and show it: the exit code. 0 if a trial is complete."""
    from ronde.dash.search_report import write_search_report
    from ronde.search.run_search import remove_search
    from ronde.search.run_search import search as run_trials

    folder = Path(options.output)
    if overwrite:
        remove_search(folder)
    with _signals_interrupt(), _paths_first(module_folders(job_file)), _show_progress(options.direction) as show:
        result = run_trials(options, job, folder, on_status=show)
    report = write_search_report(result, folder / REPORT_NAME, title=f"Search {folder.name}")
    is_good = any(trial.outcome.value == "complete" for trial in result.trials)
    if as_json:
        print(msgspec.json.encode(result.to_dict()).decode())
    else:
        print(describe_result(result, report))
    return 0 if is_good else 1


def describe_result(result: SearchResult, report: Path) -> str:
    """Say what came of a search, for the end of the output."""
    from ronde.search.results import format_params
    from ronde.search.trial_output import OUTPUT_FOLDER

    counts = {
        kind: sum(trial.outcome.value == kind for trial in result.trials) for kind in ("complete", "pruned", "failed")
    }
    shown = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    lines = [f"{format_count(len(result.trials), 'trial')} ({shown}); report: {report}"]
    if result.note:
        lines.append(result.note)
    if counts["complete"]:
        best = result.best
        lines.append(f"best: {format_compact_number(best.value)} in trial {best.number}: {format_params(best.params)}")
    else:
        lines.append("no trial is complete, so there is no best one; --overwrite begins the search anew")
    if counts["failed"]:
        lines.append(f"what the trials printed: {report.parent / OUTPUT_FOLDER}")
    return "\n".join(lines)


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the search as Ctrl-C does, so that no rank is left behind."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = {}
    for name in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(name) is not signal.SIG_IGN:
            before[name] = signal.signal(name, interrupt)
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


@contextmanager
def _paths_first(folders: list[str]) -> Iterator[None]:
    """Let workers, which get the search path of this process, find modules in these folders first."""
    before = sys.path[:]
    sys.path[:0] = folders
    try:
        yield
    finally:
        sys.path[:] = before


@contextmanager
def _show_progress(direction: str) -> Iterator[Callable[[SearchStatus], None]]:
    """Show a live table on a terminal, and a line for each trial elsewhere, on standard error."""
    if not sys.stderr.isatty():
        yield _LinePrinter().show
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show(status: SearchStatus) -> None:
            for message in status.messages:
                console.print(message, markup=False, highlight=False)
            live.update(render_search_table(status, direction), refresh=True)

        yield show


class _LinePrinter:
    """Prints a line for each trial that has ended, and for each message."""

    def __init__(self) -> None:
        self._num_shown: int | None = None

    def show(self, status: SearchStatus) -> None:
        from ronde.search.results import format_params

        if self._num_shown is None:
            self._num_shown = len(status.ended)
            if status.ended:
                print(f"{len(status.ended)} of {status.num_trials} trials have ended before", file=sys.stderr)
        for message in status.messages:
            print(message, file=sys.stderr)
        for trial in status.ended[self._num_shown :]:
            if trial.outcome.value != "failed":  # that is a message
                value = format_compact_number(trial.value)
                text = f"trial {trial.number} {trial.outcome.value}: {value}, {format_params(trial.params)}"
                print(f"{text}, {format_duration(trial.seconds)}", file=sys.stderr)
        self._num_shown = len(status.ended)
        sys.stderr.flush()


def render_search_table(status: SearchStatus, direction: str) -> Table:
    """Return the running trials and the best of those that have ended."""
    from rich.table import Table
    from rich.text import Text

    from ronde.search.results import format_params

    sign = -1.0 if direction == "maximize" else 1.0
    counts = {
        kind: sum(trial.outcome.value == kind for trial in status.ended) for kind in ("complete", "pruned", "failed")
    }
    shown = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "none has ended"
    title = f"{len(status.ended)} of {status.num_trials} trials ({shown}), {format_duration(status.seconds)}"
    if status.num_ready_groups < status.num_groups and not status.running:
        title += ", workers are starting"
    table = Table(title=Text(title), title_justify="left", box=None, padding=(0, 2, 0, 0), min_width=len(title))
    for name in ("trial", "state", "step", "value", "time", "parameters"):
        table.add_column(name, justify="right" if name in ("trial", "step", "value", "time") else "left", no_wrap=True)
    for running in status.running:
        state = "running" if running.attempt == 1 else f"running again ({running.attempt})"
        step = "" if running.step is None else str(running.step)
        value = "" if running.value is None else format_compact_number(running.value)
        cells = (str(running.number), Text(state, "green"), step, value, format_duration(running.seconds))
        table.add_row(*cells, Text(format_params(running.params)))
    complete = [trial for trial in status.ended if trial.outcome.value == "complete"]
    for trial in sorted(complete, key=lambda trial: sign * (trial.value or 0.0))[:MAX_ROWS]:
        style = "bold" if trial == status.best else ""
        ended, value = Text("best" if style else "complete"), format_compact_number(trial.value)
        cells = (str(trial.number), ended, "", value, format_duration(trial.seconds))
        table.add_row(*cells, Text(format_params(trial.params)), style=style)
    return table


def _explain(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "optuna":
        return "Optuna is not installed; run: pip install 'ronde[search]'"
    return str(error)
