"""Gradients that become ready are counted alike by the class in Python and by the one of the extension."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest

from ronde.comm.backends import native_library
from ronde.training.gradients.ready_counter import ReadyCounter
from tests.services import needs

HOT_CALLS_MISSING = "" if native_library.hot_calls is not None else "it cannot be imported; `make build` builds it"
BOTH = [
    pytest.param(ReadyCounter, id="in Python"),
    pytest.param(
        native_library.make_ready_counter,
        id="in the extension",
        marks=needs("extension hot_calls", missing=HOT_CALLS_MISSING),
    ),
]
pytestmark = pytest.mark.parametrize("make", BOTH)


class Calls:
    """What a counter of these buckets has called."""

    def __init__(self, make: Any, bucket_of: list[int], num_buckets: int) -> None:
        self.calls: list[tuple[str, int | None]] = []
        self.error: Exception | None = None
        self.counter = make(
            bucket_of=bucket_of,
            num_buckets=num_buckets,
            on_first=self.on_first,
            on_second=lambda index: self.calls.append(("second", index)),
            on_full=lambda bucket: self.calls.append(("full", bucket)),
        )
        self.hooks = [self.counter.hook(index) for index in range(len(bucket_of))]

    def on_first(self, index: int | None) -> None:
        self.calls.append(("first", index))
        if self.error is not None:
            raise self.error

    def ready(self, *indices: int) -> list[tuple[str, int | None]]:
        """Make gradients ready, and return what was called."""
        for index in indices:
            assert self.hooks[index]("a parameter") is None
        calls, self.calls = self.calls, []
        return calls


def test_the_first_gradient_every_full_bucket_and_second_gradients_are_reported(make: Any) -> None:
    calls = Calls(make, [0, 1, 0, -1, 1], 2)
    calls.counter.begin(True)
    assert calls.ready(3, 0, 1) == [("first", 3)]
    assert calls.ready(1) == [("second", 1)]
    assert calls.ready(4, 2) == [("full", 1), ("full", 0)]
    assert calls.counter.ready_order() == [3, 0, 1, 4, 2]
    assert calls.counter.all_ready()
    assert calls.ready(2) == [("second", 2)]


def test_full_buckets_are_reported_only_in_a_pass_that_counts_them(make: Any) -> None:
    calls = Calls(make, [0, 0], 1)
    assert calls.ready(1, 0) == [("first", 1)]
    calls.counter.begin(True)
    assert not calls.counter.all_ready() and calls.counter.ready_order() == []
    assert calls.ready(0, 1) == [("first", 0), ("full", 0)]
    calls.counter.begin(False)
    assert calls.ready(0, 1) == [("first", 0)]


def test_a_parameter_that_is_not_counted_begins_a_pass(make: Any) -> None:
    calls = Calls(make, [0], 1)
    new = calls.counter.hook(None)
    new()
    new()
    assert calls.ready() == [("first", None)] and calls.counter.ready_order() == []
    calls.counter.report_next()
    assert calls.ready(0) == [("first", 0)]


def test_an_error_at_the_first_gradient_is_raised_and_the_gradient_does_not_count(make: Any) -> None:
    calls = Calls(make, [0], 1)
    calls.counter.begin(True)
    calls.error = ArithmeticError("not now")
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            calls.ready(0)
    calls.error = None
    calls.calls.clear()
    assert calls.ready(0) == [("first", 0), ("full", 0)]


def test_what_the_others_raise_comes_out_of_the_hook(make: Any) -> None:
    def fail(number: int) -> None:
        raise ArithmeticError(str(number))

    counter = make(bucket_of=[0], num_buckets=1, on_first=lambda index: None, on_second=fail, on_full=fail)
    counter.begin(True)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="0"):
            counter.hook(0)()


def test_nothing_trains(make: Any) -> None:
    calls = Calls(make, [], 0)
    calls.counter.begin(True)
    assert calls.counter.all_ready() and calls.counter.ready_order() == []


def test_both_report_the_same_whatever_comes(make: Any) -> None:
    source = random.Random(7)
    for _ in range(30):
        num_buckets = source.randint(1, 4)
        bucket_of = [source.randint(-1, num_buckets - 1) for _ in range(source.randint(1, 12))]
        reference, calls = Calls(ReadyCounter, bucket_of, num_buckets), Calls(make, bucket_of, num_buckets)
        for _ in range(6):
            counts, coming = source.random() < 0.7, source.choices(range(len(bucket_of)), k=15)
            for each in (reference, calls):
                each.counter.begin(counts)
            assert calls.ready(*coming) == reference.ready(*coming)
            assert calls.counter.ready_order() == reference.counter.ready_order()
            assert calls.counter.all_ready() == reference.counter.all_ready()


def test_a_counter_and_what_it_calls_are_freed_together(make: Any) -> None:
    calls = Calls(make, [0], 1)
    owner = weakref.ref(calls)
    del calls
    gc.collect()
    assert owner() is None


def test_the_extension_refuses_numbers_that_do_not_exist(make: Any) -> None:
    if make is ReadyCounter:
        return
    callbacks: dict[str, Any] = {"on_first": print, "on_second": print, "on_full": print}
    for bucket_of, num_buckets in (([1], 1), ([-2], 1), ([0], -1)):
        with pytest.raises(ValueError):
            make(bucket_of=bucket_of, num_buckets=num_buckets, **callbacks)
    with pytest.raises(TypeError):
        make(bucket_of=["a"], num_buckets=1, **callbacks)
    counter = make(bucket_of=[0], num_buckets=1, **callbacks)
    for index in (1, -1):
        with pytest.raises(IndexError):
            counter.hook(index)
    with pytest.raises(TypeError):
        type(counter.hook(0))()
