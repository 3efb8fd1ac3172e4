"""In which order the samples of a data set are used, and by which rank. Pure functions; Stream carries them out.

A data set is a list of *blocks*: samples that lie behind each other in one file and are read together. The order of an
epoch is made in three steps, each of which depends only on the seed, the epoch and the lengths of the blocks:

1. The blocks are shuffled and dealt out to a fixed number of *virtual streams*, each to the one that is the shortest so
   far. So the streams are equally long, up to one block.
2. In each block the samples are shuffled.
3. The streams are interleaved: the first sample of each, then the second of each, and so on. A stream that has ended is
   left out.

The sample at position p of the epoch follows from p alone, without those before it (EpochOrder.locate). Position p is
used up when all before it are, so one number says where training stands, for any number of ranks and of processes that
load, and these may change at every position.

A step uses the next samples of the order. Which rank gets which of them (choose_part) decides only who reads what: each
stream has an owner, so that a block is read by one rank as far as possible. Every rank gets exactly as many samples as
its share says. What its streams have too much goes to ranks whose streams have too little; with equal shares and a
number of streams that the number of ranks divides, that happens only where streams end.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence

import numpy as np

from ronde.comm.buffers import Array
from ronde.training.sample_sharding import epoch_order

NUM_STREAMS = 60
"""By default. 2, 3, 4, 5, 6, 10, 12, 15, 20, 30 and 60 ranks own whole streams."""
BLOCK_ORDER_KEY = (0, 1)
"""Of the order of the blocks; block b has the key (b,) for the order of its samples."""
NUM_KEPT_ORDERS = 4 * NUM_STREAMS
"""So many blocks' orders of samples are kept."""


class EpochOrder:
    """The order of one epoch."""

    def __init__(
        self, block_lengths: Array, *, seed: int, epoch: int, shuffle: bool = True, num_streams: int = NUM_STREAMS
    ) -> None:
        """`block_lengths` are the numbers of samples of the blocks. Without `shuffle`, blocks and samples stay in their
        order and are only interleaved; with one stream that is the order of the data."""
        lengths = np.asarray(block_lengths, np.int64)
        self.length = int(lengths.sum())
        self._lengths = lengths
        self._order = functools.partial(epoch_order, seed=seed, epoch=epoch, shuffle=shuffle)
        self._rows = functools.lru_cache(NUM_KEPT_ORDERS)(self._order_rows)
        order = self._order(len(lengths), key=BLOCK_ORDER_KEY)
        order = order[lengths[order] > 0]
        self.num_streams = min(num_streams, len(order))
        self._blocks = _deal_out(order, lengths, self.num_streams)
        """The blocks of each stream."""
        self._ends = [np.cumsum(lengths[blocks]) for blocks in self._blocks]
        self._find_segments()

    def _find_segments(self) -> None:
        """A segment is a range of positions in which the same streams go on. There are at most as many as streams."""
        stream_lengths = np.array([ends[-1] for ends in self._ends], np.int64)
        self._first_turn, self._first_position, self._active = [], [], []
        turn = position = 0
        for length in np.unique(stream_lengths):
            active = np.flatnonzero(stream_lengths > turn)
            self._first_turn.append(turn)
            self._first_position.append(position)
            self._active.append(active)
            position += (int(length) - turn) * len(active)
            turn = int(length)
        assert position == self.length

    def locate(self, start: int, stop: int) -> tuple[Array, Array, Array]:
        """The streams, blocks, and rows in their blocks of the samples at positions `start` to `stop`."""
        if not 0 <= start <= stop <= self.length:
            raise ValueError(f"an epoch of {self.length} samples has no positions {start} to {stop}")
        positions = np.arange(start, stop)
        streams, blocks, rows = np.empty((3, stop - start), np.int64)
        segments = np.searchsorted(self._first_position, positions, side="right") - 1
        turns = np.empty(stop - start, np.int64)
        for segment in np.unique(segments):
            inside = segments == segment
            active = self._active[segment]
            rounds, index = np.divmod(positions[inside] - self._first_position[segment], len(active))
            streams[inside] = active[index]
            turns[inside] = self._first_turn[segment] + rounds
        for stream in np.unique(streams):
            inside = streams == stream
            ends, stream_blocks = self._ends[stream], self._blocks[stream]
            index = np.searchsorted(ends, turns[inside], side="right")
            blocks[inside] = stream_blocks[index]
            rows[inside] = turns[inside] - ends[index] + self._lengths[stream_blocks[index]]
        # The positions of each block of several samples, together.
        several = np.flatnonzero(self._lengths[blocks] > 1)
        several = several[np.argsort(blocks[several], kind="stable")]
        changes = np.flatnonzero(np.diff(blocks[several])) + 1
        for inside in np.split(several, changes) if len(several) else ():
            rows[inside] = self._rows(int(blocks[inside[0]]))[rows[inside]]
        return streams, blocks, rows

    def begun_blocks(self, position: int) -> dict[int, Array]:
        """The blocks of which some samples are before a position and some are not, at most one of each stream, and the
        rows of those that are not."""
        begun: dict[int, Array] = {}
        if not 0 < position < self.length:
            return begun
        segment = int(np.searchsorted(self._first_position, position, side="right")) - 1
        active = self._active[segment]
        rounds, index = divmod(position - self._first_position[segment], len(active))
        for number, stream in enumerate(active.tolist()):
            turn = self._first_turn[segment] + rounds + (number < index)
            blocks, ends = self._blocks[stream], self._ends[stream]
            place = int(np.searchsorted(ends, turn, side="right"))
            if place < len(blocks):
                block = int(blocks[place])
                num_used = turn - int(ends[place]) + int(self._lengths[block])
                if num_used:
                    begun[block] = self._rows(block)[num_used:]
        return begun

    def _order_rows(self, block: int) -> Array:
        length = int(self._lengths[block])
        return self._order(length, key=(block,)) if length > 1 else np.zeros(1, np.int64)


