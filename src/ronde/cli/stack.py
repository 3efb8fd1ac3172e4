"""`ronde stack`: where the programs of a running job's ranks are, those at the same place together."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer

from ronde.errors import RondeError
from ronde.launch.driver.monitor import NoSuchJob, find_job, query_stacks
from ronde.observe.stacks import RankStack, group_stacks
from ronde.text import format_ranks

__all__ = ["app", "format_stacks"]

USAGE_ERROR_CODE = 2

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False, rich_markup_mode=None)


@app.command()
def stack(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Its name; not needed while only one is running.")] = "",
    json: Annotated[bool, typer.Option("--json", help="As JSON, a stack per rank.")] = False,
    timeout_s: Annotated[
        float, typer.Option("--limit", metavar="SECONDS", min=0.1, max=60.0, help="How long a rank may take to answer.")
    ] = 5.0,
) -> None:
    """Print where every rank of a running job is: its Python stack.

    Ranks at the same place are shown together. It disturbs nobody: a thread of each rank answers while its program goes
    on. A rank that holds Python's interpreter, is stopped, or has not called ronde.init() cannot answer; then what is
    known of it is said.
    """
    try:
        found = query_stacks(find_job(job), timeout_s)
    except (NoSuchJob, RondeError, OSError) as error:
        typer.echo(f"ronde stack: {error}", err=True)
        raise typer.Exit(USAGE_ERROR_CODE) from None
    if json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode({"ranks": found})) + b"\n")
    else:
        typer.echo(format_stacks(found))


def format_stacks(stacks: tuple[RankStack, ...]) -> str:
    """All stacks, most ranks first: `ranks 0-6: train.py:42 in step: …`, then the stack."""
    blocks = []
    for ranks, at in group_stacks(stacks):
        who = f" on {at.host}, pid {at.pid}" if len(ranks) == 1 and at.pid else ""
        why = at.why.removeprefix("its process ")  # it follows the rank's name
        why = why if len(ranks) == 1 else _pluralize(why)
        where = f": {at.line}\n{_indent(at.stack)}" if at.line else f" {why}"
        blocks.append(f"{format_ranks(ranks)}{who}{where}".rstrip())
    return "\n\n".join(blocks)


def _pluralize(reason: str) -> str:
    """What is said of one rank, for more of them."""
    verb, space, rest = reason.partition(" ")
    verbs = {"has": "have", "does": "do", "is": "are"}
    return verbs.get(verb, verb) + space + rest.replace("; its process is", "; their processes are")


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" if line else line for line in text.splitlines())
