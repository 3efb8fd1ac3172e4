"""An image folder in ImageNet's layout: FOLDER/{train,val,test}/CLASS/*.{jpg,png,…}."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ronde

__all__ = ["ImageFolder", "Split", "read_folder", "read_folder_once"]

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff")
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Split:
    """Files, below the folder, and the number of the class of each."""

    files: tuple[str, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True)
class ImageFolder:
    """What there is in a folder."""

    root: Path
    classes: tuple[str, ...]
    splits: dict[str, Split]
    fingerprint: str
    """Changes when a file comes, goes or changes: names, sizes and times of all files, hashed. Reading all bytes of
    an ImageNet at each start would take longer than what the cache saves."""


def read_folder(root: Path) -> ImageFolder:
    """Look at a folder. Raises ValueError with what is missing."""
    missing = [name for name in ("train", "val") if not (root / name).is_dir()]
    if missing:
        raise ValueError(f"{root} has no folder {' and '.join(missing)}; it needs train/CLASS/*.jpg, val/CLASS/*.jpg")
    classes = tuple(sorted(entry.name for entry in os.scandir(root / "train") if entry.is_dir()))
    if not classes:
        raise ValueError(f"{root / 'train'} has no folders; it needs one per class with the images in it")
    digest = hashlib.sha256()
    splits: dict[str, Split] = {}
    for name in SPLITS:
        if (root / name).is_dir():
            splits[name] = _read_split(root, name, classes, digest)
    return ImageFolder(root, classes, splits, digest.hexdigest())


def read_folder_once(root: Path) -> ImageFolder:
    """What rank 0 finds in a folder, on all ranks: a big one is slow to list. Ends the job if that fails."""
    folder: ImageFolder | None = None
    problem = ""
    if ronde.rank() == 0:
        try:
            folder = read_folder(root)
        except (ValueError, OSError) as error:
            problem = str(error)
    folder, problem = ronde.objects.broadcast((folder, problem))
    if folder is None:
        raise SystemExit(problem)
    return folder


def _read_split(root: Path, name: str, classes: tuple[str, ...], digest: hashlib._Hash) -> Split:
    numbers = {name: number for number, name in enumerate(classes)}
    found = sorted(entry.name for entry in os.scandir(root / name) if entry.is_dir())
    unknown = [one for one in found if one not in numbers]
    if unknown:
        raise ValueError(f"{root / name} has the class {unknown[0]!r}, which {root / 'train'} has not")
    files, labels = [], []
    for one in found:
        for file, state in _images(root / name / one):
            files.append(f"{name}/{one}/{file}")
            labels.append(numbers[one])
            digest.update(f"{files[-1]}\0{state.st_size}\0{state.st_mtime_ns}\0".encode())
    if not files:
        raise ValueError(f"{root / name} has no images; known endings are {' '.join(ENDINGS)}")
    return Split(tuple(files), tuple(labels))


def _images(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.lower().endswith(ENDINGS) and entry.is_file():
            yield entry.name, entry.stat()
