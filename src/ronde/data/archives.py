"""Readers of WebDataset's tar files and of TFRecord files, without their libraries.

A file is scanned once for where its blocks begin: runs of samples of about BLOCK_BYTES. What is in a block is parsed
when it is opened, so the table stays small. Members of an archive are never extracted to files.
"""

from __future__ import annotations

import functools
import os
import struct
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ronde.comm.buffers import Array
from ronde.data.checksums import masked_crc32c
from ronde.data.files import ByteRange, DataFolder, FileInfo, RangeFile, scan_file
from ronde.data.samples import KEY, MAX_SAMPLE_BYTES, Sample, decode_field
from ronde.data.shards import BLOCK_BYTES, BlockTable
from ronde.errors import DataError
from ronde.text import shorten

TAR_RECORD_BYTES = 512
_RECORD_HEAD = struct.Struct("<QI")

BlockList = list[tuple[int, int, int]]


def _cut(ends: Iterator[int], block_bytes: int) -> BlockList:
    """Blocks from the offset of the first sample, and then the end of each."""
    blocks, start, num_samples = [], next(ends), 0
    end = start
    for end in ends:
        num_samples += 1
        if end - start >= block_bytes:
            blocks.append((start, end - start, num_samples))
            start, num_samples = end, 0
    if num_samples:
        blocks.append((start, end - start, num_samples))
    return blocks


class FileReader:
    """What the readers of this module have in common: files that are scanned for blocks when they have no index."""

    classes: tuple[str, ...] = ()

    def __init__(
        self,
        folder: DataFolder,
        table: BlockTable,
        *,
        trust: bool = False,
        decode: bool = True,
        decode_images: bool = True,
    ) -> None:
        self.folder = folder
        self.table = table
        self._trust = trust
        self._decode = decode
        self._decode_images = decode and decode_images

    def _range(self, block: int) -> tuple[ByteRange, str, int, int]:
        """The bytes of a block, the name of its file, its offset, and its number of samples."""
        table = self.table
        name, start, size = table.files[table.file_of[block]], int(table.starts[block]), int(table.sizes[block])
        return self.folder.open_range(name, start, size), name, start, int(table.lengths[block])


# --- tar -----------------------------------------------------------------------------------------------------------


def split_member_name(name: str) -> tuple[str, str]:
    """The key of the sample to which a member belongs, and its field: everything up to the first dot of the file's
    name, and what is behind it."""
    folder, slash, file = name.rpartition("/")
    stem, _, ending = file.partition(".")
    return folder + slash + stem, ending


def scan_tar(folder: DataFolder, info: FileInfo, *, block_bytes: int = BLOCK_BYTES) -> BlockList:
    """The blocks of a tar file. DataError with the offset if it is truncated, damaged or compressed."""
    return _cut(_scan_members(folder, info), block_bytes)


