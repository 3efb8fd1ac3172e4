"""The extension for repeated allreduces, as far as the conformance tests do not see it."""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ronde.comm.backends import native_library
from ronde.comm.backends.native_library import make_allreduce_cache
from ronde.comm.world import World
from ronde.observe.recorder import Recorder
from ronde.observe.stragglers import ArrivalSampler
from tests.services import needs
from tests.unit.comm.thread_ranks import run_ranks

HOT_CALLS_MISSING = "" if native_library.hot_calls is not None else "it cannot be imported; `make build` builds it"
pytestmark = needs("extension hot_calls", missing=HOT_CALLS_MISSING)


def make(**more: Any) -> Any:
    """A cache without a channel: what it holds may not be run."""
    given: dict[str, Any] = dict(
        algorithm=0,
        timeout_s=1.0,
        this_thread=SimpleNamespace(operation=""),
        recorder=Recorder(0),
        running_calls=deque(),
        next_sequence=itertools.count().__next__,
        sampler=ArrivalSampler(0),
        on_failure=print,
    )
    cache = make_allreduce_cache(0, **{**given, **more})
    assert cache is not None
    return cache


def add(cache: Any, x: Any, op: str = "sum") -> None:
    cache.add(x, op, 1.0, 1.0, 10, 0, 7, b"allreduce")


def run(cache: Any, x: Any, out: Any = None, op: object = "sum", prescale: object = 1.0) -> Any:
    return cache.run(x, out, op, prescale, 1.0)


class OtherArray(np.ndarray[Any, Any]):
    pass


@pytest.mark.parametrize(
    "case",
    [
        lambda x: (x.astype(np.float64),),
        lambda x: (x[:3],),
        lambda x: (x.reshape(1, 4),),
        lambda x: (np.zeros((4, 2), np.float32)[:, 0],),
        lambda x: (x, np.zeros(4, np.float32)),
        lambda x: (x, None, "mean"),
        lambda x: (x, None, "sum", 2.0),
        lambda x: (x, None, "sum", 1),
        lambda x: ([1.0],),
        lambda x: (x.view(OtherArray),),
        lambda x: (x.astype(">f4"),),
        lambda x: (np.zeros(4, "M8[s]"),),
        lambda x: (np.zeros((1,) * 12, np.float32),),
    ],
)
def test_what_was_not_made_before_is_left_to_the_caller(case: Any) -> None:
    x = np.zeros(4, np.float32)
    cache = make()
    add(cache, x)
    assert run(cache, *case(x)) is None


@pytest.mark.parametrize(
    "more",
    [
        {"running_calls": deque([1])},
        {"this_thread": SimpleNamespace(operation="allreduce")},
        {"recorder": SimpleNamespace(tracing=True)},
    ],
)
def test_beside_other_work_it_is_left_to_the_caller(more: dict[str, Any]) -> None:
    x = np.zeros(4, np.float32)
    cache = make(**more)
    add(cache, x)
    assert run(cache, x) is None


def test_many_shapes_do_not_fill_it_for_ever() -> None:
    cache = make()
    for size in range(2000):
        add(cache, np.zeros(size, np.float32))
    assert run(cache, np.zeros(5000, np.float32)) is None


def test_after_close_nothing_is_held_and_nothing_runs() -> None:
    x, op = np.zeros(4, np.float32), "".join(["s", "um"])
    cache = make()
    before = sys.getrefcount(op)
    add(cache, x, op)
    assert sys.getrefcount(op) == before + 1
    cache.close()
    cache.close()
    add(cache, x, op)
    assert sys.getrefcount(op) == before
    assert run(cache, x, op=op) is None
    assert cache.counts() == (0, 0, 0, 0)


def test_a_cycle_with_it_is_collected() -> None:
    class Owner:
        cache: Any = None

        def fail(self, *_: object) -> None:
            raise AssertionError

    owner = Owner()
    owner.cache = make(on_failure=owner.fail)
    watched = weakref.ref(owner)
    del owner
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("arguments", [(), (1, 2, 3)])
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        make().run(*arguments)
    with pytest.raises(TypeError):
        make().add(*arguments)


def test_a_closed_channel_is_not_kept_by_its_sums() -> None:
    def body(world: World) -> tuple[int, int]:
        num_before = len(world.recorder._counters._sources)
        group = world.add_group(range(2))
        for _ in range(3):
            group.allreduce(np.ones(4, np.float32))
        world.remove_group(group)
        counted = world.recorder.metrics().of(group.id, "allreduce").operations
        return counted, len(world.recorder._counters._sources) - num_before

    assert run_ranks(2, body) == [(3, 0)] * 2


@pytest.mark.parametrize("how", ["closed", "cleared"])
def test_a_call_that_is_about_to_run_outlives_the_table(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_double)
    refuse = prototype(lambda *_: native_library.NativeStatus.CLOSED)
    monkeypatch.setattr(native_library, "load_library", lambda: SimpleNamespace(rd_run=refuse))
    original = np.empty_like

    def empty_like(x: Any) -> Any:
        """NumPy's own runs a frame of Python: a signal handler may call shutdown() there, and other threads may run."""
        if how == "closed":
            cache.close()
        for size in range(300):
            add(cache, np.zeros((2, size), np.float32))
        return original(x)

    def fail(description: bytes, status: int, result: bytes) -> None:
        raise RuntimeError(f"{description.decode()}: {status}")

    x = np.zeros(4, np.float32)
    with monkeypatch.context() as patch:
        patch.setattr(np, "empty_like", empty_like)
        cache = make(on_failure=fail)
    cache.add(x, "sum", 1.0, 1.0, 10, 0, 7, b"the first one")
    with pytest.raises(RuntimeError, match=f"the first one: {native_library.NativeStatus.CLOSED}"):
        run(cache, x)
