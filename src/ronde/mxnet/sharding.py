"""Data that are shared out to ranks: ShardedBatches, in global batches that stay the same when ranks come and go.

    batches = ronde.mxnet.ShardedBatches(len(x), global_batch=64, seed=1)
    while batches.epoch < num_epochs:
        for indices in batches:
            with autograd.record():
                loss = loss_function(net(x[indices]), y[indices])
            loss.backward()
            trainer.step(batches.num_samples)     # of a trainer with op="sum"

The loss of gluon is a vector, whose gradient is the sum over samples. So with op="sum" and the number of samples of all
ranks, a step uses the mean over all samples, also if one rank has one more of them than another. ShardedSampler, for a
gluon DataLoader, is the one of training/sample_sharding.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.training.data_position import DataPosition
from ronde.training.global_batches import equal_shares
from ronde.training.sample_sharding import epoch_order, part_of_batch, share_out


class ShardedBatches(DataPosition):
    """The indices of this rank's samples, batch by batch, from the present position to the end of the epoch.

    Either the `global_batch` is given, which is divided among the ranks, or the `per_rank_batch`. The order depends
    only on seed and epoch. `ends` says what happens to the last samples of an epoch, if they make no whole batch:
    "drop" (default) leaves them out; "uneven" divides them, and a rank for which there is none has one batch less;
    "pad" gives such a rank one that another rank has. A batch counts as used when its step has finished: put it into an
    elastic State, or come back for the next one.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        global_batch: int | None = None,
        per_rank_batch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        ends: str = "drop",
        group: Group | None = None,
    ) -> None:
        length = data if isinstance(data, int) else len(data)
        if length < 0:
            raise ValueError(f"the number of samples must be 0 or more, got {length}")
        super().__init__(
            global_batch=global_batch,
            per_rank_batch=per_rank_batch,
            shuffle=shuffle,
            seed=seed,
            ends=ends,
            group=group,
            length=length,
        )
        self._num_samples = length
        self.num_samples = 0
        """How many samples the present batch has, on all ranks together."""

    def __iter__(self) -> Iterator[Array]:
        return self.loop_over(self._own_parts())

    def _own_parts(self) -> Iterator[Array]:
        members = self._members()
        assert members.rank is not None
        order = epoch_order(self._num_samples, epoch=self.epoch, seed=self.seed, shuffle=bool(self._shuffle))
        position, whole = self.consumed, self.global_batch
        while position < order.size:
            batch = order[position : position + whole]
            if batch.size < whole and self.ends == "drop":
                return
            counts = share_out(int(batch.size), equal_shares(members.size))
            if not counts[members.rank] and self.ends == "uneven":
                return
            start, end = part_of_batch(counts, members.rank)
            self.num_samples = int(batch.size)
            yield batch[start:end]
            position += whole
