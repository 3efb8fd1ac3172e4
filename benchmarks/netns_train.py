"""Training on two hosts with a link of known speed, on one machine: the namespaces of netns.py, one rank in each.

    sudo python benchmarks/netns_train.py --rate 1gbit --models mlp,alexnet

Measures in turn, so that all see the same noise: what plain TCP gets through the link, two processes that do not
communicate, ronde and DDP with float32 on the wire, and both with 16 bits (DDP over gloo has only float16). How the
bound is computed is in README.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import ExitStack

from netns import Hosts, goodput, peer_ranks, ronde_ranks, run_as_root
from rich.console import Console
from rich.table import Table

from ronde.cli.bench.models import BenchmarkModel, parse_models
from ronde.cli.bench.peers import MeasuredLibrary
from ronde.cli.bench.runner import RONDE, MeasurementBudget, RankPool
from ronde.cli.bench.table import format_ratio
from ronde.cli.bench.train import APART, DDP, TrainingCase, TrainingResult, TrainingSetup
from ronde.types import Deadline

START_TIMEOUT_S = 120.0
NUM_HOSTS = 2
SETUPS = (
    TrainingSetup(MeasuredLibrary(APART, APART), NUM_HOSTS),
    TrainingSetup(MeasuredLibrary("ronde", RONDE), NUM_HOSTS),
    TrainingSetup(MeasuredLibrary("ronde bfloat16", RONDE), NUM_HOSTS, "bfloat16"),
    TrainingSetup(MeasuredLibrary("ddp-view", DDP), NUM_HOSTS, view=True),
    TrainingSetup(MeasuredLibrary("ddp-view float16", DDP), NUM_HOSTS, "float16", view=True),
)


def measure(hosts: Hosts, cases: Sequence[TrainingCase], budget: MeasurementBudget) -> float:
    """Let the cases train in turn; gigabits per second of the link, measured in turn with them."""
    for case in cases:
        case.setup()
        case.calibrate(budget)
    link = []
    for index in range(budget.rounds):
        link.append(goodput(hosts))
        first = index % len(cases)
        for case in (*cases[first:], *cases[:first]):
            case.run_round(budget)
    return statistics.median(link)


def rows(model: BenchmarkModel, results: Sequence[TrainingResult], link: float) -> list[tuple[str, ...]]:
    bound_ms = 8 * model.num_bytes / link / 1e6
    ddp = next(result for result in results if result.impl == "ddp-view")
    found: list[tuple[str, ...]] = []
    for result in results:
        communicates = result.impl != APART
        found.append(
            (
                model.name,
                result.impl,
                f"{result.samples_per_s:,.1f}",
                f"{result.step_us / 1e3:.1f}",
                f"{result.backward_us / 1e3:.1f}",
                f"{bound_ms:.1f}" if communicates else "",
                f"{1e3 * bound_ms / result.backward_us:.0%}" if communicates else "",
                format_ratio(result.samples_per_s / ddp.samples_per_s) if result.impl.startswith(RONDE) else "",
            )
        )
    return found


def train(
    hosts: Hosts, model: BenchmarkModel, batch: int, budget: MeasurementBudget, console: Console
) -> list[tuple[str, ...]]:
    """Start the ranks of all setups, measure one network, and end them."""
    with ExitStack() as stack:
        cases = []
        for setup in SETUPS:
            console.print(f"{model.name}: starting {setup.name}", style="dim")
            library = setup.library.library
            start = ronde_ranks(hosts, 1, {}) if library == RONDE else peer_ranks(hosts, library)
            pool = RankPool(setup.name, NUM_HOSTS, start, Deadline(START_TIMEOUT_S))
            stack.callback(pool.close)
            cases.append(TrainingCase(pool, setup, model, batch))
        console.print(f"{model.name}: training", style="dim")
        link = measure(hosts, cases, budget)
        return rows(model, [case.result() for case in cases], link)


def measure_all(flags: argparse.Namespace, console: Console) -> Table:
    table = Table("network", "", "samples/s", "step ms", "backward ms", "bound ms", "of the bound", "against DDP")
    models = parse_models(flags.models)
    budget = MeasurementBudget(rounds=flags.rounds, seconds=flags.seconds, steps=flags.steps)
    with Hosts(flags.rate) as hosts:
        for model in models:
            for row in train(hosts, model, flags.batch or model.batch, budget, console):
                table.add_row(*row)
            table.add_section()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Train between two namespaces, against what the link allows.")
    parser.add_argument("--rate", default="1gbit", help="speed of the link in each direction, as tc writes it")
    parser.add_argument("--models", default="mlp,alexnet", help="what to train")
    parser.add_argument("--batch", type=int, help="samples per rank and step, if not the model's own")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per row")
    parser.add_argument("--seconds", type=float, default=25.0, help="time per row, shared by its rounds")
    parser.add_argument("--steps", type=int, help="steps per round; by default as many as fit")
    run_as_root(parser, measure_all)


if __name__ == "__main__":
    main()
