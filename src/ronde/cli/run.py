"""`ronde run`: reads what is asked for, and lets the driver do it. Used by cli/main, and by entry for the list of all
commands.

Nothing heavy is imported before the request is known to be right.

The flags of `ronde run`, made from launch/options. Used by command.

argparse, because it starts in milliseconds: what users wait for here, they wait for at every start of every job.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import select
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn

from ronde.errors import RondeError
from ronde.launch.config import LaunchConfig, LaunchOption, launch_options, make_launch_config

if TYPE_CHECKING:
    from ronde.launch.output.printer import Printer
    from ronde.launch.output.terminal import StandardStreams

__all__ = ["parse_arguments", "run"]

USAGE_ERROR_CODE = 2
INTERRUPTED_CODE = 130


def run(arguments: Sequence[str]) -> int:
    """Carry out `ronde run ARGUMENTS`: the exit code for the shell."""
    try:
        request = make_launch_config(*parse_arguments(arguments))
        return _run_job(request)
    except (RondeError, ValueError, OSError) as error:
        _print_error(f"ronde run: {' '.join(str(error).split())}")
        return USAGE_ERROR_CODE
    except KeyboardInterrupt:  # before the driver hears signals, or while a reader that has stopped is waited for
        return INTERRUPTED_CODE


def _run_job(request: LaunchConfig) -> int:
    from ronde.launch.driver.driver import Driver
    from ronde.launch.output.terminal import StandardStreams

    with ExitStack() as opened:
        target = StandardStreams(sys.stdout.buffer, sys.stderr.buffer)
        if request.top:
            if not sys.stderr.isatty():
                raise ValueError("--top needs a terminal; `ronde top` can look at the job from one")
            from ronde.cli.top import LiveStatusTable

            nowhere = opened.enter_context(open(os.devnull, "wb"))  # noqa: PTH123  # a device
            target = StandardStreams(nowhere, nowhere)
            opened.enter_context(LiveStatusTable(request.job.name or str(os.getpid())))
        screen = opened.enter_context(contextlib.closing(_make_printer(request, target)))
        outcome = Driver(request.job, screen).run()
    if outcome.summary and (outcome.stop_request is None or _accepts_output(sys.stderr.fileno())):
        _print_error(outcome.summary)
    return outcome.exit_code


def _make_printer(request: LaunchConfig, streams: StandardStreams) -> Printer:
    from ronde.launch.output.printer import OutputOptions, Printer
    from ronde.launch.output.terminal import TerminalInfo

    place = TerminalInfo.detect(streams)
    options = OutputOptions(
        fold=request.fold,
        timestamps=request.timestamps,
        color=request.color and (place.out_is_terminal or place.err_is_terminal),
        output_dir=request.output_dir,
        terminal_info=place,
        debug_rank=request.job.debug_rank,
    )
    return Printer(streams, num_ranks=request.job.num_ranks, options=options)


def _accepts_output(fd: int) -> bool:
    """Whether it takes a few lines now."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))


def _print_error(text: str) -> None:
    with contextlib.suppress(OSError):  # who does not read it does not need it
        print(text, file=sys.stderr, flush=True)


DESCRIPTION = """Start COMMAND as the ranks of one job, here or on many hosts.

  ronde run -np 4 python train.py
  ronde run -H host1:2,host2:4 python train.py --epochs 10

Whatever follows the first word of COMMAND belongs to it. The standard input of
ranks is empty, but for that of --debug."""


def parse_arguments(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The flags that were given, as texts (True for switches, a list where a flag may be repeated), and the command.
    ValueError says what is wrong; --help prints the help and exits."""
    parser = _make_parser()
    found, unknown = parser.parse_known_args(arguments)
    if unknown:
        flags = [text for action in parser._actions for text in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1)
        hint = f"did you mean {near[0]}?" if near else "`ronde run --help` shows all"
        raise ValueError(f"no such flag: {unknown[0]}; {hint}")
    flags_given = {name: value for name, value in vars(found).items() if value is not None}
    num_ranks = flags_given.get("num_ranks", "")
    if num_ranks.startswith("p") and f"-n{num_ranks}" in arguments:  # argparse takes -np2 for -n p2
        flags_given["num_ranks"] = num_ranks.removeprefix("p")
    command = flags_given.pop("command", [])
    return flags_given, command[1:] if command[:1] == ["--"] else command


class _RejectRepeated(argparse.Action):
    """Of two values, one would be lost."""

    def __call__(self, parser: argparse.ArgumentParser, found: argparse.Namespace, value: Any, *_: Any) -> None:
        before = getattr(found, self.dest)
        if before is not None:
            raise argparse.ArgumentError(self, f"given twice, as {before!r} and {value!r}")
        setattr(found, self.dest, value)


class _RaisingParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _make_parser() -> _RaisingParser:
    parser = _RaisingParser(
        prog="ronde run",
        usage="ronde run [FLAGS] [--] COMMAND …",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=None,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in launch_options():
        group = groups.get(option.group) or groups.setdefault(option.group, parser.add_argument_group(option.group))
        _add_option(group, option)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_option(group: argparse._ArgumentGroup, option: LaunchOption) -> None:
    text = option.help.replace("%", "%%")
    if option.kind == "switch":
        group.add_argument(*option.all_flags, dest=option.name, action="store_const", const=True, help=text)
    else:
        action = "append" if option.kind == "many" else _RejectRepeated
        group.add_argument(*option.all_flags, dest=option.name, action=action, metavar=option.metavar or "N", help=text)
