"""Gradients in fewer bits on the wire."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


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
