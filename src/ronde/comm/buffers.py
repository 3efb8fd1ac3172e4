"""The caller's arrays as memory that a channel can read and write. Used by every collective.

Accepted is whatever NumPy can see without copying: NumPy arrays and scalars, DLPack tensors on the CPU, Memory of the
CPU, and objects with the buffer protocol. What is not contiguous travels as a copy; an `out` that is not is filled at
the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ronde.comm.backends.native_library import address_of as address_of
from ronde.comm.call import Memory as Memory
from ronde.types import CPU, DType

if TYPE_CHECKING:
    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
else:
    Array = np.ndarray  # before NumPy 1.22 it has no type arguments
read_dlpack: Callable[[Any], Array] | None = getattr(np, "from_dlpack", getattr(np, "_from_dlpack", None))
"""NumPy's function for tensors with DLPack. NumPy 1.22 has it under another name, NumPy 1.21 not at all."""

NUMPY_DTYPES: dict[np.dtype[Any], DType] = {dtype.numpy: dtype for dtype in DType if dtype is not DType.BFLOAT16}
CPU_DEVICES = (1, 3)
"""DLPack: plain memory, and memory pinned for a GPU, which the CPU reads as well."""
ALIGNMENT = 64
"""Of buckets: a cache line, so that no line has two writers."""


class Bfloat16View:
    """The bits of bfloat16 numbers, for libraries whose bfloat16 NumPy cannot read.

    `bits` is an array of uint16 or int16, for PyTorch `tensor.view(torch.int16).numpy()`. Results come back as such a
    view, too.
    """

    __slots__ = ("bits",)

    def __init__(self, bits: object) -> None:
        array = _as_array(bits, "Bfloat16View")
        if array.dtype == np.int16:
            array = array.view(np.uint16)
        if array.dtype != np.uint16:
            raise TypeError(f"Bfloat16View takes the bits as uint16, got {array.dtype}; use view(), not a conversion")
        self.bits: Array = array
        """The bits, as uint16."""

    def __repr__(self) -> str:
        return f"Bfloat16View(shape={self.bits.shape})"


class SendBuffer(NamedTuple):
    """Contiguous memory to read from, and whether the caller passed a Bfloat16View."""

    array: Array
    dtype: DType
    is_view: bool

    def wrap(self, array: Array) -> object:
        """The result as the caller passed the input: as an array or as a Bfloat16View."""
        return Bfloat16View(array) if self.is_view else array


class ReceiveBuffer(NamedTuple):
    """Contiguous memory for a result."""

    array: Array
    result: object
    """What the caller gets."""
    copy_to: Array | None
    """The caller's own array, when that is another."""


def as_send_buffer(x: object, what: str) -> SendBuffer:
    """Memory to read from. `what` is the operation's name, for errors."""
    array, dtype = _array_and_dtype(x, what)
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return SendBuffer(array, dtype, isinstance(x, Bfloat16View))


def as_receive_buffer(out: object, send_buffer: SendBuffer, what: str) -> ReceiveBuffer:
    """Memory for a result like `send_buffer`; `out` None allocates it."""
    sent = send_buffer.array
    if out is None:
        array = np.empty(sent.shape, sent.dtype)
        return ReceiveBuffer(array, send_buffer.wrap(array), None)
    if isinstance(out, np.generic | int | float):
        raise TypeError(f"{what}: out must be an array that can be written to, got the number {out!r}")
    array, dtype = _array_and_dtype(out, what)
    if not array.flags.writeable:
        hint = "" if isinstance(out, np.ndarray) else f" for NumPy {np.__version__} (2.3 can write to most tensors)"
        raise ValueError(f"{what}: out is read-only{hint}; pass a writable array, or leave out= away to get a new one")
    if array.shape != sent.shape or dtype is not send_buffer.dtype:
        raise ValueError(
            f"{what}: out is {dtype.name.lower()}{list(array.shape)}, "
            f"but the result is {send_buffer.dtype.name.lower()}{list(sent.shape)}"
        )
    if array.flags.c_contiguous:
        return ReceiveBuffer(array, out, None)
    return ReceiveBuffer(np.empty_like(array, order="C"), out, array)