def _deal_out(order: Array, lengths: Array, num_streams: int) -> list[Array]:
    """The blocks of each stream. Each block goes to the stream that is the shortest so far, of equal ones the first."""
    in_order = lengths[order]
    if len(order) and (in_order == in_order[0]).all():  # as where each sample is a block: then it goes round
        return [order[stream::num_streams] for stream in range(num_streams)]
    dealt: list[list[int]] = [[] for _ in range(num_streams)]
    shortest = [(0, stream) for stream in range(num_streams)]
    for block, length in zip(order.tolist(), in_order.tolist(), strict=True):
        total, stream = shortest[0]
        dealt[stream].append(block)
        heapq.heapreplace(shortest, (total + length, stream))
    return [np.array(blocks, np.int64) for blocks in dealt]


@functools.lru_cache(maxsize=64)
def assign_streams(num_streams: int, shares: tuple[int, ...]) -> Array:
    """The owner of each stream: every member owns as many as its share says, evenly spread over all streams."""
    whole = sum(shares)
    owners, owned = [], [0] * len(shares)
    for number in range(1, num_streams + 1):
        behind = [number * share - num * whole for share, num in zip(shares, owned, strict=True)]
        owner = behind.index(max(behind))
        owned[owner] += 1
        owners.append(owner)
    return np.array(owners, np.int64)


def choose_part(streams: Array, counts: Sequence[int], owners: Array, member: int) -> Array:
    """Which samples of a batch a member gets, as indices in ascending order, if each member gets so many (share_out()
    says how many) and the samples come from these streams. A member that gets none has the first one, which another
    member has, too: it has to compute something, and it weighs nothing."""
    if not counts[member]:
        return np.zeros(min(1, len(streams)), np.int64)
    owner_of = owners[streams]
    mine, left_over, room_before = np.empty(0, np.int64), [], 0
    for each, count in enumerate(counts):
        owned = np.flatnonzero(owner_of == each)
        left_over.append(owned[count:])
        if each < member:
            room_before += count - len(owned[:count])
        elif each == member:
            mine = owned[:count]
    room = counts[member] - len(mine)
    if not room:
        return mine
    others = np.sort(np.concatenate(left_over))[room_before : room_before + room]
    return np.sort(np.concatenate([mine, others]))


def local_range(start: int, stop: int, own_length: int, total_length: int) -> tuple[int, int]:
    """Which of its own samples a rank uses in the step at positions `start` to `stop`, if every rank has samples of its
    own, of unequal number, and all of them have to come to their end together."""
    if not total_length:
        return 0, 0
    return start * own_length // total_length, stop * own_length // total_length
