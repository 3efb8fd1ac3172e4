"""The Open Inference Protocol, version 2, over REST: requests and replies as bytes, with the extension for binary
tensors. Without I/O; used by the front.

    JSON                                     {"inputs": [{"name", "shape", "datatype", "data"}], "outputs": […]}
    JSON and binary                          Inference-Header-Content-Length: N; N bytes of JSON, then the tensors whose
                                             `parameters.binary_data_size` says so, in the order of the inputs
    one raw input                            Inference-Header-Content-Length: 0; the whole body is the only input

A tensor is a shape and its bytes in C order, little endian. Elements of BYTES are texts or bytes of any length, each
behind its length in 4 bytes. Nothing of a request is trusted: whatever does not fit the model is a ValueError that says
what was wrong and what the model takes.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from ronde.comm.buffers import Array
from ronde.serve.model import TensorInfo
from ronde.text import shorten

Buffer: TypeAlias = "bytes | memoryview"

DATATYPES = {
    **{"bool": "BOOL", "string": "BYTES", "float16": "FP16", "float32": "FP32", "float64": "FP64"},
    **{f"{kind}int{bits}": f"{kind.upper()}INT{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)},
}
"""The protocol's names of dtypes."""
DTYPES_BY_DATATYPE = {datatype: dtype for dtype, datatype in DATATYPES.items()}
HEADER_LENGTH = b"inference-header-content-length"
MAX_DIMENSIONS = 16
MAX_DIMENSION = 2**31
MAX_JSON_DEPTH = MAX_DIMENSIONS + 1
MAX_ID_CHARS = 512
_LENGTH = struct.Struct("<I")


class Tensor(NamedTuple):
    """One tensor of a request or a reply."""

    info: TensorInfo
    shape: tuple[int, ...]
    data: Buffer
    """In C order; elements of BYTES behind their lengths."""


class WantedOutput(NamedTuple):
    name: str
    is_binary: bool


class PredictionRequest(NamedTuple):
    """A request that fits the model."""

    tensors: tuple[Tensor, ...]
    """In the order of the model's inputs."""
    num_rows: int
    """Samples; 1 if the model has no axis for them."""
    outputs: tuple[WantedOutput, ...]
    id: str = ""
    timeout_s: float | None = None


