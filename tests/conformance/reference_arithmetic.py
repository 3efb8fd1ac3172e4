"""What the members' numbers add up to, in NumPy. Used by the threads backend; the native library is written to give the
same results.

16-bit floats are folded in float32 and rounded once. Integers wrap; a mean of integers divides exactly and truncates.
For bool, sum and max are "or", product and min are "and".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ronde.comm.buffers import Array, bfloat16_from_float32, float32_from_bfloat16
from ronde.types import DType, Op

_FOLDS = {Op.SUM: np.add, Op.MEAN: np.add, Op.MIN: np.minimum, Op.MAX: np.maximum, Op.PRODUCT: np.multiply}
_BOOL_FOLDS = {Op.SUM: np.logical_or, Op.MAX: np.logical_or, Op.PRODUCT: np.logical_and, Op.MIN: np.logical_and}


def reduce(inputs: Sequence[Array], dtype: DType, op: Op, prescale: float, postscale: float) -> Array:
    """postscale * op(prescale * input), folded in the order of the inputs, as a new array of the inputs' dtype."""
    with np.errstate(all="ignore"):  # overflow is a result, as it is in the native library
        if dtype is DType.BOOL:
            return _fold(_BOOL_FOLDS[op], inputs)
        wide = [_scaled(_widen(array, dtype), prescale) for array in inputs]
        result = adasum(wide) if op is Op.ADASUM else _fold(_FOLDS[op], wide)
        if op is Op.MEAN and dtype.is_float:
            postscale /= len(wide)
        elif op is Op.MEAN:
            result = _divided(result, len(wide))
        return _narrow(_scaled(result, postscale), dtype)


def adasum(vectors: Sequence[Array]) -> Array:
    """Those beyond the largest power of two are mixed into the first ones; then neighbours, pairs, and so on."""
    full = 1 << (len(vectors).bit_length() - 1)
    row = [_combine_pair(vectors[i], vectors[i + full]) if i + full < len(vectors) else vectors[i] for i in range(full)]
    while len(row) > 1:
        row = [_combine_pair(first, second) for first, second in zip(row[::2], row[1::2], strict=True)]
    return row[0].copy()


def _combine_pair(first: Array, second: Array) -> Array:
    """Both, each without half of what the other says as well."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    overlap = float(a @ b)
    mixed: Array = _adasum_weight(overlap, float(a @ a)) * a + _adasum_weight(overlap, float(b @ b)) * b
    return mixed.astype(first.dtype)


def _adasum_weight(overlap: float, square: float) -> float:
    # Below this a square has no precision left to divide by.
    return 1.0 - overlap / (2.0 * square) if square >= 2.0**-511 else 1.0


def _fold(step: np.ufunc, inputs: Sequence[Array]) -> Array:
    result = inputs[0].copy()
    for array in inputs[1:]:
        step(result, array, out=result)
    return result


def _divided(array: Array, by: int) -> Array:
    wide = array if array.dtype.itemsize == 8 else array.astype(np.int64)
    divisor = wide.dtype.type(by)
    quotient = wide // divisor  # rounds down, which is one too low below zero
    exact: Array = quotient + ((wide < 0) & (wide % divisor != 0))
    return exact.astype(array.dtype)


def _scaled(array: Array, factor: float) -> Array:
    if factor == 1.0:
        return array
    product = array.astype(np.float64) * factor
    if array.dtype.kind == "f":
        return product.astype(array.dtype)
    limits = np.iinfo(array.dtype)
    # The largest double that the type can hold; for 64 bits the maximum itself is not a double.
    high = float(limits.max if array.dtype.itemsize < 8 else limits.max >> 11 << 11)
    inside = np.clip(np.nan_to_num(product), float(limits.min), high).astype(array.dtype)
    return np.where(product > high, array.dtype.type(limits.max), inside)


def _widen(array: Array, dtype: DType) -> Array:
    if dtype is DType.FLOAT16:
        return array.astype(np.float32)
    if dtype is DType.BFLOAT16:
        return float32_from_bfloat16(array.view(np.uint16))
    return array


def _narrow(array: Array, dtype: DType) -> Array:
    if dtype is DType.FLOAT16:
        return array.astype(np.float16)
    if dtype is DType.BFLOAT16:
        return bfloat16_from_float32(array)
    return array