def aligned_zeros(num_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """New memory for buckets."""
    memory = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    start = -address_of(memory) % ALIGNMENT
    return memory[start : start + num_bytes]


def array_at(start: int, count: int, dtype: np.dtype[Any]) -> Array:
    """The reverse of address_of(): a flat array over memory that the caller keeps alive."""
    if count == 0:
        return np.empty(0, dtype)
    interface = {"data": (start, False), "shape": (count,), "typestr": dtype.str, "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def as_memory(array: Array) -> Memory:
    """The bytes of a contiguous array, which they keep alive."""
    return Memory(address_of(array), (array.nbytes,), "uint8", owner=array)


def as_array(memory: Memory) -> Array:
    """An array over memory of the CPU, whose owner it keeps alive."""
    dtype = memory.number.numpy
    if not memory.size:
        return np.empty(memory.shape, dtype)
    interface = {"data": (memory.address, False), "shape": memory.shape, "typestr": dtype.str, "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=interface, owner=memory.owner))


def split_by_counts(data: Array, counts: Sequence[int]) -> list[Array]:
    """An array in pieces of so many rows."""
    return [data[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]


def float32_from_bfloat16(bits: Array) -> Array:
    """The numbers whose bfloat16 bits are given as uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bfloat16_from_float32(numbers: Array) -> Array:
    """The bits of the nearest bfloat16 numbers as uint16, ties to even."""
    bits = numbers.view(np.uint32)
    high = bits >> 16
    rounded = (bits + np.uint32(0x7FFF) + (high & 1)) >> 16
    # A NaN keeps its upper bits: rounding could make it infinite.
    return np.where(np.isnan(numbers), high | 0x40, rounded).astype(np.uint16)


def _array_and_dtype(x: object, what: str) -> tuple[Array, DType]:
    if isinstance(x, Bfloat16View):
        return x.bits, DType.BFLOAT16
    if isinstance(x, Memory):
        if x.device != CPU:
            raise TypeError(
                f"{what}: the memory is on {x.device}, and only allreduce, broadcast and reduce can use memory of other"
                " devices than the CPU so far; copy it to the CPU first"
            )
        return as_array(x), x.number
    array = _as_array(x, what)
    found = NUMPY_DTYPES.get(array.dtype)
    if found is not None:
        return array, found
    if array.dtype.name == "bfloat16":  # of ml_dtypes, which JAX and TensorFlow use
        return array, DType.BFLOAT16
    if array.dtype.hasobject:
        raise TypeError(f"{what}: an array of Python objects cannot be sent as numbers; use ronde.objects")
    if not array.dtype.isnative:
        raise TypeError(f"{what}: dtype {array.dtype.str} has foreign byte order; convert it with astype()")
    supported = ", ".join(dtype.name.lower() for dtype in DType)
    raise TypeError(f"{what}: dtype {array.dtype} is not supported; supported are {supported}")


def _as_array(x: object, what: str) -> Array:
    if isinstance(x, np.ndarray):
        return x
    if isinstance(x, np.generic | bool | int | float):
        return np.asarray(x)
    if hasattr(x, "__dlpack__") and read_dlpack is not None:
        return _from_dlpack(x, read_dlpack, what)
    try:
        view = memoryview(x)  # type: ignore[arg-type]  # whether it is a buffer is what we ask
    except TypeError:
        tensors = "a tensor with DLPack" + ("" if read_dlpack is not None else " (with NumPy 1.22 or later)")
        raise TypeError(
            f"{what}: cannot read {type(x).__name__}; pass a NumPy array, {tensors}, or a buffer, "
            "and use ronde.objects for Python objects"
        ) from None
    return np.asarray(view)


def _from_dlpack(x: Any, read: Callable[[Any], Array], what: str) -> Array:  # any library's tensor
    name = type(x).__name__
    device, _ = x.__dlpack_device__()
    if int(device) not in CPU_DEVICES:
        raise TypeError(
            f"{what}: the {name} is not in CPU memory (DLPack device {int(device)}); copy it there first, or describe "
            "it as ronde.Memory if the backend takes its device"
        )
    try:
        return read(x)
    except (RuntimeError, BufferError, TypeError) as error:
        hint = "for bfloat16 pass ronde.Bfloat16View(its bits as uint16)"
        raise TypeError(f"{what}: NumPy cannot read the {name}: {error}; {hint}") from None
