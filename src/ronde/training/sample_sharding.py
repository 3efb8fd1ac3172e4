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

A loader's workers fetch batches long before the training loop gets them, so what was drawn from a sampler says nothing
about what was trained on. SampleShard.track() counts a batch when it is handed to the loop: state_dict() then has every
batch that the loop has got, the present one included, and none that merely was fetched ahead. A plain loop over the
loader has a new order in each epoch, too; it only cannot say where in an epoch it stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.comm.world import resolve_group

Batch = TypeVar("Batch")

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
        """The position in the state_dict() of a sampler. ValueError if it is none, or in the middle of an epoch whose
        order depended on other settings than these."""
        missing = [key for key in ("epoch", "consumed", *order_settings) if key not in state]
        if missing:
            raise ValueError(f"that is no position of such a sampler or data set: it has no {missing[0]!r}")
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


class SampleShard:
    """A sampler that gives each rank its share of a dataset, in an order that depends only on the seed and the epoch.

    `ends` says what happens when the samples cannot be divided evenly: "pad" (default) repeats a few so that every rank
    has equally many; "drop" leaves a few out; "uneven" gives every sample to exactly one rank, so that some ranks run
    out one batch earlier than others: those call ronde.join() after their loop, which gives zeros to the collectives of
    the others until all have joined. Use "uneven" for evaluation, with average_metrics(…, count=…).
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        ends: str = "pad",
        group: Group | None = None,
    ) -> None:
        self.length = data if isinstance(data, int) else len(data)
        """Number of samples, of all ranks together."""
        if self.length < 0 or seed < 0:
            raise ValueError(f"the number of samples and seed must be 0 or more, got {self.length} and {seed}")
        if ends not in TAIL_POLICIES:
            raise ValueError(f"ends must be one of {', '.join(TAIL_POLICIES)}, got {ends!r}")
        self.shuffle = shuffle
        self.seed = seed
        self.ends = ends
        self._group = group
        self._position = SamplePosition()
        # The position from which a loop without track() ran to its end.
        self._finished_from: SamplePosition | None = None

    @property
    def epoch(self) -> int:
        """The epoch that is under way, from 0. The end of a loop over track() begins the next; a plain loop over the
        loader does so when it starts again after its end."""
        return self._position.epoch

    @property
    def consumed(self) -> int:
        """How many samples of this epoch all ranks together have used."""
        return self._position.consumed

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch. It does nothing for the current epoch, so a resumed one continues."""
        if epoch != self.epoch:
            self._position = SamplePosition(epoch)
        self._finished_from = None

    def __iter__(self) -> Iterator[int]:
        """This rank's samples from the present position on; after a whole loop without track(), those of the next
        epoch."""
        if self._finished_from == self._position:
            self._position = SamplePosition(self.epoch + 1)
        order = epoch_order(self.length, epoch=self.epoch, seed=self.seed, shuffle=self.shuffle)
        samples = shard_indices(order, self.consumed, *self._rank_and_size(), self.ends).tolist()
        start = self._position

        def one_epoch() -> Iterator[int]:
            yield from samples
            self._finished_from = start

        return one_epoch()

    def __len__(self) -> int:
        """Return how many samples of this epoch this rank has not used yet."""
        return shard_size(self.length - self.consumed, *self._rank_and_size(), self.ends)

    def track(self, loader: Iterable[Batch], *, batch_size: int | None = None) -> Iterator[Batch]:
        """Iterate over the batches of the loader, and count each as used when the loop gets it. At the end the next
        epoch begins.

        batch_size is the loader's own unless given. Leave the loop early and a new track() goes on where it stopped.
        """
        self._check_loader(loader)
        size = self._rank_and_size()[1]
        start = self._position
        self._finished_from = None  # what some ranks alone have looked through is no epoch
        each = _batch_size(loader) if batch_size is None else batch_size
        for count, batch in enumerate(loader, start=1):
            self._position = start.after(count * each, size, self.length)
            yield batch
        self._position = SamplePosition(start.epoch + 1)

    def advance(self, num_each: int) -> None:
        """Count samples that every rank has used, or all that it had left. For loops that do not use track()."""
        self._position = self._position.after(num_each, self._rank_and_size()[1], self.length)

    def state_dict(self) -> dict[str, Any]:
        """Return seed, epoch and the number of used samples; the same on every rank."""
        return {**self._position._asdict(), **self._order_settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state_dict(), with any number of ranks."""
        self._position = SamplePosition.load(state, self._order_settings())
        self._finished_from = None

    def _check_loader(self, loader: object) -> None:
        # ValueError if the loader does not draw from this sampler, as far as a framework can tell.
        return None

    def _order_settings(self) -> dict[str, Any]:
        return {"length": self.length, "seed": self.seed, "shuffle": self.shuffle}

    def _rank_and_size(self) -> tuple[int, int]:
        """Return the index of this rank and the number of members. A restart may change both, so they are not kept."""
        group = resolve_group(self._group)
        if group.rank is None:
            raise ValueError(f"this rank is not a member of {group!r}, among which the samples are shared out")
        return group.rank, group.size


def _batch_size(loader: object) -> int:
    """Samples per batch of a DataLoader."""
    size = getattr(loader, "batch_size", None)
    if size is None:
        batches = getattr(loader, "batch_sampler", None)
        size = 1 if batches is None and hasattr(loader, "batch_sampler") else getattr(batches, "batch_size", None)
    if not isinstance(size, int):
        raise ValueError("track() cannot see how many samples a batch of this loader has; pass batch_size=")
    return size
