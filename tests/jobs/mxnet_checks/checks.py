"""The list of checks."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np

import ronde
import ronde.mxnet as rm
from ronde.mxnet.engine_library import load_engine_library

CHECKS: dict[str, Callable[[], None]] = {}


def check(body: Callable[[], None]) -> Callable[[], None]:
    """Run it on every rank."""
    CHECKS[f"{body.__module__.rpartition('.')[2]}.{body.__name__}"] = body
    return body


def run_checks() -> None:
    """Run all of them, on all ranks in the same order, and end the process at the first that fails."""
    for name, body in CHECKS.items():
        try:
            body()
            mx.nd.waitall()
            ronde.barrier()
        except Exception:
            traceback.print_exc()
            sys.exit(f"{name} failed on rank {ronde.rank()}")
        print(f"passed {name}", flush=True)


def runs_in_engine() -> bool:
    """Whether asynchronous operations of all ranks run in MXNet's engine. Collective."""
    return all(ronde.objects.allgather(load_engine_library() is not None))


def error_of(function: Callable[[], Any]) -> Exception:
    """The error of ronde that a function raises, or that is in the array which it returns."""
    try:
        found = function()
        for each in found if isinstance(found, list) else [found]:
            each.wait_to_read()
    except Exception as error:
        return rm.find_error(error) or error
    raise AssertionError(f"nothing was raised, but {found}")


def slow_zeros(size: int = 300) -> Any:
    """An array that takes the engine a while to compute: all of its elements are 0."""
    x = mx.nd.ones((size, size))
    for _ in range(8):
        x = mx.nd.dot(x, x) * 0.0
    return x


def expect_equal_on_all(array: Any, what: str) -> None:
    """The same bits on all ranks. Collective."""
    mine = np.ascontiguousarray(array.asnumpy() if hasattr(array, "asnumpy") else array)
    rows = ronde.allgather(mine.reshape(1, -1))
    assert all(np.array_equal(row, rows[0]) for row in rows), what
