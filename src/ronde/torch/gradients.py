"""All that combines the gradients of one optimizer: one reducer per group of ranks. Used by DistributedOptimizer."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.cuda.amp import GradScaler  # where it is in every version, for the CPU, too

from ronde.binding.buckets import pays_to_overlap
from ronde.binding.codec import Codec
from ronde.binding.gradients import GradientSettings
from ronde.binding.passes import Passes
from ronde.binding.reducer import Reducer
from ronde.comm.current import current
from ronde.comm.group import Group
from ronde.torch.adapter import TorchAdapter
from ronde.torch.autograd import Autograd, find_frame
from ronde.torch.names import Names
from ronde.torch.tracing import leave_alone
from ronde.types import Op, parse_op

__all__ = ["Gradients"]

_in_use: WeakSet[Gradients] = WeakSet()
"""Those of this process that are not closed: no parameter may be in two of them."""

Named = Sequence[tuple[str, Tensor]]

# The hooks of parameters, and what is called at the end of a pass and around a step.
leave_alone(Reducer.ready, Reducer.stray, TorchAdapter._take_large)
leave_alone(Passes.begin, Passes._end, Passes._finish, Passes.synchronize, Passes.stepped, Passes.cleared)


class Gradients:
    """The parameters of one optimizer; those of each group of ranks have a reducer of their own."""

    def __init__(
        self, names: Names, group: Group | None, settings: GradientSettings, codec: Codec | None, num_passes: int
    ) -> None:
        self._names = names
        self._group = _checked(group)
        self._settings = settings
        self._codec = codec
        self._params: list[list[Tensor]] = []  # of each of the optimizer's groups
        self._groups: list[Group] = []  # the ranks of each
        self._parts: dict[Group, tuple[TorchAdapter, Reducer]] = {}
        self._idle: list[tuple[Group, Named]] = []  # a rank that is alone has nothing to do for these
        self._known: dict[int, tuple[str, Tensor]] = {}  # what the reducers have, by identity
        self.passes = Passes(Autograd(), num_passes, mark=partial(_mark, self._known))
        """Counts the backward passes, and sees to it that gradients are combined."""
        _in_use.add(self)

    def add(self, param_group: Mapping[str, Any], *, later: bool = False) -> None:
        """One of the optimizer's groups. Its `group` says over which ranks it averages."""
        group = _checked(param_group.get("group")) or self._group or current("DistributedOptimizer").group
        named = self._names.of(len(self._params), param_group, later=later)
        if group.included:
            self._place(group, named)
        self._names.take(name for name, _ in named)
        self._params.append([parameter for _, parameter in named])
        self._groups.append(group)

    def check(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Whether the optimizer still has the parameters it had. In every step, so it has to be quick."""
        try:
            # Lists of the same objects are equal without a look at the numbers. Others may be taken for equal while
            # they have one number each and it is the same: until the step after.
            if not self._parts or [group["params"] for group in param_groups] == self._params:
                return
        except RuntimeError:  # a tensor is not true or false
            pass
        raise self._replaced(param_groups)

    def set_passes(self, num_passes: int) -> None:
        """How many passes make a step from now on. With several, one rank has to do something, too."""
        self.passes.num_passes = num_passes
        idle, self._idle = self._idle, []
        for group, named in idle:
            self._place(group, named)

    def average_loss(self, loss: Any) -> Any:  # a tensor, a number, or None
        """What a closure returned, combined among ranks: an optimizer that looks at it must not decide differently."""
        group: Group = self._group or current().group
        if loss is None or not group.included or group.size == 1:
            return loss
        op = "sum" if parse_op(self._settings.op) is Op.SUM else "mean"
        if not isinstance(loss, torch.Tensor):
            return float(group.allreduce(np.array(float(loss)), op=op))
        return torch.full_like(loss.detach(), float(group.allreduce(np.array(loss.item()), op=op)))

    def reset(self) -> None:
        """Begin anew: parameters may have been converted, and it may be a new round, with all ranks of it."""
        world = current("reset()")
        groups = self._groups if self._group is None else [*self._groups, self._group]
        now = {group: group if group.id else world.group for group in groups}
        for group in now.values():
            if group not in world.groups:
                raise ValueError(
                    f"{group} is no more; close() this optimizer, and build one for the groups there are now"
                )
        self._groups = [now[group] for group in self._groups]
        self._group = None if self._group is None else now[self._group]
        self._parts = {now[group]: part for group, part in self._parts.items()}
        for group, (_, reducer) in self._parts.items():
            reducer.reset(group)
        self.passes.cleared()  # what broke off before is no more
        idle, self._idle = self._idle, []
        for group, named in idle:
            self._place(now[group], named)

    def close(self) -> None:
        """Combine gradients no more. Idempotent."""
        _in_use.discard(self)
        self.passes.close()
        self._parts.clear()
        self._known.clear()
        self._idle.clear()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _place(self, group: Group, named: Named) -> None:
        """Give these to the reducer of the group, if there is something to do."""
        if group.size == 1 and not self._acts_alone:
            self._idle.append((group, named))
            return
        self._refuse_shared(named)
        if group in self._parts:
            adapter, reducer = self._parts[group]
            adapter.add(named)
            reducer.refresh()
        else:
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
            self._parts[group] = (adapter, reducer)
            self.passes.add(reducer)
        self._known.update((id(parameter), (name, parameter)) for name, parameter in named)

    @property
    def _acts_alone(self) -> bool:
        """Whether a single rank has something to do."""
        return self.passes.num_passes > 1 or self._codec is not None or self._settings.check_finite

    def _refuse_shared(self, named: Named) -> None:
        """No other optimizer may combine these, too."""
        if not _others_of(named, self):
            return
        gc.collect()  # one that nobody uses may still be there
        for name in _others_of(named, self):
            raise ValueError(
                f"rank {current().rank}: parameter {name!r} is in another distributed optimizer already, and both "
                "would combine its gradients; call close() of that one before you build this one"
            )

    def _replaced(self, param_groups: Sequence[Mapping[str, Any]]) -> ValueError:
        rank, words = current().rank, "the optimizer has other groups of parameters than it was given"
        for number, (group, known) in enumerate(zip(param_groups, self._params, strict=False)):
            odd = [index for index, (one, two) in enumerate(zip_longest(group["params"], known)) if one is not two]
            if odd:
                was = self._known.get(id(known[odd[0]])) if odd[0] < len(known) else None
                name = f", which was {was[0]!r}," if was else ""
                words = f"parameter {odd[0]} of the optimizer's group {number}{name} is not the one it was given"
                break
        return ValueError(
            f"rank {rank}: {words}: gradients of others are not combined. Replace parameters before "
            "DistributedOptimizer is called (or close() it and build another), and add some by add_param_group()"
        )


def _checked(group: object) -> Group | None:
    if group is not None and not isinstance(group, Group):
        raise TypeError(
            f"group must be a ronde.Group, got {type(group).__name__}; ronde.add_group(ranks) makes one, on all ranks"
        )
    return group


def _others_of(named: Named, mine: Gradients) -> list[str]:
    """Names of those that another optimizer combines."""
    others = {key for each in _in_use if each is not mine for key in each._known}
    return [name for name, parameter in named if id(parameter) in others]


def _mark(known: dict[int, tuple[str, Tensor]]) -> tuple[object, ...]:
    """A gradient and how often it was written to, as who clips gradients writes to all of them; and whether a scaler is
    making the step: it has looked for infinities before, and unscaled gradients, which nobody counts."""
    grads = (parameter.grad for _, parameter in reversed(known.values()))  # what is frozen comes first, mostly
    grad = next((grad for grad in grads if grad is not None), None)
    num_writes = 0 if grad is None else grad._version
    return id(grad), num_writes, find_frame(GradScaler.step) is None


def _pays_to_overlap(group: Group) -> bool:
    topology = current().topology
    return pays_to_overlap(
        num_hosts=len({topology.places[rank] for rank in group.ranks}),
        num_busy=topology.local_size * torch.get_num_threads(),
        num_cores=len(os.sched_getaffinity(0)),
    )
