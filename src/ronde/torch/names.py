"""What the parameters of an optimizer are called, in errors and to compare ranks. For the distributed optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

__all__ = ["Names"]


class Names:
    """As the caller says, as the optimizer knows them, or by their places in it."""

    def __init__(self, named: Iterable[tuple[str, Tensor]] | None, rank: int) -> None:
        self._rank = rank
        self._given = None if named is None else _read(named, rank)
        self.taken: set[str] = set()
        """All that parameters have."""

    def of(self, number: int, group: Mapping[str, Any], *, later: bool = False) -> list[tuple[str, Tensor]]:
        """The parameters of an optimizer's group with their names. `later`: it was added after the names were given."""
        known: Sequence[str] = group.get("param_names", ())
        found: dict[str, Tensor] = {}
        for index, parameter in enumerate(group["params"]):
            name = known[index] if known else f"group{number}.param{index}"
            if self._given is not None:
                name = self._given.get(id(parameter), (name if later else "", parameter))[0]
            if is_lazy(parameter):
                raise ValueError(
                    f"rank {self._rank}: parameter {name or index!r} of a lazy module has no shape yet; let the model "
                    "compute something before DistributedOptimizer is called"
                )
            if not name:
                raise ValueError(
                    f"rank {self._rank}: named_parameters lacks parameter {index} of the optimizer's group {number} "
                    f"({parameter.dtype}{list(parameter.shape)}); pass model.named_parameters() of the model that the "
                    "optimizer was built for, and build it after the model was moved or copied"
                )
            if name in self.taken or name in found:
                raise ValueError(f"rank {self._rank}: two parameters of the optimizer are named {name!r}")
            found[name] = parameter
        return list(found.items())

    def take(self, names: Iterable[str]) -> None:
        """No other parameter may get one of these."""
        self.taken.update(names)


def _read(named: Iterable[tuple[str, Tensor]], rank: int) -> dict[int, tuple[str, Tensor]]:
    """Names by identity; the parameters are kept, so that no other gets theirs."""
    found: dict[int, tuple[str, Tensor]] = {}
    names: set[str] = set()
    for pair in named if isinstance(named, Iterable) else (named,):
        if not isinstance(pair, tuple) or [isinstance(each, str | Tensor) for each in pair] != [True, True]:
            raise TypeError(
                f"rank {rank}: named_parameters must be pairs of a name and a parameter, such as "
                f"model.named_parameters() gives, got {pair if isinstance(pair, str) else type(pair).__name__}"
            )
        name, parameter = pair
        if name in names:
            raise ValueError(f"rank {rank}: named_parameters has two parameters named {name!r}; names must differ")
        if id(parameter) in found:
            raise ValueError(f"rank {rank}: named_parameters has {found[id(parameter)][0]!r} again, as {name!r}")
        names.add(name)
        found[id(parameter)] = (name, parameter)
    return found
