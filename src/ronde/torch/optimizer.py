"""Any optimizer of PyTorch, with gradients combined among ranks. Public as ronde.torch.DistributedOptimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ronde.binding.codec import Codec, find_codec
from ronde.binding.gradients import GradientSettings
from ronde.comm.collectives import mark_step
from ronde.comm.current import current, is_initialized
from ronde.comm.group import Group
from ronde.torch.codecs import CODECS
from ronde.torch.gradients import Gradients
from ronde.torch.names import Names
from ronde.torch.tracing import leave_alone
from ronde.types import Op

__all__ = ["Distributed", "DistributedOptimizer"]


def DistributedOptimizer(
    optimizer: Optimizer,
    *,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    op: str | Op = "mean",
    passes: int = 1,
    codec: str | Codec | None = None,
    bucket_mb: float | None = None,
    group: Group | None = None,
    **settings: Any,  # see GradientSettings
) -> Distributed:
    """The same optimizer, made to average gradients over all ranks (or over `group`) in every backward().

    When backward() returns, p.grad is the average: clip it, unscale it, step as ever. `passes` backward passes make a
    step: nothing travels before the last, and their gradients are averaged, as if their batches were one. `codec` is
    what gradients are on the wire: "float16", "bfloat16", or a Codec of your own. A group of parameters may have a
    `group` of its own: `SGD([{"params": head, "group": some_ranks}])`. Further settings are those of GradientSettings.

    What it adds to the optimizer is in `Distributed`.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"DistributedOptimizer takes an optimizer of PyTorch, got {type(optimizer).__name__}")
    if isinstance(optimizer, Distributed):
        raise ValueError("the optimizer is distributed already; wrap it once")
    world = current("DistributedOptimizer")
    wanted = GradientSettings(op=op, bucket_mb=bucket_mb, **settings)
    names = Names(named_parameters, world.rank)
    gradients = Gradients(names, group, wanted, find_codec(codec, CODECS), passes)
    try:
        for param_group in optimizer.param_groups:
            gradients.add(param_group)
        wanted.check_names(names.taken)
    except BaseException:
        gradients.close()
        raise
    return _convert(optimizer, gradients)


def _convert(optimizer: Optimizer, gradients: Gradients) -> Distributed:
    """The same optimizer, of a class that combines these gradients."""
    plain: Any = type(optimizer)
    distributed: Any = optimizer
    distributed.__class__ = _distributed(plain)
    distributed._gradients = gradients
    optimizer.register_step_pre_hook(_Before(gradients))
    optimizer.register_step_post_hook(_After(gradients))
    for param_group in optimizer.param_groups:
        param_group.pop("group", None)  # the optimizer need not know, nor its state
    # The hooks of parameters live as long as the model: without the optimizer they have nothing to do.
    weakref.finalize(optimizer, gradients.close).atexit = False
    result: Distributed = distributed
    return result


class Distributed(Optimizer):
    """What DistributedOptimizer adds to an optimizer's class."""

    _gradients: Gradients | None = None
    """None in a copy, which is an optimizer like any other."""

    def synchronize(self) -> None:
        """Combine gradients now. backward() and step() do it by themselves; it is needed only on a rank that had no
        backward pass, or fewer than `passes`, and looks at gradients, clips or unscales them before step()."""
        if self._gradients is not None:
            self._gradients.passes.synchronize()

    @property
    def passes(self) -> int:
        """How many backward passes make a step. It can be set between steps."""
        return 1 if self._gradients is None else self._gradients.passes.num_passes

    @passes.setter
    def passes(self, passes: int) -> None:
        if self._gradients is not None:
            self._gradients.set_passes(passes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ever. With several passes per step it begins a new one: those before are forgotten."""
        if self._gradients is not None:
            self._gradients.passes.cleared()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ever; `group` in it may be a ronde.Group. Every rank adds it before the same step."""
        super().add_param_group(param_group)
        if self._gradients is None:
            return
        try:
            self._gradients.add(self.param_groups[-1], later=True)
        except BaseException:
            del self.param_groups[-1]  # or it would train, uncombined
            raise
        self.param_groups[-1].pop("group", None)

    def reset(self) -> None:
        """After shutdown() and init(): go on in the new round. After the model was converted: agree on it anew. Every
        rank calls it."""
        if self._gradients is not None:
            self._gradients.reset()

    def close(self) -> None:
        """Combine gradients no more, and give back what that takes. Idempotent."""
        if self._gradients is not None:
            self._gradients.close()

    def __reduce_ex__(self, protocol: Any) -> Any:  # as object's
        """Copies are optimizers of the class it had before."""
        return _empty, (type(self).__mro__[2],), self.__getstate__()


def _empty(plain: type[Optimizer]) -> Optimizer:
    """An optimizer that is about to get its state."""
    return plain.__new__(plain)


@cache
def _distributed(plain: Any) -> type[Optimizer]:  # a class
    """A subclass of the same name."""
    return type(plain.__name__, (Distributed, plain), {"__module__": plain.__module__, "__doc__": plain.__doc__})


class _Before:
    """Before step(): gradients are to be combined, also those that a closure makes."""

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients

    def __call__(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """What step() is to be called with instead, when it was given a closure."""
        self._gradients.check(optimizer.param_groups)
        if len(args) > 1 and args[1] is not None:
            return (args[0], self._wrap(args[1]), *args[2:]), kwargs
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._wrap(kwargs["closure"])}
        self._gradients.passes.synchronize()
        return None

    def _wrap(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def combined() -> Any:  # whatever the closure returns
            loss = closure()
            self._gradients.passes.synchronize()
            return self._gradients.average_loss(loss)

        return combined


class _After:
    """After step(): gradients are used up."""

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell those who count."""
        self._gradients.passes.stepped()
        if is_initialized():
            mark_step()


leave_alone(_Before.__call__, _After.__call__)
