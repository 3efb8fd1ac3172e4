"""A rank of tests/jobs/test_torch_parts.py: a training run with checkpoints. When told to, rank 0 dies in the middle of
writing one; a later job goes on from the one before.
"""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ronde
import ronde.torch as rt
from tests.jobs.scripts.control import ControlSocket

BATCH = 2


class Bomb:
    """Whoever pickles it is killed."""

    def __reduce__(self) -> tuple[Any, ...]:
        os.kill(os.getpid(), signal.SIGKILL)
        return Bomb, ()


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that starts differently on every rank."""
    torch.manual_seed(ronde.rank())
    model = rt.convert_sync_batchnorm(nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    return model, torch.optim.AdamW(model.parameters(), lr=rt.scale_lr(0.01))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """One step with the mean gradient of all ranks."""
    optimizer.zero_grad()
    (model(x) - x.sin()).square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    rt.allreduce(gradients, op="mean", out=gradients)
    optimizer.step()


def run(test: ControlSocket, path: str, num_samples: int, die_at: int | None) -> None:
    """Train through one epoch, or up to a death."""
    model, optimizer = build()
    rt.broadcast_parameters(model)
    rt.broadcast_optimizer_state(optimizer)
    data = TensorDataset(torch.arange(float(num_samples)).unsqueeze(1))
    sampler = rt.ShardedSampler(data, seed=4)
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=1, prefetch_factor=4)
    checkpoints = rt.Checkpoints(path, model=model, optimizer=optimizer, sampler=sampler)
    restored = checkpoints.restore()
    step = restored.step if restored else 0
    in_sync = rt.SyncCheck(model, every=2)
    used: list[int] = []
    for (x,) in sampler.track(loader):
        train(model, optimizer, x)
        step += 1
        used += x.flatten().int().tolist()
        in_sync()
        if step == die_at:
            checkpoints.save(step)
            break
    test.send("trained", used=used, restored=restored.step if restored else None, step=step, epoch=sampler.epoch)
    if die_at is not None:
        try:
            checkpoints.save(step + 1, extras={"bomb": Bomb()})
            ronde.barrier()
        except ronde.PeerLost as error:
            test.send("lost", peer=error.peer)
    rt.check_in_sync(model)
    metrics = rt.average_metrics({"samples": len(used)}, count=len(used))
    test.send("over", weights=[parameter.sum().item() for parameter in model.parameters()], metrics=metrics)


def main() -> None:
    warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)  # how a loader starts its workers
    torch.set_num_threads(1)
    with ControlSocket() as test:
        wanted = test.receive()
        ronde.init()
        try:
            run(test, wanted["path"], wanted["num_samples"], wanted["die_at"])
        except ronde.RondeError:
            if wanted["die_at"] is None:
                raise
        ronde.shutdown()


if __name__ == "__main__":
    main()
