"""How many images a second ronde.data.Stream reads, against WebDataset and a plain DataLoader of PyTorch.

    python benchmarks/data.py --images 600 --rounds 5

All of them read the same JPEG files, decode them with Pillow, and collate batches of 32: the plain loader from one file
for each image, in a random order; WebDataset from tar files, through its shuffle buffer; Stream from shards of
`ronde data prepare`. With 0 workers all work is in the calling process and thread. Rounds take turns, and the best of
each counts, so that what else the machine does hurts all of them alike. Without workers the
CPU time of an image is measured, too: on a busy machine it is the number that can be compared.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import ronde
import ronde.torch
from ronde.data import PrepareOptions, Stream, decode_image, prepare

BATCH = 32


def decode(data: bytes) -> Any:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


class Files(Dataset[Any]):
    """What people write for an image folder."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*/*.jpg"))
        classes = sorted({path.parent.name for path in self.paths})
        self.labels = [classes.index(path.parent.name) for path in self.paths]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return decode(self.paths[index].read_bytes()), self.labels[index]


def decode_stream_sample(sample: dict[str, Any]) -> tuple[Any, int]:
    return decode_image(sample["image"]), sample["label"]


def decode_tar_sample(sample: dict[str, Any]) -> tuple[Any, int]:
    return decode(sample["jpg"]), int(sample["cls"])


def write_photos(folder: Path, num_images: int, size: int) -> None:
    """Smooth noise, which is about as large as photos of this size are."""
    random = np.random.default_rng(0)
    for number in range(num_images):
        small = Image.fromarray(random.integers(0, 256, (size // 8, size // 8, 3), np.uint8))
        path = folder / f"class{number % 10}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        small.resize((size, size), Image.Resampling.BICUBIC).save(path, quality=90)


def write_tars(photos: Path, folder: Path) -> str:
    files = Files(photos)
    folder.mkdir()
    order = np.random.default_rng(1).permutation(len(files))
    with webdataset.ShardWriter(str(folder / "%04d.tar"), maxcount=200, verbose=0) as writer:
        for index in order.tolist():
            data, label = files.paths[index].read_bytes(), files.labels[index]
            writer.write({"__key__": f"{index:06d}", "jpg": data, "cls": label})
    return f"{folder}/{{0000..{-(-len(files) // 200) - 1:04d}}}.tar"


def make_loaders(photos: Path, tars: str, shards: Path, workers: int) -> dict[str, Callable[[], Iterable[Any]]]:
    context = "forkserver" if workers else None
    more: dict[str, Any] = {
        "num_workers": workers,
        "multiprocessing_context": context,
        "persistent_workers": workers > 0,
    }
    plain = DataLoader(Files(photos), batch_size=BATCH, shuffle=True, **more)
    pipeline = webdataset.WebDataset(tars, shardshuffle=100, nodesplitter=webdataset.split_by_node).shuffle(200)
    web = webdataset.WebLoader(pipeline.map(decode_tar_sample).batched(BATCH), batch_size=None, **more)
    stream = Stream(shards, global_batch=BATCH, transform=decode_stream_sample, num_threads=0)
    if not workers:
        return {"DataLoader": lambda: plain, "WebDataset": lambda: web, "ronde": lambda: stream}
    ours = DataLoader(ronde.torch.StreamDataset(stream), batch_size=None, **more)
    return {"DataLoader": lambda: plain, "WebDataset": lambda: web, "ronde": lambda: stream.track(ours)}


def count_images(batches: Iterable[Any]) -> int:
    return sum(len(batch[1]) for batch in batches)


def describe_cpu(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """The best and the median round of each, and the median of the ratios of rounds that were next to each other."""
    ratios = [plain / ours for plain, ours in zip(seconds["DataLoader"], seconds["ronde"], strict=True)]
    return {
        "cpu_us_per_image": {name: round(min(each) * 1e6, 1) for name, each in seconds.items()},
        "median_cpu_us_per_image": {name: round(statistics.median(each) * 1e6, 1) for name, each in seconds.items()},
        "cpu_ratio_to_dataloader": round(statistics.median(ratios), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Read images with ronde, WebDataset and a plain DataLoader.")
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--size", type=int, default=256, help="pixels")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0, help="processes of each loader")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ronde.init()
    with tempfile.TemporaryDirectory(prefix="ronde-bench-") as directory:
        photos, shards = Path(directory, "photos"), Path(directory, "shards")
        write_photos(photos, options.images, options.size)
        prepare(PrepareOptions(input=str(photos), output=str(shards)))
        loaders = make_loaders(photos, write_tars(photos, Path(directory, "tars")), shards, options.workers)
        best = dict.fromkeys(loaders, 0.0)
        cpu: dict[str, list[float]] = {name: [] for name in loaders}
        for number in range(options.rounds + 1):
            for name, make in loaders.items():
                began, cpu_began = time.perf_counter(), time.process_time()
                num_images = count_images(make())
                assert num_images == options.images, f"{name} gave {num_images} images"
                if number:  # the first round reads the files into the cache of the system, and starts workers
                    best[name] = max(best[name], num_images / (time.perf_counter() - began))
                    cpu[name].append((time.process_time() - cpu_began) / num_images)
        size = sum(path.stat().st_size for path in photos.glob("*/*")) / options.images
    result = {
        "images_per_s": {name: round(rate, 1) for name, rate in best.items()},
        "ratio_to_webdataset": round(best["ronde"] / best["WebDataset"], 3),
        "ratio_to_dataloader": round(best["ronde"] / best["DataLoader"], 3),
        "workers": options.workers,
        **(describe_cpu(cpu) if not options.workers else {}),
        "bytes_per_image": round(size),
        "load": os.getloadavg()[0],
    }
    print(json.dumps(result))
    ronde.shutdown()


if __name__ == "__main__":
    main()
