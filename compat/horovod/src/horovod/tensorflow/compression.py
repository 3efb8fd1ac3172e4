"""Horovod's Compression and Compressor, for tensors of TensorFlow."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The compressed tensor, and the ctx for decompress()."""
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
    """Converts floating-point tensors to float16, and leaves others as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None or tensor.dtype == ctx else tf.cast(tensor, ctx)


class Compression:
    none = NoneCompressor
    fp16 = FP16Compressor
