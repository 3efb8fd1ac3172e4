"""`ronde stack`: the Python stacks of the ranks of a running job, equal ones printed once."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

import msgspec

from ronde.cli.arguments import CommandParser, number, print_error
from ronde.errors import RondeError
from ronde.launch.driver.monitor import NoSuchJob, find_job, query_stacks
from ronde.observe.stacks import RankStack, group_stacks
from ronde.text import format_ranks

DESCRIPTION = """Print where every rank of a running job is: its Python stack.

Ranks with the same stack are shown together. The job is not disturbed: a
thread of each rank answers while its program goes on. A rank that holds
Python's interpreter lock, is stopped, or has not called ronde.init() cannot
answer; what is known of it is printed instead."""


def stack(arguments: Sequence[str]) -> int:
    parser = CommandParser("stack", DESCRIPTION, usage="[FLAGS] [JOB]")
    parser.add_job()
    parser.add_argument("--json", action="store_true", help="Print JSON, a stack per rank.")
    parser.add_argument(
        "--limit",
        metavar="SECONDS",
        type=number(0.1, 60.0),
        default=5.0,
        help="How long a rank may take to answer, 0.1 to 60. Default: %(default)g.",
    )
    flags = parser.parse(arguments)
    try:
        stacks = query_stacks(find_job(flags.job), flags.limit)
    except (NoSuchJob, RondeError, OSError) as error:
        return print_error(parser.prog, error)
    if flags.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode({"ranks": stacks})) + b"\n")
    else:
        print(format_stacks(stacks))
    return 0


def format_stacks(stacks: tuple[RankStack, ...]) -> str:
    """All stacks, the one of most ranks first: `ranks 0-6: train.py:42 in step: …`, then the stack; or the reason why
    there is none."""
    blocks = []
    for ranks, first in group_stacks(stacks):
        process = f" on {first.host}, pid {first.pid}" if len(ranks) == 1 and first.pid else ""
        text = f"{first.line}\n{textwrap.indent(first.stack, '  ')}" if first.line else first.why
        each = ", each" if not first.line and len(ranks) > 1 else ""
        blocks.append(f"{format_ranks(ranks)}{process}{each}: {text}".rstrip())
    return "\n\n".join(blocks)
