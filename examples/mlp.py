"""mlp.py: a small network on scikit-learn's handwritten digits. The five lines with a number make training distributed;
what follows the loop measures the result on all ranks together.

ronde run -np 2 python examples/mlp.py
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ronde
import ronde.torch

ronde.init()  # 1 find the other ranks
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))  # the same on every rank
x = torch.tensor(digits.data[order] / 16, dtype=torch.float32)
y = torch.tensor(digits.target[order])
train, test = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])

torch.manual_seed(ronde.rank())
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = ronde.torch.DistributedOptimizer(optimizer)  # 2 average gradients in backward()
ronde.torch.broadcast_parameters(model)  # 3 begin with the same numbers everywhere
sampler = ronde.torch.ShardedSampler(train)  # 4 every rank its share of the data
loader = DataLoader(train, batch_size=32, sampler=sampler)

while sampler.epoch < 10:
    for images, labels in sampler.track(loader):  #   (and it knows what is used up)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    if ronde.rank() == 0:  # 5 one of them speaks
        print(f"epoch {sampler.epoch}: loss {loss.item():.3f}")

shares = ronde.torch.ShardedSampler(test, shuffle=False, ends="uneven")  # every image exactly once
with torch.no_grad():
    right = [bool(model(image).argmax() == label) for image, label in (test[index] for index in shares)]
metrics = ronde.torch.average_metrics({"accuracy": sum(right) / len(right)}, count=len(right))

if ronde.rank() == 0:
    print(f"test accuracy with {ronde.size()} rank(s): {metrics['accuracy']:.1%}")
ronde.shutdown()