def _scan_members(folder: DataFolder, info: FileInfo) -> Iterator[int]:
    where = folder.where(info.name)
    yield 0
    with scan_file(folder, info) as file:
        end, key = 0, None
        for member in _iterate_tar(file, where, info.num_bytes):
            if member.isdir():
                continue
            member_key, _ = split_member_name(member.name)
            if key is not None and member_key != key:
                yield end
            key = member_key
            end = member.offset_data + -(-member.size // TAR_RECORD_BYTES) * TAR_RECORD_BYTES
        if key is not None:
            yield end
        file.seek(end)
        if not info.num_bytes or file.read(TAR_RECORD_BYTES).strip(b"\0") or info.num_bytes - end < TAR_RECORD_BYTES:
            raise DataError(f"{where} is truncated: it ends at byte {info.num_bytes} without the end of an archive")


def _iterate_tar(file: Any, where: str, num_bytes: int, offset: int = 0) -> Iterator[tarfile.TarInfo]:
    """The members in a file object whose first byte is at this offset of the archive."""
    end = 0
    try:
        with tarfile.open(fileobj=file, mode="r:", errorlevel=1) as archive:
            for member in archive:
                if not (member.isreg() or member.isdir()):
                    raise DataError(
                        f"{where} holds the link or device {shorten(member.name)!r} at byte {offset + member.offset}: "
                        "refused; a data set holds files"
                    )
                if member.size > MAX_SAMPLE_BYTES or member.issparse():
                    raise DataError(f"{where}: {shorten(member.name)!r} at byte {offset + member.offset} is too large")
                end = member.offset_data + member.size
                if end > num_bytes:
                    raise DataError(
                        f"{where} is truncated: it ends at byte {offset + num_bytes}, inside of "
                        f"{shorten(member.name)!r}, which begins at byte {offset + member.offset}"
                    )
                yield member
                archive.members = []  # type: ignore[attr-defined]  # it would keep all of them
    except tarfile.ReadError as error:
        hint = "; unpack a compressed one, or prepare it" if not end else ""
        raise DataError(f"{where} is truncated or no tar file, behind byte {offset + end}: {error}{hint}") from None
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise DataError(f"{where} is damaged behind byte {offset + end}: {error}") from None


class TarBlock:
    """Consecutive samples of a tar file."""

    def __init__(self, source: ByteRange, where: str, start: int, decode: Callable[[str, bytes], Any] | None) -> None:
        self._source = source
        self._where = where
        self._start = start
        self._decode = decode
        self._samples: list[tuple[str, list[tuple[str, int, int]]]] = []
        with RangeFile(source) as file:
            for member in _iterate_tar(file, where, source.num_bytes, start):
                if member.isdir():
                    continue
                key, field = split_member_name(member.name)
                if not self._samples or self._samples[-1][0] != key:
                    self._samples.append((key, []))
                self._samples[-1][1].append((field, member.offset_data, member.size))

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, row: int) -> Sample:
        key, members = self._samples[row]
        sample: Sample = {KEY: key}
        for field, offset, size in members:
            data = self._source.read(offset, size)
            try:
                if len(data) < size:
                    raise DataError("the file is truncated")
                sample[field] = data if self._decode is None else self._decode(field, data)
            except DataError as error:
                raise DataError(
                    f"{self._where}: {shorten(key)}.{field} at byte {self._start + offset}: {error}"
                ) from None
        return sample


class TarReader(FileReader):
    """WebDataset's tar files: the members of a sample lie behind each other and have the same name up to the first
    dot."""

    def open(self, block: int, rows: Array | None = None) -> TarBlock:
        source, name, start, num_samples = self._range(block)
        decode: Callable[[str, bytes], Any] | None = None
        if self._decode:
            decode = functools.partial(decode_field, trust=self._trust, images=self._decode_images)
        opened = TarBlock(source, self.folder.where(name), start, decode)
        if len(opened) != num_samples:
            raise DataError(f"{self.folder.where(name)} has changed: the block at byte {start} has other samples")
        return opened


# --- TFRecord ------------------------------------------------------------------------------------------------------


def scan_records(folder: DataFolder, info: FileInfo, *, block_bytes: int = BLOCK_BYTES) -> BlockList:
    """The blocks of a TFRecord file. DataError with the offset if it is truncated or damaged."""
    return _cut(_scan_records(folder, info), block_bytes)


def _scan_records(folder: DataFolder, info: FileInfo) -> Iterator[int]:
    where = folder.where(info.name)
    offset = 0
    yield offset
    with scan_file(folder, info) as file:
        while head := file.read(_RECORD_HEAD.size):
            length = _record_length(head, where, offset)
            end = offset + _RECORD_HEAD.size + length + 4
            if end > info.num_bytes:
                raise DataError(
                    f"{where} is truncated: it ends at byte {info.num_bytes}, inside of the record at byte {offset}"
                )
            offset = file.seek(end, os.SEEK_SET)
            yield offset


def _record_length(head: bytes, where: str, offset: int) -> int:
    if len(head) < _RECORD_HEAD.size:
        raise DataError(f"{where} is truncated: it ends at byte {offset + len(head)}, inside of a record's length")
    length, crc = _RECORD_HEAD.unpack(head)
    if crc != masked_crc32c(head[:8]):
        raise DataError(f"{where} is damaged or no TFRecord: the length at byte {offset} has another checksum")
    if length > MAX_SAMPLE_BYTES:
        raise DataError(f"{where}: the record at byte {offset} claims {length} bytes: refused")
    return int(length)


