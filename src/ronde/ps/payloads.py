"""The payloads of messages: arrays as they travel between workers and servers.

With compression, gradients and parameters travel as numbers of 16 bits, and are trained as what they are. A worker
rounds its gradients once. Both replicas of a part get the same bits, and so come to the same values. Servers round what
they send to workers, and keep the exact values. Several arrays, such as rows and their numbers, travel as one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from ronde.errors import ProtocolError
from ronde.ps.partition import Array

CODECS = ("none", "float16", "bfloat16")


def check_codec(codec: str | None) -> str:
    """The codec that a caller means."""
    name = "none" if codec is None else codec
    if name not in CODECS:
        raise ValueError(f"compression must be one of {', '.join(CODECS)}, got {codec!r}")
    return name


def encode_values(values: Array, codec: str) -> Array:
    """What travels. Numbers of bfloat16 are the upper halves of those of float32, as uint16."""
    if codec == "none":
        return values
    if codec == "float16":
        with np.errstate(over="ignore"):  # what is too large becomes infinity, as with every other codec
            return values.astype(np.float16)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, np.uint32(0x7FC0), rounded).astype(np.uint16)


def decode_values(encoded: Array, dtype: str) -> Array:
    """What encode_values() was given, rounded."""
    if encoded.dtype == np.uint16:
        encoded = (encoded.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return encoded.astype(dtype, copy=False)


# --- several arrays in one payload -----------------------------------------------------------------------------------

_DTYPES = ("uint8", "uint16", "uint32", "int64", "float16", "float32", "float64")
_COUNT = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQQ")
"""Of each array: the number of its dtype, its rows, and the elements of a row."""
_ALIGNMENT = 8


def pack_arrays(arrays: Sequence[Array]) -> Array:
    """Several arrays of one or two dimensions as the bytes of one message."""
    head = _COUNT.pack(len(arrays))
    for array in arrays:
        head += _ENTRY.pack(_DTYPES.index(array.dtype.name), len(array), array.shape[1] if array.ndim == 2 else 0)
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    packed = np.empty(len(head) + sum(sizes), np.uint8)
    packed[: len(head)] = np.frombuffer(head, np.uint8)
    start = len(head)
    for array, size in zip(arrays, sizes, strict=True):
        packed[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
        packed[start + array.nbytes : start + size] = 0
        start += size
    return packed


def unpack_arrays(packed: Array) -> list[Array]:
    """What pack_arrays() was given, as views of the message."""
    try:
        (count,) = _COUNT.unpack(packed[: _COUNT.size].tobytes())
        if count * _ENTRY.size > packed.size:
            raise ValueError(f"{count} arrays")
        start, arrays = _COUNT.size + _ENTRY.size * count, []
        entries = _ENTRY.iter_unpack(packed[_COUNT.size : start].tobytes())
        for kind, rows, columns in entries:
            dtype = np.dtype(_DTYPES[kind])
            num_bytes = rows * (columns or 1) * dtype.itemsize
            piece = packed[start : start + num_bytes].view(dtype)
            arrays.append(piece.reshape(rows, columns) if columns else piece.reshape(rows))
            start += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    except (struct.error, ValueError, IndexError) as error:
        raise ProtocolError(f"a message with rows of a table that no ronde of this version sends: {error}") from error
    return arrays
