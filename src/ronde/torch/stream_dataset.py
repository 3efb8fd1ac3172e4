"""A stream of ronde.data as a dataset of PyTorch, for DataLoaders with worker processes.

    stream = ronde.data.Stream("data/photos", global_batch=256, transform=decode)
    loader = DataLoader(ronde.torch.StreamDataset(stream), batch_size=None, num_workers=4)
    while stream.epoch < num_epochs:
        for batch in stream.track(loader):
            ...

Worker w of n loads batches w, w + n, … of this rank, and a DataLoader takes batches from its workers in turn. So the
batches and their order are the same with any number of workers, and the position stays that of the stream, which counts
what the training loop has finished, not what workers have loaded.

Where an epoch begins is told to workers through shared memory, so they may live longer than an epoch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.utils.data

from ronde.data import Stream
from ronde.data.stream import StepPlan
from ronde.training.sample_sharding import TAIL_POLICIES, SamplePosition

MAX_RANKS = 1 << 16
NUM_FACTS = 8
"""Numbers of a plan in shared memory, before the shares of the ranks."""
NUM_LOOPS_INDEX = 7
"""Of them, the one that counts the loops over the plan."""


class StreamDataset(torch.utils.data.IterableDataset[Any]):
    """The batches of a ronde.data.Stream as tensors, for `DataLoader(dataset, batch_size=None, num_workers=…)`. Loop
    over `stream.track(loader)`.

    It has the protocol of torchdata's StatefulDataLoader. stream.state_dict() is simpler and good for any number of
    workers and ranks.
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        if not isinstance(stream, Stream):
            raise TypeError(f"StreamDataset takes a ronde.data.Stream, got a {type(stream).__name__}")
        self._loader = stream.loader
        size = len(stream.plan().shares)
        # Room for jobs that grow: workers that are there would not see another piece of memory.
        self._shared = torch.zeros(NUM_FACTS + min(MAX_RANKS, max(1024, 4 * size)), dtype=torch.int64).share_memory_()
        self._start: SamplePosition | None = None  # of the iteration under way
        self._next_batch = 0
        self._resume: tuple[SamplePosition, int] | None = None
        self.start_epoch(stream)

    def start_epoch(self, stream: Stream) -> None:
        # Called by Stream.track(): the next iteration begins at the position of the stream.
        plan = stream.plan()
        if len(plan.shares) > len(self._shared) - NUM_FACTS:
            raise ValueError(f"the job has grown to {len(plan.shares)} ranks; make a new StreamDataset")
        facts = [*plan.position, plan.global_batch, TAIL_POLICIES.index(plan.ends), plan.member, plan.is_local]
        numbers = torch.tensor([*facts, len(plan.shares), 0, *plan.shares], dtype=torch.int64)
        self._shared[: len(numbers)] = numbers

    def __iter__(self) -> Iterator[Any]:
        """The batches of this process: all of this rank, or every n-th in a worker."""
        worker = torch.utils.data.get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        plan, skip = self._read_plan(), 0
        if self._resume is not None:
            (position, skip), self._resume = self._resume, None
            plan = StepPlan(
                position=position,
                global_batch=plan.global_batch,
                ends=plan.ends,
                member=plan.member,
                shares=plan.shares,
                is_local=plan.is_local,
            )
        elif first == 0:
            self._count_loop()
        self._start, self._next_batch = plan.position, skip
        options: dict[str, Any] = {"num_threads": 0, "stack": stack_in_shared_memory} if worker else {}
        loaded = self._loader.load(plan, first=first, stride=stride, skip=skip, **options)
        step = skip + (first - skip) % stride
        for _, batch in loaded:
            self._next_batch = step + 1
            step += stride
            yield as_tensors(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return where this process is: for StatefulDataLoader, which asks each worker."""
        epoch, consumed = self._start or self._read_plan().position
        return {"epoch": epoch, "consumed": consumed, "next_batch": self._next_batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration of this process go on there, with equally many workers."""
        self._resume = SamplePosition(int(state["epoch"]), int(state["consumed"])), int(state["next_batch"])

    def _count_loop(self) -> None:
        self._shared[NUM_LOOPS_INDEX] += 1
        if self._shared[NUM_LOOPS_INDEX] == 2 and self._loader.shuffle:
            warnings.warn(
                "this loop over a DataLoader has the same batches in the same order as the one before, and its stream "
                "does not count them: loop over stream.track(loader), which begins the next epoch",
                stacklevel=1,
            )

    def _read_plan(self) -> StepPlan:
        epoch, consumed, global_batch, ends, member, is_local, size, _ = self._shared[:NUM_FACTS].tolist()
        return StepPlan(
            position=SamplePosition(epoch, consumed),
            global_batch=global_batch,
            ends=TAIL_POLICIES[ends],
            member=member,
            shares=tuple(self._shared[NUM_FACTS : NUM_FACTS + size].tolist()),
            is_local=bool(is_local),
        )


def stack_in_shared_memory(arrays: list[Any]) -> Any:
    """One tensor of many arrays, where the process that takes it from a worker finds it without a copy."""
    first = arrays[0]
    if first.dtype.kind not in "biufc" or not first.size:
        return np.stack(arrays)
    empty = torch.from_numpy(np.empty(0, first.dtype))
    storage = empty._typed_storage()._new_shared(len(arrays) * first.size, device=empty.device)
    whole = empty.new(storage).resize_(len(arrays), *first.shape)
    np.stack(arrays, out=whole.numpy())
    return whole


def as_tensors(batch: Any) -> Any:
    """The batch with tensors in place of arrays of numbers."""
    if isinstance(batch, np.ndarray):
        if batch.dtype.kind not in "biufc":
            return batch
        return torch.from_numpy(batch if batch.flags.writeable else batch.copy())
    if isinstance(batch, Mapping):
        return {name: as_tensors(value) for name, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(as_tensors(value) for value in batch)
    return batch
