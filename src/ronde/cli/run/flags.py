"""The flags of `ronde run`, made from launch/options. Used by command.

argparse, because it starts in milliseconds: what users wait for here, they wait for at every start of every job.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from ronde.launch.options import Option, options

__all__ = ["parse_flags"]

DESCRIPTION = """Start COMMAND as the ranks of one job, here or on many hosts.

  ronde run -np 4 python train.py
  ronde run -H host1:2,host2:4 python train.py --epochs 10

Whatever follows the first word of COMMAND belongs to it. The standard input of
ranks is empty, but for that of --debug."""


def parse_flags(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
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


class _Once(argparse.Action):
    """Of two values, one would be lost."""

    def __call__(self, parser: argparse.ArgumentParser, found: argparse.Namespace, value: Any, *_: Any) -> None:
        before = getattr(found, self.dest)
        if before is not None:
            raise argparse.ArgumentError(self, f"given twice, as {before!r} and {value!r}")
        setattr(found, self.dest, value)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _make_parser() -> _Parser:
    parser = _Parser(
        prog="ronde run",
        usage="ronde run [FLAGS] [--] COMMAND …",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=None,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options():
        group = groups.get(option.group) or groups.setdefault(option.group, parser.add_argument_group(option.group))
        _add(group, option)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    text = option.help.replace("%", "%%")
    if option.kind == "switch":
        group.add_argument(*option.all_flags, dest=option.name, action="store_const", const=True, help=text)
    else:
        action = "append" if option.kind == "many" else _Once
        group.add_argument(*option.all_flags, dest=option.name, action=action, metavar=option.metavar or "N", help=text)
