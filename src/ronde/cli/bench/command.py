"""The subcommands of `ronde bench`. Used by cli/main.py."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console, RenderableType
from rich.text import Text

from ronde.cli.bench.cases import MANY, MODELS, Workload, parse_models, parse_numbers, parse_works
from ronde.cli.bench.peers import RondeImplementation, find_kits, find_peers, parse_codec
from ronde.cli.bench.runner import (
    AllreduceCase,
    AllreduceImplementation,
    BenchmarkResult,
    BenchmarkRunner,
    MeasurementBudget,
    lanes_of,
)
from ronde.cli.bench.table import (
    BenchmarkDisplay,
    allreduce_table,
    conditions,
    negotiation_table,
    ranks_table,
    train_tables,
)
from ronde.cli.bench.train import TrainingResult, no_room, train
from ronde.errors import RondeError
from ronde.text import format_exact_bytes

__all__ = ["app"]

PATHS = ("array", "bucket", "many")
SIZES = "4K,64K,1M,16M,64M,256M,many"

app = typer.Typer(
    help="Measure ronde on this machine, in turn with gloo, DDP and MPI.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
)


def _option(metavar: str, words: str, *flags: str, least: int | None = None) -> Any:  # typer's own
    return typer.Option(*flags, metavar=metavar, help=words, min=least)


PEERS = "Measure these too: gloo, hvd, mpi (every MPI found), openmpi, mpich; or none."

Ranks = Annotated[int, _option("N", "Number of ranks.", "-np", "-n", "--ranks", "--num-ranks", least=1)]
Peers = Annotated[str | None, _option("PEER,…", f"{PEERS} Default: all there are.")]
MpiPythons = Annotated[
    list[str] | None,
    _option("PATH", "Python of an environment with mpi4py and an MPI library. Repeatable.", "--mpi-python"),
]
Json = Annotated[Path | None, _option("FILE", "Write the results to this file, one JSON object per line.", "--json")]
Repeats = Annotated[int, _option("N", "Bursts per implementation and size.", least=1)]
Seconds = Annotated[float, _option("SECONDS", "Time per implementation and size, shared by its bursts.")]


@app.command()
def allreduce(
    np: Ranks = 2,
    sizes: Annotated[str, _option("SIZE,…", "Bytes per rank; many: the 161 gradients of ResNet-50.")] = SIZES,
    paths: Annotated[str, _option("PATH,…", "Ways through ronde: array, bucket, many.")] = ",".join(PATHS),
    peers: Peers = None,
    mpi_pythons: MpiPythons = None,
    json: Json = None,
    repeats: Repeats = 10,
    seconds: Seconds = 1.0,
) -> None:
    """Sum float32 arrays over all ranks, in place."""
    with reporting() as console:
        works = chosen_works(sizes, paths)
        pace = MeasurementBudget(repeats=repeats, seconds=seconds)
        found = find_peers(peers, mpi_pythons or ())
        kits: list[AllreduceImplementation] = [RondeImplementation(), *found.peers]
        caption = conditions(np)
        with (
            BenchmarkDisplay[BenchmarkResult](
                console, lambda records: allreduce_table(records, caption), json
            ) as screen,
            BenchmarkRunner(pace, screen.note, screen.say) as field,
        ):
            for note in found.notes:
                screen.note(note)
            for kit in kits:
                field.start(kit, np)
            for work in works:
                lanes = lanes_of(field.crews, kits, work, paths.split(","))
                if has_room(lanes, work, screen):
                    screen.add(field.race("allreduce", work.num_bytes, lanes))


@app.command()
def negotiation(
    np: Ranks = 2,
    flight: Annotated[str, _option("N,…", "How many operations are in flight at once.")] = "1,10,100,1000,10000",
    json: Json = None,
    repeats: Repeats = 10,
    seconds: Seconds = 1.0,
) -> None:
    """Time per named operation, against how many are in flight.

    Each reduces 4 bytes.
    """
    with reporting() as console:
        flights = parse_numbers(flight, "--flight")
        pace = MeasurementBudget(repeats=repeats, seconds=seconds)
        caption = conditions(np)
        with (
            BenchmarkDisplay[BenchmarkResult](
                console, lambda records: negotiation_table(records, flights, caption), json
            ) as screen,
            BenchmarkRunner(pace, screen.note, screen.say) as field,
        ):
            field.start(RondeImplementation(), np)
            for num in flights:
                lane = AllreduceCase(field.crews[0], "many", (1,), repeat=num, label=f"flight-{num}")
                screen.add(field.race("negotiation", 4, [lane]))


@app.command()
def ranks(
    counts: Annotated[str, _option("N,…", "Numbers of ranks.")] = "2,4,8,16,32,64",
    sizes: Annotated[str, _option("SIZE,…", "Bytes per rank.")] = "4K,1M",
    peers: Annotated[str, _option("PEER,…", PEERS)] = "none",
    mpi_pythons: MpiPythons = None,
    json: Json = None,
    repeats: Repeats = 3,
    seconds: Seconds = 0.5,
) -> None:
    """How starting and reducing get slower with more ranks."""
    with reporting() as console:
        works = chosen_works(sizes, "array")
        numbers = parse_numbers(counts, "--counts")
        pace = MeasurementBudget(repeats=repeats, seconds=seconds)
        kits: list[AllreduceImplementation] = [RondeImplementation(), *find_peers(peers, mpi_pythons or ()).peers]
        caption = conditions()
        with BenchmarkDisplay[BenchmarkResult](console, lambda records: ranks_table(records, caption), json) as screen:
            for num in numbers:
                with BenchmarkRunner(pace, screen.note, screen.say) as field:
                    for kit in kits:
                        screen.add(timed_start(field, kit, num))
                    for work in works:
                        lanes = lanes_of(field.crews, kits, work, ("array",))
                        screen.add(field.race("allreduce", work.num_bytes, lanes))


@app.command("train")
def train_command(
    np: Ranks = 2,
    models: Annotated[str, _option("MODEL,…", "What to train.")] = ",".join(MODELS),
    batch: Annotated[int | None, _option("N", "Samples per rank and step, if not the model's own.", least=1)] = None,
    codec: Annotated[str, _option("CODEC", "Gradients on the wire: none, float16, bfloat16.")] = "none",
    peers: Annotated[str | None, _option("PEER,…", "Measure these too: ddp, hvd; or none. Default: all.")] = None,
    ddp_buckets: Annotated[str, _option("MB,…", "Sizes of buckets that DDP tries too.")] = "10,100",
    json: Json = None,
    rounds: Annotated[int, _option("N", "Bursts per implementation and model.", least=1)] = 7,
    seconds: Annotated[float, _option("SECONDS", "Time per implementation and model, shared by its bursts.")] = 14.0,
    steps: Annotated[int | None, _option("N", "Steps per burst. Default: as many as fit.", least=1)] = None,
) -> None:
    """Train with ronde, with DDP, and without communication.

    One thread per rank: alone, without communication, with ronde, with Horovod's interface, with DDP.
    """
    with reporting() as console:
        chosen = parse_models(models)
        pace = MeasurementBudget(repeats=rounds, seconds=seconds, steps=steps)
        found = find_kits(np, parse_codec(codec), peers, parse_numbers(ddp_buckets, "--ddp-buckets"))
        caption = conditions(np)

        def draw(records: list[TrainingResult]) -> RenderableType:
            return train_tables(records, caption, width=console.width)

        with BenchmarkDisplay(console, draw, json) as screen:
            for note in found.notes:
                screen.note(note)
            for model in chosen:
                why_not = no_room(model, found.kits)
                if why_not:
                    screen.note(f"{model.name} is left out: it {why_not}")
                    continue
                with BenchmarkRunner(pace, screen.note, screen.say) as field:
                    screen.add(train(field, model, batch or model.batch, found.kits))


def chosen_works(sizes: str, paths: str) -> list[Workload]:
    """The sizes that at least one of the asked-for paths is for."""
    chosen = paths.split(",")
    for path in chosen:
        if path not in PATHS:
            raise ValueError(f"no such path: {path!r}; there are {', '.join(PATHS)}")
    single = bool({"array", "bucket"} & set(chosen))
    works = [work for work in parse_works(sizes) if (MANY in chosen if work.is_many else single)]
    if not works:
        raise ValueError(f"nothing to measure: none of the sizes {sizes!r} goes with the paths {paths!r}")
    return works


def has_room(lanes: Sequence[AllreduceCase], work: Workload, screen: BenchmarkDisplay[BenchmarkResult]) -> bool:
    """Whether the work fits into memory: each rank's array, and as much again inside the library."""
    needed = sum(2 * work.num_bytes * lane.crew.size for lane in lanes)
    available = psutil.virtual_memory().available
    if needed > available:
        needs = f"needs about {needed / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are free"
        screen.note(f"{format_exact_bytes(work.num_bytes)} is left out: it {needs}")
    return needed <= available


def timed_start(field: BenchmarkRunner, kit: AllreduceImplementation, num_ranks: int) -> list[BenchmarkResult]:
    """Start a crew; how long it took, from nothing to the first word of the last rank."""
    num_before = len(field.crews)
    start = time.perf_counter()
    field.start(kit, num_ranks)
    took_us = round((time.perf_counter() - start) * 1e6, 1)
    if len(field.crews) == num_before:
        return []
    return [BenchmarkResult(kit.name, "start", "", num_ranks, 0, took_us, took_us, 0.0)]


@contextmanager
def reporting() -> Iterator[Console]:
    """Turn errors into words: a wrong option is the user's, a failed crew is ours. SIGTERM ends like Ctrl-C does."""
    console = Console()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield console
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except RondeError as error:
        console.print(Text(f"error: {error}", style="red"), soft_wrap=True)
        raise typer.Exit(1) from None
    finally:
        signal.signal(signal.SIGTERM, before)