class ModelSignature(msgspec.Struct, frozen=True):
    """What a model, with its handler, takes and returns."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]

    @property
    def is_batched(self) -> bool:
        """Whether samples of several requests can be predicted together."""
        return all(each.is_batched for each in (*self.inputs, *self.outputs))


class _InputFields(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: msgspec.Raw = msgspec.Raw()
    parameters: dict[str, Any] = {}


class _OutputFields(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class _RequestFields(msgspec.Struct):
    inputs: list[_InputFields]
    outputs: list[_OutputFields] = []
    id: str = ""
    parameters: dict[str, Any] = {}


_request_decoder = msgspec.json.Decoder(_RequestFields)


# --- requests --------------------------------------------------------------------------------------------------------


def parse_request(
    body: bytes, header_length: bytes | None, signature: ModelSignature, *, allow_nan: bool = False
) -> PredictionRequest:
    """Return the request in a body; `header_length` is the value of HEADER_LENGTH, None without that header. ValueError
    says what is wrong with it."""
    view = memoryview(body)
    num_json_bytes = _parse_header_length(header_length, len(body))
    if num_json_bytes == 0 and header_length is not None:
        return _parse_raw(view, signature, allow_nan=allow_nan)
    try:
        fields = _request_decoder.decode(view[:num_json_bytes])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the request is no JSON of this protocol: {error}") from None
    if "sequence_id" in fields.parameters:
        raise ValueError("sequences of requests (sequence_id) are not supported")
    tensors = _parse_inputs(fields.inputs, view[num_json_bytes:], signature, allow_nan=allow_nan)
    return PredictionRequest(
        tensors,
        _count_rows(tensors),
        _parse_outputs(fields, signature),
        _check_id(fields.id),
        _parse_timeout(fields.parameters.get("timeout")),
    )


def _parse_header_length(text: bytes | None, num_body_bytes: int) -> int:
    if text is None:
        return num_body_bytes
    if not text.isdigit() or len(text) > 18:
        shown = shorten(text.decode("latin-1"))
        raise ValueError(f"the header Inference-Header-Content-Length must be a number of bytes, got {shown!r}")
    if int(text) > num_body_bytes:
        raise ValueError(
            f"the header Inference-Header-Content-Length says {int(text)} bytes, but the body has {num_body_bytes}"
        )
    return int(text)


def _parse_inputs(
    given: Sequence[_InputFields], binary: memoryview, signature: ModelSignature, *, allow_nan: bool
) -> tuple[Tensor, ...]:
    infos = {info.name: info for info in signature.inputs}
    found: dict[str, Tensor] = {}
    offset = 0
    for fields in given:
        info = infos.get(fields.name)
        name = shorten(fields.name)
        if info is None:
            raise ValueError(f"the model has no input {name!r}; it takes {describe_tensors(signature.inputs)}")
        if info.name in found:
            raise ValueError(f"the input {name!r} is there twice")
        if "shared_memory_region" in fields.parameters:
            raise ValueError(f"the input {name!r}: shared memory is not supported; send its bytes")
        shape = check_shape(info, fields.shape, fields.datatype)
        size, has_data = fields.parameters.get("binary_data_size"), bool(bytes(fields.data))
        if size is None:
            if not has_data:
                raise ValueError(f"the input {name!r} has neither data nor binary_data_size")
            data: Buffer = _parse_json_data(info, shape, bytes(fields.data))
        else:
            if has_data:
                raise ValueError(f"the input {name!r} has both data and binary_data_size")
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(binary) - offset:
                left = len(binary) - offset
                shown = shorten(repr(size))
                raise ValueError(f"the input {name!r}: binary_data_size is {shown}, but {left} bytes are left")
            data = binary[offset : offset + size]
            offset += size
            check_binary(info, shape, data, allow_nan=allow_nan)
        found[info.name] = Tensor(info, shape, data)
    if offset != len(binary):
        raise ValueError(f"{len(binary) - offset} bytes behind the JSON belong to no input")
    missing = [info for info in signature.inputs if info.name not in found]
    if missing:
        raise ValueError(f"an input is missing: {describe_tensors(missing)}")
    return tuple(found[info.name] for info in signature.inputs)


def _parse_raw(body: memoryview, signature: ModelSignature, *, allow_nan: bool) -> PredictionRequest:
    """A body that is the bytes of the only input: its shape is that of the model, with at most one unknown length."""
    if len(signature.inputs) != 1:
        raise ValueError(
            f"a body without JSON is for models with one input; this one takes {describe_tensors(signature.inputs)}"
        )
    (info,) = signature.inputs
    unknown = [axis for axis, length in enumerate(info.shape) if length is None]
    if info.dtype == "string":
        if any(length not in (None, 1) for length in info.shape):
            raise ValueError(f"a body without JSON is one element, but the model takes {info.describe()}")
        shape: tuple[int, ...] = (1,) * len(info.shape)
        data: Buffer = _LENGTH.pack(len(body)) + bytes(body)
    else:
        row_bytes = math.prod(n for n in info.shape if n is not None) * info.numpy_dtype.itemsize
        if len(unknown) > 1 or row_bytes == 0 or len(body) % row_bytes:
            raise ValueError(
                f"the shape of {len(body)} bytes without JSON is not known: the model takes {info.describe()}"
            )
        shape = tuple(len(body) // row_bytes if length is None else length for length in info.shape)
        shape, data = check_shape(info, shape, DATATYPES[info.dtype]), body
        check_binary(info, shape, data, allow_nan=allow_nan)
    tensors = (Tensor(info, shape, data),)
    outputs = tuple(WantedOutput(each.name, False) for each in signature.outputs)
    return PredictionRequest(tensors, _count_rows(tensors), outputs)


def check_shape(info: TensorInfo, shape: Sequence[int], datatype: str) -> tuple[int, ...]:
    """Return the shape, if it and the datatype are what the model takes."""
    if datatype != DATATYPES[info.dtype]:
        shown = shorten(datatype)
        raise ValueError(f"the input {info.name!r} has datatype {shown!r}; the model takes {describe_tensors([info])}")
    fits = len(shape) == len(info.shape) and all(
        0 < length < MAX_DIMENSION and wanted in (None, length)
        for length, wanted in zip(shape, info.shape, strict=True)
    )
    if not fits:
        shown = shorten(str(list(shape[: MAX_DIMENSIONS + 1])))
        raise ValueError(f"the input {info.name!r} has shape {shown}; the model takes {describe_tensors([info])}")
    return tuple(shape)


def check_binary(info: TensorInfo, shape: tuple[int, ...], data: Buffer, *, allow_nan: bool) -> None:
    """ValueError if the bytes are not those of a tensor of this dtype and shape."""
    if info.dtype == "string":
        num_elements = sum(1 for _ in iterate_elements(data, info.name))
        if num_elements != math.prod(shape):
            raise ValueError(f"the input {info.name!r} has {num_elements} elements, its shape {list(shape)} has others")
        return
    dtype = info.numpy_dtype
    num_bytes = math.prod(shape) * dtype.itemsize
    if len(data) != num_bytes:
        raise ValueError(
            f"the input {info.name!r} has {len(data)} bytes, but {DATATYPES[info.dtype]} of shape {list(shape)} "
            f"takes {num_bytes}"
        )
    if dtype.kind == "f" and not allow_nan:
        if np.isnan(np.frombuffer(data, dtype).min()):  # the least is NaN if any of them is
            raise ValueError(f"the input {info.name!r} holds NaN")
    if dtype.kind == "b" and np.frombuffer(data, np.uint8).max() > 1:
        raise ValueError(f"the input {info.name!r} is BOOL, but has bytes other than 0 and 1")


def iterate_elements(data: Buffer, name: str) -> Iterable[memoryview]:
    """The elements of a tensor of BYTES. ValueError if a length does not fit."""
    view = memoryview(data)
    offset = 0
    while offset < len(view):
        if offset + _LENGTH.size > len(view):
            raise ValueError(f"the input {name!r} ends inside of the length of an element")
        (length,) = _LENGTH.unpack_from(view, offset)
        offset += _LENGTH.size
        if offset + length > len(view):
            left = len(view) - offset
            raise ValueError(f"the input {name!r} has an element of {length} bytes, but only {left} are left")
        yield view[offset : offset + length]
        offset += length


@functools.lru_cache(maxsize=256)
def _data_decoder(dtype: str, depth: int) -> msgspec.json.Decoder[Any]:
    """Decodes lists, nested so deeply, of what a dtype can hold."""
    kind: Any
    if dtype == "string":
        kind = str
    elif dtype == "bool":
        kind = bool
    elif dtype.startswith("float"):
        kind = float
    elif dtype.endswith("64"):
        kind = int
    else:
        limits = np.iinfo(dtype)
        kind = Annotated[int, msgspec.Meta(ge=int(limits.min), le=int(limits.max))]
    for _ in range(depth):
        kind = list[kind]
    return msgspec.json.Decoder(kind)


def _parse_json_data(info: TensorInfo, shape: tuple[int, ...], text: bytes) -> Buffer:
    """`data` is a flat list, or one nested as the shape says."""
    depth = 0
    for char in text:
        if char == ord("["):
            depth += 1
        elif char not in b" \t\r\n":
            break
        if depth > MAX_JSON_DEPTH:
            break
    num_elements = math.prod(shape)
    if depth not in (1, len(shape)):
        raise ValueError(f"the data of the input {info.name!r} must be a list, flat or nested like its shape")
    if num_elements > len(text):  # every element takes at least one character
        raise ValueError(f"the input {info.name!r} has fewer elements than its shape {list(shape)} says")
    try:
        values = _data_decoder(info.dtype, depth).decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(f"the data of the input {info.name!r} are not {DATATYPES[info.dtype]}: {error}") from None
    if depth > 1:
        values = _flatten(values, shape, info.name)
    if len(values) != num_elements:
        raise ValueError(f"the input {info.name!r} has {len(values)} elements, its shape {list(shape)} {num_elements}")
    if info.dtype == "string":
        return encode_elements(text.encode("utf-8", "surrogatepass") for text in values)
    try:
        with np.errstate(over="ignore"):
            array = np.array(values, info.numpy_dtype)
    except (OverflowError, ValueError):
        raise ValueError(f"the input {info.name!r} has numbers that {DATATYPES[info.dtype]} cannot hold") from None
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"the input {info.name!r} has numbers that {DATATYPES[info.dtype]} cannot hold")
    return array.tobytes()


def _flatten(values: list[Any], shape: tuple[int, ...], name: str) -> list[Any]:
    """The elements of a list that has to be nested as the shape says."""
    is_nested_so = len(values) == shape[0]
    for length in shape[1:]:
        is_nested_so = is_nested_so and all(len(inner) == length for inner in values)
        values = [value for inner in values for value in inner]
    if not is_nested_so:
        raise ValueError(f"the data of the input {name!r} are not nested like its shape {list(shape)}")
    return values


def encode_elements(elements: Iterable[Buffer]) -> bytes:
    """The bytes of a tensor of BYTES."""
    parts: list[Buffer] = []
    for element in elements:
        parts += (_LENGTH.pack(len(element)), element)
    return b"".join(parts)


def _count_rows(tensors: Sequence[Tensor]) -> int:
    rows = {tensor.info.name: tensor.shape[0] for tensor in tensors if tensor.info.is_batched}
    if len(set(rows.values())) > 1:
        raise ValueError(f"the inputs have different numbers of samples: {rows}")
    return next(iter(rows.values()), 1)


def _parse_outputs(fields: _RequestFields, signature: ModelSignature) -> tuple[WantedOutput, ...]:
    by_default = fields.parameters.get("binary_data_output") is True
    if not fields.outputs:
        return tuple(WantedOutput(info.name, by_default) for info in signature.outputs)
    known = {info.name for info in signature.outputs}
    wanted: dict[str, WantedOutput] = {}
    for output in fields.outputs:
        name = shorten(output.name)
        if output.name not in known:
            raise ValueError(f"the model has no output {name!r}; it returns {describe_tensors(signature.outputs)}")
        if output.name in wanted:
            raise ValueError(f"the output {name!r} is there twice")
        for parameter in ("classification", "shared_memory_region"):
            if parameter in output.parameters:
                raise ValueError(f"the output {name!r}: {parameter} is not supported")
        wanted[output.name] = WantedOutput(output.name, output.parameters.get("binary_data", by_default) is True)
    return tuple(wanted.values())


def _check_id(text: str) -> str:
    if len(text) > MAX_ID_CHARS:
        raise ValueError(f"the id has {len(text)} characters, at most {MAX_ID_CHARS} are allowed")
    return text


def _parse_timeout(value: object) -> float | None:
    """`timeout` is a number of microseconds."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"timeout must be a number of microseconds above 0, got {shorten(repr(value))}")
    return value / 1e6


