"""Images decoded once, for all epochs and runs: cut to one size by `ronde.data.prepare`, on all ranks together.

The folder of the result is named after what is in it (a hash of the image folder and the size): other images or another
size make another one. A run that was killed goes on where it was.

    python examples/imagenet/prepare.py FOLDER CACHE --size 256       (alone, or under `ronde run`)
"""

from __future__ import annotations

import argparse
import hashlib
import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from folder import ImageFolder, read_folder_once
from PIL import Image

import ronde
import ronde.data
from ronde.errors import DataError

__all__ = ["cache_key", "cut_image", "prepare"]


def cut_image(sample: dict[str, Any], size: int) -> dict[str, Any]:
    """The middle of an image, its shorter side scaled to `size` pixels. Called once for each image."""
    with Image.open(io.BytesIO(sample["image"])) as image:
        image.draft("RGB", (size, size))  # a large JPEG is decoded at a fraction of its size, much faster
        whole = image.convert("RGB")
    side = min(whole.size)
    left, top = (whole.width - side) // 2, (whole.height - side) // 2
    box = (left, top, left + side, top + side)
    pixels = np.asarray(whole.resize((size, size), Image.Resampling.BILINEAR, box=box))
    return {"image": pixels, "label": sample["label"]}


def cache_key(folder: ImageFolder, size: int) -> str:
    """Changes with the images and their size."""
    return hashlib.sha256(f"{size} {folder.fingerprint}".encode()).hexdigest()[:16]


def prepare(root: Path, cache: Path, size: int) -> Path:
    """The prepared images of a folder, made if they are not there. All ranks call it; all must see both folders."""
    folder = read_folder_once(root)
    target = cache / cache_key(folder, size)
    if ronde.rank() == 0 and not (target / "index.json").exists():
        num_images = sum(len(split.files) for split in folder.splits.values())
        cache.mkdir(parents=True, exist_ok=True)
        _check_room(cache, 2 * num_images * size * size * 3)  # while they are made, they are there twice
    try:
        ronde.data.prepare(
            ronde.data.PrepareOptions(
                input=str(root),
                output=str(target),
                format="images",
                transform="prepare:cut_image",
                transform_options={"size": size},
                by="size",  # in the order of the folder, which a sampler shuffles
            )
        )
    except DataError as error:
        raise SystemExit(str(error)) from error
    return target


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise SystemExit(
            f"the prepared images need {num_bytes / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB left; "
            "use another --cache, or a smaller --image-size"
        )


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
