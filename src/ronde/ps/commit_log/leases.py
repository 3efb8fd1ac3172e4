"""Which worker trains on which samples, so that each sample of an epoch is used exactly once in every mode. Without
I/O.

A worker asks for some samples and gets a lease on ranges of their indices. The commit of the push that used them
acknowledges the lease. When a worker is lost, the ranges that it has not acknowledged are given to others. An epoch is
over when every index is acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from ronde.errors import Mismatch


class SampleRange(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Indices start to stop."""

    start: int
    stop: int


class Lease(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Samples that one worker has, and no other. It has several ranges if some came back from a lost worker."""

    number: int
    epoch: int
    ranges: tuple[SampleRange, ...]
    """Empty if the epoch is over."""


class LeaseTable:
    """The leases of one epoch after the other. The same requests in the same order give the same leases."""

    def __init__(self) -> None:
        self.epoch = -1
        self.num_samples = 0
        self._free: deque[SampleRange] = deque()
        self._leases: dict[int, tuple[int, Lease]] = {}
        """By number, those that are not acknowledged, with their worker."""
        self._next_number = 1
        self.num_acknowledged = 0
        """Samples of this epoch whose updates are committed."""

    @property
    def is_over(self) -> bool:
        """Whether every sample of the epoch is acknowledged."""
        return self.num_acknowledged == self.num_samples

    @property
    def has_free(self) -> bool:
        """Whether there are samples of this epoch that nobody has."""
        return bool(self._free)

    def open_epoch(self, epoch: int, num_samples: int) -> None:
        """Begin an epoch, unless it has begun. Raises ValueError if that cannot be."""
        if epoch < self.epoch or (epoch == self.epoch and num_samples == self.num_samples):
            return
        if epoch == self.epoch:
            raise Mismatch(f"epoch {epoch} has {self.num_samples} samples, and a worker asks for one of {num_samples}")
        if not self.is_over:
            num_left = self.num_samples - self.num_acknowledged
            raise ValueError(
                f"epoch {epoch} cannot begin: {num_left} of the {self.num_samples} samples of epoch {self.epoch} were "
                "not used in a step that was pushed; go through all of samples(), and push what is left behind it"
            )
        self.epoch, self.num_samples, self.num_acknowledged = epoch, num_samples, 0
        self._free = deque([SampleRange(0, num_samples)] if num_samples else [])

    def grant(self, worker: int, epoch: int, count: int) -> Lease | None:
        """Up to `count` samples for a worker. None while all that are left are leased to others, which may be lost; an
        empty lease when the epoch is over. So it is for a worker that has not acknowledged all of its own, as with
        accumulated gradients: it has to push them, and must not wait for itself."""
        if epoch < self.epoch or self.is_over:
            return Lease(0, epoch, ())
        if not self._free:
            return Lease(0, epoch, ()) if self.leases_of(worker) else None
        ranges: list[SampleRange] = []
        while self._free and count > 0:
            first = self._free.popleft()
            stop = min(first.stop, first.start + count)
            ranges.append(SampleRange(first.start, stop))
            count -= stop - first.start
            if stop < first.stop:
                self._free.appendleft(SampleRange(stop, first.stop))
        lease = Lease(self._next_number, epoch, tuple(ranges))
        self._next_number += 1
        self._leases[lease.number] = (worker, lease)
        return lease

    def acknowledge(self, worker: int, numbers: Iterable[int]) -> None:
        """The push that used these leases is committed. What the worker does not have is ignored."""
        for number in numbers:
            if self._leases.get(number, (None,))[0] == worker:
                _, lease = self._leases.pop(number)
                self.num_acknowledged += sum(each.stop - each.start for each in lease.ranges)

    def release(self, worker: int) -> None:
        """The worker is gone: what it has not acknowledged is given to the next that ask, the lowest index first."""
        numbers = [number for number, (owner, _) in self._leases.items() if owner == worker]
        for number in numbers:
            self._free.extend(self._leases.pop(number)[1].ranges)
        if numbers:
            self._free = deque(sorted(self._free, key=lambda each: each.start))

    def leases_of(self, worker: int) -> tuple[Lease, ...]:
        """The leases that the worker has not acknowledged."""
        return tuple(lease for owner, lease in self._leases.values() if owner == worker)
