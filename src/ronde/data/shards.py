"""Our shard format, the index of a data set, and what readers of all formats have in common.

A shard is a file: magic, blocks, footer. A block can be read without the rest of the file:

    "RBLK"  number of samples  bytes of all samples  length of each  CRC-32 of each  CRC-32 of all before   samples

The footer lists the blocks, so that a shard can be read without an index. All numbers are little-endian. A data set is
a folder with shards and `index.json`, which is written last: it names all shards of each split with their sizes,
checksums (SHA-256) and blocks, so the order of an epoch is known before any shard is opened.
"""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np

from ronde.comm.buffers import Array
from ronde.data.checksums import crc32
from ronde.data.files import ByteRange, DataFolder, FileInfo, PartialRange, read_file, safe_name
from ronde.data.samples import MAX_SAMPLE_BYTES, Sample, decode_sample
from ronde.errors import DataError
from ronde.text import shorten

INDEX_NAME = "index.json"
INDEX_FORMAT = "ronde-shards"
INDEX_VERSION = 1
MAX_INDEX_BYTES = 1 << 30
BLOCK_BYTES = 4 << 20
"""A block ends when it has so many bytes, or as many samples as its writer was told."""
SHARD_ENDING = ".shard"
FILE_MAGIC, BLOCK_MAGIC, FOOTER_MAGIC = b"RONDESH1", b"RBLK", b"RONDEEND"
GAP_DIVISOR = 64
"""Of a block that is fetched in parts, this part at most is fetched in vain, to make fewer requests. All of the 60
virtual streams together then fetch less than one block in vain."""
MAX_PARTS = 96
"""Requests for one block. Samples of 12 KB, in blocks of BLOCK_BYTES, need fewer; smaller ones are fetched together."""
_BLOCK_HEAD = struct.Struct("<4sIQ")
_FOOTER_TAIL = struct.Struct("<II8s")  # bytes of the footer, its CRC-32, magic


@dataclass(frozen=True)
class BlockTable:
    """Where the blocks of a data set are. Files are named below the folder of the data."""

    files: tuple[str, ...]
    file_of: Array
    starts: Array
    sizes: Array
    """In bytes."""
    lengths: Array
    """In samples."""

    @classmethod
    def make(cls, files: Iterable[tuple[str, Sequence[tuple[int, int, int]]]]) -> BlockTable:
        """From the name of each file and start, bytes and samples of its blocks."""
        listed = [(name, np.array(blocks, np.int64).reshape(-1, 3)) for name, blocks in files]
        rows = np.concatenate([np.empty((0, 3), np.int64), *(blocks for _, blocks in listed)])
        file_of = np.repeat(np.arange(len(listed)), [len(blocks) for _, blocks in listed])
        return cls(tuple(name for name, _ in listed), file_of, rows[:, 0], rows[:, 1], rows[:, 2])

    def select(self, blocks: slice) -> BlockTable:
        """A table of some of the blocks."""
        chosen = (numbers[blocks] for numbers in (self.file_of, self.starts, self.sizes, self.lengths))
        return BlockTable(self.files, *chosen)

    def fingerprint(self) -> str:
        """Changes when the order of an epoch would mean other samples."""
        digest = hashlib.sha256("\0".join(self.files).encode())
        for numbers in (self.file_of, self.starts, self.sizes, self.lengths):
            digest.update(np.ascontiguousarray(numbers, "<i8").tobytes())
        return digest.hexdigest()[:16]


class OpenBlock(Protocol):
    """A block whose samples can be read in any order."""

    def read(self, row: int) -> Sample:
        """One sample. DataError with file and offset if it is damaged."""


class BlockReader(Protocol):
    """The samples of a data set in one of the formats."""

    folder: DataFolder
    table: BlockTable
    classes: tuple[str, ...]
    """Names of the classes, if the format has them."""

    def open(self, block: int, rows: Array | None = None) -> OpenBlock:
        """A block. `rows` are those that will be read, if not all: a reader may fetch only these."""


# --- the index ---------------------------------------------------------------------------------------------------


class ShardInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A shard, as the index names it."""

    name: str
    num_bytes: int
    num_samples: int
    sha256: str
    blocks: tuple[tuple[int, int, int], ...]
    """Start, bytes and samples of each."""


class DataIndex(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of index.json."""

    format: str = INDEX_FORMAT
    version: int = INDEX_VERSION
    splits: dict[str, tuple[ShardInfo, ...]]
    classes: tuple[str, ...] = ()
    made_by: dict[str, Any] = {}
    """With which input and options it was prepared."""

    def num_samples(self, split: str) -> int:
        return sum(shard.num_samples for shard in self.splits[split])


