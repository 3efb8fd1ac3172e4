"""Loss curves and gradients: what several ranks learn is what one would."""

from __future__ import annotations

import gc
import hashlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore

import ronde
from ronde.torch import DistributedOptimizer
from tests.jobs.torch_checks.checks import assert_same_on_all_ranks, batch, grads, loss_of, mine, on, perceptron

CURVES = ("1 rank", "2 ranks", "4 ranks", "2 hosts", "2 ranks again")
STEPS = 10


def curve(
    *,
    passes: int = 1,
    set_later: bool = False,
    scaled: bool = False,
    bucket_mb: float | None = None,
    overlap: bool | None = None,
) -> dict[str, Any]:
    """Train with everything the same but the number of ranks: losses, and a digest of the weights."""
    model = perceptron(torch.float32)
    # To Adam a sum of passes would look as their mean.
    kind: Any = torch.optim.SGD if set_later else torch.optim.AdamW
    plain = kind(model.parameters(), lr=0.05 if set_later else 0.01)
    optimizer = DistributedOptimizer(
        plain,
        named_parameters=model.named_parameters(),
        passes=1 if set_later else passes,
        bucket_mb=bucket_mb,
        overlap=overlap,
    )
    optimizer.passes = passes
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)
    losses = []
    for step in range(STEPS):
        x, y = batch(step % 2, torch.float32)
        optimizer.zero_grad()
        total = 0.0
        for part in range(passes):
            rows = slice(part * len(x) // passes, (part + 1) * len(x) // passes)
            with torch.autocast("cpu", torch.bfloat16, enabled=scaled):
                loss = loss_of(model, mine(x[rows]), mine(y[rows]))
            scaler.scale(loss).backward()
            total += loss.item() / passes
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(ronde.allreduce(np.array(total), op="mean")))
    assert_same_on_all_ranks(model.parameters())
    optimizer.close()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return {"losses": losses, "weights": hashlib.sha256(weights).hexdigest()}


def twice(**settings: Any) -> dict[str, Any]:  # of curve()
    """The second time it is the same, bit by bit."""
    first, second = curve(**settings), curve(**settings)
    assert first == second
    return first


@on(*CURVES)
def plain_curve() -> dict[str, Any]:
    return twice()


@on(*CURVES)
def curve_of_small_buckets() -> dict[str, Any]:
    return twice(bucket_mb=0.005, overlap=True)


@on(*CURVES)
def accumulated_curve() -> dict[str, Any]:
    return twice(passes=2)


@on(*CURVES)
def accumulated_curve_whose_passes_are_set_later() -> dict[str, Any]:
    return twice(passes=2, set_later=True)


@on(*CURVES)
def curve_with_bfloat16_and_scaler() -> dict[str, Any]:
    return twice(scaled=True)


@on(*CURVES)
def accumulated_curve_with_bfloat16_and_scaler() -> dict[str, Any]:
    return twice(passes=2, scaled=True)


@on("2 ranks")
def gradients_equal_those_of_ddp() -> None:
    rank, size = ronde.rank(), ronde.size()
    first = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = ronde.objects.broadcast(first.port if first is not None else 0)
    store = first or TCPStore("127.0.0.1", port, size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    train_beside_ddp()
    gc.collect()  # DDP must not be the last to hold the process group: its end could wait for the interpreter's lock
    dist.destroy_process_group()
    ronde.barrier()  # the store is in rank 0


def train_beside_ddp() -> None:
    """Two equal models on equal data."""
    ours, theirs = perceptron(torch.float32), perceptron(torch.float32)
    optimizer = DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1))
    parallel = nn.parallel.DistributedDataParallel(theirs)
    other = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(4):
        x, y = batch(step, torch.float32)
        optimizer.zero_grad()
        other.zero_grad()
        loss_of(ours, mine(x), mine(y)).backward()
        loss_of(parallel, mine(x), mine(y)).backward()
        assert all(torch.equal(one, two) for one, two in zip(grads(ours), grads(theirs), strict=True))
        optimizer.step()
        other.step()
    optimizer.close()
