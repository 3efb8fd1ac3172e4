"""Samples as bytes: what goes in comes out, and what would run code or fill the memory is refused."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from ronde.data.samples import ARRAY_CODE, decode_field, decode_sample, encode_sample
from ronde.errors import DataError
from tests.unit.data.made_data import make_image

DTYPES = st.sampled_from(["?", "u1", "i2", ">i4", "i8", "f2", "f4", "f8", "c8", "S3", "U2"]).map(np.dtype)
VALUES = st.one_of(st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.text(), st.binary(), st.booleans())


@given(st.dictionaries(st.text(), VALUES), hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)))
@settings(deadline=None)
def test_what_is_encoded_is_decoded(sample: dict[str, Any], array: Any) -> None:
    decoded = decode_sample(encode_sample({**sample, "array": array, "numbers": [np.int32(3), np.float32(0.5)]}))
    found = decoded.pop("array")
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert found.tobytes() == array.tobytes()
    assert decoded.pop("numbers") == [3, 0.5]
    assert decoded == {name: value for name, value in sample.items() if name not in ("array", "numbers")}


@pytest.mark.parametrize("value", [object(), print, np.array([object()]), np.zeros(2, [("a", "i4")])])
def test_what_would_have_to_be_pickled_is_not_stored(value: Any) -> None:
    with pytest.raises(TypeError, match="sample 'x'"):
        encode_sample({"__key__": "x", "value": value})


@pytest.mark.parametrize(
    ("dtype", "shape"), [("<f4", [1 << 40]), ("O", [1]), ("<f4", [-1]), ("V8", [1]), ("i4,O", [1]), ("nonsense", [1])]
)
def test_an_array_that_is_not_what_it_claims_is_refused(dtype: str, shape: list[int]) -> None:
    header = msgspec.msgpack.encode([dtype, shape])
    ext = msgspec.msgpack.Ext(ARRAY_CODE, len(header).to_bytes(2, "little") + header + bytes(8))
    with pytest.raises(DataError, match="array"):
        decode_sample(msgspec.msgpack.encode({"a": ext}))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93", b"\x81\xa1a", msgspec.msgpack.encode([1])])
def test_bytes_that_are_no_sample_are_refused(data: bytes) -> None:
    with pytest.raises(DataError, match="damaged"):
        decode_sample(data)


def saved(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def test_members_are_decoded_by_their_ending() -> None:
    assert decode_field("json", b'{"a": [1]}') == {"a": [1]}
    assert decode_field("txt", "é".encode()) == "é"
    assert decode_field("cls", b"7\n") == 7
    assert decode_field("bin", b"abc") == b"abc"
    assert decode_field("mask.npy", saved(np.arange(3))).tolist() == [0, 1, 2]
    assert decode_field("PNG", make_image(8, 6)).shape == (6, 8, 3)
    packed = io.BytesIO()
    np.savez(packed, x=np.arange(2))
    assert decode_field("npz", packed.getvalue())["x"].tolist() == [0, 1]


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("1/0",)


@pytest.mark.parametrize("ending", ["pkl", "a.PICKLE", "pyd", "pt", "pth", "joblib", "dill"])
def test_pickles_are_refused_without_trust(ending: str) -> None:
    with pytest.raises(DataError, match="refused: loading it would run code"):
        decode_field(ending, pickle.dumps(RunsCode()))


def test_an_npy_of_objects_is_refused_without_trust() -> None:
    objects = np.array([RunsCode()])
    with pytest.raises(DataError, match="npy"):
        decode_field("npy", saved(objects))
    packed = io.BytesIO()
    np.savez(packed, x=objects)
    with pytest.raises(DataError, match="npy"):
        decode_field("npz", packed.getvalue())


def test_pickles_are_loaded_with_trust_and_pt_stays_bytes() -> None:
    assert decode_field("pkl", pickle.dumps([1]), trust=True) == [1]
    assert decode_field("pt", b"abc", trust=True) == b"abc"


def test_an_npy_that_claims_more_than_it_has_takes_no_memory() -> None:
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(8)
    with pytest.raises(DataError, match="damaged"):
        decode_field("npy", data)


def test_an_npz_that_unpacks_to_too_much_is_refused() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", saved(np.zeros(1 << 17)))
    assert len(file.getvalue()) < 1 << 13
    with pytest.raises(DataError, match="unpacks to"):
        decode_field("npz", file.getvalue(), limit_bytes=1 << 20)


def test_an_image_with_too_many_pixels_is_refused_before_it_is_decoded() -> None:
    file = io.BytesIO()
    Image.new("1", (5000, 5000)).save(file, "PNG")
    assert len(file.getvalue()) < 10_000
    with pytest.raises(DataError, match="5000x5000 pixels"):
        decode_field("png", file.getvalue(), limit_bytes=1 << 20)


@pytest.mark.parametrize("ending", ["png", "jpg", "npy", "npz", "json", "cls"])
def test_damaged_members_are_refused(ending: str) -> None:
    with pytest.raises(DataError):
        decode_field(ending, b"\x93NUMPYnonsense")
