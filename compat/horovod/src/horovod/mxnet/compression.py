"""Horovod's Compression and Compressor, and a Compressor as a codec of ronde's."""

from __future__ import annotations

from typing import Any

from ronde.types import Op


class Compressor:
    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The compressed array, and the ctx for decompress()."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        raise NotImplementedError


class NoneCompressor(Compressor):
    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class FP16Compressor(Compressor):
    """Converts floating-point arrays to float16, and leaves others as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        is_float = "float" in str(tensor.dtype)
        return (tensor.astype("float16", copy=False) if is_float else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor.astype(ctx, copy=False) if "float" in str(ctx) else tensor


class Compression:
    none = NoneCompressor
    fp16 = FP16Compressor


class CompressorWire:
    """A Compressor as a WireCodec. compress() must return the same shape and dtype in every step."""

    def __init__(self, compressor: type[Compressor] | Compressor) -> None:
        kind = compressor if isinstance(compressor, type) else type(compressor)
        self.name = f"{kind.__module__}.{kind.__qualname__}"
        self._compressor = compressor
        self._contexts: dict[int, Any] = {}

    def encode(self, index: int, gradient: Any) -> Any:
        wire, self._contexts[index] = self._compressor.compress(gradient)
        return wire

    def decode(self, index: int, wire: Any, gradient: Any, size: int) -> None:
        found = self._compressor.decompress(wire, self._contexts[index])
        if found is not gradient:
            found.copyto(gradient)

    def choose_op(self, op: Op) -> Op:
        return op
