"""Training on two hosts with a link of known speed, on one machine: the namespaces of netns.py, one rank in each.

    sudo python benchmarks/netns_train.py --rate 1gbit --models mlp,alexnet

Measures in turn, so that all see the same noise: what plain TCP gets through the link, two processes that do not
communicate, ronde and DDP with float32 on the wire, and both with 16 bits (DDP over gloo has only float16). How the
bound is computed is in README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, closing

from netns import Hosts, measure, run_as_root, start_peer, start_ronde
from rich.console import Console
from rich.table import Table

from ronde.cli.bench.models import BenchmarkModel, parse_models
from ronde.cli.bench.peers import RONDE
from ronde.cli.bench.runner import MeasurementBudget
from ronde.cli.bench.table import format_ratio
from ronde.cli.bench.train import APART, DDP, TrainingCase, TrainingSetup

SETUPS = (
    TrainingSetup(APART, APART),
    TrainingSetup("ronde", RONDE),
    TrainingSetup("ronde bfloat16", RONDE, codec="bfloat16"),
    TrainingSetup("ddp-view", DDP, view=True),
    TrainingSetup("ddp-view float16", DDP, codec="float16", view=True),
)


def train(
    hosts: Hosts, model: BenchmarkModel, batch: int, budget: MeasurementBudget, console: Console
) -> Iterator[tuple[str, ...]]:
    """Start the ranks of all setups, measure one network, and end them: the rows of the table."""
    with ExitStack() as stack:
        cases = []
        for setup in SETUPS:
            console.print(f"{model.name}: starting {setup.name}", style="dim")
            is_ronde = setup.library == RONDE
            pool = start_ronde(setup.name, hosts) if is_ronde else start_peer(setup.name, hosts, setup.library)
            stack.enter_context(closing(pool))
            cases.append(TrainingCase(pool, model.name, setup, batch))
        console.print(f"{model.name}: training", style="dim")
        bound_ms = 8 * model.num_bytes / measure(hosts, cases, budget) / 1e6
    results = {case.training_setup.name: case.result() for case in cases}
    for name, result in results.items():
        backward_us = result.backward_us or result.step_us
        times = (f"{result.step_us / 1e3:.1f}", f"{backward_us / 1e3:.1f}")
        bound = (f"{bound_ms:.1f}", f"{1e3 * bound_ms / backward_us:.0%}") if name != APART else ("", "")
        ratio = result.samples_per_s / results["ddp-view"].samples_per_s
        comparison = format_ratio(ratio) if name.startswith(RONDE) else ""
        yield (model.name, name, f"{result.samples_per_s:,.1f}", *times, *bound, comparison)


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
