"""Equal lines of many ranks become one: `[0-7] epoch 1`. Used by the Printer; knows nothing of files or clocks.

Each rank has a queue, so nothing is reordered within a rank. The line at the head of a queue waits for the other ranks
to bring the same line to their heads:

- every rank that still runs has it: it goes at once;
- WINDOW_S after its arrival it goes with the ranks that have it by then;
- unless it also stands further back in a queue. Then what stands before it there, which is due soon, goes first. That
  is how `hello from 3` of each rank does not keep the equal lines after it apart. It waits once more WINDOW_S at most.

So a line waits twice WINDOW_S at most, however much is printed. When very much waits, it goes without waiting.

Sets of ranks are integers with a bit for each rank.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ronde.launch.output.progress import StreamText
from ronde.launch.protocol import StdStream

__all__ = ["FOLD_WINDOW_S", "FoldedLines", "LineFolder"]

FOLD_WINDOW_S = 0.1
_MAX_WAITING_BYTES = 2 * 1024 * 1024


class FoldedLines(NamedTuple):
    """Something to print now."""

    ranks: tuple[int, ...]
    """Whose it is, in ascending order."""
    stream: StdStream
    text: StreamText
    received_s: float
    """When it arrived."""


@dataclass(slots=True)
class _Batch:
    """What arrived at once: lines that may be folded, or one text that may not."""

    stream: StdStream
    received_s: float
    due_s: float
    lines: list[bytes]
    text: StreamText | None = None
    index: int = 0
    """Of the next line."""


class _WaitingLines:
    """Which lines wait, of one stream of all ranks."""

    def __init__(self, num_ranks: int) -> None:
        self.holders: dict[bytes, int] = {}  # who has it somewhere in the queue
        self.heads: dict[bytes, int] = {}  # who has it at the head of the queue
        self.repeats: list[dict[bytes, int]] = [{} for _ in range(num_ranks)]  # how often a rank has it once more

    def add(self, rank: int, lines: list[bytes]) -> None:
        """These are in the rank's queue now."""
        holders, again, bit = self.holders, self.repeats[rank], 1 << rank
        for line in lines:
            mask = holders.get(line, 0)
            if mask & bit:
                again[line] = again.get(line, 0) + 1
            else:
                holders[line] = mask | bit

    def remove(self, rank: int, line: bytes) -> None:
        """It has left the rank's queue."""
        again = self.repeats[rank]
        if line in again:
            again[line] -= 1
            if not again[line]:
                del again[line]
            return
        mask = self.holders[line] ^ (1 << rank)
        if mask:
            self.holders[line] = mask
        else:
            del self.holders[line]

    def remove_unique(self, rank: int, lines: list[bytes], index: int) -> int:
        """Remove lines from this index on, as long as no other rank holds the same. Answers where that ends."""
        holders, again, bit, end = self.holders, self.repeats[rank], 1 << rank, len(lines)
        while index < end and holders[line := lines[index]] == bit:
            if again and line in again:
                self.remove(rank, line)
            else:
                del holders[line]
            index += 1
        return index


