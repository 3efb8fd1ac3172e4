"""All that combines the gradients of one optimizer: one reducer per group of ranks. Used by DistributedOptimizer."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from ronde.binding.buckets import pays_to_overlap
from ronde.binding.codec import Codec
from ronde.binding.gradients import GradientSettings
from ronde.binding.passes import Passes
from ronde.binding.reducer import Reducer
from ronde.comm.current import current
from ronde.comm.group import Group
from ronde.torch.adapter import TorchAdapter
from ronde.torch.autograd import Autograd
from ronde.torch.names import Names
from ronde.types import Op, parse_op

__all__ = ["Gradients"]


class Gradients:
    """The parameters of one optimizer; those of each group of ranks have a reducer of their own."""

    def __init__(
        self, names: Names, group: Group | None, settings: GradientSettings, codec: Codec | None, num_passes: int
    ) -> None:
        self.passes = Passes(Autograd(), num_passes)
        """Counts the backward passes, and sees to it that gradients are combined."""
        self._names = names
        self._group = group
        self._settings = settings
        self._codec = codec
        self._parts: dict[int, tuple[TorchAdapter, Reducer]] = {}
        """By the number of the group of ranks."""
        self._num_groups = 0

    def add(self, param_group: dict[str, Any], *, later: bool = False) -> None:
        """One of the optimizer's groups. Its `group` says over which ranks it averages; the optimizer need not know."""
        wanted = param_group.pop("group", None)
        if wanted is not None and not isinstance(wanted, Group):
            raise TypeError(f"`group` of a group of parameters must be a ronde.Group, got {type(wanted).__name__}")
        named = self._names.of(self._num_groups, param_group, later=later)
        self._num_groups += 1
        group: Group = wanted or self._group or current("DistributedOptimizer").group
        if not group.included or (group.size == 1 and not self._acts_alone):
            return
        if group.id not in self._parts:
            adapter = TorchAdapter(current().rank, sparse_as_dense=self._settings.sparse_as_dense)
            adapter.add(named)
            reducer = Reducer(
                adapter,
                group,
                self._settings,
                begin=self.passes.begin,
                codec=self._codec,
                overlap=_pays_to_overlap(group) if self._settings.overlap is None else self._settings.overlap,
            )
            self._parts[group.id] = (adapter, reducer)
            self.passes.add(reducer)
        else:
            adapter, reducer = self._parts[group.id]
            adapter.add(named)
            reducer.refresh()

    def average_loss(self, loss: Any) -> Any:  # noqa: ANN401  # a tensor, a number, or None
        """What a closure returned, combined among ranks: an optimizer that looks at it must not decide differently."""
        group: Group = self._group or current().group
        if loss is None or not group.included or group.size == 1:
            return loss
        op = "sum" if parse_op(self._settings.op) is Op.SUM else "mean"
        if not isinstance(loss, torch.Tensor):
            return float(group.allreduce(np.array(float(loss)), op=op))
        return torch.full_like(loss.detach(), float(group.allreduce(np.array(loss.item()), op=op)))

    def reset(self) -> None:
        """In a new round: go on with all ranks of it. Groups of the old one are no more."""
        world = current("reset()").group
        if self._group is not None or any(self._parts.keys()):
            raise ValueError("reset() is for optimizers over all ranks; build a new one for the groups of this round")
        for _, reducer in self._parts.values():
            reducer.reset(world)

    @property
    def _acts_alone(self) -> bool:
        """Whether a single rank has something to do."""
        return self.passes.num_passes > 1 or self._codec is not None or self._settings.check_finite


def _pays_to_overlap(group: Group) -> bool:
    topology = current().topology
    return pays_to_overlap(
        num_hosts=len({topology.places[rank] for rank in group.ranks}),
        num_busy=topology.local_size * torch.get_num_threads(),
        num_cores=len(os.sched_getaffinity(0)),
    )
