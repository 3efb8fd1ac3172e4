"""uneven_data.py: ranks with different amounts of data. Nobody waits for a batch that never comes.

    ronde run -np 2 python examples/uneven_data.py

A rank that has run out calls join(): until all have, it adds zeros to the others' gradients.
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

num_steps = 0
for epoch in range(3):
    for inputs, wanted in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), wanted).backward()
        optimizer.step()
        num_steps += 1
    last = optimizer.join()  # out of data: help the others to their end
    ronde.torch.broadcast_parameters(model, root=last)  # who had the most data has made the last steps

ronde.torch.check_in_sync(model)
steps = ronde.torch.allgather_object(num_steps)
if ronde.rank() == 0:
    print(f"steps by rank: {steps}; found {[round(value, 2) for value in model.weight[0].tolist()]}")
ronde.shutdown()
