"""The Open Inference Protocol with requests that are right, wrong and hostile."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.serve.inference_protocol import (
    ModelSignature,
    PredictionRequest,
    Tensor,
    decode_array,
    encode_array,
    encode_reply,
    model_metadata,
    parse_request,
)
from ronde.serve.model import TensorInfo

X = TensorInfo(name="x", dtype="float32", shape=(None, 3))
MASK = TensorInfo(name="mask", dtype="int32", shape=(None,))
IMAGE = TensorInfo(name="image", dtype="string", shape=(None,))
Y = TensorInfo(name="y", dtype="float32", shape=(None, 2))
ONE = ModelSignature((X,), (Y,))
TWO = ModelSignature((X, MASK), (Y, TensorInfo(name="label", dtype="string", shape=(None,))))
IMAGES = ModelSignature((IMAGE,), (Y,))


def tensor(name: str = "x", shape: Any = (1, 3), datatype: str = "FP32", **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(shape), "datatype": datatype, **more}


def parse(inputs: Any, signature: ModelSignature = ONE, binary: bytes = b"", **more: Any) -> PredictionRequest:
    text = json.dumps({"inputs": inputs, **more}).encode()
    return parse_request(text + binary, str(len(text)).encode(), signature)


def values_of(found: Tensor) -> Any:
    return decode_array(*found).tolist()


@pytest.mark.parametrize("data", [[1, 2.5, 3, 4, 5, 6], [[1, 2.5, 3], [4, 5, 6]]])
def test_data_in_json_are_flat_or_nested(data: Any) -> None:
    text = json.dumps({"inputs": [tensor(shape=(2, 3), data=data)], "id": "7"}).encode()
    request = parse_request(text, None, ONE)
    assert values_of(request.tensors[0]) == [[1, 2.5, 3], [4, 5, 6]]
    assert (request.num_rows, request.id, request.outputs) == (2, "7", (("y", False),))


def test_binary_tensors_come_in_the_order_of_the_request_and_are_kept_in_that_of_the_model() -> None:
    mask, x = np.array([1, 2], np.int32).tobytes(), np.arange(6, dtype=np.float32).tobytes()
    inputs = [
        tensor("mask", (2,), "INT32", parameters={"binary_data_size": len(mask)}),
        tensor("x", (2, 3), parameters={"binary_data_size": len(x)}),
    ]
    request = parse(inputs, TWO, mask + x, outputs=[{"name": "label", "parameters": {"binary_data": True}}])
    assert [each.info.name for each in request.tensors] == ["x", "mask"]
    assert values_of(request.tensors[1]) == [1, 2]
    assert request.outputs == (("label", True),)


def test_texts_and_bytes() -> None:
    as_json = parse([tensor("image", (2,), "BYTES", data=["a", "ö"])], IMAGES)
    assert values_of(as_json.tensors[0]) == [b"a", "ö".encode()]
    data = struct.pack("<I", 3) + b"\xff\x00\x01" + struct.pack("<I", 0)
    binary = parse([tensor("image", (2,), "BYTES", parameters={"binary_data_size": len(data)})], IMAGES, data)
    assert values_of(binary.tensors[0]) == [b"\xff\x00\x01", b""]


def test_a_body_without_json_is_the_only_input() -> None:
    photo = parse_request(b"\xff\xd8photo", b"0", IMAGES)
    assert (photo.tensors[0].shape, values_of(photo.tensors[0])) == ((1,), [b"\xff\xd8photo"])
    numbers = parse_request(np.arange(6, dtype=np.float32).tobytes(), b"0", ONE)
    assert numbers.num_rows == 2
    with pytest.raises(ValueError, match="7 bytes"):
        parse_request(b"7 bytes", b"0", ONE)
    with pytest.raises(ValueError, match="one input"):
        parse_request(b"", b"0", TWO)


def size(num_bytes: object) -> dict[str, Any]:
    return {"parameters": {"binary_data_size": num_bytes}}


THREE = np.zeros(3, np.float32).tobytes()
NAN = np.array([1, math.nan, 2], np.float32).tobytes()
WRONG: dict[str, tuple[Any, bytes, str]] = {
    "no inputs": ([], b"", "missing: x FP32"),
    "not a list": ({}, b"", "Expected `array`"),
    "unknown name": ([tensor("z", data=[1, 2, 3])], b"", "no input 'z'; it takes x"),
    "a name twice": ([tensor(data=[1, 2, 3])] * 2, b"", "twice"),
    "other datatype": ([tensor(datatype="FP64", data=[1, 2, 3])], b"", "datatype 'FP64'"),
    "datatype of no protocol": ([tensor(datatype="x" * 9000, data=[1, 2, 3])], b"", "datatype"),
    "other shape": ([tensor(shape=(1, 4), data=[1, 2, 3, 4])], b"", r"shape \[1, 4\]"),
    "other rank": ([tensor(shape=(3,), data=[1, 2, 3])], b"", "shape"),
    "no rows": ([tensor(shape=(0, 3), data=[])], b"", "shape"),
    "negative": ([tensor(shape=(-1, 3), data=[1, 2, 3])], b"", "shape"),
    "product overflows": ([tensor(shape=(2**62, 3), data=[1, 2, 3])], b"", "shape"),
    "dimension beyond 64 bits": ([tensor(shape=(2**70, 3), data=[1, 2, 3])], b"", "."),
    "large shape, little data": ([tensor(shape=(2**30, 3), data=[1, 2, 3])], b"", "fewer elements"),
    "large shape, little binary": ([tensor(shape=(2**30, 3), **size(12))], THREE, "takes 12884901888"),
    "too few": ([tensor(data=[1, 2])], b"", "2 elements"),
    "too many": ([tensor(data=[1, 2, 3, 4])], b"", "4 elements"),
    "ragged": ([tensor(shape=(2, 3), data=[[1, 2, 3, 4], [5, 6]])], b"", "nested"),
    "too deep": ([tensor(data=[[[1, 2, 3]]])], b"", "flat or nested"),
    "very deep": ([tensor(data=json.loads("[" * 500 + "]" * 500))], b"", "."),
    "texts": ([tensor(data=["1", "2", "3"])], b"", "not FP32"),
    "null": ([tensor(data=None)], b"", "flat or nested"),
    "an object": ([tensor(data={"a": 1})], b"", "flat or nested"),
    "no data": ([tensor()], b"", "neither"),
    "both": ([tensor(data=[1, 2, 3], **size(12))], THREE, "both"),
    "too large for FP32": ([tensor(data=[1, 2, 1e39])], b"", "cannot hold"),
    "NaN in binary": ([tensor(**size(12))], NAN, "NaN"),
    "size too large": ([tensor(**size(13))], THREE, "12 bytes are left"),
    "size negative": ([tensor(**size(-1))], THREE, "binary_data_size is -1"),
    "size no number": ([tensor(**size("12"))], THREE, "binary_data_size"),
    "size true": ([tensor(**size(True))], THREE, "binary_data_size"),
    "size too small": ([tensor(**size(8))], THREE, "8 bytes"),
    "bytes left over": ([tensor(**size(12))], THREE + b"x", "1 bytes behind"),
    "shared memory": ([tensor(parameters={"shared_memory_region": "r"})], b"", "shared memory"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_input_is_refused_with_a_reason(case: str) -> None:
    inputs, binary, reason = WRONG[case]
    with pytest.raises(ValueError, match=reason):
        parse(inputs, ONE, binary)


@pytest.mark.parametrize("text", ["12x", "-1", "", "9" * 30, "1e3", "99999", "٣"])
def test_a_wrong_length_of_the_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Inference-Header-Content-Length"):
        parse_request(b"{}", text.encode(), ONE)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"inputs": [NaN]}',
        b"[" * 100000,
        b'{"a":' * 100000,
        b'{"inputs": [{"name":"x","shape":[1,3],"datatype":"FP32","data":[NaN,1,2]}]}',
    ],
)
def test_broken_json_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        parse_request(body, None, ONE)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"outputs": [{"name": "z"}]}, "no output 'z'"),
        ({"outputs": [{"name": "y"}, {"name": "y"}]}, "twice"),
        ({"outputs": [{"name": "y", "parameters": {"classification": 3}}]}, "classification"),
        ({"parameters": {"sequence_id": 7}}, "sequence"),
        ({"parameters": {"timeout": "soon"}}, "microseconds"),
        ({"id": "x" * 10_000}, "id"),
    ],
)
def test_what_is_asked_for_beside_the_inputs_is_checked(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse([tensor(data=[1, 2, 3])], **more)


@pytest.mark.parametrize(
    ("datatype", "dtype", "values"),
    [
        ("UINT8", "uint8", [256]),
        ("INT8", "int8", [-129]),
        ("INT64", "int64", [2**63]),
        ("INT32", "int32", [1.5]),
        ("BOOL", "bool", [1]),
        ("UINT64", "uint64", [-1]),
    ],
)
def test_numbers_that_a_dtype_cannot_hold_are_refused(datatype: str, dtype: str, values: list[Any]) -> None:
    signature = ModelSignature((TensorInfo(name="n", dtype=dtype, shape=(None,)),), (Y,))
    with pytest.raises(ValueError, match="'n'"):
        parse([tensor("n", (1,), datatype, data=values)], signature)


def test_inputs_have_the_same_number_of_samples() -> None:
    inputs = [tensor("x", (1, 3), data=[1, 2, 3]), tensor("mask", (2,), "INT32", data=[1, 2])]
    with pytest.raises(ValueError, match="different numbers"):
        parse(inputs, TWO)


def test_nan_is_taken_where_it_is_allowed() -> None:
    text = json.dumps({"inputs": [tensor(**size(12))]}).encode()
    assert parse_request(text + NAN, str(len(text)).encode(), ONE, allow_nan=True).num_rows == 1


@pytest.mark.parametrize("data", [b"\x05\x00\x00\x00abc", b"\x01\x00", b"\xff\xff\xff\xffab"])
def test_a_damaged_list_of_bytes_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="'image'"):
        parse([tensor("image", (1,), "BYTES", **size(len(data)))], IMAGES, data)


@given(st.binary(max_size=300), st.one_of(st.none(), st.binary(max_size=6)))
def test_whatever_comes_is_a_request_or_refused(body: bytes, length: bytes | None) -> None:
    for signature in (ONE, TWO, IMAGES):
        try:
            assert isinstance(parse_request(body, length, signature), PredictionRequest)
        except ValueError:
            pass


def test_a_reply_in_json_and_in_binary() -> None:
    values = np.array([[1.5, math.inf]], np.float32)
    y = Tensor(Y, values.shape, encode_array(values))
    label = Tensor(TWO.outputs[1], (1,), encode_array(np.array(["cat"], object)))
    reply = encode_reply("m", "3", "id", [(y, False), (label, False)])
    assert reply.num_json_bytes is None
    found = json.loads(reply.body)
    assert found["outputs"][0] == {"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [1.5, None]}
    assert found["outputs"][1]["data"] == ["cat"]
    assert (found["model_name"], found["model_version"], found["id"]) == ("m", "3", "id")
    reply = encode_reply("m", "3", "", [(y, True), (label, False)])
    assert reply.num_json_bytes is not None
    text, data = reply.body[: reply.num_json_bytes], reply.body[reply.num_json_bytes :]
    assert json.loads(text)["outputs"][0]["parameters"] == {"binary_data_size": 8}
    assert np.frombuffer(data, np.float32).tolist() == [1.5, math.inf]


def test_metadata_say_what_a_model_takes() -> None:
    found = model_metadata("m", ["1"], TWO)
    assert found["inputs"][0] == {"name": "x", "datatype": "FP32", "shape": [-1, 3]}
    assert [each["name"] for each in found["outputs"]] == ["y", "label"]
