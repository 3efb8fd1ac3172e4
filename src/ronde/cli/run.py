"""`ronde run`: reads the flags and lets the driver run the job.

Nothing heavy is imported before the flags are known to be right.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ronde.cli.arguments import CommandParser, print_error
from ronde.errors import RondeError
from ronde.exit_codes import INTERRUPTED_CODE
from ronde.launch.config import HOST_OPTIONS, LaunchConfig, LaunchOption, launch_options, make_launch_config

if TYPE_CHECKING:
    from ronde.launch.driver.host_source import HostSource

DESCRIPTION = """Start COMMAND as the ranks of one job, here or on many hosts.

  ronde run -np 4 python train.py
  ronde run -H host1:2,host2:4 python train.py --epochs 10
  ronde run -np 4 --min-np 2 --max-np 8 --discover ./hosts.sh python train.py

Whatever follows the first word of COMMAND belongs to it. The standard input of
ranks is empty, but for that of --debug."""


def run(arguments: Sequence[str]) -> int:
    try:
        return _run_job(make_launch_config(*parse_arguments(arguments)))
    except (RondeError, ValueError, OSError) as error:
        return print_error("ronde run", error)
    except KeyboardInterrupt:  # while the driver does not handle signals yet, or not any more
        return INTERRUPTED_CODE


def _run_job(config: LaunchConfig) -> int:
    from ronde.launch.driver.driver import run_job
    from ronde.launch.output.printer import OutputOptions, Printer
    from ronde.launch.output.terminal import StandardStreams, TerminalInfo
    from ronde.launch.server_processes import process_names

    with ExitStack() as opened:
        streams = StandardStreams(sys.stdout.buffer, sys.stderr.buffer)
        if config.top:
            if not sys.stderr.isatty():
                raise ValueError("--top needs a terminal; `ronde top` can look at the job from one")
            from ronde.cli.top import live_status_table

            discard = opened.enter_context(open(os.devnull, "wb"))  # noqa: PTH123  # a device
            streams = StandardStreams(discard, discard)
            opened.enter_context(live_status_table(config.job.name or str(os.getpid())))
        terminal_info = TerminalInfo.detect(streams)
        options = OutputOptions(
            fold=config.fold,
            timestamps=config.timestamps,
            color=config.color and (terminal_info.out_is_terminal or terminal_info.err_is_terminal),
            output_dir=config.output_dir,
            terminal_info=terminal_info,
            names=process_names(config.job),
            debug_rank=config.job.debug_rank,
        )
        printer = Printer(streams, num_ranks=config.job.num_ranks, options=options)
        opened.enter_context(contextlib.closing(printer))
        result = run_job(config.job, printer, host_source=_make_host_source(config))
    # A job that was asked to end does not wait for someone to read its summary.
    if result.summary and (result.stop_request is None or select.select((), (sys.stderr,), (), 0)[1]):
        with contextlib.suppress(OSError):  # nobody reads it
            print(result.summary, file=sys.stderr, flush=True)
    return result.exit_code


def _make_host_source(config: LaunchConfig) -> HostSource | None:
    """Return where an elastic job learns its hosts; None for those of the job itself."""
    if not (config.discover or config.watched_hostfile):
        return None
    from ronde.elastic.discovery import DiscoveryScript, WatchedHostfile

    if config.discover:
        return DiscoveryScript(config.discover, slots_per_host=config.slots_per_host)
    return WatchedHostfile(config.watched_hostfile, slots_per_host=config.slots_per_host)


def parse_arguments(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The flags that were given, as texts (True for switches, a list where a flag may be repeated), and the command. A
    mistake ends the process, and so does --help (CommandParser.parse)."""
    parser = CommandParser("run", DESCRIPTION, usage="[FLAGS] [--] COMMAND …")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in launch_options():
        group = groups.get(option.group) or groups.setdefault(option.group, parser.add_argument_group(option.group))
        add_launch_option(group, option)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    flags = {name: value for name, value in vars(parser.parse(arguments)).items() if value is not None}
    num_ranks = flags.get("num_ranks", "")
    if num_ranks.startswith("p") and f"-n{num_ranks}" in arguments:  # argparse takes -np2 for -n p2
        flags["num_ranks"] = num_ranks.removeprefix("p")
    command = flags.pop("command", [])
    return flags, command[1:] if command[:1] == ["--"] else command


def add_launch_option(parser: argparse._ActionsContainer, option: LaunchOption) -> None:
    """Add the flags of an option to a parser or a group of one."""
    text = option.help.replace("%", "%%")
    if option.kind == "switch":
        parser.add_argument(*option.all_flags, dest=option.name, action="store_const", const=True, help=text)
    else:
        action = "append" if option.kind == "many" else _RejectRepeated
        metavar = option.metavar or "N"
        nargs = 2 if option.kind == "range" else None
        parser.add_argument(*option.all_flags, dest=option.name, action=action, metavar=metavar, nargs=nargs, help=text)


def add_host_options(parser: CommandParser, *more: str) -> None:
    """Add the flags with which every command says on which hosts its processes run, and these further ones."""
    group = parser.add_argument_group("As for `ronde run`")
    for option in launch_options():
        if option.name in (*HOST_OPTIONS, *more):
            add_launch_option(group, option)


class _RejectRepeated(argparse.Action):
    """Stores a value, and refuses a second one, which would replace the first unnoticed."""

    def __call__(self, parser: argparse.ArgumentParser, found: argparse.Namespace, value: Any, *_: Any) -> None:
        before = getattr(found, self.dest)
        if before is not None:
            raise argparse.ArgumentError(self, f"given twice, as {before!r} and {value!r}")
        setattr(found, self.dest, value)
