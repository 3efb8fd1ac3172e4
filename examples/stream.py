"""stream.py: data are prepared once, on all ranks, and read in one order by any number of them.

ronde run -np 2 python examples/stream.py
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

import ronde
import ronde.data
import ronde.torch


def read_digits() -> Iterator[dict[str, Any]]:
    """The input: any iterable of dicts."""
    digits = load_digits()
    for pixels, label in zip(digits.data, digits.target, strict=True):
        yield {"pixels": pixels, "label": int(label)}


def scale(sample: dict[str, Any]) -> dict[str, Any]:
    """The transform of the preparation: called once for each sample."""
    return {"pixels": (sample["pixels"] / 16).astype(np.float32), "label": sample["label"]}


def as_pair(sample: dict[str, Any]) -> tuple[Any, int]:
    return sample["pixels"], sample["label"]


def main() -> None:
    ronde.init()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(ronde.objects.broadcast(directory))  # that of rank 0
        # As `ronde data prepare stream:read_digits FOLDER --transform stream:scale --split train=0.8,test=0.2`
        options = ronde.data.PrepareOptions(
            input="stream:read_digits", output=str(folder), transform="stream:scale", split="train=0.8,test=0.2"
        )
        index = ronde.data.prepare(options).index
        train(folder, index.num_samples("train"))
        ronde.barrier()  # rank 0 removes the folder
    ronde.shutdown()


def train(folder: Path, num_samples: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = ronde.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    stream = ronde.data.Stream(folder, split="train", global_batch=64, seed=1, transform=as_pair)
    loader = DataLoader(ronde.torch.StreamDataset(stream), batch_size=None)
    if ronde.rank() == 0:
        print(f"{num_samples} samples of {stream.length}, {len(stream)} steps in an epoch")
    while stream.epoch < 8:
        for pixels, labels in stream.track(loader):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(pixels), labels).backward()
            optimizer.step()

    right = count = 0
    test = ronde.data.Stream(folder, split="test", global_batch=64, shuffle=False, ends="uneven", transform=as_pair)
    with torch.no_grad():
        for pixels, labels in test:
            right += int((model(torch.from_numpy(pixels)).argmax(1) == torch.from_numpy(labels)).sum())
            count += len(labels)
    right, count = ronde.allreduce(np.array([right, count])).tolist()
    if ronde.rank() == 0:
        print(f"accuracy {right / count:.1%} on {count} samples with {ronde.size()} ranks")


if __name__ == "__main__":
    main()
