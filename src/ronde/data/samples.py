"""One sample as bytes, and back: the encoding in our shards, and the decoding of archive members by their ending.

A sample is a dict of fields. In our shards it is MessagePack; arrays are an extension that holds dtype, shape and the
elements. Nothing is ever unpickled, unless the caller trusts the data. Sizes are checked before memory is taken: a few
bytes that claim to be a huge image, array or archive are refused.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np

from ronde.comm.buffers import Array
from ronde.errors import DataError
from ronde.text import format_bytes, shorten

Sample: TypeAlias = dict[str, Any]

KEY = "__key__"
"""The field with the name of a sample, by which it is split and found again."""
MAX_SAMPLE_BYTES = 1 << 30
"""A sample that is larger, or would be when it is decoded, is refused."""
ARRAY_CODE = 1
ARRAY_KINDS = "biufcSU"
"""Of NumPy's dtypes: numbers and texts of fixed size. Objects would have to be pickled."""
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff")
PICKLE_ENDINGS = (".pkl", ".pickle", ".pyd", ".pt", ".pth", ".joblib", ".dill", ".cloudpickle")
"""Files of these kinds run code when they are loaded."""


class ArrayHeader(msgspec.Struct, array_like=True, frozen=True):
    """What stands before the elements of an array."""

    dtype: str
    shape: tuple[int, ...]


_encode_header = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(ArrayHeader).decode


def _encode_other(value: Any) -> Any:
    if isinstance(value, np.generic):
        return (
            value.item()
            if value.dtype.kind in "biuf" and value.dtype.itemsize <= 8
            else _encode_other(np.asarray(value))
        )
    array = np.asarray(value)
    if array.dtype.kind not in ARRAY_KINDS:
        raise TypeError(
            f"a sample holds numbers, texts, bytes, lists, dicts and arrays of numbers, not a {type(value).__name__}"
            + (f" of dtype {array.dtype}" if isinstance(value, np.ndarray) else "")
        )
    header = _encode_header(ArrayHeader(array.dtype.str, array.shape))
    return msgspec.msgpack.Ext(ARRAY_CODE, len(header).to_bytes(2, "little") + header + array.tobytes())


