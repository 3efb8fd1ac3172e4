"""Readers of CSV and Parquet files, and of image folders in ImageNet's layout."""

from __future__ import annotations

import csv
import io
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ronde.comm.buffers import Array
from ronde.data.archives import BlockList, FileReader
from ronde.data.files import DataFolder, FileInfo, RangeFile, WholeFile, scan_file
from ronde.data.samples import IMAGE_ENDINGS, KEY, MAX_SAMPLE_BYTES, Sample, decode_image
from ronde.data.shards import BlockTable
from ronde.errors import DataError
from ronde.text import format_bytes, shorten

CSV_BLOCK_BYTES = 1 << 20
SCAN_BYTES = 1 << 20
MAX_FOOTERS = 128
QUOTE, NEWLINE, RETURN = b'"\n\r'
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RowBlock:
    """Rows that were parsed together."""

    def __init__(self, rows: Sequence[Sample | DataError]) -> None:
        self._rows = rows

    def read(self, row: int) -> Sample:
        found = self._rows[row]
        if isinstance(found, DataError):
            raise found
        return found


# --- CSV -----------------------------------------------------------------------------------------------------------


def scan_csv(folder: DataFolder, info: FileInfo, *, block_bytes: int = CSV_BLOCK_BYTES) -> BlockList:
    """The blocks of a CSV file, cut only where a row ends: not at newlines in quotes. Its first row has the names of
    the columns and is in no block. DataError with the offset if a quote is not closed."""
    blocks: BlockList = []
    rows = _scan_rows(folder, info)
    _, end = next(rows, (0, 0))
    start, num_rows = end, 0
    for is_blank, end in rows:
        num_rows += not is_blank
        if end - start >= block_bytes and num_rows:
            blocks.append((start, end - start, num_rows))
            start, num_rows = end, 0
    if num_rows:
        blocks.append((start, end - start, num_rows))
    return blocks


def _scan_rows(folder: DataFolder, info: FileInfo) -> Iterator[tuple[bool, int]]:
    """For each row whether it is blank, and its end."""
    is_quoted, offset, row_start, before = False, 0, 0, b""
    with scan_file(folder, info) as file:
        while chunk := file.read(SCAN_BYTES):
            data = np.frombuffer(chunk, np.uint8)
            quoted = (np.cumsum(data == QUOTE) + is_quoted) % 2
            for index in np.flatnonzero((data == NEWLINE) & (quoted == 0)).tolist():
                end = offset + index + 1
                content = end - row_start - 1
                last = chunk[index - 1 : index] if index else before
                yield content == 0 or (content == 1 and last == b"\r"), end
                row_start = end
            is_quoted = bool(quoted[-1])
            offset += len(chunk)
            before = chunk[-1:]
    if is_quoted:
        raise DataError(
            f"{folder.where(info.name)} ends at byte {offset} inside of quotes, in the row that begins at byte "
            f"{row_start}: it is truncated, or has a quote in a field that is not in quotes (write such a field in "
            "quotes, and each quote in it twice)"
        )
    if row_start < offset:
        yield False, offset


class CsvReader(FileReader):
    """CSV files in UTF-8 with the names of the columns in the first row. Values are texts."""

    def __init__(self, folder: DataFolder, table: BlockTable, **options: Any) -> None:
        super().__init__(folder, table, **options)
        self._headers: dict[str, list[str]] = {}

    def open(self, block: int, rows: Array | None = None) -> RowBlock:
        source, name, start, num_samples = self._range(block)
        where = self.folder.where(name)
        header = self._headers.get(name)
        if header is None:
            header = self._headers[name] = self._read_header(name)
        data = source.read(0, source.num_bytes)
        parsed: list[Sample | DataError] = []
        for row in _parse_rows(data, where, start):
            if isinstance(row, DataError):
                parsed.append(row)
            elif len(row) != len(header):
                parsed.append(
                    DataError(
                        f"{where}: row {len(parsed) + 1} behind byte {start} has {len(row)} values, but there are "
                        f"{len(header)} columns"
                    )
                )
            else:
                parsed.append({KEY: f"{name}:{start}+{len(parsed)}", **dict(zip(header, row, strict=True))})
        if len(parsed) != num_samples:
            raise DataError(f"{where} has changed or is truncated: the block at byte {start} has {len(parsed)} rows")
        return RowBlock(parsed)

    def _read_header(self, name: str) -> list[str]:
        info = next(info for info in self.folder.list_files() if info.name == name)
        _, end = next(_scan_rows(self.folder, info), (True, 0))
        data = self.folder.open_range(name, 0, end).read(0, end).removeprefix(BYTE_ORDER_MARK)
        header = next(iter(_parse_csv(data, self.folder.where(name))), [])
        if len(set(header)) != len(header) or not header:
            raise DataError(f"{self.folder.where(name)}: the first row must name the columns, each once; got {header}")
        return header


def _parse_rows(data: bytes, where: str, start: int) -> Sequence[list[str] | DataError]:
    """The rows of a block at this offset. One that cannot be parsed is an error, and the others are not affected."""
    try:
        return _parse_csv(data, f"{where} behind byte {start}")
    except DataError:
        pass
    found: list[list[str] | DataError] = []
    for line in _split_rows(data):
        try:
            found += _parse_csv(line, f"{where} behind byte {start}")
        except DataError as error:
            found.append(error)
        start += len(line)
    return found


def _split_rows(data: bytes) -> Iterator[bytes]:
    quoted = np.cumsum(np.frombuffer(data, np.uint8) == QUOTE) % 2
    start = 0
    for end in (np.flatnonzero((np.frombuffer(data, np.uint8) == NEWLINE) & (quoted == 0)) + 1).tolist():
        yield data[start:end]
        start = end
    if start < len(data):
        yield data[start:]


