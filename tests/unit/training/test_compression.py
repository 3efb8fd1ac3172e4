from __future__ import annotations

import numpy as np
import pytest

from ronde.comm.buffers import Array
from ronde.training.adapter import ParameterInfo
from ronde.training.buckets import GradientBucket, GradientLocation
from ronde.training.compression import BFLOAT16, CODECS, FLOAT16, CastCodec, WireArray, find_codec


def there_and_back(codec: CastCodec, gradients: Array) -> Array:
    bucket = GradientBucket(gradients.dtype.name, (GradientLocation(0, 0, gradients.size),), "w")
    encoder = codec.open(bucket, [ParameterInfo("w", gradients.shape, gradients.dtype.name, gradients.size)])
    assert encoder is not None
    (wire,) = encoder.wires
    assert wire == WireArray(gradients.size, codec.name)
    wires = [np.zeros(wire.count, "uint16" if codec is BFLOAT16 else "float16")]
    encoder.encode(0, gradients, wires)
    back = np.empty_like(gradients)
    encoder.decode(wires, back)
    return back


@pytest.mark.parametrize(("codec", "error"), [(FLOAT16, 2**-11), (BFLOAT16, 2**-8)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_come_back_to_within_their_last_bit(codec: CastCodec, error: float, dtype: str) -> None:
    given = np.random.default_rng(0).normal(size=1000).astype(dtype)
    np.testing.assert_allclose(there_and_back(codec, given), given, rtol=error, atol=1e-7)


@pytest.mark.parametrize("codec", [FLOAT16, BFLOAT16])
def test_what_is_not_finite_stays_so(codec: CastCodec) -> None:
    given = np.array([np.inf, -np.inf, np.nan, 1e39], np.float64)
    back = there_and_back(codec, given)
    assert np.isposinf(back[[0, 3]]).all() and np.isneginf(back[1]) and np.isnan(back[2])


def test_a_bucket_that_is_small_already_travels_as_it_is() -> None:
    bucket = GradientBucket("bfloat16", (GradientLocation(0, 0, 3),), "w")
    assert FLOAT16.open(bucket, [ParameterInfo("w", (3,), "bfloat16", 3)]) is None


def test_codecs_are_found_by_name() -> None:
    assert find_codec(None) is None
    assert find_codec("none") is None
    assert find_codec("float16") is CODECS["float16"]
    assert find_codec(BFLOAT16) is BFLOAT16


def test_what_is_no_codec_is_refused() -> None:
    with pytest.raises(ValueError, match="one of none, float16, bfloat16, or a Codec, got 'fp8'"):
        find_codec("fp8")
    with pytest.raises(TypeError, match="must be a name or have a name and open"):
        find_codec(3)  # type: ignore[arg-type]


def test_bfloat16_rounds_to_the_nearest_and_ties_to_even() -> None:
    given = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], np.uint32).view(np.float32)
    back = there_and_back(BFLOAT16, given).view(np.uint32)
    assert [hex(each) for each in back] == ["0x3f800000", "0x3f820000", "0x3f810000", "0x3f800000"]
