"""The global batches of an epoch, cut into the parts of the ranks. Used by the samplers of the frameworks.

A loader draws batches long before the training loop gets them, so GlobalBatches remembers how each batch that was drawn
is divided until it is handed out.

Parts are equally large, or follow the speed of the ranks: every AGREE_EVERY batches all of them tell each other how
many samples they have computed and how long it took, without the time in which they waited for each other.
next_shares(), a pure function, makes shares of it. They are used from the first batch on that no rank has drawn yet.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.training.sample_sharding import SamplePosition, part_of_batch, share_out

EQUAL_SHARE = 1000
"""The share of a rank when all are equally fast."""
MIN_SHARE, MAX_SHARE = 125, 4000
"""Shares stay between these, however long a rank has taken."""
SMOOTHING = 0.7
"""So far shares go towards what was measured last."""
LEAST_CHANGE = 0.03
"""Shares stay as they are while none would change by more than this part of itself."""
LEAST_S = 1e-6
"""A shorter time tells nothing."""
AGREE_EVERY = 8
"""After so many batches ranks agree on their shares anew."""
WARM_UP = 2
"""The first batches of a loop, in which memory is allocated and buckets are agreed on, are not measured."""


class MeasuredSpeed(NamedTuple):
    """What one rank has done since the last agreement."""

    num_samples: int
    own_s: float
    """How long it took, without the time in which this rank waited for others."""


def equal_shares(size: int) -> tuple[int, ...]:
    return (EQUAL_SHARE,) * size


def next_shares(shares: Sequence[int], measured: Sequence[MeasuredSpeed]) -> tuple[int, ...]:
    """The shares of the ranks from now on: in proportion to their speeds, so that all of them need equally long for
    their parts. A rank of which nothing was measured keeps its share. Equal arguments give equal results."""
    speeds = [each.num_samples / each.own_s if each.num_samples and each.own_s > LEAST_S else 0.0 for each in measured]
    known = [rank for rank, speed in enumerate(speeds) if speed]
    total_speed, total_share = sum(speeds), sum(shares[rank] for rank in known)
    wanted = list(shares)
    for rank in known:
        ideal = total_share * speeds[rank] / total_speed
        moved = shares[rank] + SMOOTHING * (ideal - shares[rank])
        wanted[rank] = min(max(round(moved), MIN_SHARE), MAX_SHARE)
    if all(abs(new - old) <= LEAST_CHANGE * old for new, old in zip(wanted, shares, strict=True)):
        return tuple(shares)
    return tuple(wanted)


class GlobalBatches:
    """An iterator over this rank's parts of the batches from a position to the end of the epoch."""

    def __init__(
        self,
        order: Array,
        position: SamplePosition,
        *,
        global_batch: int,
        drops_last: bool,
        member: int,
        shares: Sequence[int],
    ) -> None:
        """`order` is that of the epoch. `drops_last`: a last batch that is smaller is left out. `shares` are those of
        all members."""
        self._order = order
        self._next_sample = position.consumed
        self._global_batch = global_batch
        self._drops_last = drops_last
        self._member = member
        self._shares = tuple(shares)
        self._whole = self._divide(global_batch)
        """How a batch of the full size is divided."""
        self._later_shares: deque[tuple[int, tuple[int, ...]]] = deque()  # from which batch on, and the shares
        self._drawn: deque[tuple[int, ...]] = deque()
        self.num_drawn = 0

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        while self._later_shares and self.num_drawn >= self._later_shares[0][0]:
            self._shares = self._later_shares.popleft()[1]
            self._whole = self._divide(self._global_batch)
        start, count = self._next_sample, self._global_batch
        counts, first, end = self._whole
        if start + count > len(self._order):
            count = len(self._order) - start
            if count <= 0 or self._drops_last:
                raise StopIteration
            counts, first, end = self._divide(count)
        self._next_sample = start + count
        self.num_drawn += 1
        self._drawn.append(counts)
        mine: list[int] = self._order[start + first : start + end].tolist()
        return mine

    def _divide(self, count: int) -> tuple[tuple[int, ...], int, int]:
        """How many of so many samples each member gets, and from where to where this member's are."""
        counts = share_out(count, self._shares)
        return counts, *part_of_batch(counts, self._member)

    def hand_out(self) -> tuple[int, ...]:
        """How many samples each member has of the next batch. Called when the training loop gets it."""
        if not self._drawn:
            raise ValueError(
                "track(): the loader has more batches than were drawn from this sampler; make it with "
                "DataLoader(dataset, batch_sampler=sampler)"
            )
        return self._drawn.popleft()

    def change_shares(self, first_batch: int, shares: Sequence[int]) -> None:
        """Cut batches by other shares, from this one on, which has not been drawn yet. Another rank may have drawn
        farther, so earlier changes may still lie ahead."""
        assert first_batch >= self.num_drawn
        self._later_shares.append((first_batch, tuple(shares)))


class SpeedShares:
    """The shares of the members of a group, by their measured speed. All of them make the same calls."""

    def __init__(self, group: Group, shares: Sequence[int]) -> None:
        self.shares = tuple(shares)
        self._group = group
        self._num_batches = 0
        self._num_samples = 0
        self._measured_from = (0.0, 0.0)  # the time, and how long this rank had waited for others until then

    def batch_done(self, num_samples: int, waited_s: float, batches: GlobalBatches) -> None:
        """This rank has computed one more batch, `num_samples` of it its own, and has waited for others for so long
        altogether. Now and then collective: then new shares are agreed on, for batches that nobody has drawn."""
        now = time.perf_counter()
        self._num_batches += 1
        self._num_samples += num_samples
        if self._num_batches == WARM_UP:
            self._measured_from, self._num_samples = (now, waited_s), 0
        if self._num_batches < WARM_UP + AGREE_EVERY:
            return
        own_s = (now - self._measured_from[0]) - (waited_s - self._measured_from[1])
        told = self._group.allgather(np.array([[self._num_samples, max(own_s, 0.0), batches.num_drawn]]))
        measured = [MeasuredSpeed(int(num), float(seconds)) for num, seconds, _ in told]
        shares = next_shares(self.shares, measured)
        if shares != self.shares:
            self.shares = shares
            batches.change_shares(int(told[:, 2].max()), shares)
        self._num_batches, self._num_samples = WARM_UP, 0
        self._measured_from = now, waited_s
