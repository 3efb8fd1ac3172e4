"""A compressor of somebody's own as a codec of ronde's. Used by DistributedOptimizer.

Every gradient is compressed by itself and in its own shape, as Horovod does it, so each travels by itself: those who
want speed write a codec for whole buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from horovod.torch.compression import Compressor
from ronde.binding.adapter import Parameter
from ronde.binding.buckets import GradientBucket
from ronde.binding.codec import Encoder, Wire
from ronde.comm.buffers import Array
from ronde.torch.tensors import over

__all__ = ["CompressorCodec"]


class CompressorCodec:
    """What compress() gives must have the same size and dtype in every step."""

    def __init__(self, compressor: type[Compressor]) -> None:
        self.name = f"{compressor.__module__}.{compressor.__qualname__}"
        self._compressor = compressor

    def open(self, bucket: GradientBucket, parameters: Sequence[Parameter]) -> Encoder | None:
        """For one bucket."""
        return _GradientByGradient(self._compressor, bucket, parameters)


class _GradientByGradient:
    """A wire for each gradient."""

    def __init__(self, compressor: type[Compressor], bucket: GradientBucket, parameters: Sequence[Parameter]) -> None:
        self._compressor = compressor
        self._dtype = bucket.dtype
        self._spans = bucket.spans
        self._shapes = [parameters[span.index].shape for span in bucket.spans]
        self._contexts: list[Any] = [None] * len(bucket.spans)
        samples = [
            compressor.compress(torch.zeros(shape, dtype=getattr(torch, bucket.dtype))) for shape in self._shapes
        ]
        self._small_shapes = [small.shape for small, _ in samples]
        self.wires = tuple(Wire(small.numel(), str(small.dtype).removeprefix("torch.")) for small, _ in samples)

    def encode(self, number: int, gradients: Array, wires: Sequence[Array]) -> None:
        """Compress one gradient."""
        small, self._contexts[number] = self._compressor.compress(self._gradient(number, gradients))
        self._wire(number, wires).copy_(small.reshape(-1))

    def decode(self, wires: Sequence[Array], gradients: Array) -> None:
        """Decompress all."""
        for number, context in enumerate(self._contexts):
            reduced = self._wire(number, wires).reshape(self._small_shapes[number])
            self._gradient(number, gradients).copy_(self._compressor.decompress(reduced, context))

    def _gradient(self, number: int, gradients: Array) -> Tensor:
        span = self._spans[number]
        return over(gradients[span.start : span.start + span.count], self._dtype).reshape(self._shapes[number])

    def _wire(self, number: int, wires: Sequence[Array]) -> Tensor:
        return over(wires[number], self.wires[number].dtype)
