"""A model folder, and the ONNX model in it, ready to predict. Used by `ronde export`, `predict` and `serve`.

A model folder holds the files of one model and `model.json`, which is written last:

    model.json     inputs, outputs, labels, preprocessing, and the size and SHA-256 of each other file
    model.onnx     graph and weights; what is too large for one file is beside it, as in model.onnx.data

A folder with only model.onnx, or a single file of ONNX, is a model as well: it has no labels and no checksums. Models
are data: nothing in a folder is executed but the operators of ONNX, and no file outside of the folder is opened.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from ronde.comm.buffers import Array
from ronde.data.files import safe_name, write_aside
from ronde.errors import DataError, ModelError
from ronde.settings import disable_onnxruntime_telemetry
from ronde.text import shorten

METADATA_NAME = "model.json"
ONNX_NAME = "model.onnx"
MODEL_FORMAT = "ronde-model"
MODEL_VERSION = 1
MAX_METADATA_BYTES = 64 << 20
MAX_DIMENSIONS = 16
DTYPES = (
    *("float16", "float32", "float64", "bool", "string"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
"""What inputs and outputs may hold, by NumPy's names. Texts are `string`, arrays of objects in NumPy."""
_ONNX_DTYPES = {"float": "float32", "double": "float64", **{name: name for name in DTYPES}}

ModelFormat = Literal["onnx", "torch", "keras", "tensorflow", "jax", "mxnet"]
MODEL_FILES: dict[ModelFormat, str] = {
    "onnx": ONNX_NAME,
    "torch": "model.pt2",
    "keras": "model.keras",
    "tensorflow": "model",
    "jax": "model.bin",
    "mxnet": "model-symbol.json",
}
"""The file, or folder, of a model in each format."""


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An input or an output of a model."""

    name: str
    dtype: str
    """One of DTYPES."""
    shape: tuple[int | None, ...]
    """None is an axis of any length. The first axis is that of the batch."""

    @property
    def is_batched(self) -> bool:
        """Whether the first axis may have any length."""
        return bool(self.shape) and self.shape[0] is None

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(object if self.dtype == "string" else self.dtype)

    def describe(self) -> str:
        """For people: `image: float32 (batch, 3, 64, 64)`."""
        lengths = [
            "batch" if axis == 0 and length is None else str(length or "?") for axis, length in enumerate(self.shape)
        ]
        return f"{self.name}: {self.dtype} ({', '.join(lengths)})"


class ImagePreprocessing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an image becomes an input of the model: it is scaled until its shorter side has `resize` pixels, cut to
    `height` and `width` in the middle, multiplied by `scale`, and normalized with `mean` and `std` of each channel."""

    height: int
    width: int
    resize: int | None = None
    """By default the image is scaled to height and width, whatever its shape."""
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    layout: Literal["CHW", "HWC"] = "CHW"
    field: str = "image"
    """The field of a sample that holds the image."""


class FileSum(msgspec.Struct, frozen=True):
    """Size and checksum of a file."""

    num_bytes: int
    sha256: str


class ModelMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of model.json."""

    format: str = MODEL_FORMAT
    version: int = MODEL_VERSION
    name: str
    kind: ModelFormat = "onnx"
    """Of the model's file: ONNX, or the format of a framework."""
    framework: str = ""
    """Where the model comes from."""
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    labels: tuple[str, ...] = ()
    """Names of the classes: the last axis of the first output."""
    preprocessing: dict[str, ImagePreprocessing] = {}
    """By the name of an input."""
    files: dict[str, FileSum] = {}
    made_by: dict[str, Any] = {}
    """With what it was made: versions, the factory, the checkpoint and its step."""

    @property
    def is_batched(self) -> bool:
        """Whether any number of samples can be predicted at a time."""
        return all(each.is_batched for each in (*self.inputs, *self.outputs))


class ModelFolder(msgspec.Struct, frozen=True):
    """A model folder that was checked."""

    path: Path
    metadata: ModelMetadata
    model_path: Path
    """The file, or folder, with the model itself."""
    fingerprint: str
    """Changes when a file of the model does, or what model.json says about it."""


# --- folders ---------------------------------------------------------------------------------------------------------


