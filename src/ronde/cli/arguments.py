"""Reading the command line, the same for every command: one line on standard error and exit code 2 for a mistake, the
nearest flag or command for a misspelt one. Used by all commands.

argparse, because it is imported in milliseconds: users wait for it at every start of every job.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ronde.exit_codes import USAGE_ERROR_CODE


class Command(NamedTuple):
    """A command and where it is."""

    entry: str
    """`module:function`. The function takes the arguments and returns the exit code; its module is imported when the
    command is called."""
    help: str

    def __call__(self, arguments: Sequence[str]) -> int:
        module, _, function = self.entry.partition(":")
        exit_code: int = getattr(importlib.import_module(module), function)(arguments)
        return exit_code


class CommandParser(argparse.ArgumentParser):
    """The flags of one command, with its help. Texts for help are broken into lines by hand, for 80 columns."""

    def __init__(self, command: str, description: str, *, usage: str = "[FLAGS]", epilog: str = "") -> None:
        prog = f"ronde {command}".rstrip()
        raw = argparse.RawDescriptionHelpFormatter
        usage = f"{prog} {usage}".rstrip()
        super().__init__(prog, usage, description, epilog, formatter_class=raw, allow_abbrev=False)

    def add_flag(self, *names: str, metavar: str, help: str, default: Any = None, **more: Any) -> None:
        """Add a flag with a value. Its default, if it has one, is added to the help."""
        shown = "" if default is None else " Default: %(default)s."
        self.add_argument(*names, metavar=metavar, default=default, help=help + shown, **more)

    def add_job(self) -> None:
        """Add the argument of commands that look at a running job."""
        help = "Name of the job; not needed while only one is running."
        self.add_argument("job", nargs="?", default="", metavar="JOB", help=help)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the flags by name. A mistake ends the process (SystemExit) with one line, and --help with its text."""
        found, unknown = self.parse_known_args(arguments)
        if unknown:
            flags = [text for action in self._actions for text in action.option_strings]
            problem = "no such flag" if unknown[0].startswith("-") else "unexpected argument"
            hint = _nearest(unknown[0].partition("=")[0], flags) or f"`{self.prog} --help` shows all"
            self.error(f"{problem}: {unknown[0]}; {hint}")
        return found

    def error(self, message: str) -> NoReturn:
        """Called by argparse too."""
        sys.exit(print_error(self.prog, message))


def run_command(parser: CommandParser, commands: Mapping[str, Command], arguments: Sequence[str]) -> int:
    """Run the command that the first argument names, with the others: its exit code."""
    if not arguments:
        parser.print_help(sys.stderr)
        return USAGE_ERROR_CODE
    name, *rest = arguments
    if name in commands:
        return commands[name](rest)
    parser.parse([name] if name.startswith("-") else [])
    hint = _nearest(name, commands) or f"there are {', '.join(commands)}"
    return print_error(parser.prog, f"no such command: {name}; {hint}")


def list_commands(commands: Mapping[str, Command]) -> str:
    """For the end of the help."""
    width = max(map(len, commands))
    return "\n".join(["commands:", *(f"  {name:{width}}  {command.help}" for name, command in commands.items())])


def _nearest(text: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(text, known, n=1)
    return f"did you mean {nearest[0]}?" if nearest else ""


def print_error(prog: str, error: object) -> int:
    """Print one line on standard error; the exit code for mistakes of usage."""
    with contextlib.suppress(OSError):  # nobody reads it
        print(f"{prog}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return USAGE_ERROR_CODE


def whole_number(text: str) -> int:
    """The `type` of a flag whose value is a whole number of at least 1."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def number(minimum: float = float("-inf"), maximum: float = float("inf")) -> Callable[[str], float]:
    """Return the `type` of a flag whose value is a number in this range."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"must be from {minimum:g} to {maximum:g}, got {text!r}")
        return value

    return parse


def parse_option(text: str) -> tuple[str, Any]:
    """The `type` of a flag NAME=VALUE; the value is a number or another value of JSON, or a text."""
    import msgspec  # slower than the rest, and needed by few

    name, equals, value = text.partition("=")
    if not name.isidentifier() or not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value
