"""Training on two hosts with a link of known speed, on one machine: the namespaces of netns.py, one rank in each.

    sudo python benchmarks/netns_train.py --rate 1gbit --models mlp,alexnet

Measures in turn, so that all see the same noise: what plain TCP gets through the link, two processes that do not
communicate, ronde and DDP with float32 on the wire, and both with 16 bits (DDP over gloo has only float16). How the
bound is computed is in README.md.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from netns import Hosts, gloo_ranks, goodput, ronde_ranks
from rich.console import Console
from rich.table import Table

from ronde.cli.bench.cases import BenchmarkModel, parse_models
from ronde.cli.bench.peers import APART, DDP, TRAIN_PROGRAM, TrainingImplementation, TrainingSetup
from ronde.cli.bench.runner import OURS, BenchmarkProcesses, MeasurementBudget, RankPool
from ronde.cli.bench.table import format_ratio
from ronde.cli.bench.train import TrainingCase, TrainingResult
from ronde.errors import RondeError
from ronde.types import Deadline

START_S = 120.0
NUM_HOSTS = 2


def kits() -> list[TrainingImplementation]:
    """Everybody; on two hosts each rank has its own."""
    return [
        TrainingImplementation(APART, APART, NUM_HOSTS),
        TrainingImplementation("ronde", OURS, NUM_HOSTS),
        TrainingImplementation("ronde bfloat16", OURS, NUM_HOSTS, TrainingSetup(codec="bfloat16")),
        TrainingImplementation("ddp-view", DDP, NUM_HOSTS, TrainingSetup(view=True)),
        TrainingImplementation("ddp-view float16", DDP, NUM_HOSTS, TrainingSetup(view=True, codec="float16")),
    ]


def starting(kit: TrainingImplementation, hosts: Hosts) -> Callable[[Path], BenchmarkProcesses]:
    """How its ranks are started, each on its host."""
    if kit.role == OURS:
        return ronde_ranks(hosts, 1, {}, TRAIN_PROGRAM)
    return gloo_ranks(hosts, TRAIN_PROGRAM, kit.role)


def measure(hosts: Hosts, lanes: Sequence[TrainingCase], pace: MeasurementBudget) -> float:
    """Let the lanes train in turn; gigabits per second of the link, measured in turn with them."""
    for lane in lanes:
        lane.prepare()
        lane.settle(pace)
    link = []
    for turn in range(pace.repeats):
        link.append(goodput(hosts))
        first = turn % len(lanes)
        for lane in (*lanes[first:], *lanes[:first]):
            lane.run(pace)
    return statistics.median(link)


def rows(model: BenchmarkModel, records: Sequence[TrainingResult], link: float) -> list[tuple[str, ...]]:
    """What the table says of one network."""
    bound_ms = 8 * model.num_bytes / link / 1e6
    ddp = next(record for record in records if record.impl == "ddp-view")
    found: list[tuple[str, ...]] = []
    for record in records:
        travels = record.impl != APART
        found.append(
            (
                model.name,
                record.impl,
                f"{record.samples_per_s:,.1f}",
                f"{record.step_us / 1e3:.1f}",
                f"{record.backward_us / 1e3:.1f}",
                f"{bound_ms:.1f}" if travels else "",
                f"{1e3 * bound_ms / record.backward_us:.0%}" if travels else "",
                format_ratio(record.samples_per_s / ddp.samples_per_s) if record.impl.startswith(OURS) else "",
            )
        )
    return found


def train(
    hosts: Hosts, model: BenchmarkModel, batch: int, pace: MeasurementBudget, console: Console
) -> list[tuple[str, ...]]:
    """Start everybody, measure one network, end everybody."""
    with ExitStack() as stack:
        lanes = []
        for kit in kits():
            console.print(f"{model.name}: starting {kit.name}", style="dim")
            crew = RankPool(kit.name, NUM_HOSTS, starting(kit, hosts), Deadline(START_S))
            stack.callback(crew.close)
            lanes.append(TrainingCase(crew, kit, model, batch))
        console.print(f"{model.name}: training", style="dim")
        link = measure(hosts, lanes, pace)
        return rows(model, [lane.record() for lane in lanes], link)


def main(
    rate: Annotated[str, typer.Option(help="Speed of the link in each direction, as tc writes it.")] = "1gbit",
    models: Annotated[str, typer.Option(help="What to train.")] = "mlp,alexnet",
    batch: Annotated[int | None, typer.Option(min=1, help="Samples per rank and step, if not the model's own.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    seconds: Annotated[float, typer.Option(help="Seconds per line, shared by its bursts.")] = 25.0,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps per burst. Default: as many as fit.")] = None,
) -> None:
    """Train between two namespaces, against what the link allows."""
    if os.geteuid() != 0:
        raise typer.BadParameter("network namespaces need root: run with sudo")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console()
    table = Table("network", "", "samples/s", "step ms", "backward ms", "bound ms", "of the bound", "against DDP")
    chosen = parse_models(models)
    pace = MeasurementBudget(repeats=rounds, seconds=seconds, steps=steps)
    try:
        with Hosts(rate) as hosts:
            for model in chosen:
                for row in train(hosts, model, batch or model.batch, pace, console):
                    table.add_row(*row)
                table.add_section()
    except RondeError as error:
        console.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
