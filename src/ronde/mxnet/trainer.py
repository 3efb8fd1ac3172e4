"""The distributed trainer of gluon and the distributed optimizer of the module API.

trainer = ronde.mxnet.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
trainer.broadcast_parameters()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np

from ronde.comm.group import Group
from ronde.comm.world import current_world, resolve_group
from ronde.mxnet.broadcast_state import broadcast_parameters
from ronde.mxnet.gradients import GradientReducer, ParameterGradients, make_wire_codec
from ronde.training.gradients.gradient_settings import GradientSettings
from ronde.training.sync_check import checksum, compare_checksums
from ronde.types import Op

UNUSED_SETTINGS = ("average_passes", "check_finite", "idle_steps", "sparse_as_dense")
COMPARE_ADVICE = (
    "; each rank has initialized its own: call broadcast_parameters() before training, or load the same checkpoint. If "
    "they are meant to differ, compare_at_step=0 or RONDE_COMPARE_AT_STEP=0 turns this off"
)


def make_settings(op: str | Op, settings: Mapping[str, Any]) -> GradientSettings:
    """The settings of a trainer; ValueError for those that MXNet's have no use for."""
    unused = sorted(set(settings).intersection(UNUSED_SETTINGS))
    if unused:
        raise ValueError(f"a trainer of MXNet has no setting {', '.join(unused)}")
    return GradientSettings(op=op, **settings)


