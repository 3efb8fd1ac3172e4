"""The codecs with PyTorch's conversions, and how a codec is found."""

from __future__ import annotations

import numpy as np
import pytest

from ronde.comm.buffers import Array
from ronde.torch.optimizer import CODECS
from ronde.training.gradients.adapter import ParameterInfo
from ronde.training.gradients.bucket_assignment import GradientBucket, GradientLocation
from ronde.training.gradients.compression import WireArray, find_codec


def there_and_back(name: str, gradients: Array) -> Array:
    bucket = GradientBucket(gradients.dtype.name, (GradientLocation(0, 0, gradients.size),), "w")
    encoder = CODECS[name].open(bucket, [ParameterInfo("w", gradients.shape, gradients.dtype.name, gradients.size)])
    assert encoder is not None and encoder.wires == (WireArray(gradients.size, name),)
    wires = [np.zeros(gradients.size, "uint16" if name == "bfloat16" else "float16")]
    encoder.encode(0, gradients, wires)
    back = np.empty_like(gradients)
    encoder.decode(wires, back)
    return back


@pytest.mark.parametrize(("name", "error"), [("float16", 2**-11), ("bfloat16", 2**-8)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_come_back_to_within_their_last_bit_and_infinities_as_they_are(
    name: str, error: float, dtype: str
) -> None:
    given = np.random.default_rng(0).normal(size=1000).astype(dtype)
    np.testing.assert_allclose(there_and_back(name, given), given, rtol=error, atol=1e-7)
    odd = np.array([np.inf, -np.inf, np.nan], dtype)
    np.testing.assert_array_equal(there_and_back(name, odd), odd)


def test_bfloat16_rounds_to_the_nearest_and_ties_to_even() -> None:
    given = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], np.uint32).view(np.float32)
    back = there_and_back("bfloat16", given).view(np.uint32)
    assert [hex(each) for each in back] == ["0x3f800000", "0x3f820000", "0x3f810000", "0x3f800000"]


def test_a_bucket_of_16_bits_per_number_is_reduced_as_it_is() -> None:
    bucket = GradientBucket("bfloat16", (GradientLocation(0, 0, 3),), "w")
    assert CODECS["float16"].open(bucket, [ParameterInfo("w", (3,), "bfloat16", 3)]) is None


def test_a_codec_is_found_by_name_or_is_the_callers_own() -> None:
    assert find_codec(None, CODECS) is None
    assert find_codec("none", CODECS) is None
    assert find_codec("float16", CODECS) is find_codec(CODECS["float16"], {}) is CODECS["float16"]
    with pytest.raises(ValueError, match="one of none, float16, bfloat16, or a Codec, got 'fp8'"):
        find_codec("fp8", CODECS)
    with pytest.raises(TypeError, match="must be a name or have a name and open"):
        find_codec(3, CODECS)  # type: ignore[arg-type]
