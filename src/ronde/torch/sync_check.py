"""Checks that all ranks still have the same model. A forgotten broadcast, a rank-dependent branch or bad memory makes
them diverge silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.torch.batch_norm import SyncBatchNorm
from ronde.training.sync_check import checksum, compare_checksums

DEFAULT_CHECK_STEPS = 100
"""Steps between two checks: what one costs is then below 1 % of the steps between."""


def check_in_sync(
    model: nn.Module | Mapping[str, Tensor], *, skip: tuple[str, ...] = (), group: Group | None = None
) -> None:
    """Compare every parameter and buffer across ranks, bit by bit. OutOfSync names the first that differs, and the
    ranks that differ from the others.

    Every rank calls it. `skip` are patterns of names to leave out, such as "ema.*". Running statistics of BatchNorm
    layers that are not SyncBatchNorm are left out anyway: each rank's come from its own data.
    """
    if isinstance(model, nn.Module):
        own = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            if isinstance(module, _NormBase) and not isinstance(module, SyncBatchNorm | nn.SyncBatchNorm)
            for name, _ in module.named_buffers(recurse=False)
        }
        buffers = {name: buffer for name, buffer in model.named_buffers() if name not in own}
        model = {**dict(model.named_parameters()), **buffers}
    checksums = [
        (name, checksum_tensor(tensor))
        for name, tensor in model.items()
        if not (skip and any(fnmatchcase(name, pattern) for pattern in skip))
    ]
    compare_checksums(resolve_group(group), checksums)


class SyncCheck:
    """check_in_sync() for a training loop: call it once per step; it compares at the first call and every N-th after.

    All ranks call it equally often.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Tensor],
        *,
        every: int = DEFAULT_CHECK_STEPS,
        skip: tuple[str, ...] = (),
        group: Group | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}")
        self.every = every
        self.num_calls = 0
        self._model = model
        self._skip = skip
        self._group = group

    def __call__(self) -> bool:
        """Compare if this is the first or an N-th call. Return whether it has compared."""
        due = self.num_calls % self.every == 0
        self.num_calls += 1
        if due:
            check_in_sync(self._model, skip=self._skip, group=self._group)
        return due


def checksum_tensor(tensor: Tensor) -> int:
    """The checksum of a tensor's bytes, row by row."""
    # Every call counts here: models have thousands of small tensors.
    host = tensor.detach() if tensor.device.type == "cpu" else tensor.detach().cpu()
    memory: Array = host.contiguous().view(-1).view(torch.uint8).numpy()
    return checksum(memory)
