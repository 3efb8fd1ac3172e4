"""The prepared images as a dataset of PyTorch. Only what is used comes into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ronde.data import open_dataset
from ronde.data.files import open_folder
from ronde.data.shards import DataIndex, OpenBlock
from ronde.data.shards import read_index as read_data_index

__all__ = ["Images", "crop_centre", "crop_randomly", "make_loader", "read_index"]

Batch = tuple[Tensor, Tensor]


def read_index(cache: Path) -> DataIndex:
    """What was prepared: classes, and the shards of each split."""
    return read_data_index(open_folder(cache))


class Images(Dataset[Batch]):
    """One split. Batches are fetched as a whole: bytes (batch, rows, columns, 3), and labels."""

    def __init__(self, cache: Path, split: str) -> None:
        self._reader = open_dataset(cache, split=split)
        self._ends = np.cumsum(self._reader.table.lengths)
        """Of the blocks, in images."""
        self._blocks: dict[int, OpenBlock] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitems__(self, indices: list[int]) -> Batch:
        samples = [self._read(index) for index in indices]
        images = torch.from_numpy(np.stack([sample["image"] for sample in samples]))
        return images, torch.tensor([sample["label"] for sample in samples])

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_blocks": {}}  # a worker process opens files itself

    def _read(self, index: int) -> dict[str, Any]:
        block = int(np.searchsorted(self._ends, index, side="right"))
        if block not in self._blocks:
            self._blocks[block] = self._reader.open(block)
        return self._blocks[block].read(index - int(self._ends[block]) + int(self._reader.table.lengths[block]))


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