# --- replies ---------------------------------------------------------------------------------------------------------


class EncodedReply(NamedTuple):
    body: bytes
    num_json_bytes: int | None
    """For the header HEADER_LENGTH; None when there is nothing but JSON."""


def encode_reply(model: str, version: str, request_id: str, outputs: Sequence[tuple[Tensor, bool]]) -> EncodedReply:
    """Return the body of a reply with these outputs, each with whether it is binary. Numbers that JSON lacks (NaN,
    infinity) are null there."""
    listed: list[dict[str, Any]] = []
    binary: list[Buffer] = []
    for tensor, is_binary in outputs:
        info, shape, data = tensor
        entry: dict[str, Any] = {"name": info.name, "datatype": DATATYPES[info.dtype], "shape": shape}
        if is_binary:
            entry["parameters"] = {"binary_data_size": len(data)}
            binary.append(data)
        else:
            entry["data"] = _json_values(tensor)
        listed.append(entry)
    fields: dict[str, Any] = {"model_name": model, "model_version": version}
    if request_id:
        fields["id"] = request_id
    text = msgspec.json.encode({**fields, "outputs": listed})
    if not binary:
        return EncodedReply(text, None)
    return EncodedReply(b"".join((text, *binary)), len(text))


def _json_values(tensor: Tensor) -> list[Any]:
    if tensor.info.dtype == "string":
        # What is no text is shown as far as it is one: such outputs are asked for in binary.
        return [str(each, "utf-8", "replace") for each in iterate_elements(tensor.data, tensor.info.name)]
    values: list[Any] = np.frombuffer(tensor.data, tensor.info.numpy_dtype).tolist()
    return values


