"""Images decoded once, for all epochs and runs: cut to one size and stored as arrays that are mapped into memory.

The images of a split go to *shards* of at most 64 MB, one file each, and the shards are dealt out to the ranks. So
every rank holds one shard in memory at a time, and the cache does not depend on the number of ranks. Its folder is
named after what is in it (a hash of the image folder and the options): other images or another size make another cache.

A shard appears under its name when it is complete, and the folder when all shards are there, so a crash leaves no half
cache; the next run takes over the shards that were done.

    python examples/imagenet/prepare.py FOLDER CACHE --size 256       (alone, or under `ronde run`)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from folder import ImageFolder, Split, read_folder_once
from PIL import Image

import ronde

__all__ = ["Shard", "cache_key", "load_image", "plan_shards", "prepare"]

VERSION = 1
"""Of the format: another one makes another cache."""
SHARD_BYTES = 64 * 1024 * 1024
LEAST_SHARDS = 8
"""Per split, so that also small data keep several ranks busy."""


@dataclass(frozen=True)
class Shard:
    """Images `start` to `stop` of a split, in one file."""

    split: str
    number: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:05d}.npy"


def shard_length(num_images: int, size: int) -> int:
    """Images per shard."""
    return max(1, min(SHARD_BYTES // (size * size * 3), -(-num_images // LEAST_SHARDS)))


def plan_shards(split: str, num_images: int, size: int) -> list[Shard]:
    """Which images go where; the same for any number of ranks."""
    length = shard_length(num_images, size)
    starts = range(0, num_images, length)
    return [Shard(split, number, start, min(start + length, num_images)) for number, start in enumerate(starts)]


def cache_key(folder: ImageFolder, size: int) -> str:
    """Changes with the images, their size, and the format."""
    return hashlib.sha256(f"{VERSION} {size} {folder.fingerprint}".encode()).hexdigest()[:16]


def prepare(root: Path, cache: Path, size: int) -> Path:
    """The cache of an image folder, made if it is not there. All ranks call it; all must see both folders."""
    folder = read_folder_once(root)
    target = cache / cache_key(folder, size)
    if not ronde.objects.broadcast(target.is_dir()):
        _make(folder, target, size)
    if not (target / "index.json").is_file():
        raise SystemExit(
            f"rank {ronde.rank()} does not see {target}; the cache must be on storage that all ranks share"
        )
    return target


def _make(folder: ImageFolder, target: Path, size: int) -> None:
    unfinished = target.with_name(target.name + ".unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    plan = {name: plan_shards(name, len(split.files), size) for name, split in folder.splits.items()}
    shards = [shard for split in plan.values() for shard in split]
    if ronde.rank() == 0:
        _check_room(unfinished, sum(shard.stop - shard.start for shard in shards) * size * size * 3)
    for shard in shards[ronde.rank() :: ronde.size()]:
        if not (unfinished / shard.name).exists():
            _write_shard(folder.root, folder.splits[shard.split], shard, unfinished, size)
    ronde.barrier()
    if ronde.rank() == 0:
        index = {
            "classes": folder.classes,
            "size": size,
            "splits": {
                name: {"labels": split.labels, "shard_length": shard_length(len(split.labels), size)}
                for name, split in folder.splits.items()
            },
        }
        (unfinished / "index.json").write_text(json.dumps(index), encoding="utf-8")
        unfinished.rename(target)
    ronde.barrier()


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise SystemExit(
            f"the prepared images need {num_bytes / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB left; "
            "use another --cache, or a smaller --image-size"
        )


def _write_shard(root: Path, split: Split, shard: Shard, folder: Path, size: int) -> None:
    images = np.empty((shard.stop - shard.start, size, size, 3), np.uint8)
    for row, file in enumerate(split.files[shard.start : shard.stop]):
        images[row] = load_image(root / file, size)
    aside = folder / f".{shard.name}.{ronde.rank()}"
    with aside.open("wb") as out:
        np.save(out, images)
    aside.rename(folder / shard.name)


def load_image(path: Path, size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The middle of an image, its shorter side scaled to `size` pixels."""
    try:
        with Image.open(path) as image:
            image.draft("RGB", (size, size))  # a large JPEG is decoded at a fraction of its size, much faster
            whole = image.convert("RGB")
    except OSError as error:
        raise SystemExit(f"cannot read the image {path}: {error}") from error
    side = min(whole.size)
    left, top = (whole.width - side) // 2, (whole.height - side) // 2
    box = (left, top, left + side, top + side)
    return np.asarray(whole.resize((size, size), Image.Resampling.BILINEAR, box=box))


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode and cut all images of a folder, in parallel across ranks.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--size", type=int, default=256)
    options = parser.parse_args()
    ronde.init()
    made = prepare(options.folder, options.cache, options.size)
    if ronde.rank() == 0:
        print(f"prepared: {made}")
    ronde.shutdown()


if __name__ == "__main__":
    main()
