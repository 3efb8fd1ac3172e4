"""async_digits.py: a parameter server trains with a slow rank, in step and asynchronously.

    ronde run -np 3 python examples/async_digits.py

The last rank is slow: it sleeps in every step. In "sync" mode all ranks wait for it; in "bounded" mode they wait when
they are four steps ahead; in "async" mode nobody waits, and the slow rank just does fewer of the batches. Every sample
is used exactly once in an epoch, whoever trains on it.
"""

import time

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import ronde
import ronde.torch

EPOCHS, BATCH, SLOW_S = 12, 25, 0.03

ronde.init()
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))  # the same on every rank
x = torch.tensor(digits.data[order] / 16, dtype=torch.float32)
y = torch.tensor(digits.target[order])
torch.set_num_threads(1)

for mode in ("sync", "bounded", "async"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    lr = 0.3 if mode == "sync" else 0.1  # the mean of all ranks is one step, and each push of a rank is one
    optimizer = ronde.torch.AsyncOptimizer(torch.optim.SGD(model.parameters(), lr=lr), mode=mode, staleness=4)
    num_steps, staleness, begun_s = 0, 0, time.monotonic()
    for epoch in range(EPOCHS):
        for indices in optimizer.samples(1500, BATCH, epoch=epoch):
            if ronde.rank() == ronde.size() - 1:
                time.sleep(SLOW_S)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
            optimizer.step()
            num_steps += 1
            staleness = max(staleness, optimizer.server.staleness)
    seconds = time.monotonic() - begun_s
    version = optimizer.pull()
    with torch.no_grad():
        accuracy = float((model(x[1500:]).argmax(1) == y[1500:]).float().mean())
    all_steps = ronde.allgather(np.array([num_steps])).tolist()
    worst = int(ronde.allreduce(np.array([staleness]), op="max")[0])
    if ronde.rank() == 0:
        print(
            f"{mode + ':':8} {accuracy:.1%} after {version} updates in {seconds:.1f} s, staleness up to {worst}, "
            f"batches by rank {' '.join(map(str, all_steps))}"
        )
    optimizer.close()
