"""What the members' numbers add up to, in NumPy. Used by the threads backend; the native library is written to give the
same results.

16-bit floats are folded in float32 and rounded once. Integers wrap, but not in a mean: that is the exact sum, divided
and truncated. For bool, sum and max are "or", product and min are "and".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ronde.comm.buffers import Array, bfloat16_from_float32, float32_from_bfloat16
from ronde.types import DType, Op

_BIT_FOLDS = {Op.BIT_AND: np.bitwise_and, Op.BIT_OR: np.bitwise_or, Op.BIT_XOR: np.bitwise_xor}
_FOLDS = {
    Op.SUM: np.add,
    Op.MEAN: np.add,
    Op.MIN: np.minimum,
    Op.MAX: np.maximum,
    Op.PRODUCT: np.multiply,
    **_BIT_FOLDS,
}
_BOOL_FOLDS = {
    Op.SUM: np.logical_or,
    Op.MAX: np.logical_or,
    Op.PRODUCT: np.logical_and,
    Op.MIN: np.logical_and,
    **_BIT_FOLDS,
}


def reduce(inputs: Sequence[Array], dtype: DType, op: Op, prescale: float, postscale: float) -> Array:
    """postscale * op(prescale * input), folded in the order of the inputs, as a new array of the inputs' dtype."""
    with np.errstate(all="ignore"):  # overflow is a result, as it is in the native library
        if dtype is DType.BOOL:
            return _fold(_BOOL_FOLDS[op], inputs)
        wide = [_scaled(_widen(array, dtype), prescale) for array in inputs]
        if op is Op.MEAN and not dtype.is_float:
            return _scaled(_mean_of_integers(wide), postscale)
        result = adasum(wide) if op is Op.ADASUM else _fold(_FOLDS[op], wide)
        if op is Op.MEAN:
            postscale /= len(wide)
        return _narrow(_scaled(result, postscale), dtype)


def float32_bounds(
    inputs: Sequence[Array], dtype: DType, op: Op, prescale: float = 1.0, postscale: float = 1.0
) -> tuple[Array, Array]:
    """The least and the largest result (as float64) that is a float32 result, rounded once to this 16-bit dtype.

    A float32 result differs from the exact one by at most one rounding per member, of the sum of all sizes.
    """
    exact = np.array([_widen(array, dtype).astype(np.float64) for array in inputs]) * prescale
    factor = postscale / (len(inputs) if op is Op.MEAN else 1)
    fold = _FOLDS[op].reduce
    size = np.abs(exact).sum(axis=0) if op in (Op.SUM, Op.MEAN) else np.abs(fold(exact))
    error = (len(inputs) + 2) * abs(factor) * (size * 2.0**-24 + 2.0**-149)
    with np.errstate(over="ignore"):
        low, high = (_round_once(fold(exact) * factor + each, dtype) for each in (-error, error))
    return low, high


def _round_once(numbers: Array, dtype: DType) -> Array:
    """Rounded to the dtype, ties to even; by way of a float32 that is odd where it is not exact, which decides ties as
    the exact number does."""
    if dtype is DType.FLOAT16:
        return numbers.astype(np.float16).astype(np.float64)
    single = numbers.astype(np.float32)
    bits = single.view(np.uint32)
    too_far = np.abs(single.astype(np.float64)) > np.abs(numbers)
    truncated = np.where(too_far, bits - 1, bits)
    odd = np.where(truncated.view(np.float32).astype(np.float64) == numbers, truncated, truncated | 1)
    return float32_from_bfloat16(bfloat16_from_float32(odd.astype(np.uint32).view(np.float32))).astype(np.float64)


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


def _mean_of_integers(inputs: Sequence[Array]) -> Array:
    """In Python's numbers, which have no end."""
    sums = [sum(column) for column in zip(*(array.tolist() for array in inputs), strict=True)]
    truncated = [abs(total) // len(inputs) * (1 if total >= 0 else -1) for total in sums]
    return np.array(truncated, inputs[0].dtype)


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
