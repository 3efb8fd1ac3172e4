"""async_digits.py: training with a slow rank, in step and asynchronously.

    ronde run -np 3 python examples/async_digits.py

The last rank is slow: it sleeps in every step. In "sync" mode all ranks wait for it; in "bounded" mode they wait when
they are four steps ahead; in "async" mode nobody waits, and the slow rank just does fewer of the batches. Every sample
is used exactly once in an epoch, whoever trains on it. "gossip" needs no servers: each rank trains on its own and sends
its parameters to another one now and then; after each epoch all take the mean. The page that is written at the end
shows accuracy against time in all modes, and how stale the gradients of each rank were.
"""

import argparse
import time
from collections.abc import Iterable

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import ronde
import ronde.torch
from ronde.dash import PlotData, PlotLine, write_plots

EPOCHS, BATCH, SLOW_S, TRAIN = 12, 25, 0.03, 1500
MODES = ("sync", "bounded", "async", "gossip")

parser = argparse.ArgumentParser()
parser.add_argument("--report", default="runs/async_digits.html", help="where the plots go")
report = parser.parse_args().report

ronde.init()
rank, size = ronde.rank(), ronde.size()
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))  # the same on every rank
x = torch.tensor(digits.data[order] / 16, dtype=torch.float32)
y = torch.tensor(digits.target[order])
torch.set_num_threads(1)
accuracies: dict[str, tuple[list[float], list[float]]] = {}  # by mode: times and values
stalenesses: dict[str, list[tuple[list[float], list[float]]]] = {}  # by mode and rank


def batches(optimizer: ronde.torch.AsyncOptimizer | ronde.torch.LocalSGD, epoch: int) -> Iterable[torch.Tensor]:
    if isinstance(optimizer, ronde.torch.AsyncOptimizer):
        return optimizer.samples(TRAIN, BATCH, epoch=epoch)
    # Without servers there are no leases: each rank has its share of the samples.
    return torch.tensor(np.random.default_rng(epoch).permutation(TRAIN)[rank::size]).split(BATCH)


def measure_accuracy(model: nn.Module) -> float:
    with torch.no_grad():
        return float((model(x[TRAIN:]).argmax(1) == y[TRAIN:]).float().mean())


for mode in MODES:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    lr = {"sync": 0.3, "gossip": 0.3}.get(mode, 0.1)  # of the mean of all ranks, or of each push of a rank
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer: ronde.torch.AsyncOptimizer | ronde.torch.LocalSGD
    if mode == "gossip":
        optimizer = ronde.torch.LocalSGD(sgd, every=4, averaging="gossip")
    else:
        optimizer = ronde.torch.AsyncOptimizer(sgd, mode=mode, staleness=4)

    num_steps = 0
    times: list[float] = []
    staleness: list[float] = []
    accuracies[mode] = ([], [])
    begun_s = time.monotonic()
    for epoch in range(EPOCHS):
        for indices in batches(optimizer, epoch):
            if rank == size - 1:
                time.sleep(SLOW_S)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
            optimizer.step()
            num_steps += 1
            if isinstance(optimizer, ronde.torch.AsyncOptimizer):
                times.append(time.monotonic() - begun_s)
                staleness.append(optimizer.server.staleness)
            if rank == 0 and num_steps % 10 == 0:
                accuracies[mode][0].append(time.monotonic() - begun_s)
                accuracies[mode][1].append(100 * measure_accuracy(model))
        if isinstance(optimizer, ronde.torch.LocalSGD):
            optimizer.finish()  # the mean of all: ranks that meet too rarely become too different for it
    seconds = time.monotonic() - begun_s
    all_steps = ronde.allgather(np.array([num_steps])).tolist()
    if isinstance(optimizer, ronde.torch.LocalSGD):
        num_updates = sum(all_steps)
    else:
        num_updates = optimizer.pull()
        stalenesses[mode] = ronde.objects.allgather((times, staleness))
    worst = int(ronde.allreduce(np.array([max(staleness, default=0)]), op="max")[0])
    if rank == 0:
        print(
            f"{mode + ':':8} {measure_accuracy(model):.1%} after {num_updates} updates in {seconds:.1f} s, "
            f"staleness up to {worst}, batches by rank {' '.join(map(str, all_steps))}"
        )
    optimizer.close()

if rank == 0:
    lines = tuple(PlotLine(mode, *accuracies[mode]) for mode in MODES)
    plots = [PlotData("accuracy", "seconds", "%", lines, y_max=100.0)]
    for mode in ("bounded", "async"):
        of_ranks = enumerate(stalenesses[mode])
        lines = tuple(PlotLine(f"rank {number}", *series) for number, series in of_ranks)
        plots.append(PlotData(f"staleness with {mode}", "seconds", "updates of others", lines, y_min=0.0))
    print(f"plots: {write_plots(plots, report, title='A slow rank, in step and asynchronously')}")
