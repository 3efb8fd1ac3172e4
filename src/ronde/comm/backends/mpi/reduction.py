"""Element types and operators that MPI lacks: element-wise arithmetic in NumPy before and after an MPI reduction.

The same rules as the native kernels (native/src/reduce/reduce.h). A reduction has three steps:

    wire = to_wire(data)            a type and an operator that every MPI library reduces in the same way
    …                               MPI reduces the wire arrays of all members with wire_op()
    result = from_wire(wire)        division of a mean, postscale, rounding: once

Types on the wire:

    float16, bfloat16               float32, so that sums are rounded once, at the end
    bool                            uint8 of 0 and 1: "or" is the maximum, "and" the minimum
    integers, sum/product           unsigned ones of at least 32 bits, where overflow is defined: it wraps. (Open MPI
                                    adds integers of 8 and 16 bits with saturation on some processors.)
    floats, min/max                 integers in the same order as the floats, NaN outermost: a NaN always wins
    everything else                 itself
"""

from __future__ import annotations

import numpy as np

from ronde.comm.buffers import Array, bfloat16_from_float32, float32_from_bfloat16
from ronde.types import DType, Op

BLOCK_ELEMENTS = 1 << 16
"""Elements that are turned into doubles at a time."""

MIN_SQUARE = 2.0**-511
"""Below this a vector's square has no precision left to divide by."""

_ORDERED = (Op.MIN, Op.MAX)


def wire_op(dtype: DType, op: Op) -> Op:
    """The operator (SUM, MIN, MAX or PRODUCT) with which MPI reduces the wire arrays."""
    if dtype is DType.BOOL:
        return Op.MAX if op in (Op.SUM, Op.MAX) else Op.MIN
    return Op.SUM if op is Op.MEAN else op


def to_wire(data: Array, dtype: DType, op: Op, prescale: float = 1.0) -> Array:
    """The array to reduce: new memory, or a view of `data` when its bits can be used as they are."""
    if dtype is DType.BOOL:
        return np.not_equal(data.view(np.uint8), 0).view(np.uint8)
    wire = _widen(data, dtype)
    if prescale != 1.0:
        wire = _scale(wire, prescale, None)
    if op in _ORDERED and dtype.is_float:
        return _to_ordered(wire, op)
    if op not in _ORDERED and wire.dtype.kind in "iu":
        return wire.view(f"u{wire.itemsize}") if wire.itemsize >= 4 else wire.astype(np.uint32)
    return wire


def from_wire(wire: Array, dtype: DType, op: Op, postscale: float = 1.0, divisor: int = 1) -> Array:
    """The result as `dtype` (bfloat16 as uint16), in the wire's memory where possible. `divisor` is for a mean: the
    number of members."""
    if dtype is DType.BOOL:
        return wire.view(np.bool_)
    if op in _ORDERED and dtype.is_float:
        wire = _from_ordered(wire)
    elif not dtype.is_float:
        wire = wire.view(dtype.numpy) if wire.itemsize == dtype.num_bytes else wire.astype(dtype.numpy)
    factor = postscale
    if op is Op.MEAN and dtype.is_float:
        factor /= divisor
    elif op is Op.MEAN and divisor > 1:
        wire = _divide(wire, divisor)
    if factor != 1.0:
        wire = _scale(wire, factor, wire)
    return _narrow(wire, dtype)


def combine_adasum(a: Array, b: Array) -> None:
    """Write the Adasum of a and b (float32 or float64) into a: the sum, with half of the overlap taken from each."""
    dots = np.zeros(3)
    with np.errstate(all="ignore"):
        for start in range(0, len(a), BLOCK_ELEMENTS):
            x = a[start : start + BLOCK_ELEMENTS].astype(np.float64)
            y = b[start : start + BLOCK_ELEMENTS].astype(np.float64)
            dots += (np.dot(x, y), np.dot(x, x), np.dot(y, y))
        weight_a, weight_b = _adasum_weight(dots[0], dots[1]), _adasum_weight(dots[0], dots[2])
        for start in range(0, len(a), BLOCK_ELEMENTS):
            x = a[start : start + BLOCK_ELEMENTS]
            x[:] = weight_a * x.astype(np.float64) + weight_b * b[start : start + BLOCK_ELEMENTS].astype(np.float64)


def _adasum_weight(overlap: float, square: float) -> float:
    return 1.0 - overlap / (2.0 * square) if square >= MIN_SQUARE else 1.0


def _widen(data: Array, dtype: DType) -> Array:
    if dtype is DType.FLOAT16:
        return data.astype(np.float32)
    if dtype is DType.BFLOAT16:
        return float32_from_bfloat16(data)
    return data


def _narrow(wire: Array, dtype: DType) -> Array:
    if dtype is DType.FLOAT16:
        with np.errstate(all="ignore"):
            return wire.astype(np.float16)
    if dtype is DType.BFLOAT16:
        return bfloat16_from_float32(wire)
    return wire


def _scale(data: Array, factor: float, out: Array | None) -> Array:
    """data * factor, multiplied in double precision and rounded once. Integers are truncated toward zero and kept
    within the type's range; NaN gives 0."""
    out = np.empty_like(data) if out is None else out
    with np.errstate(all="ignore"):
        if data.dtype.kind == "f":
            return np.multiply(data, factor, out=out, dtype=np.float64, casting="unsafe")
        info = np.iinfo(data.dtype)
        # The largest double that the type can hold; for 64 bits the maximum itself is not a double.
        high = float(info.max if info.bits < 64 else (info.max >> 11) << 11)
        for start in range(0, len(data), BLOCK_ELEMENTS):
            exact = np.nan_to_num(data[start : start + BLOCK_ELEMENTS] * np.float64(factor), nan=0.0)
            inside = np.clip(exact, float(info.min), high).astype(data.dtype)
            out[start : start + BLOCK_ELEMENTS] = np.where(exact > high, info.max, inside)
    return out


def _divide(wire: Array, divisor: int) -> Array:
    """Exact, truncated toward zero. In 64 bits: a small type may not even hold the divisor."""
    wide = wire.astype(np.int64 if wire.dtype.kind == "i" else np.uint64)
    number = wide.dtype.type(divisor)
    return ((wide - np.fmod(wide, number)) // number).astype(wire.dtype)


def _to_ordered(data: Array, op: Op) -> Array:
    """Integers in the same order as the floats. The bits of a float are sign and magnitude, so that of negative ones is
    inverted."""
    bits = data.view(f"i{data.itemsize}")
    info = np.iinfo(bits.dtype)
    ordered = _flip_negative(bits)
    ordered[np.isnan(data)] = info.max if op is Op.MAX else info.min
    return ordered


def _from_ordered(ordered: Array) -> Array:
    return _flip_negative(ordered).view(f"f{ordered.itemsize}")


def _flip_negative(bits: Array) -> Array:
    """Invert the magnitude of negative numbers; the inverse of itself."""
    info = np.iinfo(bits.dtype)
    flipped: Array = bits ^ ((bits >> (info.bits - 1)) & info.max)
    return flipped