def _parse_csv(data: bytes, where: str) -> list[list[str]]:
    try:
        return [row for row in csv.reader(io.StringIO(data.decode("utf-8"), newline=""), strict=True) if row]
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start} is no UTF-8") from None
    except csv.Error as error:
        raise DataError(f"{where}: {error}") from None


# --- Parquet -------------------------------------------------------------------------------------------------------


def scan_parquet(folder: DataFolder, info: FileInfo) -> BlockList:
    """The row groups of a Parquet file."""
    where = folder.where(info.name)
    with _open_parquet(folder, info) as file:
        blocks = []
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            if group.total_byte_size > MAX_SAMPLE_BYTES:
                size = format_bytes(group.total_byte_size)
                raise DataError(f"{where}: row group {number} has {size}; write it with smaller row groups")
            if group.num_rows:
                # Of a row group its number is kept in place of an offset.
                compressed = sum(group.column(column).total_compressed_size for column in range(group.num_columns))
                blocks.append((number, compressed, group.num_rows))
        return blocks


def _open_parquet(folder: DataFolder, info: FileInfo, metadata: Any = None) -> Any:
    """The file; its footer is not read if `metadata` has what is in it."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{folder.where(info.name)} needs pyarrow: pip install ronde[data]") from error
    file = RangeFile(WholeFile(folder, info))
    try:
        return parquet.ParquetFile(pa.PythonFile(file, mode="r"), metadata=metadata)
    except (pa.ArrowException, OSError) as error:
        end = WholeFile(folder, info).read(max(0, info.num_bytes - 4), 4)
        reason = f": it ends at byte {info.num_bytes} without a footer" if end != b"PAR1" else ""
        text = shorten(" ".join(str(error).split()))
        raise DataError(f"{folder.where(info.name)} is truncated, damaged or no Parquet{reason} ({text})") from None


class ParquetReader(FileReader):
    """Parquet files; a row group is a block."""

    def __init__(self, folder: DataFolder, table: BlockTable, **options: Any) -> None:
        super().__init__(folder, table, **options)
        self._infos: dict[str, FileInfo] = {}
        self._footers: OrderedDict[str, Any] = OrderedDict()
        """Of the files that were read last: a footer may be larger than a row group."""

    def open(self, block: int, rows: Array | None = None) -> RowBlock:
        import pyarrow as pa

        table = self.table
        name, number = table.files[table.file_of[block]], int(table.starts[block])
        if not self._infos:
            self._infos = {info.name: info for info in self.folder.list_files()}
        if name not in self._infos:
            raise DataError(f"{self.folder.where(name)} is not there any more")
        with _open_parquet(self.folder, self._infos[name], self._footers.get(name)) as file:
            self._footers[name] = file.metadata
            while len(self._footers) > MAX_FOOTERS:
                self._footers.popitem(last=False)
            try:
                found = file.read_row_group(number, use_threads=False).to_pylist()
            except (pa.ArrowException, OSError, IndexError) as error:
                begin = file.metadata.row_group(number).column(0).file_offset if file.metadata.num_row_groups else 0
                raise DataError(
                    f"{self.folder.where(name)} is damaged: row group {number}, near byte {begin}: {error}"
                ) from None
        if len(found) != table.lengths[block]:
            raise DataError(f"{self.folder.where(name)} has changed: row group {number} has {len(found)} rows")
        return RowBlock([{KEY: f"{name}:{number}+{row}", **values} for row, values in enumerate(found)])


# --- image folders -------------------------------------------------------------------------------------------------


class ImageBlock:
    """One image."""

    def __init__(self, data: bytes, sample: Sample, where: str, decode: bool) -> None:
        self._data = data
        self._sample = sample
        self._where = where
        self._decode = decode

    def read(self, row: int) -> Sample:
        assert row == 0
        try:
            image: Any = decode_image(self._data) if self._decode else self._data
        except DataError as error:
            raise DataError(f"{self._where}: {error}") from None
        return {**self._sample, "image": image}


class ImageFolderReader(FileReader):
    """FOLDER/CLASS/*.jpg: the class of an image is the name of its folder, its label the number of that name among
    all, in alphabetical order. Each image is a block. A sample has `image`, `label` and `class`."""

    def __init__(self, folder: DataFolder, table: BlockTable, **options: Any) -> None:
        super().__init__(folder, table, **options)
        self.classes = tuple(sorted({class_of(name) for name in table.files}))
        self._labels = {name: label for label, name in enumerate(self.classes)}

    def open(self, block: int, rows: Array | None = None) -> ImageBlock:
        source, name, _, _ = self._range(block)
        data = source.read(0, source.num_bytes)
        sample = {KEY: name, "label": self._labels[class_of(name)], "class": class_of(name)}
        where = self.folder.where(name)
        if len(data) < source.num_bytes:
            raise DataError(f"{where} is truncated: it ends at byte {len(data)}")
        return ImageBlock(data, sample, where, self._decode_images)


def class_of(name: str) -> str:
    """The class of an image in a folder: the name of the folder right above it."""
    return name.rpartition("/")[0].rpartition("/")[2]


def is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_ENDINGS) and "/" in name


def scan_image(folder: DataFolder, info: FileInfo) -> BlockList:
    if info.num_bytes > MAX_SAMPLE_BYTES or not info.num_bytes:
        raise DataError(f"{folder.where(info.name)} has {info.num_bytes} bytes: no image")
    return [(0, info.num_bytes, 1)]
