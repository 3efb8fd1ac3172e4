"""Gradients in fewer bits on the wire.

A compressor of somebody's own as a codec of ronde's. Used by DistributedOptimizer.

Every gradient is compressed by itself and in its own shape, as Horovod does it, so each travels by itself: those who
want speed write a codec for whole buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ronde.comm.buffers import Array
from ronde.torch.tensors import tensor_view
from ronde.training.adapter import ParameterInfo
from ronde.training.buckets import GradientBucket
from ronde.training.compression import BucketEncoder, WireArray

__all__ = ["Compression", "Compressor", "CompressorCodec", "FP16Compressor", "NoneCompressor"]


class Compressor:
    """How a tensor is made smaller before an operation and whole again after it."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """The smaller tensor, and what decompress() needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        """The tensor as it was."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves it as it is."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        """The tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Floating-point numbers travel with 16 bits; others as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """In float16."""
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        """In the type it had."""
        return tensor if ctx is None or tensor.dtype == ctx else tensor.to(ctx)


class Compression:
    """The choices, as DistributedOptimizer and allreduce take them."""

    none = NoneCompressor
    fp16 = FP16Compressor


class CompressorCodec:
    """What compress() gives must have the same size and dtype in every step."""

    def __init__(self, compressor: type[Compressor]) -> None:
        self.name = f"{compressor.__module__}.{compressor.__qualname__}"
        self._compressor = compressor

    def open(self, bucket: GradientBucket, parameters: Sequence[ParameterInfo]) -> BucketEncoder | None:
        """For one bucket."""
        return _CompressorEncoder(self._compressor, bucket, parameters)


class _CompressorEncoder:
    """A wire for each gradient."""

    def __init__(
        self, compressor: type[Compressor], bucket: GradientBucket, parameters: Sequence[ParameterInfo]
    ) -> None:
        self._compressor = compressor
        self._dtype = bucket.dtype
        self._locations = bucket.locations
        self._shapes = [parameters[span.index].shape for span in bucket.locations]
        self._contexts: list[Any] = [None] * len(bucket.locations)
        samples = [
            compressor.compress(torch.zeros(shape, dtype=getattr(torch, bucket.dtype))) for shape in self._shapes
        ]
        self._compressed_shapes = [small.shape for small, _ in samples]
        self.wires = tuple(WireArray(small.numel(), str(small.dtype).removeprefix("torch.")) for small, _ in samples)

    def encode(self, number: int, gradients: Array, wires: Sequence[Array]) -> None:
        """Compress one gradient."""
        small, self._contexts[number] = self._compressor.compress(self._gradient(number, gradients))
        self._wire(number, wires).copy_(small.reshape(-1))

    def decode(self, wires: Sequence[Array], gradients: Array) -> None:
        """Decompress all."""
        for number, context in enumerate(self._contexts):
            reduced = self._wire(number, wires).reshape(self._compressed_shapes[number])
            self._gradient(number, gradients).copy_(self._compressor.decompress(reduced, context))

    def _gradient(self, number: int, gradients: Array) -> Tensor:
        span = self._locations[number]
        return tensor_view(gradients[span.start : span.start + span.count], self._dtype).reshape(self._shapes[number])

    def _wire(self, number: int, wires: Sequence[Array]) -> Tensor:
        return tensor_view(wires[number], self.wires[number].dtype)
