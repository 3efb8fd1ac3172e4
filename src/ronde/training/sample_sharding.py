"""Which samples belong to which rank, and how many are used up. Used by the samplers of the frameworks.

The samples of an epoch have one order, the same on every rank. Of each `size` samples in a row that are not used up,
every rank gets one. So when each rank has taken m samples, the first m * size of the order are used up, and one number
says where training stands. That number is all a restart needs, with any number of ranks; and if ranks times batch size
is equal, a global batch has the same samples for any number of ranks.

At the end of an epoch fewer than `size` samples may be left. There are three policies:

    pad      every rank gets equally many; some samples of the epoch's beginning are used twice
    drop     every rank gets equally many; up to size - 1 samples are left out
    uneven   every sample exactly once; some ranks get one more than others
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ronde.comm.buffers import Array

TAIL_POLICIES = ("pad", "drop", "uneven")


def epoch_order(length: int, *, epoch: int, seed: int, shuffle: bool) -> Array:
    """The order of the samples in an epoch: equal for equal arguments, with any version of NumPy."""
    if not shuffle:
        return np.arange(length)
    # A bit generator's stream is promised to stay as it is; that of Generator.permutation is not.
    bits = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(length)
    return np.argsort(bits, kind="stable")


def shard_size(num_remaining: int, rank: int, size: int, tail_policy: str) -> int:
    """How many of the remaining samples belong to this rank."""
    least, more = divmod(num_remaining, size)
    if tail_policy == "drop":
        return least
    if tail_policy == "pad":
        return least + (more > 0)
    return least + (rank < more)


def shard_indices(order: Array, consumed: int, rank: int, size: int, tail_policy: str) -> Array:
    """The samples of this rank, in an epoch of which `consumed` are used up."""
    left = order[consumed:]
    if tail_policy == "pad":
        left = np.concatenate([left, np.resize(order, -left.size % size)])
    elif tail_policy == "drop":
        left = left[: left.size - left.size % size]
    return left[rank::size]


class SamplePosition(NamedTuple):
    """The epoch, and how many of its samples are used up. The same on every rank."""

    epoch: int = 0
    consumed: int = 0

    def after(self, samples_per_rank: int, size: int, length: int) -> SamplePosition:
        """The position after each rank has taken this many more samples, or all that it had left."""
        return self._replace(consumed=min(self.consumed + samples_per_rank * size, length))
