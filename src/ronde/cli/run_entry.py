"""How `ronde run` shows in the list of all commands. Used by commands; the console script goes past it, see main."""

from __future__ import annotations

from typing import Annotated

import typer

from ronde.cli.run import run

__all__ = ["app"]

app = typer.Typer(add_completion=False)


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}
)
def start(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Start a command as the ranks of one job, here or on many hosts."""
    raise typer.Exit(run(arguments or ()))
