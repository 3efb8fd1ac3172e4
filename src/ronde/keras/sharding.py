"""Arrays, dealt out to the ranks in global batches, for fit() on any backend of Keras: shard()."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from ronde.comm.group import Group
from ronde.keras.elastic_state import count_reductions
from ronde.training.data_position import ShardedRows
from ronde.training.sample_sharding import SamplePosition


def shard(
    data: Any,
    *,
    global_batch: int | None = None,
    per_rank_batch: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    ends: str = "pad",
    group: Group | None = None,
) -> ShardedArrays:
    """Deal out arrays to the ranks, in batches, for fit() or a loop. `data` is what fit() would get: (x, y), (x, y,
    sample_weight) or (x,), whose parts are arrays or structures of arrays with equally many rows.

    The other arguments are those of ronde.tensorflow.shard(), which does the same for a tf.data.Dataset.
    """
    return ShardedArrays(
        data,
        global_batch=global_batch,
        per_rank_batch=per_rank_batch,
        shuffle=shuffle,
        seed=seed,
        ends=ends,
        group=group,
    )


class ShardedArrays(ShardedRows, keras.utils.PyDataset):
    """This rank's part of arrays, and the position in them. Made by shard().

    For fit(data, shuffle=False) it is a dataset whose length is the number of steps from the position to the end of the
    epoch; the callback TrackState counts them. A loop over it gives the same batches, and counts each when its step has
    finished. In a State (`State(data=data, …)`) the position is that of the last finished step, for any number of
    ranks.
    """

    def __init__(
        self,
        data: Any,
        *,
        global_batch: int | None,
        per_rank_batch: int | None,
        shuffle: bool,
        seed: int,
        ends: str,
        group: Group | None,
    ) -> None:
        keras.utils.PyDataset.__init__(self)
        self._start: SamplePosition | None = None
        """Where the epoch of fit() that is under way has begun."""
        if not isinstance(data, tuple):
            raise TypeError(f"shard() takes a tuple such as (x, y), got a {type(data).__name__}")
        lengths = {len(each) for each in keras.tree.flatten(data) if each is not None}
        if len(lengths) != 1:
            raise ValueError(f"the arrays must have equally many rows, got {sorted(lengths)}")
        ShardedRows.__init__(
            self,
            global_batch=global_batch,
            per_rank_batch=per_rank_batch,
            shuffle=bool(shuffle),
            seed=seed,
            ends=ends,
            group=group,
            length=lengths.pop(),
        )
        self._data = data
        self._next_index = 0

    def __len__(self) -> int:
        """Return how many batches this rank has from the position to the end of the epoch; in fit(), from where the
        epoch has begun."""
        return self._count_batches(self._start or self._next_position())

    def __getitem__(self, index: int) -> Any:
        """Return this rank's part of a batch, counted from the beginning of the epoch of fit() or from the position."""
        if self._start is not None:
            if index not in (0, self._next_index):
                raise ValueError("fit() asks for batches in a random order; pass shuffle=False: shard() shuffles")
            self._next_index = index + 1
        return self._get_batch(self._start or self._next_position(), index)

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches from the position to the end of the epoch. The next epoch begins at the end."""
        start, self._start = self._next_position(), None
        return self.loop_over(self._get_batch(start, index) for index in range(len(self)))

    def on_epoch_begin(self) -> None:
        # Called by fit().
        self._start, self._next_index = self._next_position(), 0

    def on_epoch_end(self) -> None:
        # Called by fit(), also before the first epoch, when it has looked at a batch. Without a State, which counts
        # steps, the next epoch begins when all batches were asked for.
        is_over = self._start is not None and self._next_index >= len(self)
        self._start = None
        if is_over and self._state is None:
            self.end_epoch()

    def _set(self, position: SamplePosition, carried_from: SamplePosition | None) -> None:
        super()._set(position, carried_from)
        self._start = None  # a call of fit() may have been left in the middle of an epoch

    def _count_reductions(self) -> int:
        return count_reductions()

    def _get_batch(self, start: SamplePosition, index: int) -> Any:
        rows = self._get_rows(start, index)
        return keras.tree.map_structure(lambda each: None if each is None else each[rows], self._data)
