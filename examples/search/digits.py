"""digits.py: an objective for `ronde search`: a small network on scikit-learn's handwritten digits, trained by all
ranks of a trial together.

ronde search examples/search/job.yaml
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ronde
import ronde.search
import ronde.torch

EPOCHS = 4


def load() -> tuple[TensorDataset, TensorDataset]:
    """Called once by every worker: the data stay loaded for all trials."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(digits.data / 16, dtype=torch.float32)[order]
    y = torch.tensor(digits.target)[order]
    return TensorDataset(x[:1200], y[:1200]), TensorDataset(x[1200:1500], y[1200:1500])


def objective(trial: ronde.search.Trial, data: tuple[TensorDataset, TensorDataset]) -> float:
    """Return the accuracy on the validation data, which is reported after every epoch."""
    ronde.init()  # the ranks of this trial
    train, validation = data
    width = int(trial.params["width"])
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=float(trial.params["lr"]), momentum=0.9)
    optimizer = ronde.torch.DistributedOptimizer(optimizer)
    ronde.torch.broadcast_parameters(model)
    sampler = ronde.torch.ShardedSampler(train)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    accuracy = 0.0
    while sampler.epoch < EPOCHS:
        for images, labels in sampler.track(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            images, labels = validation.tensors
            accuracy = (model(images).argmax(dim=1) == labels).double().mean().item()
        trial.report(accuracy, sampler.epoch)  # on all ranks, with the same step
        if trial.should_prune():  # the same answer on all ranks
            raise ronde.search.TrialPruned
    return accuracy