def read_index(folder: DataFolder) -> DataIndex:
    """The checked index of a folder. DataError if there is none, or if it is damaged."""
    data = read_file(folder, INDEX_NAME, limit_bytes=MAX_INDEX_BYTES)
    try:
        index = msgspec.json.decode(data, type=DataIndex)
    except msgspec.MsgspecError as error:
        raise DataError(f"{folder.where(INDEX_NAME)} is damaged or no index of ronde: {error}") from None
    if (index.format, index.version) != (INDEX_FORMAT, INDEX_VERSION):
        raise DataError(
            f"{folder.where(INDEX_NAME)} is of format {shorten(index.format)!r}, version {index.version}; this ronde "
            f"reads {INDEX_FORMAT!r}, version {INDEX_VERSION}"
        )
    for shards in index.splits.values():
        for shard in shards:
            safe_name(shard.name)
            _check_blocks(shard.blocks, shard.num_bytes, f"{folder.where(INDEX_NAME)}: {shard.name}")
            if sum(length for _, _, length in shard.blocks) != shard.num_samples:
                raise DataError(f"{folder.where(INDEX_NAME)}: the blocks of {shard.name} have other samples than it")
    return index


def _check_blocks(blocks: Sequence[tuple[int, int, int]], num_bytes: int, source: str) -> None:
    for start, size, length in blocks:
        if not (0 <= start <= start + size <= num_bytes and 0 < length <= size):
            raise DataError(f"{source}: there is no block of {length} samples in bytes {start} to {start + size}")


def write_index(folder: DataFolder, index: DataIndex) -> None:
    folder.write(INDEX_NAME, msgspec.json.format(msgspec.json.encode(index), indent=1))


# --- writing -----------------------------------------------------------------------------------------------------


class ShardWriter:
    """Writes a shard to an open file. The caller writes it aside and renames it."""

    def __init__(
        self, file: io.BufferedIOBase, name: str, *, block_bytes: int = BLOCK_BYTES, block_samples: int = 1 << 20
    ) -> None:
        self._file = file
        self._name = name
        self._limits = block_bytes, block_samples
        self._samples: list[bytes] = []
        self._num_pending_bytes = 0
        self._blocks: list[tuple[int, int, int]] = []
        self._num_bytes = 0
        self._num_samples = 0
        self._digest = hashlib.sha256()
        self._write(FILE_MAGIC)

    def add(self, encoded: bytes) -> None:
        """Add a sample, as encode_sample() makes it."""
        self._samples.append(encoded)
        self._num_pending_bytes += len(encoded)
        if self._num_pending_bytes >= self._limits[0] or len(self._samples) >= self._limits[1]:
            self._end_block()

    def finish(self) -> ShardInfo:
        """Write the footer. The file is complete, and the caller closes it."""
        self._end_block()
        footer = msgspec.msgpack.encode(self._blocks)
        self._write(footer + _FOOTER_TAIL.pack(len(footer), crc32(footer), FOOTER_MAGIC))
        return ShardInfo(
            name=self._name,
            num_bytes=self._num_bytes,
            num_samples=self._num_samples,
            sha256=self._digest.hexdigest(),
            blocks=tuple(self._blocks),
        )

    def _end_block(self) -> None:
        if not self._samples:
            return
        head = _BLOCK_HEAD.pack(BLOCK_MAGIC, len(self._samples), self._num_pending_bytes)
        head += np.array([len(sample) for sample in self._samples], "<u4").tobytes()
        head += np.array([crc32(sample) for sample in self._samples], "<u4").tobytes()
        start = self._num_bytes
        self._write(head + struct.pack("<I", crc32(head)))
        for sample in self._samples:
            self._write(sample)
        self._blocks.append((start, self._num_bytes - start, len(self._samples)))
        self._num_samples += len(self._samples)
        self._samples, self._num_pending_bytes = [], 0

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._num_bytes += len(data)


def _head_bytes(num_samples: int) -> int:
    """The size of the header of a block: up to its first sample."""
    return _BLOCK_HEAD.size + 8 * num_samples + 4


def _end_of(data: bytes, start: int) -> str:
    """Where a file ends of which these bytes were read, and no more, from an offset on."""
    return f"at byte {start + len(data)}" if data else f"before byte {start + 1}"


# --- reading -----------------------------------------------------------------------------------------------------


def merge_ranges(starts: Array, ends: Array, gap_bytes: int) -> list[tuple[int, int]]:
    """Ranges, in ascending order, as few as possible if all that lies between them and is fetched, too, may have so
    many bytes: start and number of bytes of each. It is one range if there would be more than MAX_PARTS."""
    gaps = starts[1:] - ends[:-1]
    smallest_first = np.argsort(gaps, kind="stable")
    num_closed = np.searchsorted(np.cumsum(gaps[smallest_first]), gap_bytes, side="right")
    cuts = np.sort(smallest_first[num_closed:])
    if len(cuts) >= MAX_PARTS:
        cuts = cuts[:0]
    firsts, lasts = starts[np.append(0, cuts + 1)], ends[np.append(cuts, len(ends) - 1)]
    return list(zip(firsts.tolist(), (lasts - firsts).tolist(), strict=True))


