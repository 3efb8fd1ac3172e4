"""Which samples belong to which rank, and how many are used up. Used by the samplers of the frameworks.

The samples of an epoch have one order, the same on every rank. Of each `size` samples in a row that are not used up,
every rank gets one. So when each rank has taken m samples, the first m * size of the order are used up, and one number
says where training stands. That number is all a restart needs, with any number of ranks; and if ranks times batch size
is equal, a global batch has the same samples for any number of ranks.

At the end of an epoch fewer than `size` samples may be left. There are three policies:

    pad      every rank gets equally many; some samples of the epoch's beginning are used twice
    drop     every rank gets equally many; up to size - 1 samples are left out
    uneven   every sample exactly once; some ranks get one more than others

That is ShardedSampler's way: a rank's samples are cut into batches after they were shared out. ElasticBatchSampler cuts
the order into global batches first, and each of these into the parts of the ranks: the step at position `consumed` uses
order[consumed : consumed + global_batch], whatever the number of ranks. Parts may differ in size, so gradients are
weighted (sample_weight) such that their mean over ranks is the mean over all samples of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ronde.comm.buffers import Array

TAIL_POLICIES = ("pad", "drop", "uneven")


def epoch_order(length: int, *, epoch: int, seed: int, shuffle: bool, key: tuple[int, ...] = ()) -> Array:
    """The order of the samples in an epoch: equal for equal arguments, with any version of NumPy. Other keys give other
    orders, for example one for each block of the data; zeros at the end of a key do not count."""
    if not shuffle:
        return np.arange(length)
    # A bit generator's stream is promised to stay as it is; that of Generator.permutation is not.
    bits = np.random.Philox(np.random.SeedSequence([seed, epoch, *key])).random_raw(length)
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


def count_steps(num_remaining: int, global_batch: int, tail_policy: str) -> int:
    """How many global batches the remaining samples make. The last one may be smaller, unless that is dropped."""
    return num_remaining // global_batch if tail_policy == "drop" else -(-num_remaining // global_batch)


@lru_cache(maxsize=64)
def share_out(total: int, shares: tuple[int, ...]) -> tuple[int, ...]:
    """How many of `total` samples each rank gets: as many as its share says, rounded such that none are left over. A
    rank gets none only if there are fewer samples than ranks.

    Whole numbers make it equal on every machine. Shares are above 0.
    """
    whole = sum(shares)
    counts = [total * share // whole for share in shares]
    # What rounding has left over goes to those that lost the most by it, and among equals to the first.
    by_loss = sorted(range(len(shares)), key=lambda rank: -(total * shares[rank] % whole))
    for rank in by_loss[: total - sum(counts)]:
        counts[rank] += 1
    while 0 in counts and max(counts) > 1:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return tuple(counts)


def part_of_batch(counts: Sequence[int], member: int) -> tuple[int, int]:
    """From where to where a member's part of a global batch is, of which each member has so many samples, as
    share_out() says. A member without a sample gets one that another one has: it has to compute something, and it
    weighs nothing."""
    start = sum(counts[:member])
    return (start, start + counts[member]) if counts[member] else (0, 1)


def sample_weight(counts: Sequence[int], member: int) -> float:
    """What the mean gradient of a member's samples is multiplied by, so that the mean over members is the mean over all
    of their samples. The weights of all members add up to their number."""
    total = sum(counts)
    return counts[member] * len(counts) / total if total else 1.0


class SamplePosition(NamedTuple):
    """The epoch, and how many of its samples are used up. The same on every rank."""

    epoch: int = 0
    consumed: int = 0

    def after(self, samples_per_rank: int, size: int, length: int) -> SamplePosition:
        """The position after each rank has taken this many more samples, or all that it had left."""
        return self._replace(consumed=min(self.consumed + samples_per_rank * size, length))

    @classmethod
    def load(cls, state: Mapping[str, Any], order_settings: Mapping[str, Any]) -> SamplePosition:
        """The position in the state_dict() of a sampler. ValueError if it is in the middle of an epoch whose order
        depended on other settings than these."""
        position = cls(int(state["epoch"]), int(state["consumed"]))
        wrong = [f"{key}={state[key]!r}, here {mine!r}" for key, mine in order_settings.items() if state[key] != mine]
        if wrong and position.consumed:
            raise ValueError(
                f"cannot go on in the middle of epoch {position.epoch}: the saved order had {'; '.join(wrong)}; "
                "make the sampler as it was, or set state['consumed'] to 0 to begin the epoch again"
            )
        return position

    def after_samples(self, num_samples: int) -> SamplePosition:
        """The position after so many more samples, of all ranks together."""
        return self._replace(consumed=self.consumed + num_samples)
