"""scikit-learn's handwritten digits (1,797 of 8 x 8 pixels, part of the package) as an image folder.

Every rank writes its share of the files; the folder appears under its name when all of them are there.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from PIL import Image

import ronde
from ronde.data import choose_split

__all__ = ["write_digits"]

SHARES = {"train": 0.7, "val": 0.1, "test": 0.2}


def write_digits(folder: Path) -> Path:
    """Make the folder in ImageNet's layout, unless it is there. All ranks call it."""
    there = ronde.objects.broadcast(folder.is_dir())
    if there:
        return folder
    unfinished = folder.with_name(folder.name + ".unfinished")
    if ronde.rank() == 0 and unfinished.exists():  # a run was killed here
        shutil.rmtree(unfinished)
    ronde.barrier()
    _write_share(unfinished)
    ronde.barrier()
    if ronde.rank() == 0:
        unfinished.rename(folder)
    ronde.barrier()
    return folder


def _write_share(folder: Path) -> None:
    # Takes seconds, and is needed once only.
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it ships no types

    digits = load_digits()
    for index in range(ronde.rank(), len(digits.target), ronde.size()):
        name = f"{digits.target[index]}/{index:04d}.png"
        path = folder / choose_split(name, SHARES) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[index] * (255 / 16)).astype(np.uint8)).save(path)
