"""The parts of an elastic State that are objects of MXNet: blocks of gluon and their parameters, trainers, and arrays.
Importing ronde.mxnet registers them.

In an elastic job a trainer waits for all gradients before it updates, so an interrupted step has changed no parameter
that trains: only what the forward pass changes (running means of batch normalization) is kept at every step end.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mxnet as mx

from ronde.comm import objects
from ronde.comm.world import current_world
from ronde.elastic.state import State, StatePart, register_container_part, register_part
from ronde.mxnet.arrays import clear_errors, get_dtype
from ronde.mxnet.broadcast_state import broadcast_parameters
from ronde.mxnet.gradients import count_reductions


class ParametersPart(StatePart):
    """The parameters of a block, or those in a ParameterDict."""

    def __init__(self, parameters: Any, state: State) -> None:
        if isinstance(parameters, mx.gluon.Block):
            parameters = parameters.collect_params()
        self._parameters: dict[str, Any] = {str(i): each for i, each in enumerate(parameters.values())}
        uninitialized = [each.name for each in self._parameters.values() if each._data is None]
        if not self._parameters or uninitialized:
            what = f"{uninitialized[0]!r} has no values yet" if uninitialized else "there are no parameters"
            raise ValueError(f"{what}, which a State could keep; initialize the block and call it on a batch first")
        self._kept: dict[str, Any] = {}
        self._num_reductions = 0
        self.end_step()

    def commit(self) -> dict[str, Any]:
        return {key: each.list_data()[0].copy() for key, each in self._parameters.items()}

    def restore(self, committed: dict[str, Any]) -> None:
        clear_errors()
        for key, value in committed.items():
            self._parameters[key].set_data(value)

    def end_step(self) -> None:
        changing = {key: each for key, each in self._parameters.items() if each.grad_req == "null"}
        self._kept = {key: each.list_data()[0].copy() for key, each in changing.items()}
        self._num_reductions = count_reductions()

    def undo_step(self) -> None:
        self.restore(self._kept)

    def has_stepped(self) -> bool:
        return count_reductions() != self._num_reductions

    def describe(self) -> str:
        arrays = [each.list_data()[0] for each in self._parameters.values()]
        return ", ".join(f"{get_dtype(each).name.lower()}{list(each.shape)}" for each in arrays)

    def sync(self, givers: Sequence[int]) -> None:
        broadcast_parameters(self._parameters, root=givers[0], group=current_world().group)


class TrainerPart(StatePart):
    """What a trainer of gluon keeps besides parameters: momenta and the like, counters, the learning rate."""

    def __init__(self, trainer: Any, state: State) -> None:
        self._trainer = trainer

    def commit(self) -> Any:
        return self._read()

    def restore(self, committed: Any) -> None:
        self._write(committed)

    def sync(self, givers: Sequence[int]) -> None:
        is_giver = current_world().rank in givers
        given = objects.broadcast(self._read() if is_giver else None, root=givers[0])
        if not is_giver:
            self._write(given)

    def _read(self) -> tuple[bytes, dict[str, Any], float]:
        optimizer = self._trainer._optimizer
        counters = {name: copy.deepcopy(getattr(optimizer, name)) for name in _COUNTERS if hasattr(optimizer, name)}
        return self._trainer._updaters[0].get_states(dump_optimizer=False), counters, optimizer.lr

    def _write(self, given: tuple[bytes, dict[str, Any], float]) -> None:
        states, counters, learning_rate = given
        optimizer = self._trainer._optimizer
        for updater in self._trainer._updaters:
            updater.set_states(states)
        for name, value in counters.items():
            setattr(optimizer, name, copy.deepcopy(value))
        if hasattr(optimizer, "_all_index_update_counts"):  # its first one is what counts on the first context
            optimizer._index_update_count = optimizer._all_index_update_counts.setdefault(0, {})
        optimizer.lr = learning_rate


_COUNTERS = ("num_update", "begin_num_update", "_index_update_count", "_all_index_update_counts", "lr_scheduler")
"""Attributes of MXNet's optimizers that change from step to step."""


class ArraysPart(StatePart):
    """Arrays that a script changes by itself. All of them are kept at every step end."""

    def __init__(self, arrays: Sequence[Any], state: State) -> None:
        self._arrays = list(arrays)
        self._kept: list[Any] = []
        self._num_reductions = 0
        self.end_step()

    def commit(self) -> list[Any]:
        return [each.copy() for each in self._arrays]

    def restore(self, committed: list[Any]) -> None:
        clear_errors()
        for array, value in zip(self._arrays, committed, strict=True):
            value.copyto(array)

    def end_step(self) -> None:
        self._kept = self.commit()
        self._num_reductions = count_reductions()

    def undo_step(self) -> None:
        self.restore(self._kept)

    def has_stepped(self) -> bool:
        return count_reductions() != self._num_reductions

    def can_undo_step(self) -> bool:
        return True

    def sync(self, givers: Sequence[int]) -> None:
        named = {f"{index:06d}": each for index, each in enumerate(self._arrays)}
        broadcast_parameters(named, root=givers[0], group=current_world().group)


def _is_arrays(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(each, mx.nd.NDArray) for each in value)


register_part(mx.gluon.Block, ParametersPart)
register_part(mx.gluon.ParameterDict, ParametersPart)
register_part(mx.gluon.Trainer, TrainerPart)
register_part(mx.nd.NDArray, lambda array, state: ArraysPart([array], state))
register_container_part(_is_arrays, ArraysPart)