class ShardBlock:
    """A block of a shard. Its header is in memory, its samples are read one by one."""

    def __init__(self, source: ByteRange, where: str, start: int, num_samples: int) -> None:
        """`where` is the path of the shard and `start` the offset of the block in it, for messages."""
        self._source = source
        self._where = where
        self._start = start
        num_head = _head_bytes(num_samples)
        head = source.read(0, num_head)
        if len(head) < num_head:
            raise DataError(f"{where} is truncated: it ends {_end_of(head, start)}, inside of a block's header")
        magic, num_found, payload_bytes = _BLOCK_HEAD.unpack_from(head)
        (crc,) = struct.unpack_from("<I", head, num_head - 4)
        if magic != BLOCK_MAGIC or num_found != num_samples or crc != crc32(head[:-4]):
            raise DataError(f"{where} is damaged: the header of the block at byte {start} is not what was written")
        lengths, self._crcs = np.frombuffer(head, "<u4", 2 * num_samples, _BLOCK_HEAD.size).reshape(2, -1)
        self._ends = num_head + np.cumsum(lengths, dtype=np.int64)
        self._lengths = lengths
        if num_head + payload_bytes != source.num_bytes or self._ends[-1] != source.num_bytes:
            raise DataError(f"{where} is truncated: the block at byte {start} has only {source.num_bytes} bytes")

    def choose_parts(self, rows: Array) -> list[tuple[int, int]]:
        """The parts of the block that hold these samples, as offset and number of bytes."""
        rows = np.sort(rows)
        ends = self._ends[rows]
        return merge_ranges(ends - self._lengths[rows], ends, self._source.num_bytes // GAP_DIVISOR)

    def read(self, row: int) -> Sample:
        data = self.read_bytes(row)
        try:
            return decode_sample(data)
        except DataError as error:
            at = self._start + int(self._ends[row]) - len(data)
            raise DataError(f"{self._where}: the sample at byte {at}: {error}") from None

    def read_bytes(self, row: int) -> bytes:
        """One sample as encode_sample() made it."""
        length = int(self._lengths[row])
        first = int(self._ends[row]) - length
        data = self._source.read(first, length)
        if len(data) < length:
            raise DataError(f"{self._where} is truncated: it ends {_end_of(data, self._start + first)}")
        if crc32(data) != self._crcs[row]:
            raise DataError(f"{self._where} is damaged: the sample at byte {self._start + first} has another checksum")
        return data


class ShardReader:
    """The shards of one split."""

    def __init__(self, folder: DataFolder, shards: Sequence[ShardInfo], classes: Sequence[str] = ()) -> None:
        self.folder = folder
        self.classes = tuple(classes)
        self.table = BlockTable.make((shard.name, shard.blocks) for shard in shards)

    def open(self, block: int, rows: Array | None = None) -> ShardBlock:
        table = self.table
        name, start, size = table.files[table.file_of[block]], int(table.starts[block]), int(table.sizes[block])
        num_samples = int(table.lengths[block])
        if rows is None or self.folder.is_local:
            return ShardBlock(self.folder.open_range(name, start, size), self.folder.where(name), start, num_samples)
        source = PartialRange(self.folder, name, start, size)
        source.fetch([(0, _head_bytes(num_samples))])
        opened = ShardBlock(source, self.folder.where(name), start, num_samples)
        source.fetch(opened.choose_parts(rows))
        return opened


def read_footer(folder: DataFolder, info: FileInfo) -> tuple[tuple[int, int, int], ...]:
    """The blocks of a shard that no index names. DataError if it is truncated or no shard."""
    where = folder.where(info.name)
    tail_start = info.num_bytes - _FOOTER_TAIL.size
    if tail_start < len(FILE_MAGIC):
        raise DataError(f"{where} is truncated: it ends at byte {info.num_bytes}, before its footer")
    tail = folder.open_range(info.name, tail_start, _FOOTER_TAIL.size).read(0, _FOOTER_TAIL.size)
    length, crc, magic = _FOOTER_TAIL.unpack(tail)
    if magic != FOOTER_MAGIC or length > tail_start:
        raise DataError(f"{where} is truncated: it ends at byte {info.num_bytes} without a footer")
    footer = folder.open_range(info.name, tail_start - length, length).read(0, length)
    if crc32(footer) != crc:
        raise DataError(f"{where} is damaged: the footer at byte {tail_start - length} has another checksum")
    try:
        blocks = msgspec.msgpack.decode(footer, type=tuple[tuple[int, int, int], ...])
    except msgspec.MsgspecError as error:
        raise DataError(f"{where} is damaged: the footer at byte {tail_start - length}: {error}") from None
    _check_blocks(blocks, info.num_bytes, where)
    return blocks


def count_samples(splits: Mapping[str, Sequence[ShardInfo]]) -> dict[str, int]:
    return {split: sum(shard.num_samples for shard in shards) for split, shards in splits.items()}


assert MAX_SAMPLE_BYTES < 1 << 32, "lengths in a block have 32 bits"
