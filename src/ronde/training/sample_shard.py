"""One rank's share of the samples of a dataset, and where training stands in them: the samplers of the frameworks.

A loader's workers fetch batches long before the training loop gets them, so what was drawn from a sampler says nothing
about what was trained on. track() counts a batch when it is handed to the loop: state_dict() then has every batch that
the loop has got, the present one included, and none that merely was fetched ahead. A plain loop over the loader has a
new order in each epoch, too; it only cannot say where in an epoch it stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar

from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.training.sample_sharding import TAIL_POLICIES, SamplePosition, epoch_order, shard_indices, shard_size

Batch = TypeVar("Batch")


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
