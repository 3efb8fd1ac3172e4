"""The collectives on tensors, without autograd: each is ronde's own, with tensors going in and coming out.

Used by the public collectives, by their backward rules, and wherever numbers travel that have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ronde.comm.group import Group
from ronde.torch.tensors import Given, Landing, TensorWork, as_array, as_tensor
from ronde.types import Op

__all__ = ["Reduction", "allgather", "allreduce", "allreduce_one", "alltoall", "broadcast", "reduce_scatter"]


class Reduction(NamedTuple):
    """How numbers are combined: postscale * op(prescale * x)."""

    op: str | Op = "sum"
    prescale: float = 1.0
    postscale: float = 1.0


def allreduce_one(
    group: Group, x: Tensor, out: Tensor | None, how: Reduction, *, name: str | None, wait: bool
) -> Any:  # a tensor, or its TensorWork
    """The sum of one tensor: the most frequent case, the short way."""
    given = as_array(x, "allreduce")
    landing = Landing(out, x, given, "allreduce")
    op, prescale, postscale = how
    outcome = group.allreduce(
        given, op=op, out=landing.array, name=name, prescale=prescale, postscale=postscale, wait=wait
    )
    if wait:
        return landing.finish(outcome)
    return TensorWork([outcome], lambda results: landing.finish(results[0]), name)


def allreduce(
    group: Group, xs: Sequence[Tensor], outs: Sequence[Tensor | None], how: Reduction, *, name: str | None, wait: bool
) -> Any:  # a list of tensors, or its TensorWork
    """The sums of some tensors as a list. Those of one dtype travel as a unit; each dtype is a unit of its own."""
    given = [as_array(x, "allreduce") for x in xs]
    landings = [Landing(out, x, array, "allreduce") for out, x, array in zip(outs, xs, given, strict=True)]
    units = _units(xs)
    outcomes = []
    for dtype, unit in units.items():
        unit_outs = [landings[index].array for index in unit]
        outcomes.append(
            group.allreduce(
                [given[index] for index in unit],
                out=None if outs[unit[0]] is None else unit_outs,
                name=f"{name}.{dtype}" if name and len(units) > 1 else name,
                wait=wait,
                **how._asdict(),
            )
        )

    def finish(results: list[list[Given]]) -> list[Tensor]:
        landed: dict[int, Tensor] = {}
        for unit, result in zip(units.values(), results, strict=True):
            landed.update((index, landings[index].finish(array)) for index, array in zip(unit, result, strict=True))
        return [landed[index] for index in range(len(xs))]

    return _ended(outcomes, finish, name, wait)


def _units(xs: Sequence[Tensor]) -> dict[str, list[int]]:
    """Which tensors have which dtype, in the order in which dtypes first appear."""
    units: dict[str, list[int]] = {}
    for index, x in enumerate(xs):
        units.setdefault(str(x.dtype).removeprefix("torch."), []).append(index)
    return units


def allgather(group: Group, xs: Sequence[Tensor], *, name: str | None, wait: bool) -> Any:
    """Everybody's rows of some tensors, as a list."""

    def start(index: int, name: str | None) -> tuple[Any, Callable[[Given], Tensor]]:
        device = xs[index].device
        outcome = group.allgather(as_array(xs[index], "allgather"), name=name, wait=wait)
        return outcome, lambda result: as_tensor(result, device)

    return _each(len(xs), start, name, wait)


def broadcast(
    group: Group, xs: Sequence[Tensor], outs: Sequence[Tensor | None], root: int, *, name: str | None, wait: bool
) -> Any:
    """The root's tensors for everybody, as a list."""

    def start(index: int, name: str | None) -> tuple[Any, Callable[[Given], Tensor]]:
        given = as_array(xs[index], "broadcast")
        landing = Landing(outs[index], xs[index], given, "broadcast")
        return group.broadcast(given, root=root, out=landing.array, name=name, wait=wait), landing.finish

    return _each(len(xs), start, name, wait)


def reduce_scatter(group: Group, xs: Sequence[Tensor], how: Reduction, *, name: str | None, wait: bool) -> Any:
    """My rows of the sums of some tensors, as a list."""

    def start(index: int, name: str | None) -> tuple[Any, Callable[[Given], Tensor]]:
        device = xs[index].device
        outcome = group.reduce_scatter(as_array(xs[index], "reduce_scatter"), name=name, wait=wait, **how._asdict())
        return outcome, lambda result: as_tensor(result, device)

    return _each(len(xs), start, name, wait)


def alltoall(group: Group, x: Tensor, splits: Any, *, name: str | None, wait: bool) -> Any:
    """The rows that came, and how many from each member (int64)."""
    if isinstance(splits, Tensor):
        splits = splits.tolist()
    outcome = group.alltoall(as_array(x, "alltoall"), splits=splits, name=name, wait=wait)
    device = x.device

    def finish(results: list[tuple[Given, Any]]) -> tuple[Tensor, Tensor]:
        rows, received = results[0]
        return as_tensor(rows, device), torch.from_numpy(received)

    return _ended([outcome], finish, name, wait)


def _each(
    count: int,
    start: Callable[[int, str | None], tuple[Any, Callable[[Given], Tensor]]],
    name: str | None,
    wait: bool,
) -> Any:
    """One operation per tensor. start() gives what ronde returned, and what makes a tensor of its result."""
    started = [start(index, f"{name}.{index}" if name and count > 1 else name) for index in range(count)]
    finishes = [finish for _, finish in started]

    def finish_all(results: list[Given]) -> list[Tensor]:
        return [finish(result) for finish, result in zip(finishes, results, strict=True)]

    return _ended([outcome for outcome, _ in started], finish_all, name, wait)


def _ended(outcomes: list[Any], finish: Callable[[list[Any]], Any], name: str | None, wait: bool) -> Any:
    """Results right away, or the handle of what is under way."""
    return finish(outcomes) if wait else TensorWork(outcomes, finish, name)
