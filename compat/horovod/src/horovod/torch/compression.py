"""Horovod's Compression and Compressor, and a user's own Compressor as a codec of ronde's.

As in Horovod a Compressor gets every gradient in its own shape, so each is reduced by itself. A codec of ronde's, which
gets whole buckets, is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ronde.comm.buffers import Array
from ronde.torch.tensors import tensor_view
from ronde.training.gradients.adapter import ParameterInfo
from ronde.training.gradients.bucket_assignment import GradientBucket
from ronde.training.gradients.compression import BucketEncoder, WireArray


class Compressor:
    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """The compressed tensor, and the ctx for decompress()."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        raise NotImplementedError


class NoneCompressor(Compressor):
    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Converts floating-point tensors to float16, and leaves others as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        return tensor if ctx is None or tensor.dtype == ctx else tensor.to(ctx)


class Compression:
    none = NoneCompressor
    fp16 = FP16Compressor


class CompressorCodec:
    """A Compressor as a Codec. compress() must return the same size and dtype in every step."""

    def __init__(self, compressor: type[Compressor] | Compressor) -> None:
        kind = compressor if isinstance(compressor, type) else type(compressor)
        self.name = f"{kind.__module__}.{kind.__qualname__}"
        self._compressor = compressor

    def open(self, bucket: GradientBucket, parameters: Sequence[ParameterInfo]) -> BucketEncoder | None:
        return _CompressorEncoder(self._compressor, bucket, parameters)


class _CompressorEncoder:
    """Has one wire for each gradient."""

    def __init__(
        self, compressor: type[Compressor] | Compressor, bucket: GradientBucket, parameters: Sequence[ParameterInfo]
    ) -> None:
        self._compressor = compressor
        self._dtype = bucket.dtype
        self._locations = bucket.locations
        self._shapes = [parameters[location.index].shape for location in bucket.locations]
        self._contexts: list[Any] = [None] * len(bucket.locations)
        samples = [
            compressor.compress(torch.zeros(shape, dtype=getattr(torch, bucket.dtype))) for shape in self._shapes
        ]
        self._compressed_shapes = [small.shape for small, _ in samples]
        self.wires = tuple(WireArray(small.numel(), str(small.dtype).removeprefix("torch.")) for small, _ in samples)

    def encode(self, number: int, gradients: Array, wires: Sequence[Array]) -> None:
        small, self._contexts[number] = self._compressor.compress(self._gradient(number, gradients))
        self._wire(number, wires).copy_(small.reshape(-1))

    def decode(self, wires: Sequence[Array], gradients: Array) -> None:
        for number, context in enumerate(self._contexts):
            reduced = self._wire(number, wires).reshape(self._compressed_shapes[number])
            self._gradient(number, gradients).copy_(self._compressor.decompress(reduced, context))

    def _gradient(self, number: int, gradients: Array) -> Tensor:
        location = self._locations[number]
        return tensor_view(gradients[location.start : location.start + location.count], self._dtype).reshape(
            self._shapes[number]
        )

    def _wire(self, number: int, wires: Sequence[Array]) -> Tensor:
        return tensor_view(wires[number], self.wires[number].dtype)
