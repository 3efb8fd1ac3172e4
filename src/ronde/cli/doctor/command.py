"""`ronde doctor`: can jobs run on these hosts, and how fast do they talk? Used by cli/commands."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from ronde.cli.doctor.diagnosis import diagnose
from ronde.cli.doctor.report import Report
from ronde.cli.doctor.survey import Survey
from ronde.cli.doctor.table import draw_report
from ronde.launch.config import make_request
from ronde.launch.job import Job
from ronde.launch.options import options

__all__ = ["app"]

BROKEN_CODE = 1
WRONG_CODE = 2
INTERRUPTED_CODE = 130

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False, rich_markup_mode=None)


def _flag(name: str) -> Any:  # typer's own
    """The same as that of `ronde run`."""
    option = next(option for option in options() if option.name == name)
    return typer.Option(*option.flags, option.flag, help=option.help, metavar=option.metavar)


Text = str | None


@app.command()
def doctor(
    hosts: Annotated[Text, _flag("hosts")] = None,
    hostfile: Annotated[Text, _flag("hostfile")] = None,
    ssh_port: Annotated[Text, _flag("ssh_port")] = None,
    ssh_identity: Annotated[Text, _flag("ssh_identity")] = None,
    ssh_option: Annotated[list[str] | None, _flag("ssh_option")] = None,
    ssh_start_s: Annotated[Text, _flag("ssh_start_s")] = None,
    python: Annotated[Text, _flag("python")] = None,
    json: Annotated[bool, typer.Option("--json", help="Everything as JSON, on standard output.")] = False,
) -> None:
    """Say whether jobs can run on these hosts, and what to do if not.

    Without hosts: on this machine. Looks at versions, frameworks, data planes, cores, memory, shared memory and limits
    of every host, and measures how fast ranks talk, on each host and between all pairs of hosts. Ends with 1 when
    something is broken that jobs need.
    """
    given = {
        "hosts": hosts,
        "hostfile": hostfile,
        "ssh_port": ssh_port,
        "ssh_identity": ssh_identity,
        "ssh_option": ssh_option or None,
        "ssh_start_s": ssh_start_s,
        "python": python,
    }
    try:
        request = make_request({name: value for name, value in given.items() if value is not None}, ("ronde doctor",))
    except ValueError as error:
        typer.echo(f"ronde doctor: {error}", err=True)
        raise typer.Exit(WRONG_CODE) from None
    try:
        report = examine_all(request.job)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_CODE) from None
    if json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    else:
        Console().print(draw_report(report))
    raise typer.Exit(0 if report.healthy else BROKEN_CODE)


def examine_all(job: Job) -> Report:
    """Look at everything, and say on a terminal what is being done."""
    with ExitStack() as opened:
        survey = opened.enter_context(Survey(job))
        progress = opened.enter_context(Progress())
        progress.say("looking at", survey.num_hosts, "host")
        hosts = survey.look_at_hosts(progress.step)
        usable = [host.name for host in hosts if host.facts is not None]
        num_pairs = len(usable) * (len(usable) + 1) // 2
        progress.say("measuring", num_pairs, "pair")
        return diagnose(hosts, survey.look_at_pairs(usable, progress.step))


class Progress:
    """What is being done, on standard error, where that is a terminal. A context."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._status = console.status("") if console.is_terminal else None
        self._doing, self._done, self._most = "", 0, 0

    def __enter__(self) -> Progress:
        """Itself, shown."""
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Gone again."""
        if self._status is not None:
            self._status.stop()

    def say(self, doing: str, most: int, what: str) -> None:
        """Something new begins."""
        self._doing, self._done, self._most = f"{doing} {most} {what}{'s' * (most != 1)}", 0, most
        self._show()

    def step(self) -> None:
        """One of them is done. From any thread."""
        self._done += 1
        self._show()

    def _show(self) -> None:
        if self._status is not None:
            self._status.update(f"{self._doing}{f', {self._done} done' if self._done else ''} …")
