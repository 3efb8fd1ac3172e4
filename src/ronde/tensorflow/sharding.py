"""A tf.data.Dataset, dealt out to the ranks in global batches: shard().

    data = ronde.tensorflow.shard(dataset, global_batch=256, shuffle=10_000, seed=1)
    while data.epoch < num_epochs:
        for x, y in data:
            ...

Every rank reads the whole dataset, in one order, and takes its part of each global batch. Rank, number of ranks, epoch
and position are asked for when an iteration begins, and not when the pipeline is built: so a dataset that was handed to
fit(), or used in a function, is right in the next epoch and in the next round of an elastic job, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from ronde.comm.group import Group
from ronde.tensorflow.gradients import count_reductions
from ronde.training.data_position import DataPosition

GRAPH_SEED = 87654321
"""Of the functions that shuffle: TensorFlow mixes it with the seed of the epoch. The user's own global seed, which may
differ between ranks, has no effect."""
NUM_SEEDS = 1 << 31


def shard(
    dataset: Any,
    *,
    global_batch: int | None = None,
    per_rank_batch: int | None = None,
    shuffle: int | bool = False,
    seed: int = 0,
    ends: str = "pad",
    map: Callable[..., Any] | None = None,
    group: Group | None = None,
) -> ShardedDataset:
    """Deal out the elements of a tf.data.Dataset to the ranks, in batches. Its length need not be known.

    A step uses the next `global_batch` elements, of which each rank gets its part; with `per_rank_batch` it is so many
    for each rank. The parts of two ranks differ by at most one element.

    `shuffle` is the size of tf.data's shuffle buffer; True holds all elements. The order is another one in each epoch,
    and the same on all ranks. The dataset itself must have the same order in each iteration and on every rank.

    `ends` says what happens to the last elements of an epoch, when they make no whole global batch. All ranks have
    equally many batches with "pad" (default), where a rank for which no element is left gets one that another rank has,
    and with "drop", which leaves them out. With "uneven" every element is used exactly once, and a rank may have one
    batch less than others: for evaluation, or with join() behind the loop.

    `map` is called for each element of this rank before they are batched, as by tf.data's map(): what is expensive,
    such as decoding images, is better done there than before.
    """
    return ShardedDataset(
        dataset,
        global_batch=global_batch,
        per_rank_batch=per_rank_batch,
        shuffle=shuffle,
        seed=seed,
        ends=ends,
        map=map,
        group=group,
    )


class ShardedDataset(DataPosition):
    """This rank's part of a dataset, and the position in it. Made by shard().

    A loop over it gives the batches from the position to the end of the epoch, counts each when its step has finished,
    and begins the next epoch at its end. `dataset` is for fit() and for functions of TensorFlow. In a State
    (`State(data=data, …)`) the position is that of the last finished step, for any number of ranks.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int | None,
        per_rank_batch: int | None,
        shuffle: int | bool,
        seed: int,
        ends: str,
        map: Callable[..., Any] | None,
        group: Group | None,
    ) -> None:
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(f"shard() takes a tf.data.Dataset, got a {type(dataset).__name__}")
        refuse_own_shuffle(dataset)
        known = int(dataset.cardinality().numpy()) if tf.executing_eagerly() else -2
        if known == tf.data.INFINITE_CARDINALITY:
            raise ValueError("the dataset has no end; leave its repeat() out: every loop over shard() is one epoch")
        length = known if known >= 0 else None
        if shuffle is True:
            if length is None:
                raise ValueError("the number of elements is not known: pass the size of the buffer, shuffle=10_000")
            shuffle = max(length, 1)
        if not isinstance(shuffle, int) or shuffle < 0:
            raise ValueError(f"shuffle must be the size of a buffer, True or False, got {shuffle!r}")
        super().__init__(
            global_batch=global_batch,
            per_rank_batch=per_rank_batch,
            shuffle=int(shuffle),
            seed=seed,
            ends=ends,
            group=group,
            length=length,
        )
        self._source = dataset
        self._map = map
        self._built: Any = None

    @property
    def dataset(self) -> Any:
        """The batches of this rank as a tf.data.Dataset: each iteration over it gives those from the position to the
        end of the epoch. It does not count them: the callback TrackState of ronde.keras does. What is added to it has
        to leave one batch one batch, as map() and prefetch() do."""
        if self._built is None:
            self._built = self._build()
        return self._built

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches from the position to the end of the epoch. The next epoch begins at the end."""
        return self.loop_over(self.dataset)

    def _count_reductions(self) -> int:
        return count_reductions()

    def _build(self) -> Any:
        def start(_: Any) -> Any:
            numbers = tf.numpy_function(self._get_start, [], tf.int64, stateful=True)
            return tf.ensure_shape(numbers, [5])

        built = tf.data.Dataset.from_tensors(0).map(start).flat_map(self._build_epoch)
        options = tf.data.Options()
        options.deterministic = True
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return built.with_options(options).prefetch(tf.data.AUTOTUNE)

    def _get_start(self) -> Any:
        """What an iteration that begins now has to know."""
        members, position = self._members(), self._next_position()
        seed = np.random.SeedSequence([self.seed, position.epoch]).generate_state(1)[0] % NUM_SEEDS
        return np.array([seed, position.consumed, self.global_batch, members.rank, members.size], np.int64)

    def _build_epoch(self, numbers: Any) -> Any:
        """The batches of one epoch, in a function of tf.data, whose seed is its own."""
        tf.random.set_seed(GRAPH_SEED)
        # Not tf.unstack(): tf.data crashes when it looks for the node of skip()'s argument among several outputs.
        seed, consumed, global_batch, rank, size = (numbers[index] for index in range(5))
        elements = self._source
        if self._shuffle:
            elements = elements.shuffle(self._shuffle, seed=seed, reshuffle_each_iteration=False)
        windows = elements.skip(consumed).window(global_batch, drop_remainder=self.ends == "drop")

        structure = windows.element_spec

        def take_part(*window: Any) -> Any:  # tf.data hands the parts of a tuple over one by one
            parts = tf.nest.pack_sequence_as(structure, tf.nest.flatten(window))
            return self._take_part(parts, rank, size)

        part = windows.flat_map(take_part)
        if self._map is not None:
            part = part.map(self._map, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        # Only the last window may have fewer elements, so batches of this size end where windows do.
        return part.batch(divide(global_batch, rank, size)[1])

    def _take_part(self, window: Any, rank: Any, size: Any) -> Any:
        first = tf.nest.flatten(window)[0]
        elements = window if isinstance(window, tf.data.Dataset) else tf.data.Dataset.zip(window)
        start, count = divide(first.cardinality(), rank, size)
        if self.ends == "pad":
            is_none = tf.equal(count, 0)
            start = tf.where(is_none, tf.zeros_like(start), start)
            count = tf.maximum(count, 1)
        return elements.skip(start).take(count)


def divide(total: Any, rank: Any, size: Any) -> tuple[Any, Any]:
    """Where this rank's part of so many elements begins, and how many it has: as sample_sharding.share_out() with equal
    shares."""
    least, more = total // size, total % size
    return rank * least + tf.minimum(rank, more), least + tf.cast(rank < more, tf.int64)


def refuse_own_shuffle(dataset: Any) -> None:
    """Raise ValueError if the dataset is shuffled: the order depends on global seeds, so ranks may differ in it, lose
    some elements and use others twice."""
    pending = [dataset]
    while pending:
        each = pending.pop()
        if "ShuffleDataset" in type(each).__name__:
            raise ValueError(
                "the dataset is shuffled before it is dealt out, so the order differs between ranks and iterations, "
                "and elements would be lost; leave its shuffle() out (of list_files(): shuffle=False), and pass "
                "shuffle= and seed= to shard()"
            )
        pending.extend(each._inputs() if hasattr(each, "_inputs") else ())
