"""Small data sets for tests, and folders that count what is read."""

from __future__ import annotations

import contextlib
import io
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import ronde
from ronde.data.files import ByteRange, DataFolder, FileInfo, LocalFolder, MemoryRange
from ronde.data.samples import KEY, encode_sample
from ronde.data.shards import DataIndex, ShardReader, ShardWriter, write_index


def write_shards(
    folder: Path, lengths: Iterable[int], *, block_samples: int = 4, num_bytes: int = 100, split: str = "train"
) -> DataIndex:
    """Shards with so many samples each. Sample n has the field `number` n, and so many random bytes."""
    random = np.random.default_rng(1)
    folder.mkdir(parents=True, exist_ok=True)
    shards, number = [], 0
    for shard, length in enumerate(lengths):
        name = f"{split}-{shard:05d}.shard"
        with (folder / name).open("wb") as file:
            writer = ShardWriter(file, name, block_samples=block_samples)
            for _ in range(length):
                writer.add(encode_sample({KEY: f"s{number}", "number": number, "bytes": random.bytes(num_bytes)}))
                number += 1
            shards.append(writer.finish())
    index = DataIndex(splits={split: tuple(shards)})
    write_index(LocalFolder(folder), index)
    return index


class CountedRange:
    """A range that tells its folder how many bytes are read of it."""

    def __init__(self, source: ByteRange, folder: CountingFolder) -> None:
        self.num_bytes = source.num_bytes
        self._source = source
        self._folder = folder

    def read(self, start: int, num_bytes: int) -> bytes:
        data = self._source.read(start, num_bytes)
        self._folder.count(len(data))
        return data


class CountingFolder:
    """A local folder that counts the bytes that are read. `is_far`: it fetches ranges as a whole, as a remote one."""

    def __init__(self, path: Path, *, is_far: bool = False) -> None:
        self._folder = LocalFolder(path)
        self._is_far = is_far
        self.is_local = not is_far
        self.url = self._folder.url
        self.num_bytes = 0
        self.num_ranges = 0
        self._lock = threading.Lock()

    def count(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes

    def where(self, name: str) -> str:
        return self._folder.where(name)

    def list_files(self) -> list[FileInfo]:
        return self._folder.list_files()

    def open_range(self, name: str, start: int, num_bytes: int) -> ByteRange:
        self.num_ranges += 1
        source = self._folder.open_range(name, start, num_bytes)
        if not self._is_far:
            return CountedRange(source, self)
        data = source.read(0, num_bytes)
        self.count(len(data))
        return MemoryRange(data)

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self.open_range(name, start, num_bytes).read(0, num_bytes) for start, num_bytes in ranges]

    def write(self, name: str, data: bytes | Path) -> None:
        self._folder.write(name, data)

    def remove(self, name: str) -> None:
        self._folder.remove(name)


def counting_reader(path: Path, index: DataIndex, *, is_far: bool = False) -> tuple[ShardReader, CountingFolder]:
    folder = CountingFolder(path, is_far=is_far)
    typed: DataFolder = folder
    return ShardReader(typed, index.splits["train"]), folder


def make_image(width: int = 8, height: int = 6, *, color: tuple[int, int, int] = (10, 20, 30)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()


def write_images(folder: Path, counts: Mapping[str, int]) -> None:
    """FOLDER/CLASS/NNN.png, so many of each class."""
    for label, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            image = make_image(color=(label, number % 256, number // 256))
            (folder / name / f"{number:03d}.png").write_bytes(image)


@contextlib.contextmanager
def data_of_all_ranks(lengths: Iterable[int]) -> Iterator[Path]:
    """A context with shards that the first rank writes and all ranks see. Collective."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(ronde.objects.broadcast(directory))
        if ronde.rank() == 0:
            write_shards(folder, lengths, num_bytes=10)
        ronde.barrier()
        yield folder
        ronde.barrier()


def plain(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample with lists in place of arrays, to be compared."""
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in sample.items()}
