"""Which samples belong to whom, and how far all have come. Used by the samplers of the frameworks.

The samples of an epoch have one order, the same on every rank. What is left of it is dealt out like cards: of each
`size` samples in a row, every rank gets one. So when each rank has taken m samples, the first m * size of the order are
used up, whoever had them, and one number says where training stands. That number is all a restart needs, with as many
ranks as before or another number of them; and ranks times batch size being equal, a global batch has the same samples
for any number of ranks.

At the end of an epoch the rest may not go round. Three ways out:

    pad      everybody gets equally many; some samples of the epoch's beginning are used twice
    drop     everybody gets equally many; up to size - 1 samples are left out
    uneven   every sample exactly once; some ranks get one more than others
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ronde.comm.buffers import Array

__all__ = ["SamplePosition", "TAIL_POLICIES", "epoch_order", "shard_indices", "shard_size"]

TAIL_POLICIES = ("pad", "drop", "uneven")


def epoch_order(length: int, *, epoch: int, seed: int, shuffle: bool) -> Array:
    """The order of the samples in an epoch: equal for equal arguments, with any version of NumPy."""
    if not shuffle:
        return np.arange(length)
    # A bit generator's stream is promised to stay as it is; that of Generator.permutation is not.
    bits = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(length)
    return np.argsort(bits, kind="stable")


def shard_size(num_remaining: int, rank: int, size: int, tail_policy: str) -> int:
    """How many of the samples that are left go to this rank."""
    least, more = divmod(num_remaining, size)
    if tail_policy == "drop":
        return least
    if tail_policy == "pad":
        return least + (more > 0)
    return least + (rank < more)


def shard_indices(order: Array, consumed: int, rank: int, size: int, tail_policy: str) -> Array:
    """My samples of an epoch of which so many are used up."""
    left = order[consumed:]
    if tail_policy == "pad":
        left = np.concatenate([left, np.resize(order, -left.size % size)])
    elif tail_policy == "drop":
        left = left[: left.size - left.size % size]
    return left[rank::size]


@dataclass(frozen=True, slots=True)
class SamplePosition:
    """Where all ranks stand: in which epoch, and how many of its samples are used up. The same on every rank."""

    epoch: int = 0
    consumed: int = 0

    def after(self, samples_per_rank: int, size: int, length: int) -> SamplePosition:
        """When each rank has taken so many samples (or all it had) since this position."""
        return replace(self, consumed=min(self.consumed + samples_per_rank * size, length))

    def at_epoch(self, epoch: int) -> SamplePosition:
        """The beginning of an epoch; the position itself if that epoch is under way."""
        return self if epoch == self.epoch else SamplePosition(epoch)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {"epoch": self.epoch, "consumed": self.consumed}
