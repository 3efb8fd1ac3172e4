"""Stream: batches of a data set for each rank, in an order that any number of ranks agrees on.

    stream = ronde.data.Stream("s3://bucket/photos", global_batch=256, seed=1, cache="/tmp/cache")
    while stream.epoch < num_epochs:
        for batch in stream:
            ...

StepPlan says which samples a rank gets in each step (a pure function of the position), BatchLoader reads them, and
Stream knows the ranks and counts what was consumed. A BatchLoader knows nothing of ranks, so it also works in other
processes: a DataLoader's workers have one each.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ronde.comm import objects
from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.data.dataset import open_dataset
from ronde.data.files import LocalFolder
from ronde.data.order import NUM_STREAMS, EpochOrder, assign_streams, choose_part, local_range
from ronde.data.samples import KEY, Sample
from ronde.data.shards import BlockReader, OpenBlock
from ronde.errors import DataError
from ronde.text import shorten
from ronde.training.agreement import check_settings
from ronde.training.data_position import DataPosition
from ronde.training.global_batches import EQUAL_SHARE
from ronde.training.gradients.steps import count_optimizer_steps, inner_sample_counts, set_sample_counts
from ronde.training.sample_sharding import SamplePosition, count_steps, share_out

NUM_LOCATED = 4096
"""So many positions at least are located at a time."""
BATCHES_PER_THREAD = 2
"""So many batches are loaded ahead for each thread."""


class PlannedBatch(NamedTuple):
    """This rank's part of one step."""

    counts: tuple[int, ...]
    """How many samples each rank has in this step."""
    blocks: list[int]
    rows: list[int]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The steps from a position to the end of an epoch, as one member of a group sees them."""

    position: SamplePosition
    global_batch: int
    ends: str
    member: int
    shares: tuple[int, ...]
    """Of all members; with data of their own, the numbers of their samples."""
    is_local: bool = False

    def num_steps(self, length: int) -> int:
        """How many batches this member gets, if there are so many samples in an epoch."""
        num_left = max(0, length - self.position.consumed)
        num_steps = count_steps(num_left, self.global_batch, self.ends)
        if self.ends == "uneven" and num_left % self.global_batch:
            first = self.position.consumed + (num_steps - 1) * self.global_batch
            num_steps -= not self.counts(first, length)[self.member]
        return num_steps

    def counts(self, start: int, length: int) -> tuple[int, ...]:
        """How many samples each member has in the step at this position."""
        stop = min(start + self.global_batch, length)
        if not self.is_local:
            return share_out(stop - start, self.shares)
        ranges = (local_range(start, stop, own, length) for own in self.shares)
        return tuple(last - first for first, last in ranges)

    def first_sample(self, order: EpochOrder, *, skip: int = 0) -> int:
        """The position in the order of the first sample that any member uses, without the batches before `skip`; of the
        own data, that this member uses."""
        length = sum(self.shares) if self.is_local else order.length
        start = min(self.position.consumed + skip * self.global_batch, length)
        return local_range(start, start, self.shares[self.member], length)[0] if self.is_local else start

    def batches(self, order: EpochOrder, *, first: int = 0, stride: int = 1, skip: int = 0) -> Iterator[PlannedBatch]:
        """Batches `first`, `first + stride`, … of this member, without those before `skip`. `order` is that of the
        data, or of its own data."""
        length = sum(self.shares) if self.is_local else order.length
        per_chunk = max(1, NUM_LOCATED // self.global_batch)
        num_steps = self.num_steps(length)
        for chunk in range(skip, num_steps, per_chunk):
            starts = [
                self.position.consumed + step * self.global_batch
                for step in range(chunk, min(chunk + per_chunk, num_steps))
                if step % stride == first
            ]
            if starts:
                yield from self._plan_local(order, starts, length) if self.is_local else self._plan(order, starts)

    def _plan(self, order: EpochOrder, starts: Sequence[int]) -> Iterator[PlannedBatch]:
        owners = assign_streams(order.num_streams, self.shares)
        base = starts[0]
        streams, blocks, rows = order.locate(base, min(starts[-1] + self.global_batch, order.length))
        for start in starts:
            inside = slice(start - base, start - base + self.global_batch)
            counts = self.counts(start, order.length)
            part = choose_part(streams[inside], counts, owners, self.member)
            yield PlannedBatch(counts, blocks[inside][part].tolist(), rows[inside][part].tolist())

    def _plan_local(self, order: EpochOrder, starts: Sequence[int], length: int) -> Iterator[PlannedBatch]:
        own = self.shares[self.member]
        for start in starts:
            first, last = local_range(start, min(start + self.global_batch, length), own, length)
            if first == last:  # it has to compute something, which weighs nothing
                first, last = min(first, own - 1), min(first, own - 1) + 1
            _, blocks, rows = order.locate(first, last)
            yield PlannedBatch(self.counts(start, length), blocks.tolist(), rows.tolist())


class _BlockEntry:
    """A block that is in use. Its lock is held while it is opened."""

    def __init__(self, num_left: int, opened: OpenBlock | None = None) -> None:
        self.lock = threading.Lock()
        self.opened = opened
        self.num_left = num_left


class BlocksInUse:
    """The blocks of which samples were read and others are left, at most so many. Threads share it. `begun` are blocks
    of which samples were used before, with the rows that are left; those that a former loop has opened are taken from
    it."""

    def __init__(
        self, reader: BlockReader, capacity: int, begun: Mapping[int, Array], former: BlocksInUse | None = None
    ) -> None:
        self._reader = reader
        self._capacity = capacity
        self._begun = begun
        self._entries: OrderedDict[int, _BlockEntry] = OrderedDict()
        self._lock = threading.Lock()
        for block, opened in former.list_opened() if former is not None else ():
            if block in begun:
                self._entries[block] = _BlockEntry(len(begun[block]), opened)

    def read(self, block: int, row: int) -> Sample:
        rows = self._begun.get(block)
        with self._lock:
            entry = self._entries.pop(block, None) or _BlockEntry(
                int(self._reader.table.lengths[block]) if rows is None else len(rows)
            )
            entry.num_left -= 1
            if entry.num_left > 0:
                self._entries[block] = entry
                if len(self._entries) > self._capacity:
                    self._entries.popitem(last=False)
        with entry.lock:
            if entry.opened is None:
                entry.opened = self._reader.open(block, rows)
        return entry.opened.read(row)

    def list_opened(self) -> list[tuple[int, OpenBlock | None]]:
        with self._lock:
            return [(block, entry.opened) for block, entry in self._entries.items()]


class BatchLoader:
    """Reads batches: samples are read and decoded, transformed one by one, and collated, in threads if there are any.
    It can be pickled."""

    def __init__(
        self,
        reader: BlockReader,
        *,
        seed: int,
        shuffle: bool,
        num_streams: int,
        transform: Callable[[Sample], Any] | None,
        collate: Callable[[list[Any]], Any] | None,
        num_threads: int,
    ) -> None:
        self.reader = reader
        self.num_samples = int(reader.table.lengths.sum())
        self.num_streams = num_streams
        self._seed = seed
        self.shuffle = shuffle
        self._transform = transform
        self._collate = collate
        self._num_threads = num_threads
        self._latest: tuple[int, int, BlocksInUse] | None = None
        """Of the latest loop, unless it has come to its end: its epoch, where it began, and the blocks it has open."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_latest": None}

    def load(
        self,
        plan: StepPlan,
        *,
        first: int = 0,
        stride: int = 1,
        skip: int = 0,
        num_threads: int | None = None,
        stack: Callable[[list[Any]], Any] = np.stack,
    ) -> Iterator[tuple[tuple[int, ...], Any]]:
        """The batches of a plan with the counts of all members, or some of them, as StepPlan.batches() says. They are
        loaded ahead of the caller, by another number of threads if one is given. `stack` makes one array of those of
        many samples, unless the loader has a collate function."""
        num_threads = self._num_threads if num_threads is None else num_threads
        order = EpochOrder(
            self.reader.table.lengths,
            seed=self._seed,
            epoch=plan.position.epoch,
            shuffle=self.shuffle,
            num_streams=self.num_streams,
        )
        blocks = self._open_blocks(order, plan.first_sample(order, skip=skip), plan.position.epoch, num_threads)
        planned = plan.batches(order, first=first, stride=stride, skip=skip)
        if not num_threads:
            for batch in planned:
                yield batch.counts, self._load_batch(batch, blocks, stack)
            self._latest = None
            return
        pending: deque[tuple[tuple[int, ...], Future[Any]]] = deque()
        executor = ThreadPoolExecutor(num_threads, thread_name_prefix="ronde-data")
        try:
            for batch in planned:
                pending.append((batch.counts, executor.submit(self._load_batch, batch, blocks, stack)))
                if len(pending) > num_threads * BATCHES_PER_THREAD:
                    counts, loaded = pending.popleft()
                    yield counts, loaded.result()
            while pending:
                counts, loaded = pending.popleft()
                yield counts, loaded.result()
            self._latest = None
        finally:
            executor.shutdown(wait=True, cancel_futures=True)

    def _open_blocks(self, order: EpochOrder, start: int, epoch: int, num_threads: int) -> BlocksInUse:
        """For a loop from this position on. If one of the same epoch was left before, as when ranks change, its blocks
        are used again: they have all rows that are left, if it did not begin later."""
        latest, self._latest = self._latest, None
        former = latest[2] if latest is not None and latest[0] == epoch and latest[1] <= start else None
        capacity = order.num_streams + 2 * num_threads
        blocks = BlocksInUse(self.reader, capacity, order.begun_blocks(start), former)
        self._latest = epoch, start, blocks
        return blocks

    def _load_batch(self, batch: PlannedBatch, blocks: BlocksInUse, stack: Callable[[list[Any]], Any]) -> Any:
        samples: list[Any] = []
        for block, row in zip(batch.blocks, batch.rows, strict=True):
            sample = blocks.read(block, row)
            samples.append(sample if self._transform is None else self._transform_one(sample))
        return collate_samples(samples, stack) if self._collate is None else self._collate(samples)

    def _transform_one(self, sample: Sample) -> Any:
        assert self._transform is not None
        try:
            return self._transform(sample)
        except Exception as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(f"transform failed for the sample {shorten(str(sample.get(KEY)))!r}")
            raise


