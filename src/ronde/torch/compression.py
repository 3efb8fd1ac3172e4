"""Gradients with fewer bits on the wire, by PyTorch's own conversions. Used by the distributed optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from ronde.comm.buffers import Array
from ronde.torch.tensors import CPU, as_tensor, tensor_view
from ronde.training.adapter import ParameterInfo
from ronde.training.buckets import GradientBucket
from ronde.training.compression import BucketEncoder, Codec, WireArray

__all__ = ["CODECS", "TorchCastCodec"]


class TorchCastCodec:
    """As binding.codec.Cast, and several times as quick."""

    def __init__(self, dtype: str) -> None:
        self.name = dtype

    def open(self, bucket: GradientBucket, parameters: Sequence[ParameterInfo]) -> BucketEncoder | None:
        """Nothing to gain for buckets that are as small already."""
        if bucket.dtype not in ("float32", "float64"):
            return None
        return _TorchCastEncoder(bucket.count, self.name)


class _TorchCastEncoder:
    def __init__(self, count: int, dtype: str) -> None:
        self.wires = (WireArray(count, dtype),)
        self._dtype = dtype

    def encode(self, number: int, gradients: Array, wires: Sequence[Array]) -> None:
        """To 16 bits, to the nearest."""
        tensor_view(wires[0], self._dtype).copy_(as_tensor(gradients, CPU))

    def decode(self, wires: Sequence[Array], gradients: Array) -> None:
        """Back to what they were."""
        as_tensor(gradients, CPU).copy_(tensor_view(wires[0], self._dtype))


CODECS: dict[str, Codec] = {"float16": TorchCastCodec("float16"), "bfloat16": TorchCastCodec("bfloat16")}
