"""ronde.mxnet, for the collective cases: blocking, and asynchronous in MXNet's engine, which gets one thread for
computing. Arrays are those of mx.np, which may have no elements and no dimensions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import mxnet as mx
import numpy as np

import ronde.mxnet
from ronde.comm.buffers import array_at
from ronde.mxnet.arrays import as_memory, get_dtype, new_array
from ronde.types import DType
from tests.conformance.frameworks.framework import Value

mx.npx.set_np()


class EagerFramework:
    """Every operation is waited for."""

    collectives: Any = ronde.mxnet
    dtypes = (
        *(DType.UINT8, DType.INT8, DType.INT32, DType.INT64),
        *(DType.FLOAT16, DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16, DType.BOOL),
    )
    fixed_shapes = False

    def run(self, function: Callable[..., Any], inputs: Sequence[Value]) -> list[Value]:
        found = function(*map(_as_tensor, inputs))
        results = [_as_value(each) for each in (found if isinstance(found, list | tuple) else [found])]
        mx.nd.waitall()
        return results

    def gradients(self, function: Callable[..., Any], inputs: Sequence[Value]) -> list[Value]:
        raise NotImplementedError("collectives on arrays of MXNet have no gradients")

    second_gradients = gradients

    def find_error(self, error: Exception) -> Exception:
        return ronde.mxnet.find_error(error) or error


class AsynchronousFramework(EagerFramework):
    """What can be is given to the engine, and waited for at the end."""

    collectives = SimpleNamespace(
        **{name: getattr(ronde.mxnet, name) for name in ("allgather", "alltoall", "barrier", "join")},
        **{
            name: functools.partial(getattr(ronde.mxnet, name), wait=False)
            for name in ("allreduce", "broadcast", "reduce_scatter")
        },
    )


def _as_tensor(value: Value) -> Any:
    tensor = new_array(value.array.shape, value.dtype, mx.np.zeros(1))
    if value.array.size:
        bits = np.ascontiguousarray(value.array).reshape(-1)
        array_at(as_memory(tensor, value.dtype).address, bits.size, bits.dtype)[:] = bits
    return tensor


def _as_value(result: Any) -> Value:
    result.wait_to_read()
    dtype = get_dtype(result)
    numbers = np.uint16 if dtype is DType.BFLOAT16 else dtype.numpy
    flat = array_at(as_memory(result, dtype).address, result.size, np.dtype(numbers)).copy()
    return Value(flat.reshape(result.shape), dtype)


FRAMEWORKS = {"eager": EagerFramework, "asynchronous": AsynchronousFramework}
