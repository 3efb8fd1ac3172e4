"""Photos by class, split into train, val and test: SOURCE/CLASS/*.jpg becomes FOLDER/{train,val,test}/CLASS/*.jpg.

    python examples/imagenet/split.py photos data/photos --shares 80 10 10

A hash of CLASS/NAME decides where an image goes, so it stays there when others come: run the command again after images
were added, and only these are added to FOLDER. Images are linked, not copied, where the file system allows it.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from folder import ENDINGS, SPLITS

from ronde.data import choose_split

__all__ = ["split_images"]


def split_images(source: Path, folder: Path, shares: Mapping[str, float]) -> dict[str, int]:
    """Link all images of the source into the folder. Return how many each split has got. ValueError if there are none,
    or if an earlier call with other shares has put one of them into another split."""
    counts = dict.fromkeys(shares, 0)
    for group in sorted(entry for entry in source.iterdir() if entry.is_dir()):
        for image in sorted(group.iterdir()):
            if image.name.lower().endswith(ENDINGS) and image.is_file():
                name = f"{group.name}/{image.name}"
                split = choose_split(name, shares)
                counts[split] += 1
                _place(image, name, split, folder)
    if not any(counts.values()):
        raise ValueError(f"{source} has no images; it needs CLASS/*.jpg, and known endings are {' '.join(ENDINGS)}")
    return counts


def _place(image: Path, name: str, split: str, folder: Path) -> None:
    for other in SPLITS:
        if other != split and (folder / other / name).exists():
            raise ValueError(
                f"{folder / other / name} belongs to {split} with these shares; "
                "give the shares that the folder was made with, or another folder"
            )
    target = folder / split / name
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(image.resolve(), target)
    except OSError:  # another file system, or one without links
        aside = target.with_name(f".{target.name}.unfinished")
        shutil.copy2(image, aside)
        aside.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Split images by class into train, val and test.")
    parser.add_argument("source", type=Path, help="folder with CLASS/*.jpg")
    parser.add_argument("folder", type=Path, help="folder to make or to add to")
    parser.add_argument(
        "--shares", type=float, nargs=3, default=(80, 10, 10), metavar=("TRAIN", "VAL", "TEST"), help="80 10 10"
    )
    options = parser.parse_args()
    if min(options.shares) < 0 or min(options.shares[:2]) == 0:
        parser.error("--shares: train and val need more than 0, test 0 or more")
    try:
        counts = split_images(options.source, options.folder, dict(zip(SPLITS, options.shares, strict=True)))
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from error
    print(f"{options.folder}: " + ", ".join(f"{count} {split}" for split, count in counts.items()))


if __name__ == "__main__":
    main()
