"""digits.py: training that goes on when ranks are lost or come. Every sample is used exactly once in an epoch.

    ronde run -np 3 --min-np 1 python examples/elastic/digits.py --kill-at 40

With --kill-at, the process that was rank 1 first is killed in that step, in the middle of its backward pass. The others
do the step again, without it. The new process that `ronde run` starts instead gets its state from them.
"""

import argparse
import os
import signal

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ronde
import ronde.elastic
import ronde.torch

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--kill-at", type=int, help="kill a rank in this step")
options = parser.parse_args()

ronde.init()
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))  # the same on every rank
x = torch.tensor(digits.data[order] / 16, dtype=torch.float32)
y = torch.tensor(digits.target[order])
train_set, test_set = TensorDataset(x[:1500], y[:1500]), (x[1500:], y[1500:])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = ronde.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
sampler = ronde.torch.ElasticBatchSampler(train_set, global_batch=96)  # 96 samples per step, for any number of ranks
loader = DataLoader(train_set, batch_sampler=sampler)

# All that belongs to a step. What else a step changes would be lost, or counted twice, when it is done again.
state = ronde.elastic.State(model=model, optimizer=optimizer, sampler=sampler)
may_die = ronde.rank() == 1 and os.environ.get("RONDE_WORKER", "1") == "1"  # of all processes that are ever rank 1, one
sizes = []


def train(state: ronde.elastic.State) -> None:
    """Called again when ranks were lost or have come. The sampler goes on behind the last step that was finished."""
    sizes.append(ronde.size())
    while sampler.epoch < options.epochs:
        for images, labels in sampler.track(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            if may_die and state.steps == options.kill_at:
                loss.register_hook(die)
            loss.backward()
            optimizer.step()
            state.loss = loss.item()  # in the state, as train() may be called again right behind the last step
        if ronde.rank() == 0:
            print(f"epoch {sampler.epoch}: loss {state.loss:.3f} with {ronde.size()} rank(s)")


def die(_: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ronde.elastic.run(train, state)
if ronde.rank() == 0:
    with torch.no_grad():
        accuracy = float((model(test_set[0]).argmax(1) == test_set[1]).float().mean())
    print(f"test accuracy {accuracy:.1%} after {state.steps} steps; ranks: {' '.join(map(str, sizes))}")