class DistributedTrainer(mx.gluon.Trainer):
    """A trainer of gluon whose step() averages the gradients over all ranks, and sums them over the contexts of a rank.

    `compression` is None, "fp16", or a dictionary as gluon's own trainer takes it: {"type": "2bit", "threshold": 0.5}.
    The other options are those of GradientSettings: op, bucket_mb, overlap, predivide, together, compare_at_step. All
    ranks begin to use their trainers in the same order, or give them names.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: dict[str, Any] | None = None,
        *,
        op: str | Op = "mean",
        compression: Any = None,
        group: Group | None = None,
        name: str = "",
        **settings: Any,  # see GradientSettings
    ) -> None:
        wanted = make_settings(op, settings)
        reducer = GradientReducer(wanted, group, make_wire_codec(compression), name)
        self._init_distributed(params, optimizer, optimizer_params, reducer, group, wanted.compare_at_step)

    def _init_distributed(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: dict[str, Any] | None,
        reducer: GradientReducer,
        group: Group | None,
        compare_at_step: int | None = None,
    ) -> None:
        # For trainers that derive from this one and reduce in their own way.
        if isinstance(optimizer, ReducingOptimizer):
            raise ValueError(
                "DistributedTrainer reduces the gradients itself; give it the optimizer that DistributedOptimizer() got"
            )
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        for param in self._params:
            if param._grad_stype != "default" or param._stype != "default":
                raise ValueError(
                    f"the parameter {param.name!r} or its gradient is sparse, and those cannot be reduced; make the "
                    "layer with sparse_grad=False"
                )
        self._reducer = reducer
        self._num_steps = 0
        self._group = group
        self._compare_at_step = compare_at_step

    def broadcast_parameters(self, root: int = 0) -> None:
        """Give the parameters of the root, a rank of the world, to all ranks. Those that have no shape yet are given
        when they are initialized. Collective."""
        broadcast_parameters(self, root, group=self._group)

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Reduce the gradients, and update the parameters. Collective. With `ignore_stale_grad` a parameter is updated
        if backward() has given it a gradient on any rank; the other ranks count as if theirs were 0."""
        if ignore_stale_grad:
            self._agree_on_fresh(clear=True)
        super().step(batch_size, ignore_stale_grad)

    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Update the parameters after allreduce_grads(). With `ignore_stale_grad` it is collective: a parameter is
        updated if backward() has given it a gradient on any rank."""
        if ignore_stale_grad:
            self._agree_on_fresh(clear=False)
        super().update(batch_size, ignore_stale_grad)

    def _agree_on_fresh(self, *, clear: bool) -> None:
        """Mark on all ranks and contexts the gradients that are fresh on any; `clear` those that are not fresh here, so
        that they add nothing to the others."""
        members = resolve_group(self._group)
        params = [each for each in self._params if each.grad_req != "null"]
        fresh = np.array([any(data._fresh_grad for data in each.list_data()) for each in params], np.uint8)
        if params and members.rank is not None:
            fresh = members.allreduce(fresh, op=Op.MAX)
        for param, is_fresh in zip(params, fresh, strict=True):
            for data, gradient in zip(param.list_data(), param.list_grad(), strict=True):
                if is_fresh and not data._fresh_grad:
                    if clear:
                        gradient[:] = 0
                    data._fresh_grad = True

    def _allreduce_grads(self) -> None:
        self._num_steps += 1
        self._compare_parameters()
        gradients = [
            ParameterGradients(param.name, param.list_grad(), index)
            for index, param in enumerate(self._params)
            if param.grad_req != "null"
        ]
        if gradients:
            self._reducer.reduce(gradients)

    def _compare_parameters(self) -> None:
        world, members, at_step = current_world("a step"), resolve_group(self._group), self._compare_at_step
        if at_step is None:
            at_step = world.settings.compare_at_step
        # In an elastic job a rank may come later than others, and its State gives it their parameters.
        if self._num_steps != at_step or members.size == 1 or members.rank is None or world.can_rejoin:
            return
        checksums = []
        for index, param in enumerate(self._params):
            if param.grad_req == "null":  # the forward pass may have changed it
                continue
            data = np.ascontiguousarray(param.list_data()[0].asnumpy())
            checksums.append((f"parameter {index}", checksum(data.reshape(-1).view(np.uint8))))
        compare_checksums(members, checksums, advice=COMPARE_ADVICE)


def DistributedOptimizer(
    optimizer: Any,
    *,
    op: str | Op = "mean",
    compression: Any = None,
    group: Group | None = None,
    name: str = "",
    **settings: Any,  # see GradientSettings
) -> Any:
    """Return an optimizer for the module API which averages the gradients over all ranks before it updates, and leaves
    the rest to the given one. The options are those of DistributedTrainer.

    A module on several contexts needs a kvstore that updates (`kvstore="local"`, the default of fit()), which sums
    their gradients first.
    """
    if not isinstance(optimizer, mx.optimizer.Optimizer):
        raise TypeError(
            f"DistributedOptimizer takes an optimizer of MXNet, got a {type(optimizer).__name__}; use "
            "mx.optimizer.create('sgd')"
        )
    reducer = GradientReducer(make_settings(op, settings), group, make_wire_codec(compression), name)
    return ReducingOptimizer(optimizer, reducer)


class ReducingOptimizer(mx.optimizer.Optimizer):
    """What DistributedOptimizer() returns."""

    def __init__(self, optimizer: Any, reducer: GradientReducer) -> None:
        # The base class is not initialized: all attributes are those of the wrapped optimizer.
        self._optimizer = optimizer
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_optimizer", "_reducer"):
            self.__dict__[name] = value
        else:
            setattr(self._optimizer, name, value)

    def create_state(self, index: Any, weight: Any) -> Any:
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        return self._optimizer.create_state_multi_precision(index, weight)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average the gradients over all ranks, and update. Collective."""
        self._reduce(index, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """As update(), with a copy of the weights in float32."""
        self._reduce(index, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)

    def set_learning_rate(self, lr: float) -> None:
        self._optimizer.set_learning_rate(lr)

    def set_lr_mult(self, args_lr_mult: Any) -> None:
        self._optimizer.set_lr_mult(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: Any) -> None:
        self._optimizer.set_wd_mult(args_wd_mult)

    def _reduce(self, index: Any, grad: Any) -> None:
        indices: Sequence[Any] = index if isinstance(index, list | tuple) else [index]
        grads: Sequence[Any] = grad if isinstance(grad, list | tuple) else [grad]
        check_single_context(self._optimizer)
        names = [str(self._optimizer.idx2name.get(each, each)) for each in indices]
        given = zip(names, grads, indices, strict=True)
        self._reducer.reduce([ParameterGradients(name, [each], index) for name, each, index in given])


def check_single_context(optimizer: Any) -> None:
    """ValueError if the optimizer of a module gets the gradients of several contexts one by one: then nobody has summed
    them."""
    counts = Counter(optimizer.idx2name.values())
    name = next((name for name, count in counts.items() if count > 1), None)
    if name is not None:
        raise ValueError(
            f"the module has {name!r} on several contexts, and the optimizer updates each of them by itself, so their "
            "gradients are not summed; use kvstore='local' with update_on_kvstore, or one context"
        )
