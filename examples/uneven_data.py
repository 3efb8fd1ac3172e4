"""uneven_data.py: ranks with different amounts of data. Nobody waits for a batch that never comes.

    ronde run -np 2 python examples/uneven_data.py

A rank that has run out of data calls step() with the others: it has no gradients of its own, and gets theirs.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ronde
import ronde.torch

ronde.init()
num_samples = 320 * (1 + ronde.rank())  # rank 0 has 10 batches, rank 1 has 20, …
generator = torch.Generator().manual_seed(ronde.rank())
x = torch.randn(num_samples, 8, generator=generator)
y = x @ torch.arange(1.0, 9.0)[:, None]
loader = DataLoader(TensorDataset(x, y), batch_size=32)

torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = ronde.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
ronde.torch.broadcast_parameters(model)

num_batches = ronde.torch.allgather_object(len(loader))
for _ in range(3):
    batches = iter(loader)
    for step in range(max(num_batches)):
        num_active = sum(step < number for number in num_batches)
        optimizer.zero_grad()
        if step < len(loader):
            inputs, wanted = next(batches)
            loss = nn.functional.mse_loss(model(inputs), wanted)
            # The mean counts every rank; who has no data must not make the others' gradients smaller.
            (loss * ronde.size() / num_active).backward()
        optimizer.step()

ronde.torch.check_in_sync(model)
if ronde.rank() == 0:
    print(f"batches by rank: {num_batches}; found {[round(value, 2) for value in model.weight[0].tolist()]}")
ronde.shutdown()