def load_model_folder(path: str | os.PathLike[str], *, verify: bool = True) -> ModelFolder:
    """Return the checked model at a path: a folder with model.json, one with model.onnx, or a file of ONNX. ModelError
    if there is none, or if a file is damaged, missing or outside of the folder. `verify` compares checksums."""
    if "://" in os.fspath(path):
        raise ModelError(f"{path}: a model has to be on this machine; copy its folder here first")
    root = Path(path)
    if root.is_file() and root.suffix == ".onnx":
        return _load_bare(root)
    if not root.is_dir():
        raise ModelError(f"there is no model at {root}: `ronde export` makes a folder with {METADATA_NAME}")
    if not (root / METADATA_NAME).is_file():
        if (root / ONNX_NAME).is_file():
            return _load_bare(root / ONNX_NAME)
        raise ModelError(f"{root} is no model: it has no {METADATA_NAME}; `ronde export` writes it last")
    text = (root / METADATA_NAME).read_bytes()
    metadata = _decode_metadata(text, root / METADATA_NAME)
    for name, expected in metadata.files.items():
        file = _inner_file(root, name)
        size = file.stat().st_size
        if size != expected.num_bytes:
            raise ModelError(f"{file} is damaged: it has {size} bytes, but {expected.num_bytes} were written")
        if verify and sum_file(file).sha256 != expected.sha256:
            raise ModelError(f"{file} is damaged: its SHA-256 is not that in {METADATA_NAME}")
    if metadata.kind == "onnx":
        if ONNX_NAME not in metadata.files:
            raise ModelError(f"{root / METADATA_NAME} names no {ONNX_NAME}: it is damaged")
        _check_external_data(root / ONNX_NAME, set(metadata.files))
    return ModelFolder(root, metadata, root / MODEL_FILES[metadata.kind], hashlib.sha256(text).hexdigest())


def _load_bare(path: Path) -> ModelFolder:
    """A file of ONNX without metadata. Its inputs and outputs are those of the graph."""
    _check_external_data(path, None)
    names = {path.name, *external_files(path)}
    files = {name: sum_file(path.parent / name) for name in sorted(names)}
    session = _open_session(path, threads=1)
    metadata = ModelMetadata(
        name=path.stem if path.name != ONNX_NAME else path.absolute().parent.name,
        inputs=tuple(_describe_node(node, path) for node in session.get_inputs()),
        outputs=tuple(_describe_node(node, path) for node in session.get_outputs()),
        files=files,
    )
    return ModelFolder(path.parent, metadata, path, hashlib.sha256(msgspec.json.encode(metadata)).hexdigest())


def _decode_metadata(text: bytes, path: Path) -> ModelMetadata:
    if len(text) > MAX_METADATA_BYTES:
        raise ModelError(f"{path} has {len(text)} bytes: it is no {METADATA_NAME} of ronde")
    try:
        metadata = msgspec.json.decode(text, type=ModelMetadata)
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path} is damaged or was not written by ronde: {error}") from None
    if (metadata.format, metadata.version) != (MODEL_FORMAT, MODEL_VERSION):
        raise ModelError(
            f"{path} is of format {shorten(metadata.format)!r}, version {metadata.version}; this ronde reads "
            f"{MODEL_FORMAT!r}, version {MODEL_VERSION}"
        )
    for each in (*metadata.inputs, *metadata.outputs):
        if (
            each.dtype not in DTYPES
            or len(each.shape) > MAX_DIMENSIONS
            or any(n is not None and n < 0 for n in each.shape)
        ):
            raise ModelError(f"{path}: {shorten(each.name)!r} has dtype {shorten(each.dtype)!r} and shape {each.shape}")
    return metadata


def write_metadata(root: Path, metadata: ModelMetadata) -> ModelFolder:
    """Write model.json, with the sums of all files that are in the folder, and return the folder. Called last."""
    files = {
        path.relative_to(root).as_posix(): sum_file(path)
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != METADATA_NAME and not path.name.startswith(".")
    }
    metadata = msgspec.structs.replace(metadata, files=files)
    text = msgspec.json.format(msgspec.json.encode(metadata), indent=1)
    with write_aside(root / METADATA_NAME) as file:
        file.write(text)
    return ModelFolder(root, metadata, root / MODEL_FILES[metadata.kind], hashlib.sha256(text).hexdigest())