def collate_samples(samples: list[Any], stack: Callable[[list[Any]], Any] = np.stack) -> Any:
    """One batch of many samples: dicts and tuples field by field; numbers, and arrays of one shape, become an array
    with one more dimension; anything else is a list."""
    first = samples[0]
    if isinstance(first, Mapping):
        fields = [name for name in first if all(isinstance(each, Mapping) and name in each for each in samples)]
        return {name: collate_samples([each[name] for each in samples], stack) for name in fields}
    if isinstance(first, tuple):
        return tuple(collate_samples(list(parts), stack) for parts in zip(*samples, strict=True))
    if isinstance(first, np.ndarray):
        alike = all(
            isinstance(each, np.ndarray) and each.shape == first.shape and each.dtype == first.dtype for each in samples
        )
        return stack(samples) if alike else samples
    if isinstance(first, bool | int | float | np.generic):
        return np.array(samples)
    return samples


class Stream(DataPosition):
    """Batches of a data set for this rank. A loop over it gives those from the position to the end of the epoch, counts
    each when its step has finished, and begins the next epoch at its end.

    `path` is a folder or URL of prepared data (`ronde data prepare`), of tar files of WebDataset, TFRecord, Parquet or
    CSV files, or of images in one folder for each class. `split` is one of its splits.

    A step uses the next `global_batch` samples of the order, on all ranks together, or `per_rank_batch` for each rank.
    Without either, a step is one sample for each rank, and the loop gives samples instead of batches. The order depends
    on the seed and the epoch only; state_dict() and ronde.elastic.State keep the position, which is good for any number
    of ranks. `share` is the weight of this rank: one with twice the share gets twice the samples; give it on all ranks
    or on none. Gradients of DistributedOptimizer are weighted by the samples of each rank. Everything else that decides
    about samples has to be the same on all ranks, and load_state_dict() is for all of them.

    With `local=True` the path is that of data that only this machine has; its ranks share them. All ranks come to the
    end of the epoch together, those with more samples with larger batches.

    `transform` is called with each sample, a dict; `collate` with the list of a batch. Both run in `num_threads`
    threads, or with 0 in the calling one. `cache` is a folder for what is far away, of at most `cache_bytes`.

    `ends` says what happens to the last samples: with "pad" (default) and "drop" all ranks have equally many batches;
    see ronde.tensorflow.shard(). A sample that is repeated by "pad" does not count in gradients.
    """

    def __init__(
        self,
        path: Any,
        *,
        seed: int = 0,
        split: str | None = None,
        global_batch: int | None = None,
        per_rank_batch: int | None = None,
        shuffle: bool = True,
        ends: str = "pad",
        share: float | None = None,
        local: bool = False,
        transform: Callable[[Sample], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        num_threads: int = 2,
        num_streams: int = NUM_STREAMS,
        format: str | None = None,
        decode: bool = True,
        trust: bool = False,
        cache: Any = None,
        cache_bytes: int = 10 << 30,
        group: Group | None = None,
    ) -> None:
        if share is not None and not 0.001 <= share <= 1000:
            raise ValueError(f"share must be from 0.001 to 1000, got {share!r}")
        if local and share is not None:
            raise ValueError("with local=True each rank uses its own samples: leave share out")
        if num_streams < 1 or num_threads < 0:
            raise ValueError(f"num_streams must be at least 1 and num_threads 0, got {num_streams} and {num_threads}")
        members = resolve_group(group)
        # The first rank opens the data for all, and each of them plans its own steps: with other settings samples would
        # be left out and repeated.
        same = {"local": local, "seed": seed, "shuffle": bool(shuffle), "ends": ends, "num_streams": num_streams}
        same |= {"global_batch": global_batch or (per_rank_batch or 1) * members.size}
        same |= {"share": None if share is None else "a number"}
        if not local:
            same |= {"path": os.fspath(path), "split": split, "format": format, "decode": decode, "trust": trust}
        hints = {"path": "; if each machine has data of its own, give local=True"}
        check_settings(members, "a Stream", same, hints=hints)

        def open_reader() -> BlockReader:
            return open_dataset(
                path, split=split, format=format, decode=decode, trust=trust, cache=cache, cache_bytes=cache_bytes
            )

        # Files that all ranks see are scanned once.
        reader = _open_own(open_reader, members) if local else objects.call_on_first(open_reader, group=members)
        is_single = global_batch is None and per_rank_batch is None
        self._loader = BatchLoader(
            reader,
            seed=seed,
            shuffle=bool(shuffle),
            num_streams=num_streams,
            transform=transform,
            collate=_only_one if is_single else collate,
            num_threads=num_threads,
        )
        if not local and not self._loader.num_samples:
            raise DataError(f"{path} has no samples" + (f" in the split {split!r}" if split is not None else ""))
        self._is_local = local
        self._share = None if share is None else max(1, round(share * EQUAL_SHARE))
        self._shares: tuple[Group, tuple[int, ...]] | None = None
        super().__init__(
            global_batch=global_batch,
            per_rank_batch=1 if is_single else per_rank_batch,
            shuffle=bool(shuffle),
            seed=seed,
            ends=ends,
            group=group,
            length=None if local else self._loader.num_samples,
        )
        if local:
            self.length = sum(self._get_shares(members))

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, if the data have them. In data of images the label of a sample is an index of it."""
        return self._loader.reader.classes

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches from the position to the end of the epoch. The next epoch begins at the end."""
        return self.loop_over(self._weighted_batches())

    def track(self, loader: Any) -> Iterator[Any]:
        """Iterate over the batches of a DataLoader of ronde.torch.StreamDataset, which loads those of this stream, and
        count each when its step has finished."""
        dataset = getattr(loader, "dataset", None)
        prepare = getattr(dataset, "start_epoch", None)
        if prepare is None:
            raise ValueError("track(): make the loader with DataLoader(StreamDataset(stream), batch_size=None)")
        if not getattr(loader, "in_order", True):
            raise ValueError("track(): a DataLoader with in_order=False returns batches in any order; leave it out")
        prepare(self)
        return self.loop_over(self._weigh(loader))

    # --- for the adapters of the frameworks --------------------------------------------------------------------------

    @property
    def loader(self) -> BatchLoader:
        # What reads the batches, in this process or another one.
        return self._loader

    @property
    def is_in_state(self) -> bool:
        # Whether the steps of a State decide which batches count.
        return self._state is not None

    def plan(self) -> StepPlan:
        # The steps from the position on. Collective, if ranks have shares or data of their own and others than before.
        members = self._members()
        assert members.rank is not None
        return StepPlan(
            position=self._next_position(),
            global_batch=self.global_batch,
            ends=self.ends,
            member=members.rank,
            shares=self._get_shares(members),
            is_local=self._is_local,
        )

    # --- inside ------------------------------------------------------------------------------------------------------

    def _weighted_batches(self) -> Iterator[Any]:
        members = self._members()
        with inner_sample_counts(members):
            for counts, batch in self._loader.load(self.plan()):
                set_sample_counts(members, counts)
                yield batch
            set_sample_counts(members, (1,) * members.size)

    def _weigh(self, batches: Any) -> Iterator[Any]:
        members, plan = self._members(), self.plan()
        assert self.length is not None
        with inner_sample_counts(members):
            for step, batch in enumerate(batches):
                start = plan.position.consumed + step * plan.global_batch
                set_sample_counts(members, plan.counts(start, self.length))
                yield batch
            set_sample_counts(members, (1,) * members.size)

    def _get_shares(self, members: Group) -> tuple[int, ...]:
        """The shares of all members; with data of their own, their numbers of samples."""
        own = self._loader.num_samples if self._is_local else self._share
        if own is None:
            return (EQUAL_SHARE,) * members.size
        if self._shares is None or self._shares[0] is not members:
            told = tuple(int(share) for share in members.allgather(np.array([own], np.int64)))
            if self._is_local and 0 in told:
                raise ValueError(f"rank {told.index(0)} has no samples of its own; leave that machine out of the job")
            if self._is_local and self._shares is not None and sum(told) != self.length and self.consumed:
                raise ValueError(
                    "the ranks have changed in the middle of an epoch, and each has data of its own, so nobody knows "
                    f"which samples are left; go on with set_epoch({self.epoch + 1})"
                )
            self._shares = members, told
            if self._is_local:
                self.length = sum(told)
        return self._shares[1]

    def _count_reductions(self) -> int:
        return count_optimizer_steps()

    def _order_settings(self) -> dict[str, Any]:
        settings = {**super()._order_settings(), "length": self.length, "num_streams": self._loader.num_streams}
        if not self._is_local:
            settings["data"] = self._loader.reader.table.fingerprint()
        return settings


def _only_one(samples: list[Any]) -> Any:
    (sample,) = samples
    return sample


def _open_own(open_reader: Callable[[], BlockReader], members: Group) -> BlockReader:
    """The data of this machine, of which ranks that have the same folder take every n-th block. Collective."""
    reader = open_reader()
    folder = reader.folder
    identity = folder.identity() if isinstance(folder, LocalFolder) else folder.url
    told = objects.allgather(identity, group=members)
    assert members.rank is not None
    mates = [rank for rank, each in enumerate(told) if each == identity]
    reader.table = reader.table.select(slice(mates.index(members.rank), None, len(mates)))
    return reader
