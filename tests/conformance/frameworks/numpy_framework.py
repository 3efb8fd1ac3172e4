"""ronde's own collectives on arrays, for the collective cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import ronde
from ronde.comm.buffers import Bfloat16View
from ronde.types import DType
from tests.conformance.frameworks.framework import Value


class NumpyFramework:
    """Functions are called with arrays."""

    collectives = ronde
    dtypes = tuple(DType)
    fixed_shapes = False

    def run(self, function: Callable[..., Any], inputs: Sequence[Value]) -> list[Value]:
        given = [Bfloat16View(each.array) if each.dtype is DType.BFLOAT16 else each.array for each in inputs]
        found = function(*given)
        return [_as_value(each) for each in (found if isinstance(found, list) else [found])]

    def gradients(self, function: Callable[..., Any], inputs: Sequence[Value]) -> list[Value]:
        raise NotImplementedError("NumPy has no gradients")

    def second_gradients(self, function: Callable[..., Any], inputs: Sequence[Value]) -> list[Value]:
        raise NotImplementedError("NumPy has no gradients")

    def find_error(self, error: Exception) -> Exception:
        return error


def _as_value(result: Any) -> Value:
    if isinstance(result, Bfloat16View):
        return Value(result.bits, DType.BFLOAT16)
    array = np.asarray(result)
    return Value(array, DType[array.dtype.name.upper()])


FRAMEWORKS = {"eager": NumpyFramework}
