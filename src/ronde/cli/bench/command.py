"""`ronde bench`: the list of benchmarks, and what their commands share."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from ronde.cli.arguments import Command, CommandParser, list_commands, number, print_error, run_command, whole_number
from ronde.errors import RondeError

BENCHMARKS = {
    "allreduce": Command("ronde.cli.bench.allreduce:allreduce", "Sum float32 arrays over all ranks, in place."),
    "negotiation": Command(
        "ronde.cli.bench.negotiation:negotiation", "Time per named operation, against how many are in flight."
    ),
    "elastic": Command("ronde.cli.bench.elastic:elastic", "How long training stops when a rank is lost."),
    "ps": Command("ronde.cli.bench.parameter_server:ps", "A parameter server in each mode, with slow workers."),
    "train": Command("ronde.cli.bench.train:train", "Train with ronde, with DDP, and without communication."),
}


def bench(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "bench",
        "Measure ronde on this machine, in turn with gloo, DDP and MPI.",
        usage="BENCHMARK …",
        epilog=f"{list_commands(BENCHMARKS)}\n\n`ronde bench BENCHMARK --help` has more.",
    )
    return run_command(parser, BENCHMARKS, arguments)


def make_parser(
    name: str, *, details: str = "", rounds_flag: str = "--repeats", rounds: int, seconds: float, work: str = "size"
) -> CommandParser:
    """A parser with the flags that all benchmarks have; `rounds` and `seconds` are defaults."""
    parser = CommandParser(f"bench {name}", "\n\n".join(filter(None, (BENCHMARKS[name].help, details))))
    names = ("-np", "-n", "--ranks", "--num-ranks")
    parser.add_flag(*names, dest="num_ranks", metavar="N", type=whole_number, default=2, help="Number of ranks.")
    parser.add_flag("--json", metavar="FILE", help="Write the results to this file, one JSON object per line.")
    rounds_help = f"Rounds per implementation and {work}."
    parser.add_flag(rounds_flag, dest="rounds", metavar="N", type=whole_number, default=rounds, help=rounds_help)
    seconds_help = f"Time per implementation and {work}, shared by its rounds."
    parser.add_flag("--seconds", metavar="SECONDS", type=number(), default=seconds, help=seconds_help)
    return parser


def run_benchmark(
    parser: CommandParser, arguments: Sequence[str], measure: Callable[[argparse.Namespace, Console], None]
) -> int:
    """Parse the arguments and measure: the exit code. A ValueError of `measure` is a mistake of usage, a RondeError is
    printed as what it is. SIGTERM ends the ranks as Ctrl-C does."""
    flags = parser.parse(arguments)
    console = Console()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        measure(flags, console)
    except ValueError as error:
        return print_error(parser.prog, error)
    except RondeError as error:
        console.print(Text(f"error: {error}", style="red"), soft_wrap=True)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def parse_numbers(text: str, flag: str) -> tuple[int, ...]:
    """`1,10,100` as numbers from 1. ValueError names the flag."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not (part.isascii() and part.isdigit()) or int(part) < 1:
            raise ValueError(f"{flag} must be whole numbers from 1, separated by commas; got {part!r}")
    return tuple(int(part) for part in parts)