class RecordBlock:
    """Consecutive records of a TFRecord file."""

    def __init__(self, source: ByteRange, where: str, start: int, name: str, decode: bool) -> None:
        self._source = source
        self._where = where
        self._start = start
        self._name = name
        self._decode = decode
        self._offsets = []
        offset = 0
        while offset < source.num_bytes:
            length = _record_length(source.read(offset, _RECORD_HEAD.size), where, start + offset)
            self._offsets.append((offset + _RECORD_HEAD.size, length))
            offset += _RECORD_HEAD.size + length + 4

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, row: int) -> Sample:
        offset, length = self._offsets[row]
        data = self._source.read(offset, length + 4)
        at = f"{self._where}: the record at byte {self._start + offset - _RECORD_HEAD.size}"
        if len(data) < length + 4:
            raise DataError(f"{at} is truncated")
        if int.from_bytes(data[length:], "little") != masked_crc32c(data[:length]):
            raise DataError(f"{at} is damaged: it has another checksum")
        sample: Sample = {KEY: f"{self._name}:{self._start + offset - _RECORD_HEAD.size}"}
        if not self._decode:
            return {**sample, "record": data[:length]}
        try:
            return {**sample, **parse_example(data[:length])}
        except DataError as error:
            raise DataError(f"{at}: {error}") from None


class RecordReader(FileReader):
    """TFRecord files of tf.train.Example; without `decode`, of anything: then a sample has the bytes as `record`."""

    def open(self, block: int, rows: Array | None = None) -> RecordBlock:
        source, name, start, num_samples = self._range(block)
        opened = RecordBlock(source, self.folder.where(name), start, name, self._decode)
        if len(opened) != num_samples:
            raise DataError(f"{self.folder.where(name)} has changed: the block at byte {start} has other records")
        return opened


def parse_example(data: bytes) -> Sample:
    """The features of a tf.train.Example: bytes if there is one value of bytes, a list if there are more, and arrays of
    float32 and int64. DataError if it is no such message."""
    sample: Sample = {}
    for number, features in _fields(data):
        for entry_number, entry in _fields(features) if number == 1 else ():
            if entry_number != 1:
                continue
            parts = dict(_fields(entry))
            name = parts.get(1, b"").decode("utf-8", "replace")
            for kind, values in _fields(parts.get(2, b"")):
                sample[name] = _feature_values(kind, values)
    return sample


def _feature_values(kind: int, data: bytes) -> Any:
    values = [value for number, value in _fields(data, with_numbers=True) if number == 1]
    if kind == 1:
        found = [value for value in values if isinstance(value, bytes)]
        return found[0] if len(found) == 1 else found
    if kind == 2:  # packed, or one by one
        packed = b"".join(value for value in values if isinstance(value, bytes))
        if len(packed) % 4:
            raise DataError("a list of floats has a wrong length: no tf.train.Example")
        return np.frombuffer(packed, "<f4").astype(np.float32)
    if kind == 3:
        numbers: list[int] = []
        for value in values:
            numbers.extend(_varints(value) if isinstance(value, bytes) else [value])
        return np.array([number - (1 << 64) if number >> 63 else number for number in numbers], np.int64)
    raise DataError(f"a feature has the unknown kind {kind}: no tf.train.Example")


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while offset < len(data) and shift < 70:
        byte = data[offset]
        offset += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & ((1 << 64) - 1), offset
        shift += 7
    raise DataError("a number does not end: no tf.train.Example, read the records with decode=False")


def _varints(data: bytes) -> Iterator[int]:
    offset = 0
    while offset < len(data):
        value, offset = _varint(data, offset)
        yield value


def _fields(data: bytes, *, with_numbers: bool = False) -> Iterator[tuple[int, Any]]:
    """The fields of a message of Protocol Buffers: number, and bytes (or, `with_numbers`, a number)."""
    offset = 0
    while offset < len(data):
        tag, offset = _varint(data, offset)
        match tag & 7:
            case 0:
                value, offset = _varint(data, offset)
                if with_numbers:
                    yield tag >> 3, value
                continue
            case 1:
                length = 8
            case 5:
                length = 4
            case 2:
                length, offset = _varint(data, offset)
            case kind:
                raise DataError(f"a field has the unknown kind {kind}: no tf.train.Example")
        if offset + length > len(data):
            raise DataError("a field is longer than its message: no tf.train.Example")
        yield tag >> 3, data[offset : offset + length]
        offset += length
