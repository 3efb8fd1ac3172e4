"""ElasticSampler: the rest of an epoch, divided anew when the processes change."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch.utils.data

from horovod.torch.mpi_ops import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Indices of this process, in an order that is the same for a seed and epoch.

    Call record_batch() after each batch and set_epoch() at the end of an epoch, and put the sampler into the state.
    Processes that have fewer samples than others repeat some. Counting is per batch of equal size on all processes, so
    samples may be used twice or not at all around a loss; ronde.torch.ElasticBatchSampler uses each exactly once.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self.reset()

    @property
    def processed_indices(self) -> set[int]:
        """The indices that all processes have used in this epoch, as far as they were recorded."""
        return set(self._order()[: self.processed_num])

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch with all samples. To be called at the end of an epoch: at its beginning it would forget what
        was recorded before a change of processes."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch of this size on every process as used."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the samples that were not recorded among the processes there are now."""
        self.num_replicas = size()
        self.rank = rank()
        self.remaining_indices = self._order()[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def _order(self) -> list[int]:
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        return indices

    def __iter__(self) -> Iterator[int]:
        remaining = self.remaining_indices
        return iter([remaining[i % len(remaining)] for i in range(self.rank, self.total_size, self.num_replicas)])

    def __len__(self) -> int:
        return self.num_samples
