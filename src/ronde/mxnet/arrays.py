"""MXNet's arrays as memory of ronde: which ones can be used, where they lie, and new ones like them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.ndarray.ndarray import _new_alloc_handle

from ronde.comm.buffers import NUMPY_DTYPES
from ronde.comm.call import Memory
from ronde.mxnet.engine_library import get_address, wait_to_write
from ronde.training.graph_errors import find_error
from ronde.types import DType

BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
"""How MXNet names it."""
CPU_DEVICES = ("cpu", "cpu_pinned", "cpu_shared")


def is_array(x: object) -> bool:
    """Whether x is an array of MXNet, of `mx.nd` or of `mx.np`."""
    return isinstance(x, mx.nd.NDArray)


def check_array(x: Any, what: str) -> DType:
    """The dtype of an array that an operation can use; TypeError for any other."""
    if not isinstance(x, mx.nd.NDArray):
        raise TypeError(f"{what}: takes arrays of MXNet, got a {type(x).__name__}; use mx.nd.array(x)")
    if x.stype != "default":
        raise TypeError(f"{what}: cannot use an array of storage type {x.stype}; use x.tostype('default')")
    if x.context.device_type not in CPU_DEVICES:
        raise TypeError(
            f"{what}: the array is on {x.context}, and only the CPU can be used; use x.as_in_context(mx.cpu())"
        )
    return get_dtype(x)


def get_dtype(x: Any) -> DType:
    dtype = np.dtype(x.dtype)
    return DType.BFLOAT16 if dtype == BFLOAT16 else NUMPY_DTYPES[dtype]


def to_mxnet_dtype(dtype: DType) -> Any:
    """The dtype as MXNet's functions take it."""
    return BFLOAT16 if dtype is DType.BFLOAT16 else dtype.numpy


def new_array(shape: Sequence[int], dtype: DType, like: Any) -> Any:
    """An array with memory that nobody has written, of the class and on the device of another one."""
    with mx.util.np_shape(True):  # else a dimension of 0 would mean that it is not known
        handle = _new_alloc_handle(tuple(shape), like.context, False, to_mxnet_dtype(dtype))
    return type(like)(handle)


def wait_for_arrays(arrays: Sequence[Any], *, written: bool = False) -> None:
    """Wait until the arrays are computed; to be written, until nobody reads them, too. Raises the error of ronde that
    is in them, if there is one."""
    for each in arrays:
        try:
            if written:
                wait_to_write(each)
            else:
                each.wait_to_read()
        except mx.MXNetError as error:
            found = find_error(error)
            if found is None:
                raise
            raise found from error


def as_memory(x: Any, dtype: DType) -> Memory:
    """The memory of an array that is computed, which it keeps alive."""
    return Memory(get_address(x) if x.size else 0, tuple(x.shape), dtype.name.lower(), owner=x)


def clear_errors() -> None:
    """Wait for all that the engine has to do, and forget the errors in arrays: what is computed from one of them would
    fail, too. Called when they are dealt with, and all arrays are to be written anew."""
    try:
        mx.nd.waitall()
    except mx.MXNetError:
        return