def sum_file(path: Path) -> FileSum:
    digest = hashlib.sha256()
    num_bytes = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            num_bytes += len(chunk)
    return FileSum(num_bytes, digest.hexdigest())


def _inner_file(root: Path, name: str) -> Path:
    """The path of a file of the folder. ModelError if it is not there, or is a link that leads out."""
    try:
        path = root / safe_name(name)
    except DataError as error:
        raise ModelError(f"{root}: {error}") from None
    if not path.resolve().is_relative_to(root.resolve()):
        raise ModelError(f"{path} is refused: a link leads out of the folder of the model")
    if not path.is_file():
        raise ModelError(f"{path} is not there; the model is incomplete")
    return path


# --- external data of ONNX -------------------------------------------------------------------------------------------

# The messages of onnx.proto that lead to a tensor: by message, the numbers of fields and what they hold.
_ONNX_MESSAGES: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function", 20: "training"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "external"},
}
_MAX_NESTING = 64


def external_files(path: Path) -> set[str]:
    """The names of files in which an ONNX file keeps weights. ModelError if it is no ONNX."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise ModelError(f"{path} is empty: no ONNX")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
            try:
                return set(_external_names(data, "model", 0))
            except ValueError as error:
                raise ModelError(f"{path} is truncated, damaged or no ONNX: {error}") from None


def _external_names(data: memoryview, message: str, depth: int) -> Iterator[str]:
    if depth > _MAX_NESTING:
        raise ValueError("its graphs are nested too deeply")
    kinds = _ONNX_MESSAGES[message]
    for number, start, end in _length_delimited(data):
        kind = kinds.get(number)
        if kind is None:
            continue
        with data[start:end] as inner:
            if kind != "external":
                yield from _external_names(inner, kind, depth + 1)
                continue
            entry = {field: bytes(inner[first:last]) for field, first, last in _length_delimited(inner)}
            if entry.get(1) == b"location":
                yield entry.get(2, b"").decode("utf-8", "replace")


def _length_delimited(data: memoryview) -> Iterator[tuple[int, int, int]]:
    """Number, start and end of each field of a Protocol Buffers message that holds bytes or another message."""
    offset, length = 0, len(data)
    while offset < length:
        tag, offset = _varint(data, offset)
        match tag & 7:
            case 0:
                _, offset = _varint(data, offset)
            case 1:
                offset += 8
            case 5:
                offset += 4
            case 2:
                size, offset = _varint(data, offset)
                if offset + size > length:
                    raise ValueError(f"a field at byte {offset} is longer than the message it is in")
                yield tag >> 3, offset, offset + size
                offset += size
            case kind:
                raise ValueError(f"a field at byte {offset} has the unknown kind {kind}")
    if offset > length:
        raise ValueError("it ends inside of a number")


def _varint(data: memoryview, offset: int) -> tuple[int, int]:
    value = shift = 0
    while offset < len(data) and shift < 70:
        byte = data[offset]
        offset += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, offset
        shift += 7
    raise ValueError(f"a number before byte {offset} does not end")


def _check_external_data(path: Path, named: set[str] | None) -> None:
    """ModelError if weights are in a file outside of the folder, or in one that model.json does not name."""
    for name in sorted(external_files(path)):
        _inner_file(path.parent, name)
        if named is not None and name not in named:
            raise ModelError(f"{path} keeps weights in {shorten(name)!r}, which {METADATA_NAME} does not name: refused")


# --- prediction ------------------------------------------------------------------------------------------------------


def _open_session(path: Path, *, threads: int) -> Any:
    disable_onnxruntime_telemetry()
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("running a model needs ONNX Runtime: pip install ronde[serve]") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Threads that wait do not spin: other ranks and replicas of this machine compute meanwhile.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises errors of several classes of its own
        raise ModelError(f"ONNX Runtime cannot load {path}: {shorten(str(error), 500)}") from None


def _describe_node(node: Any, path: Path) -> TensorInfo:
    """An input or output as ONNX Runtime names it: `tensor(float)`, with texts for axes of any length."""
    dtype = _ONNX_DTYPES.get(node.type.removeprefix("tensor(").removesuffix(")"))
    if dtype is None:
        raise ModelError(f"{path}: {node.name!r} is a {node.type}; ronde runs models on tensors of {', '.join(DTYPES)}")
    return TensorInfo(
        name=node.name, dtype=dtype, shape=tuple(n if isinstance(n, int) and n >= 0 else None for n in node.shape)
    )


class OnnxModel:
    """A loaded ONNX model. predict() may be called by several threads at a time."""

    def __init__(self, folder: ModelFolder, *, threads: int = 1) -> None:
        """`threads` compute one call of predict(), the calling one among them."""
        if folder.metadata.kind != "onnx":
            raise ModelError(
                f"{folder.path} is a model of {folder.metadata.kind}, which predict and serve do not run; export it "
                "with --to onnx"
            )
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self.folder = folder
        self.metadata = folder.metadata
        self._session = _open_session(folder.model_path, threads=threads)
        for noun, nodes, named in (
            ("inputs", self._session.get_inputs(), self.metadata.inputs),
            ("outputs", self._session.get_outputs(), self.metadata.outputs),
        ):
            found = tuple(_describe_node(node, folder.model_path) for node in nodes)
            if [(each.name, each.dtype) for each in found] != [(each.name, each.dtype) for each in named]:
                listed = "; ".join(each.describe() for each in found)
                raise ModelError(f"{folder.path}: {METADATA_NAME} names other {noun} than the model has: {listed}")
        self._inputs = {each.name: each for each in self.metadata.inputs}
        self._output_names = [each.name for each in self.metadata.outputs]

    def predict(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs by name. ValueError if the inputs are not those of the model; ModelError if it fails."""
        self.check_inputs(inputs)
        try:
            results = self._session.run(self._output_names, dict(inputs))
        except Exception as error:  # ONNX Runtime raises errors of several classes of its own
            raise ModelError(f"the model {self.metadata.name!r} has failed: {shorten(str(error), 500)}") from None
        return dict(zip(self._output_names, results, strict=True))

    def check_inputs(self, inputs: Mapping[str, Array]) -> int:
        """Return the number of samples. ValueError says which input is missing, unknown, or has another dtype or shape
        than the model takes."""
        for name in inputs:
            if name not in self._inputs:
                raise ValueError(f"the model has no input {shorten(str(name))!r}; it has {', '.join(self._inputs)}")
        lengths = {}
        for name, info in self._inputs.items():
            if name not in inputs:
                raise ValueError(f"the input {name!r} is missing; the model takes {info.describe()}")
            given = inputs[name]
            if not isinstance(given, np.ndarray) or given.dtype != info.numpy_dtype:
                kind = given.dtype if isinstance(given, np.ndarray) else type(given).__name__
                raise ValueError(f"the input {name!r} is {kind}; the model takes {info.describe()}")
            fits = len(given.shape) == len(info.shape) and all(
                wanted is None or length == wanted for length, wanted in zip(given.shape, info.shape, strict=True)
            )
            if not fits:
                raise ValueError(f"the input {name!r} has shape {given.shape}; the model takes {info.describe()}")
            if info.is_batched:
                lengths[name] = given.shape[0]
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the inputs have different numbers of samples: {lengths}")
        return next(iter(lengths.values()), 1)

    def make_example(self, num_samples: int = 1) -> dict[str, Array]:
        """Inputs of zeros, or of empty texts, for warming up; axes of unknown length have length 1."""
        example: dict[str, Array] = {}
        for info in self.metadata.inputs:
            shape = tuple(
                (num_samples if axis == 0 else 1) if length is None else length
                for axis, length in enumerate(info.shape)
            )
            if math.prod(shape) > 1 << 30:
                raise ModelError(f"the input {info.describe()} is too large")
            example[info.name] = np.full(shape, "" if info.dtype == "string" else 0, info.numpy_dtype)
        return example


def load_model(path: str | os.PathLike[str], *, threads: int = 1, verify: bool = True) -> OnnxModel:
    """Load the model at a path, ready to predict."""
    return OnnxModel(load_model_folder(path, verify=verify), threads=threads)
