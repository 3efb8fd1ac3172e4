from __future__ import annotations

import numpy as np
import pytest

from ronde.comm.buffers import Array
from ronde.torch.optimizer import CODECS
from ronde.training import compression as codec
from ronde.training.adapter import ParameterInfo
from ronde.training.buckets import GradientBucket, GradientLocation


def wire_of(made: codec.Codec, gradients: Array) -> tuple[Array, Array]:
    """What travels, and what comes back of it."""
    bucket = GradientBucket(gradients.dtype.name, (GradientLocation(0, 0, gradients.size),), "w")
    encoder = made.open(bucket, [ParameterInfo("w", gradients.shape, gradients.dtype.name, gradients.size)])
    assert encoder is not None and encoder.wires == (codec.WireArray(gradients.size, made.name),)
    wires = [np.zeros(gradients.size, "float16" if made.name == "float16" else "uint16")]
    encoder.encode(0, gradients, wires)
    back = np.empty_like(gradients)
    encoder.decode(wires, back)
    return wires[0], back


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_conversions_are_those_of_numpy(name: str, dtype: str) -> None:
    given = np.random.default_rng(0).normal(size=1000).astype(np.float32).astype(dtype)
    given[:4] = [np.inf, -np.inf, 0.0, 1e30]
    ours, theirs = wire_of(CODECS[name], given), wire_of(codec.CODECS[name], given)
    assert np.array_equal(ours[0], theirs[0])
    assert np.array_equal(ours[1], theirs[1])


def test_small_dtypes_travel_as_they_are() -> None:
    bucket = GradientBucket("float16", (GradientLocation(0, 0, 3),), "w")
    assert CODECS["bfloat16"].open(bucket, [ParameterInfo("w", (3,), "float16", 3)]) is None
