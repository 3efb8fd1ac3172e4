"""The `ronde` command: its subcommands, each in a package or module of its own."""

from __future__ import annotations

import platform

import typer

import ronde
from ronde.cli.bench.command import app as bench

__all__ = ["app", "main"]

app = typer.Typer(
    name="ronde",
    help="Distributed deep-learning training that says which rank, where and why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # locals may hold a job's key
)
app.add_typer(bench, name="bench")


@app.command()
def version() -> None:
    """Say which ronde this is, on which Python."""
    typer.echo(
        f"ronde {ronde.__version__}, Python {platform.python_version()}, {platform.machine()} {platform.system()}"
    )


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
