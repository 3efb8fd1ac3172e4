"""Finds the format of data and opens them: open_dataset(). Used by Stream and by `ronde data`."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ronde.data.archives import BlockList, RecordReader, TarReader, scan_records, scan_tar
from ronde.data.files import CachedFolder, DataFolder, FileInfo, LocalFolder, open_folder
from ronde.data.shards import (
    INDEX_NAME,
    SHARD_ENDING,
    BlockReader,
    BlockTable,
    DataIndex,
    ShardReader,
    read_footer,
    read_index,
)
from ronde.data.tables import (
    CsvReader,
    ImageFolderReader,
    ParquetReader,
    is_image,
    scan_csv,
    scan_image,
    scan_parquet,
)
from ronde.errors import DataError
from ronde.settings import cache_dir

logger = logging.getLogger("ronde.data")

SPLITS = ("train", "val", "test")
MIN_SAVED_BYTES = 32 << 20
"""The blocks of less data than this are looked for each time; those of more are written down."""


class DataFormat(NamedTuple):
    """How to know and to read a format."""

    matches: Callable[[str], bool]
    scan: Callable[[DataFolder, FileInfo], BlockList]
    make_reader: Callable[..., BlockReader]


FORMATS = {
    "tar": DataFormat(lambda name: name.endswith(".tar"), scan_tar, TarReader),
    "tfrecord": DataFormat(lambda name: ".tfrecord" in name or ".tfrec" in name, scan_records, RecordReader),
    "parquet": DataFormat(lambda name: name.endswith((".parquet", ".pq")), scan_parquet, ParquetReader),
    "csv": DataFormat(lambda name: name.endswith(".csv"), scan_csv, CsvReader),
    "images": DataFormat(is_image, scan_image, ImageFolderReader),
}


def open_dataset(
    path: str | os.PathLike[str],
    *,
    split: str | None = None,
    format: str | None = None,
    decode: bool = True,
    decode_images: bool = True,
    trust: bool = False,
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int = 10 << 30,
) -> BlockReader:
    """Open the data at a path: a folder or URL with index.json, or with files of one other format, or one such file.

    `split` is a split of prepared data, or a folder of this name. With `cache`, what is far away is kept in this folder
    of this machine, at most `cache_bytes` of it. Without `decode`, members of tar files, images and records stay bytes;
    without `decode_images`, only images.
    """
    folder = open_folder(path)
    files = folder.list_files()
    if cache is not None and not isinstance(folder, LocalFolder):
        folder = CachedFolder(folder, Path(cache), cache_bytes)
    if format is None and any(info.name == INDEX_NAME for info in files):
        index = read_index(folder)
        return ShardReader(folder, index.splits[choose_split(index, split, folder.url)], index.classes)
    if split is not None:
        files = [info for info in files if info.name.startswith(f"{split}/")]
        if not files:
            raise DataError(f"{folder.url} has no split {split!r}")
    shards = [info for info in files if info.name.endswith(SHARD_ENDING)]
    if shards and format in (None, "shards"):
        reader = ShardReader(folder, ())
        reader.table = BlockTable.make((info.name, read_footer(folder, info)) for info in shards)
        return reader
    name = format or _find_format(files, os.fspath(path))
    if name not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)} and shards, got {name!r}")
    known = FORMATS[name]
    chosen = [info for info in files if known.matches(info.name)] or files
    table = _find_blocks(folder, chosen, name)
    return known.make_reader(folder, table, trust=trust, decode=decode, decode_images=decode_images)


def choose_split(index: DataIndex, split: str | None, url: str) -> str:
    """The split to read, by default the only one or `train`."""
    if split is None:
        if "train" not in index.splits and len(index.splits) > 1:
            raise DataError(
                f"{url} has the splits {', '.join(index.splits)}, and none is named train: say which one (split=)"
            )
        split = "train" if "train" in index.splits else next(iter(index.splits), "")
    if split not in index.splits:
        raise DataError(f"{url} has no split {split!r}; it has {', '.join(index.splits) or 'none'}")
    return split


def _find_format(files: Iterable[FileInfo], url: str) -> str:
    found = {name for info in files for name, known in FORMATS.items() if known.matches(info.name)}
    if len(found) != 1:
        what = f"files of several formats ({', '.join(sorted(found))}); pass format=" if found else "no data"
        raise DataError(
            f"{url} has {what}: there are prepared data (with {INDEX_NAME}), {', '.join(FORMATS)}; images are in one "
            "folder for each class"
        )
    return found.pop()


def _find_blocks(folder: DataFolder, files: list[FileInfo], format: str) -> BlockTable:
    """The blocks of all files, which were written down when they were looked for last."""
    scan = FORMATS[format].scan
    if format == "images" or sum(info.num_bytes for info in files) < MIN_SAVED_BYTES:
        return BlockTable.make((info.name, scan(folder, info)) for info in files)
    identity = hashlib.sha256(repr((folder.url, format, files)).encode()).hexdigest()
    saved = LocalFolder(cache_dir() / "blocks")
    name = f"{identity}.msgpack"
    kind = list[tuple[str, BlockList]]
    try:
        return BlockTable.make(msgspec.msgpack.decode((saved.root / name).read_bytes(), type=kind))
    except (OSError, msgspec.MsgspecError):
        found: list[Any] = [(info.name, scan(folder, info)) for info in files]
    try:
        saved.write(name, msgspec.msgpack.encode(found))
    except (DataError, OSError) as error:  # a home that cannot be written to costs only time
        logger.info("cannot keep where the blocks of %s are: %s", folder.url, error)
    return BlockTable.make(found)