def _decode_other(code: int, data: memoryview) -> Array:
    if code != ARRAY_CODE:
        raise DataError(f"a sample holds an extension with the unknown code {code}")
    end = 2 + int.from_bytes(data[:2], "little")
    header = _decode_header(data[2:end])
    try:
        dtype = np.dtype(header.dtype)
    except (TypeError, ValueError, SyntaxError):
        raise DataError(f"an array has the unknown dtype {shorten(header.dtype)!r}") from None
    elements = data[end:]
    if dtype.kind not in ARRAY_KINDS or any(length < 0 for length in header.shape):
        raise DataError(f"an array with dtype {shorten(header.dtype)!r} and shape {header.shape} is refused")
    if math.prod(header.shape) * dtype.itemsize != len(elements):
        raise DataError(f"an array of shape {header.shape} and dtype {dtype} has {len(elements)} bytes: it is damaged")
    return np.frombuffer(elements, dtype).reshape(header.shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_decoder = msgspec.msgpack.Decoder(dict[str, Any], ext_hook=_decode_other)


def encode_sample(sample: Mapping[str, Any]) -> bytes:
    """The bytes of a sample, for decode_sample(). TypeError for a field that cannot be stored."""
    try:
        data = _encoder.encode(sample)
    except (TypeError, OverflowError, ValueError, RecursionError) as error:
        raise TypeError(f"sample {shorten(str(sample.get(KEY, '')))!r}: {error}") from None
    if len(data) > MAX_SAMPLE_BYTES:
        raise ValueError(
            f"sample {shorten(str(sample.get(KEY, '')))!r} has {format_bytes(len(data))}, more than "
            f"{format_bytes(MAX_SAMPLE_BYTES)}"
        )
    return data


def decode_sample(data: bytes) -> Sample:
    """The sample in these bytes. Arrays are views of them, and read-only."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DataError(f"a sample is damaged: {error}") from None


# --- members of archives, and files ------------------------------------------------------------------------------


def decode_field(
    ending: str, data: bytes, *, trust: bool = False, images: bool = True, limit_bytes: int = MAX_SAMPLE_BYTES
) -> Any:
    """The value of a member of an archive, by the ending of its name, as WebDataset has them: an image as an array of
    bytes (rows, columns, 3), npy and npz as arrays, json, txt, cls. Bytes of other kinds stay bytes, and images, too,
    unless `images`.

    Pickles are refused unless `trust`, also in npy; then those of Python are loaded, and a .pt stays bytes for
    torch.load().
    """
    last = "." + ending.rpartition(".")[2].lower()
    if last in PICKLE_ENDINGS and not trust:
        raise DataError(
            f"a member {shorten(ending)!r} is refused: loading it would run code that it holds; use data of another "
            "kind, or trust the source (trust=True, --trust)"
        )
    match last:
        case ".npy":
            return decode_npy(data, trust=trust, limit_bytes=limit_bytes)
        case ".npz":
            return _decode_npz(data, trust=trust, limit_bytes=limit_bytes)
        case ".json":
            try:
                return msgspec.json.decode(data)
            except msgspec.DecodeError as error:
                raise DataError(f"a member {shorten(ending)!r} is no JSON: {error}") from None
        case ".txt" | ".text":
            return data.decode("utf-8", "replace")
        case ".cls" | ".cls2" | ".index" | ".count":
            try:
                return int(data)
            except ValueError:
                raise DataError(f"a member {shorten(ending)!r} is no whole number: {data[:20]!r}") from None
        case ".pkl" | ".pickle" | ".pyd":
            return pickle.loads(data)
        case _ if images and last in IMAGE_ENDINGS:
            return decode_image(data, limit_bytes=limit_bytes)
    return data


def decode_image(data: bytes, *, limit_bytes: int = MAX_SAMPLE_BYTES) -> Array:
    """An image as an array of bytes (rows, columns, 3)."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            check_image_size(image.size, limit_bytes=limit_bytes)
            return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    except DataError:
        raise
    except Exception as error:  # decoders raise errors of any class for damaged images, a warning for large ones
        raise DataError(f"cannot decode an image of {len(data)} bytes: {error}") from None


def check_image_size(size: tuple[int, int], *, limit_bytes: int = MAX_SAMPLE_BYTES) -> None:
    """DataError if an image of this width and height takes more bytes than the limit."""
    if size[0] * size[1] * 4 > limit_bytes:
        raise DataError(f"an image of {size[0]}x{size[1]} pixels takes more than {format_bytes(limit_bytes)}: refused")


def decode_npy(data: bytes, *, trust: bool = False, limit_bytes: int = MAX_SAMPLE_BYTES) -> Array:
    """An array in NumPy's format. Its header is checked against the bytes that are there before memory is taken."""
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
        if not dtype.hasobject and math.prod(shape) * dtype.itemsize > min(len(data) - file.tell(), limit_bytes):
            raise DataError(f"an npy of shape {shape} and dtype {dtype} has only {len(data)} bytes: it is damaged")
        file.seek(0)
        return np.asarray(np.load(file, allow_pickle=trust))
    except DataError:
        raise
    except (ValueError, TypeError, EOFError, SyntaxError, OverflowError) as error:
        raise DataError(f"cannot read an npy of {len(data)} bytes: {shorten(str(error))}") from None


def _decode_npz(data: bytes, *, trust: bool, limit_bytes: int) -> dict[str, Array]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            total = sum(member.file_size for member in archive.infolist())
            if total > limit_bytes:
                raise DataError(f"an npz of {len(data)} bytes unpacks to {format_bytes(total)}: refused")
            arrays = {}
            for member in archive.infolist():
                with archive.open(member) as file:
                    # The size in the directory may be a lie: no more is ever read than it says.
                    unpacked = file.read(member.file_size)
                arrays[member.filename.removesuffix(".npy")] = decode_npy(
                    unpacked, trust=trust, limit_bytes=limit_bytes
                )
            return arrays
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"cannot read an npz of {len(data)} bytes: {shorten(str(error))}") from None
