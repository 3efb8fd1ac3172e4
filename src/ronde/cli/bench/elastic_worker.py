"""A worker of `ronde bench elastic`: trains a small network, and writes down when its steps end and its rounds change.

It is started as `python -m ronde.cli.bench.elastic_worker WORK DIRECTORY …`. Its file in the directory has one JSON
object per line; `at_ns` is time.monotonic_ns(), one clock for all processes of the host.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import ronde
import ronde.elastic
from ronde.comm.world import current_world
from ronde.observe.events import RoundChanged
from ronde.settings import Settings

NUM_SAMPLES = 1 << 16
GLOBAL_BATCH = 64
WIDTHS = (256, 256, 10)
CHANNELS = (1, 16, 24, 32)
BURST_MS = 50.0
"""About so long bursts of plain and of elastic training are."""
MIN_BURSTS = 4
COUNTED_STEPS = 20


class EventFile:
    def __init__(self, directory: str) -> None:
        self._file = Path(directory, f"worker-{Settings.load().worker}.jsonl").open("ab", buffering=0)

    def write(self, event: str, **facts: object) -> None:
        self._file.write(json.dumps({"event": event, "at_ns": time.monotonic_ns(), **facts}).encode() + b"\n")


def build(*, shares: str = "equal", kind: str = "linear") -> tuple[Any, Any, Any, Any]:
    """A network, its optimizer, a sampler, and the state of these. The kind is "linear" or "convolutional"."""
    import torch

    import ronde.torch

    torch.set_num_threads(1)
    torch.manual_seed(1)
    layers: list[torch.nn.Module] = []
    if kind == "linear":
        for a, b in itertools.pairwise(WIDTHS):
            layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    else:
        layers.append(torch.nn.Unflatten(1, (1, 16, 16)))
        for a, b in itertools.pairwise(CHANNELS):
            layers += [torch.nn.Conv2d(a, b, 3, padding=1), torch.nn.BatchNorm2d(b), torch.nn.ReLU()]
        layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(CHANNELS[-1], WIDTHS[-1])]
    network = torch.nn.Sequential(*layers)
    optimizer = ronde.torch.DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9))
    sampler = ronde.torch.ElasticBatchSampler(NUM_SAMPLES, global_batch=GLOBAL_BATCH, seed=1, shares=shares)
    state = ronde.elastic.State(network=network, optimizer=optimizer, sampler=sampler)
    return network, optimizer, sampler, state


def train_until_killed(directory: str, step_ms: str) -> None:
    """Train. The benchmark kills workers, and at last the job."""
    import torch

    events = EventFile(directory)
    ronde.init()
    network, optimizer, sampler, state = build()
    x = torch.randn(1, WIDTHS[0])

    def train(state: ronde.elastic.State) -> None:
        while True:
            for event in ronde.events():
                if isinstance(event, RoundChanged):
                    times = {"noticed_ns": event.noticed_ns, "joined_ns": event.joined_ns, "synced_ns": event.at_ns}
                    events.write("changed", size=event.size, **times)
            for _ in sampler.track(sampler):
                time.sleep(float(step_ms) / 1000)
                optimizer.zero_grad()
                network(x).sum().backward()
                optimizer.step()
                events.write("step", step=state.steps, size=ronde.size())

    ronde.elastic.run(train, state)


def compare_with_plain(directory: str, kind: str, seconds: str) -> None:
    """Alternate short bursts of plain and of elastic training of the same network on the same batch, and write the
    times of their steps; at last count what a step calls."""
    import torch

    events = EventFile(directory)
    ronde.init()
    network, optimizer, sampler, state = build(kind=kind)
    x, y = torch.randn(64, WIDTHS[0]), torch.randint(0, WIDTHS[-1], (64,))

    def run_steps(batches: Iterator[Any]) -> float:
        """Train on these batches; how many milliseconds a step took."""
        began_ns = time.monotonic_ns()
        num_steps = 0
        for _ in batches:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()
            num_steps += 1
        return (time.monotonic_ns() - began_ns) / 1e6 / num_steps

    def train(state: ronde.elastic.State) -> None:
        end_ns = time.monotonic_ns() + int(float(seconds) * 1e9)
        epochs = BatchesOfBoth(sampler)
        run_steps(epochs.take(False, 2))  # the first plans the buckets
        step_ms = ronde.broadcast(np.array([run_steps(epochs.take(False, 8))]), root=0)[0]
        num_steps = min(max(int(BURST_MS / step_ms), 4), 50)
        is_over = False
        for number in itertools.count():
            for is_elastic in (False, True) if number % 2 else (True, False):
                batches = epochs.take(is_elastic, num_steps)
                ronde.barrier()
                events.write("burst", is_elastic=is_elastic, step_ms=run_steps(batches))
            is_over = ronde.broadcast(np.array([time.monotonic_ns() >= end_ns]), root=0)[0]
            if is_over and number >= MIN_BURSTS:
                break
        for is_elastic in (False, True):
            batches = epochs.take(is_elastic, COUNTED_STEPS)
            calls, operations = count_calls(partial(run_steps, batches))
            per_step = {"python_calls": calls / COUNTED_STEPS, "operations": operations / COUNTED_STEPS}
            events.write("counts", is_elastic=is_elastic, **per_step)

    ronde.elastic.run(train, state)


class BatchesOfBoth:
    """Batches of plain training, and of elastic training, which ends its steps. They begin anew before an epoch ends,
    so that no burst has to."""

    def __init__(self, sampler: Any) -> None:  # an ElasticBatchSampler
        from torch.utils.data import BatchSampler

        import ronde.torch

        self._sampler = sampler
        self._plain_sampler = ronde.torch.ShardedSampler(NUM_SAMPLES)
        self._plain = BatchSampler(self._plain_sampler, GLOBAL_BATCH // ronde.size(), drop_last=False)
        self._num_left = {False: 0, True: 0}
        self._batches: dict[bool, Iterator[Any]] = {}

    def take(self, is_elastic: bool, num_steps: int) -> Iterator[Any]:
        if self._num_left[is_elastic] < num_steps:
            sampler = self._sampler if is_elastic else self._plain_sampler
            self._batches.pop(is_elastic, None)
            sampler.set_epoch(sampler.epoch + 1)
            self._batches[is_elastic] = sampler.track(sampler) if is_elastic else iter(self._plain)
            self._num_left[is_elastic] = NUM_SAMPLES // GLOBAL_BATCH
        self._num_left[is_elastic] -= num_steps
        return itertools.islice(self._batches[is_elastic], num_steps)


def count_calls(run: Callable[[], object]) -> tuple[int, int]:
    """Call the function; return how many calls of Python functions it made, and how many operations of the ranks."""
    num_calls = 0

    def on_event(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    recorder = current_world().recorder
    before = recorder.sample_activity(0, None).operations
    sys.setprofile(on_event)
    try:
        run()
    finally:
        sys.setprofile(None)
    return num_calls, recorder.sample_activity(0, None).operations - before


def train_with_slow_rank(directory: str, shares: str, seconds: str) -> None:
    """Train with a last rank that takes twice as long for a sample. Samples sleep, so that cores are not the limit."""
    import torch

    events = EventFile(directory)
    ronde.init()
    network, optimizer, sampler, state = build(shares=shares)
    x = torch.randn(1, WIDTHS[0])

    def train(state: ronde.elastic.State) -> None:
        sample_s = 0.002 if ronde.rank() == ronde.size() - 1 else 0.001
        end_ns = time.monotonic_ns() + int(float(seconds) * 1e9)
        for batch in sampler.track(sampler):
            time.sleep(len(batch) * sample_s)
            optimizer.zero_grad()
            network(x).sum().backward()
            optimizer.step()
            events.write("step", step=state.steps, size=len(batch))
            if state.steps % 20 == 19 and ronde.broadcast(np.array([time.monotonic_ns() >= end_ns]), root=0)[0]:
                return

    ronde.elastic.run(train, state)


WORK: dict[str, Callable[..., None]] = {
    "recovery": train_until_killed,
    "cost": compare_with_plain,
    "shares": train_with_slow_rank,
}

if __name__ == "__main__":
    WORK[sys.argv[1]](*sys.argv[2:])
