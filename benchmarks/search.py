"""How fast searches go: the same 40 parameter sets in one process and on two warm workers, and what a trial costs
besides its objective.

    python benchmarks/search.py

The objective trains a small network of PyTorch for a fixed number of steps; every process has one thread. One process
runs it in a plain loop, without a search; ronde.search runs it on two workers. Two processes that run half of the loop
each, and know nothing of each other, show what the machine allows. Time counts from the start of the first trial to the
end of the last: interpreters are started, and PyTorch has trained a few steps, before. Rounds take turns; the best of
each counts, and all are printed.

The overhead is measured with an objective that does nothing, on one worker: the time from the end of one trial to the
start of the next. With two ranks, trials join a round and leave it, and the whole time of a trial counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import ronde
import ronde.search

POINTS = [{"lr": 0.001 * (1 + index), "width": 64 + 16 * (index % 5)} for index in range(40)]
SPACE = {"lr": {"low": 0.001, "high": 0.1}, "width": {"low": 64, "high": 128, "step": 16}}


def train(params: dict[str, Any], steps: int) -> float:
    torch.manual_seed(0)
    width = int(params["width"])
    model = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=float(params["lr"]))
    x, y = torch.randn(64, 256), torch.randint(10, (64,))
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def warm_up() -> None:
    """PyTorch loads a part of itself in the first step, which takes a second."""
    torch.set_num_threads(1)
    train(POINTS[0], 10)


def train_in_loop(steps: int, part: int, num_parts: int) -> None:
    """Train with every n-th point in a plain loop: print when it is ready, wait for a line, print the seconds."""
    warm_up()
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    for point in POINTS[part::num_parts]:
        train(point, steps)
    print(time.monotonic() - began)


def time_loops(steps: int, num_processes: int) -> float:
    """Seconds for all points in so many processes that know nothing of each other."""
    started = []
    for part in range(num_processes):
        words = [sys.executable, __file__, "--steps", str(steps), "--loop", f"{part}/{num_processes}"]
        started.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return max(float(process.communicate()[0]) for process in started)


def search(
    body: Callable[[Any], float], *, ranks: int, parallel: int, points: Sequence[Any] | int
) -> list[list[float]]:
    """Start and end of every trial, in the order of the starts."""
    with tempfile.TemporaryDirectory() as folder:

        def objective(trial: ronde.search.Trial, _: object) -> float:
            began = time.monotonic()
            value = body(trial)
            if ranks == 1 or trial.slot == 0:
                Path(folder, str(trial.number)).write_text(json.dumps([began, time.monotonic()]))
            return value

        fixed: dict[str, Any] = {"trials": points, "sampler": "random"}
        if not isinstance(points, int):
            fixed = {"trials": len(points), "points": points}
        ronde.search.run(
            objective,
            SPACE,
            ranks_per_trial=ranks,
            parallel=parallel,
            setup=warm_up,
            env={"OMP_NUM_THREADS": "1"},
            **fixed,
        )
        return sorted(json.loads(path.read_text()) for path in Path(folder).iterdir())


def measure_speed(steps: int, rounds: int) -> dict[str, Any]:
    def body(trial: Any) -> float:
        return train(trial.params, steps)

    seconds: dict[str, list[float]] = {"one process": [], "two processes apart": [], "two workers of a search": []}
    for _ in range(rounds):
        seconds["one process"].append(time_loops(steps, 1))
        seconds["two processes apart"].append(time_loops(steps, 2))
        times = search(body, ranks=1, parallel=2, points=POINTS)
        seconds["two workers of a search"].append(max(end for _, end in times) - times[0][0])
    one, apart, together = (min(each) for each in seconds.values())
    return {
        "seconds": {name: [round(each, 2) for each in times] for name, times in seconds.items()},
        "times faster": round(one / together, 3),
        "times faster, two processes apart": round(one / apart, 3),
        "median of rounds": round(
            median(a / b for a, b in zip(seconds["one process"], seconds["two workers of a search"], strict=True)), 3
        ),
    }


def measure_overhead(trials: int) -> dict[str, float]:
    def nothing(trial: Any) -> float:
        return 0.0

    def join(trial: Any) -> float:
        ronde.init()
        ronde.barrier()
        return 0.0

    times = search(nothing, ranks=1, parallel=1, points=trials)
    gaps = [1e3 * (start - end) for (_, end), (start, _) in itertools.pairwise(times)]
    times = search(join, ranks=2, parallel=1, points=trials)
    starts = [start for start, _ in times]
    whole = [1e3 * (after - before) for before, after in itertools.pairwise(starts)]
    return {
        "1 rank, ms": median(gaps),
        "1 rank, worst of 100, ms": sorted(gaps)[len(gaps) * 99 // 100],
        "2 ranks that join, ms": median(whole),
        "2 ranks that join, worst of 100, ms": sorted(whole)[len(whole) * 99 // 100],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="Steps of training in each trial.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=200, help="Trials for the overhead.")
    parser.add_argument("--loop", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop:
        part, num_parts = map(int, options.loop.split("/"))
        return train_in_loop(options.steps, part, num_parts)
    print(json.dumps({"speed": measure_speed(options.steps, options.rounds)}), flush=True)
    print(json.dumps({"overhead": measure_overhead(options.trials)}))


if __name__ == "__main__":
    main()
