"""Arrays, dealt out to the ranks in global batches: shard().

data = ronde.jax.shard((images, labels), global_batch=256, seed=1)
while data.epoch < num_epochs:
    for x, y in data:
        ...
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from ronde.comm.group import Group
from ronde.training.data_position import ShardedRows


def shard(
    data: Any,
    *,
    global_batch: int | None = None,
    per_rank_batch: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    ends: str = "pad",
    group: Group | None = None,
) -> ShardedTree:
    """Deal out a tree of arrays with equally many rows to the ranks, in batches.

    A step uses the next `global_batch` rows, of which each rank gets its part; with `per_rank_batch` it is so many for
    each rank. The parts of two ranks differ by at most one row. The order is another one in each epoch, and the same on
    all ranks.

    `ends` says what happens to the last rows of an epoch, when they make no whole global batch. All ranks have equally
    many batches with "pad" (default), where a rank for which no row is left gets one that another rank has, and with
    "drop", which leaves them out, so that all batches have one shape and a jitted step is compiled once. With "uneven"
    every row is used exactly once, and a rank may have one batch less than others: for evaluation.
    """
    return ShardedTree(
        data,
        global_batch=global_batch,
        per_rank_batch=per_rank_batch,
        shuffle=shuffle,
        seed=seed,
        ends=ends,
        group=group,
    )


class ShardedTree(ShardedRows):
    """This rank's part of a tree of arrays, and the position in it. Made by shard().

    A loop over it gives the batches from the position to the end of the epoch, counts each when its step has finished,
    and begins the next epoch at its end. In a State (`State(data=data, …)`) the position is that of the last finished
    step, for any number of ranks.
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
        leaves = jax.tree.leaves(data)
        if not leaves or not all(hasattr(leaf, "shape") and leaf.shape for leaf in leaves):
            raise TypeError(f"shard() takes an array or a tree of arrays with rows, got a {type(data).__name__}")
        lengths = {len(leaf) for leaf in leaves}
        if len(lengths) != 1:
            raise ValueError(f"the arrays must have equally many rows, got {sorted(lengths)}")
        super().__init__(
            global_batch=global_batch,
            per_rank_batch=per_rank_batch,
            shuffle=bool(shuffle),
            seed=seed,
            ends=ends,
            group=group,
            length=lengths.pop(),
        )
        self._data = data

    def __len__(self) -> int:
        """Return how many batches this rank has from the position to the end of the epoch."""
        return self._count_batches(self._next_position())

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches from the position to the end of the epoch. The next epoch begins at the end."""
        start = self._next_position()
        return self.loop_over(self._take(start, index) for index in range(self._count_batches(start)))

    def _take(self, start: Any, index: int) -> Any:
        rows = self._get_rows(start, index)
        return jax.tree.map(lambda each: each[rows], self._data)
