"""What an optimizer has after DistributedOptimizer, for gradients and for Adasum alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from functools import cache
from typing import Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from horovod.common.process_sets import ProcessSet

__all__ = ["Wrapped", "class_for"]

H = TypeVar("H", bound=Hashable)


class Wrapped(Optimizer):
    """It knows what DistributedOptimizer was called with, and its copies are optimizers of the class it had before."""

    op: int
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet
    _parameter_names: dict[Tensor, str]
    _plain: type[Optimizer]
    """The class it had before."""

    @property
    def _requires_update(self) -> set[Tensor]:
        """Parameters that learn; some scripts look at them."""
        return {param for group in self.param_groups for param in group["params"] if param.requires_grad}

    @staticmethod
    def find_duplicates(lst: Iterable[H]) -> set[H]:
        """What is in it more than once."""
        return {each for each, count in Counter(lst).items() if count > 1}

    def __reduce_ex__(self, protocol: Any) -> Any:  # as object's
        """For copies and files."""
        return _empty, (self._plain,), self.__getstate__()


def _empty(plain: type[Optimizer]) -> Optimizer:
    """An optimizer that is about to get its state."""
    return plain.__new__(plain)


def class_for(kind: Any, plain: Any) -> Any:  # classes
    """A class of this kind over that of an optimizer, with its name, and where Horovod has such classes."""
    return _class(kind, plain)


@cache
def _class(kind: Any, plain: Any) -> Any:
    names = {"__module__": "horovod.torch.optimizer", "__doc__": plain.__doc__, "_plain": plain}
    return type(plain.__name__, (kind, plain), names)
