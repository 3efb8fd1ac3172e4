"""The prepared images as a dataset of PyTorch. The arrays are mapped: only what is used comes into memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

__all__ = ["Images", "crop_centre", "crop_randomly", "make_loader", "read_index"]

Batch = tuple[Tensor, Tensor]


def read_index(cache: Path) -> dict[str, Any]:
    """What prepare wrote down: classes, size, labels of each split."""
    index: dict[str, Any] = json.loads((cache / "index.json").read_text(encoding="utf-8"))
    return index


class Images(Dataset[Batch]):
    """One split. Batches are fetched as a whole: bytes (batch, rows, columns, 3), and labels."""

    def __init__(self, cache: Path, split: str) -> None:
        facts = read_index(cache)["splits"][split]
        self.labels = torch.tensor(facts["labels"])
        self._shard_length: int = facts["shard_length"]
        self._files = [cache / f"{split}-{number:05d}.npy" for number in range(-(-len(self) // self._shard_length))]
        self._maps: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> Batch:
        images = [self._map(index // self._shard_length)[index % self._shard_length] for index in indices]
        return torch.from_numpy(np.stack(images)), self.labels[indices]

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}  # a worker process maps the files itself

    def _map(self, number: int) -> Any:  # NumPy's memmap
        if number not in self._maps:
            self._maps[number] = np.load(self._files[number], mmap_mode="r")
        return self._maps[number]


def make_loader(images: Images, sampler: Sampler[int], batch_size: int, num_workers: int = 0) -> DataLoader[Batch]:
    """Batches of this rank's share."""
    return DataLoader(
        images,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=_as_is,
        pin_memory=torch.cuda.is_available(),
        # Not a fork: it would copy a process with ronde's threads in the middle of their work.
        multiprocessing_context="forkserver" if num_workers else None,
        persistent_workers=num_workers > 0,
    )


def _as_is(batch: Any) -> Any:  # DataLoader thinks of lists
    return batch


def crop_randomly(images: Tensor, size: int) -> Tensor:
    """A window of each image, somewhere."""
    room = images.shape[1] - size + 1
    rows, columns = torch.randint(room, (2, len(images))).tolist()
    windows = zip(images, rows, columns, strict=True)
    return torch.stack([image[row : row + size, column : column + size] for image, row, column in windows])


def crop_centre(images: Tensor, size: int) -> Tensor:
    """The middle of each image."""
    start = (images.shape[1] - size) // 2
    return images[:, start : start + size, start : start + size]
