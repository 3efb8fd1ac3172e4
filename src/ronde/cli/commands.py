"""The subcommands of `ronde`. Each is a package or module of its own, imported when it is asked for. Used by main."""

from __future__ import annotations

import difflib
import importlib
import platform
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ronde.version import __version__

__all__ = ["COMMANDS", "app"]

COMMANDS = {
    "run": "ronde.cli.run_entry",
    "top": "ronde.cli.top",
    "stack": "ronde.cli.stack",
    "bench": "ronde.cli.bench.command",
    "doctor": "ronde.cli.doctor.command",
}
"""Modules whose `app`, a Typer, is the subcommand."""


class Commands(TyperGroup):
    """Finds subcommands in COMMANDS."""

    def list_commands(self, ctx: Any) -> list[str]:  # typer's own
        """See typer."""
        return [*COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # typer's own
        """See typer."""
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        command = typer.main.get_command(importlib.import_module(COMMANDS[cmd_name]).app)
        command.name = cmd_name
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # typer's own
        """See typer. It suggests only commands that it has itself."""
        name, names = args[0], self.list_commands(ctx)
        if name not in names and not name.startswith("-"):
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            ctx.fail(f"no such command: {name}; {hint}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="ronde",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # locals may hold a job's key
    rich_markup_mode=None,  # plain, as the help of `ronde run`
)


def _say_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def ronde_command(
    asked: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="As `ronde version`.")
    ] = False,
) -> None:
    """Distributed deep-learning training that says which rank, where and why."""


@app.command()
def version() -> None:
    """Say which ronde this is, on which Python."""
    typer.echo(f"ronde {__version__}, Python {platform.python_version()}, {platform.machine()} {platform.system()}")
