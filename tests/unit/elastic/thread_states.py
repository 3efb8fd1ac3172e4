"""Ranks of one job as threads, each with a current world of its own, as State uses it; and parts that keep a record."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ronde.comm import objects
from ronde.comm import world as world_module
from ronde.comm.world import World, current_world
from ronde.elastic import State, StatePart, register_part
from tests.conformance.ranks import run_threads


class ThreadProcessState(threading.local):
    """What world._state is for a process, for one thread."""

    world: World | None = None
    num_rounds = 0
    joining_thread = 0
    joining_ended = None
    leaves_at_exit = True
    worlds_of_parent = ()


def run_ranks(monkeypatch: pytest.MonkeyPatch, size: int, body: Callable[[World], Any]) -> list[Any]:
    """Run the body on so many ranks; what each returned."""
    state = ThreadProcessState()
    monkeypatch.setattr(world_module, "_state", state)

    def one(world: World) -> Any:
        state.world = world
        return body(world)

    return run_threads(size, one)


class Weights:
    """Stands for a model and its optimizer: step() cannot be undone, forward() can."""

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.buffer = 0

    def forward(self) -> None:
        self.buffer += 1

    def step(self) -> None:
        self.value += 1


class WeightsPart(StatePart):
    def __init__(self, weights: Weights, state: State) -> None:
        self.weights = weights
        self.calls: list[str] = []
        self.fails: Exception | None = None
        """What the next commit() or sync() raises."""
        self.settings = ""
        self._kept = (weights.value, weights.buffer)

    def commit(self) -> tuple[int, int]:
        self._fail()
        return self.weights.value, self.weights.buffer

    def restore(self, committed: tuple[int, int]) -> None:
        self.weights.value, self.weights.buffer = committed

    def end_step(self) -> None:
        self._kept = (self.weights.value, self.weights.buffer)

    def undo_step(self) -> None:
        self.calls.append("undo_step")
        self.weights.buffer = self._kept[1]

    def has_stepped(self) -> bool:
        return self.weights.value != self._kept[0]

    def describe(self) -> str:
        return self.settings

    def reset(self) -> None:
        self.calls.append("reset")

    def sync(self, givers: Sequence[int]) -> None:
        self.calls.append(f"sync {list(givers)}")
        received = objects.broadcast((self.weights.value, self.weights.buffer), root=givers[0])
        if current_world().rank not in givers:
            self.weights.value = -1  # half of it is there
        self._fail()
        self.weights.value, self.weights.buffer = received

    def _fail(self) -> None:
        error, self.fails = self.fails, None
        if error is not None:
            raise error


register_part(Weights, WeightsPart)


def part_of(state: State, name: str = "weights") -> WeightsPart:
    part = state._parts[name]
    assert isinstance(part, WeightsPart)
    return part
