"""The extension for repeated allreduces, as far as the conformance tests do not see it."""

from __future__ import annotations

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
from ronde.observe.recorder import Recorder
from ronde.observe.stragglers import ArrivalSampler

pytestmark = pytest.mark.skipif(native_library.hot_calls is None, reason="the extension is not built here")


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