class LineFolder:
    """Put in what ranks print, take out what is to be printed now."""

    def __init__(self, num_ranks: int) -> None:
        self._queues: list[deque[_Batch]] = [deque() for _ in range(num_ranks)]
        self._running_ranks = (1 << num_ranks) - 1  # ranks that more may come from, or from which something waits
        self._exited_ranks: set[int] = set()
        self._waiting_lines: dict[StdStream, _WaitingLines] = {
            "out": _WaitingLines(num_ranks),
            "err": _WaitingLines(num_ranks),
        }
        self._ranks_to_check: deque[int] = deque()  # ranks whose heads may go now
        self._waiting_bytes = 0
        self._ready: list[FoldedLines] = []
        self._joined_lines: list[bytes] = []  # lines of the next print
        self._joined_key: tuple[tuple[int, ...], StdStream, float] = ((), "out", 0.0)

    def add(self, rank: int, stream: StdStream, text: StreamText, now_s: float) -> None:
        """Add to the end of a rank's queue."""
        self._waiting_bytes += len(text.data)
        if text.is_whole_lines:
            lines = text.data.split(b"\n")
            lines.pop()
            self._waiting_lines[stream].add(rank, lines)
            batch = _Batch(stream, now_s, now_s if text.urgent else now_s + FOLD_WINDOW_S, lines)
        else:
            batch = _Batch(stream, now_s, now_s, [], text)
        queue = self._queues[rank]
        queue.append(batch)
        if len(queue) == 1:
            self._update_head(rank)

    def rank_exited(self, rank: int) -> None:
        """Nothing more comes from the rank: nobody waits for it."""
        self._exited_ranks.add(rank)
        if not self._queues[rank]:
            self._remove_rank(rank)

    def take_ready(self, now_s: float, *, flush: bool = False) -> list[FoldedLines]:
        """What is to be printed now, in order."""
        if flush or self._waiting_bytes > _MAX_WAITING_BYTES:
            now_s = float("inf")
        waiting = sorted((queue[0].due_s, rank) for rank, queue in enumerate(self._queues) if queue)
        self._ranks_to_check.extend(rank for due_s, rank in waiting if due_s <= now_s)
        self._emit_ready(now_s)
        forced = True
        while forced:  # what is left is due, but also stands further back somewhere
            forced = False
            for _, rank in waiting:
                queue = self._queues[rank]
                if queue and queue[0].due_s + FOLD_WINDOW_S <= now_s:
                    self._emit_line(queue[0])
                    self._emit_ready(now_s)
                    forced = True
        self._flush_joined()
        prints, self._ready = self._ready, []
        return prints

    def next_due_s(self, now_s: float) -> float | None:
        """When `take` has something more to give, if nothing arrives until then."""
        times = (queue[0].due_s for queue in self._queues if queue)
        return min((due_s if due_s > now_s else due_s + FOLD_WINDOW_S for due_s in times), default=None)

    def _emit_ready(self, now_s: float) -> None:
        """Print all that may go, until nothing changes any more."""
        while self._ranks_to_check:
            rank = self._ranks_to_check.popleft()
            queue = self._queues[rank]
            while queue and self._emit_head(rank, queue[0], now_s):
                pass

    def _emit_head(self, rank: int, batch: _Batch, now_s: float) -> bool:
        """Print from the head of a queue what may go, if anything."""
        if batch.text is not None:
            self._emit_text(rank, batch, batch.text)
            return True
        shelf, line = self._waiting_lines[batch.stream], batch.lines[batch.index]
        heads = shelf.heads[line]
        if heads != self._running_ranks:
            if batch.due_s > now_s:
                return False
            if shelf.holders[line] == heads == 1 << rank:
                self._emit_unique_lines(rank, batch, shelf)
                return True
            if shelf.holders[line] != heads:
                return False
        self._emit_line(batch)
        return True

    def _emit_unique_lines(self, rank: int, batch: _Batch, waiting: _WaitingLines) -> None:
        """Print as many lines of a batch as stand nowhere else: nearly all, when ranks print much."""
        begin = batch.index
        del waiting.heads[batch.lines[begin]]
        batch.index = waiting.remove_unique(rank, batch.lines, begin)
        self._join_lines((rank,), batch.stream, batch.lines[begin : batch.index], batch.received_s)
        if batch.index == len(batch.lines):
            self._queues[rank].popleft()
        self._update_head(rank)

    def _emit_text(self, rank: int, batch: _Batch, text: StreamText) -> None:
        self._flush_joined()
        self._ready.append(FoldedLines((rank,), batch.stream, text, batch.received_s))
        self._waiting_bytes -= len(text.data)
        self._queues[rank].popleft()
        self._update_head(rank)

    def _emit_line(self, batch: _Batch) -> None:
        """Print the next line of a batch, for all ranks that have it at their heads."""
        shelf, line = self._waiting_lines[batch.stream], batch.lines[batch.index]
        ranks = _ranks_of_mask(shelf.heads.pop(line))
        self._join_lines(ranks, batch.stream, [line], min([self._queues[rank][0].received_s for rank in ranks]))
        for rank in ranks:
            shelf.remove(rank, line)
            queue = self._queues[rank]
            head = queue[0]
            head.index += 1
            if head.index == len(head.lines):
                queue.popleft()
            self._update_head(rank)

    def _join_lines(self, ranks: tuple[int, ...], stream: StdStream, lines: list[bytes], received_s: float) -> None:
        """Add to what is printed; lines that belong together become one print."""
        self._waiting_bytes -= (sum(map(len, lines)) + len(lines)) * len(ranks)
        run_of = (ranks, stream, received_s)
        if self._joined_key != run_of:
            self._flush_joined()
            self._joined_key = run_of
        self._joined_lines += lines

    def _flush_joined(self) -> None:
        if self._joined_lines:
            self._joined_lines.append(b"")
            ranks, stream, at_s = self._joined_key
            self._ready.append(FoldedLines(ranks, stream, StreamText(b"\n".join(self._joined_lines)), at_s))
            self._joined_lines = []

    def _update_head(self, rank: int) -> None:
        """Something else is at the head of the rank's queue, and perhaps it completes what others wait for."""
        queue = self._queues[rank]
        if not queue:
            if rank in self._exited_ranks:
                self._remove_rank(rank)
            return
        batch = queue[0]
        if batch.text is not None:
            self._ranks_to_check.append(rank)
            return
        shelf, line = self._waiting_lines[batch.stream], batch.lines[batch.index]
        heads = shelf.heads[line] = shelf.heads.get(line, 0) | 1 << rank
        if heads in (shelf.holders[line], self._running_ranks):
            self._ranks_to_check.extend(_ranks_of_mask(heads))

    def _remove_rank(self, rank: int) -> None:
        """One fewer to wait for."""
        self._running_ranks &= ~(1 << rank)
        for shelf in self._waiting_lines.values():
            for heads in shelf.heads.values():
                if heads == self._running_ranks:
                    self._ranks_to_check.extend(_ranks_of_mask(heads)[:1])


@lru_cache(maxsize=4096)
def _ranks_of_mask(mask: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(mask.bit_length()) if mask >> rank & 1)