def describe_tensors(infos: Iterable[TensorInfo]) -> str:
    """For people: `image FP32 [-1, 3, 64, 64]`, as metadata show it."""
    return "; ".join(f"{each.name} {DATATYPES[each.dtype]} {protocol_shape(each)}" for each in infos)


def protocol_shape(info: TensorInfo) -> list[int]:
    return [-1 if length is None else length for length in info.shape]


def model_metadata(model: str, versions: Sequence[str], signature: ModelSignature) -> dict[str, Any]:
    """What GET /v2/models/NAME returns."""

    def describe(infos: Iterable[TensorInfo]) -> list[dict[str, Any]]:
        return [{"name": i.name, "datatype": DATATYPES[i.dtype], "shape": protocol_shape(i)} for i in infos]

    return {
        "name": model,
        "versions": list(versions),
        "platform": "onnxruntime_onnx",
        "inputs": describe(signature.inputs),
        "outputs": describe(signature.outputs),
    }


# --- arrays, in replicas ---------------------------------------------------------------------------------------------


def decode_array(info: TensorInfo, shape: Sequence[int], data: Buffer) -> Array:
    """The tensor as an array; elements of BYTES are bytes objects."""
    if info.dtype == "string":
        array = np.empty(math.prod(shape), object)
        array[:] = [bytes(each) for each in iterate_elements(data, info.name)]
        return array.reshape(shape)
    return np.frombuffer(data, info.numpy_dtype).reshape(shape)


def encode_array(array: Array) -> Buffer:
    """The bytes of an array; of one with objects, those of a tensor of BYTES."""
    if array.dtype.kind in "OUS":
        return encode_elements(
            each if isinstance(each, bytes) else str(each).encode("utf-8", "replace") for each in array.reshape(-1)
        )
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
