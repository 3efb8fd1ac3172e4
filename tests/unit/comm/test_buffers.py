"""What callers may pass as arrays, and the errors for what cannot be sent."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest

from ronde.comm import buffers
from ronde.comm.buffers import (
    Bfloat16View,
    as_receive_buffer,
    as_send_buffer,
    bfloat16_from_float32,
)
from ronde.types import DType

Array = np.ndarray[Any, np.dtype[Any]]


class Tensor:
    """A tensor of a library that only speaks DLPack."""

    def __init__(self, data: Array, device: int = 1) -> None:
        self._data = data
        self._device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0

    def __dlpack__(self, **options: object) -> object:
        return self._data.__dlpack__(**options)  # type: ignore[arg-type]  # NumPy knows its own options


class UnreadableTensor(Tensor):
    """A tensor of a dtype that NumPy does not have."""

    def __dlpack__(self, **options: object) -> object:
        raise BufferError("bfloat16 is not supported")


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype is not DType.BFLOAT16])
def test_every_dtype_is_known(dtype: DType) -> None:
    source = as_send_buffer(np.zeros(3, dtype.numpy), "allreduce")
    assert source.dtype is dtype


# With older ones, DLPack has no way to say whether a tensor may be written to.
needs_writable_dlpack = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.3.0", reason="before NumPy 2.3 what came by DLPack is read-only"
)


@pytest.mark.parametrize(
    "given",
    [np.arange(4.0), pytest.param(Tensor(np.arange(4.0)), marks=needs_writable_dlpack), bytearray(4)],
)
def test_memory_is_read_and_written_where_it_is(given: object) -> None:
    source = as_send_buffer(given, "allreduce")
    target = as_receive_buffer(given, source, "allreduce")
    assert target.result is given and target.copy_to is None
    target.array[:] = 7
    assert source.array.tolist() == [7] * 4


class OldTensor(Tensor):
    """A tensor of a library that does not say whether it may be written to."""

    def __dlpack__(self, **options: object) -> object:
        return self._data.__dlpack__()


def test_a_tensor_that_may_be_immutable_is_read_but_not_written() -> None:
    tensor = OldTensor(np.arange(4.0))
    source = as_send_buffer(tensor, "allreduce")
    assert source.array.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"allreduce: out is read-only for NumPy .*; pass a writable array"):
        as_receive_buffer(tensor, source, "allreduce")


def test_a_numpy_without_dlpack_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "read_dlpack", None)
    with pytest.raises(TypeError, match=r"cannot read Tensor; .* a tensor with DLPack \(with NumPy 1.22"):
        as_send_buffer(Tensor(np.arange(4.0)), "allreduce")
    assert as_send_buffer(bytearray(4), "allreduce").array.tolist() == [0] * 4


@pytest.mark.parametrize(
    ("buffer", "dtype"),
    [
        (bytearray(b"abc"), DType.UINT8),
        (b"abc", DType.UINT8),
        (array.array("f", [1.0, 2.0, 3.0]), DType.FLOAT32),
        (memoryview(array.array("q", [1, 2, 3])), DType.INT64),
        (3.5, DType.FLOAT64),
        (True, DType.BOOL),
        (np.float16(1.0), DType.FLOAT16),
    ],
)
def test_buffers_and_numbers_are_arrays_too(buffer: object, dtype: DType) -> None:
    assert as_send_buffer(buffer, "allreduce").dtype is dtype


def test_gaps_in_memory_are_closed_on_the_way_in_and_kept_on_the_way_out() -> None:
    wide = np.zeros((3, 4))
    column = wide[:, 1]
    target = as_receive_buffer(column, as_send_buffer(column, "allreduce"), "allreduce")
    assert target.array.flags.c_contiguous and target.copy_to is target.result is column


def test_bits_of_bfloat16_come_back_as_such() -> None:
    view = Bfloat16View(np.zeros(3, np.int16))
    source = as_send_buffer(view, "allreduce")
    assert source.dtype is DType.BFLOAT16 and source.array.dtype == np.uint16
    result = as_receive_buffer(None, source, "allreduce").result
    assert isinstance(result, Bfloat16View) and result.bits.shape == (3,)
    with pytest.raises(TypeError, match="bits as uint16, got float32"):
        Bfloat16View(np.zeros(3, np.float32))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.array([object()]), "use ronde.objects"),
        (np.zeros(3, ">f4"), "foreign byte order"),
        (np.zeros(3, np.complex64), "complex64 is not supported; supported are uint8"),
        (np.zeros(3, "M8[s]"), "not supported"),
        ({"a": 1}, "cannot read dict; pass a NumPy array"),
        (None, "cannot read NoneType"),
        (Tensor(np.zeros(3), device=2), r"not in CPU memory \(DLPack device 2\)"),
        (UnreadableTensor(np.zeros(3)), "Bfloat16View"),
    ],
)
def test_what_cannot_be_sent_is_refused_with_a_way_out(x: object, words: str) -> None:
    with pytest.raises(TypeError, match=rf"allreduce: .*{words}"):
        as_send_buffer(x, "allreduce")


def test_an_out_that_cannot_take_the_result_is_refused() -> None:
    x = np.zeros((2, 3), np.float32)
    source = as_send_buffer(x, "allreduce")
    frozen = np.zeros_like(x)
    frozen.flags.writeable = False
    for out, words in (
        (frozen, "out is read-only"),
        (b"abcdef", "read-only"),
        (np.zeros((2, 3)), r"out is float64\[2, 3\], but the result is float32\[2, 3\]"),
        (np.zeros((3, 2), np.float32), r"out is float32\[3, 2\]"),
        (3.0, "got the number 3"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            as_receive_buffer(out, source, "allreduce")


def test_bfloat16_rounds_to_the_nearest_and_ties_to_even() -> None:
    numbers = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], np.uint32).view(np.float32)
    assert [hex(each) for each in bfloat16_from_float32(numbers)] == ["0x3f80", "0x3f82", "0x3f81", "0x3f80"]
