"""multi_task.py: two tasks learn together. The trunk is shared by all ranks, each head only by the ranks of its task.

    ronde run -np 4 python examples/multi_task.py

Even ranks learn the sum of the inputs, odd ranks whether their product is positive.
"""

import torch
from torch import Tensor, nn

import ronde
import ronde.torch

ronde.init()
tasks = [ronde.add_group(range(first, ronde.size(), 2)) for first in range(min(2, ronde.size()))]  # on every rank
task = ronde.rank() % 2

torch.manual_seed(ronde.rank())
trunk = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
head = nn.Linear(64, 1)  # of my task
ronde.torch.broadcast_parameters(trunk)
ronde.torch.broadcast_parameters(head, root=tasks[task].ranks[0], group=tasks[task])
optimizer = ronde.torch.DistributedOptimizer(
    torch.optim.Adam(
        [
            {"params": trunk.parameters()},  # averaged over all ranks
            {"params": head.parameters(), "group": tasks[task]},  # averaged over those of my task
        ],
        lr=0.01,
    )
)


def loss_on(x: Tensor) -> Tensor:
    answer = head(trunk(x))[:, 0]
    if task == 0:
        return nn.functional.mse_loss(answer, x.sum(1))
    return nn.functional.binary_cross_entropy_with_logits(answer, (x.prod(1) > 0).float())


generator = torch.Generator().manual_seed(100 + ronde.rank())
first = loss_on(torch.randn(1000, 3, generator=generator)).item()
for _ in range(300):
    optimizer.zero_grad()
    loss_on(torch.randn(64, 3, generator=generator)).backward()
    optimizer.step()
last = loss_on(torch.randn(1000, 3, generator=generator)).item()

ronde.torch.check_in_sync(trunk)
ronde.torch.check_in_sync(head, group=tasks[task])
mean = ronde.torch.average_metrics({"first": first, "last": last}, group=tasks[task])
if ronde.rank() < len(tasks):
    name = ("sum", "sign of the product")[task]
    print(f"task {task} ({name}) on ranks {list(tasks[task].ranks)}: loss {mean['first']:.2f} -> {mean['last']:.2f}")
ronde.shutdown()
