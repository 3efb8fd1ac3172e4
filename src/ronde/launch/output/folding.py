"""Equal lines of many ranks are printed once: `[0-7] epoch 1`. Pure: no files, no clock.

Each rank has a queue, so nothing is reordered within a rank. The line at the head of a queue waits until the other
ranks have the same line at their heads:

- when every rank that still runs has it there, it is printed at once;
- FOLD_WINDOW_S after its arrival it is printed for the ranks that have it there by then;
- unless it also stands further back in a queue. Then the lines before it there, which are due soon, are printed first.
  So a line like `hello from 3`, different on each rank, does not keep the equal lines after it apart. The line then
  waits for one more FOLD_WINDOW_S at most.

So a line waits for 2 * FOLD_WINDOW_S at most, however much is printed. When very much waits, nothing waits any longer.

Sets of ranks are integers with a bit for each rank.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ronde.launch.output.progress import StreamText
from ronde.launch.protocol import StdStream

FOLD_WINDOW_S = 0.1
_MAX_WAITING_BYTES = 2 * 1024 * 1024


class FoldedLines(NamedTuple):
    """Text to print now."""

    ranks: tuple[int, ...]
    """In ascending order."""
    stream: StdStream
    text: StreamText
    received_s: float


@dataclass(slots=True)
class _Batch:
    """What one rank wrote at once: lines that may be folded, or one text that may not."""

    stream: StdStream
    received_s: float
    due_s: float
    lines: list[bytes]
    text: StreamText | None = None
    index: int = 0
    """The next line to print."""


class _WaitingLines:
    """The lines that wait in one stream of all ranks."""

    def __init__(self) -> None:
        self.holders: dict[bytes, int] = {}  # ranks that have the line anywhere in their queues
        self.heads: dict[bytes, int] = {}  # ranks that have the line at the heads of their queues
        self.repeats: list[dict[bytes, int]] = []  # by rank: how often beyond once

    def add(self, rank: int, lines: list[bytes]) -> None:
        holders, repeats, bit = self.holders, self.repeats[rank], 1 << rank
        for line in lines:
            mask = holders.get(line, 0)
            if mask & bit:
                repeats[line] = repeats.get(line, 0) + 1
            else:
                holders[line] = mask | bit

    def remove(self, rank: int, line: bytes) -> None:
        repeats = self.repeats[rank]
        if line in repeats:
            repeats[line] -= 1
            if not repeats[line]:
                del repeats[line]
            return
        mask = self.holders[line] ^ (1 << rank)
        if mask:
            self.holders[line] = mask
        else:
            del self.holders[line]

    def remove_unique(self, rank: int, lines: list[bytes], index: int) -> int:
        """Remove lines from this index on, as long as no other rank has the same line. Return the index after them."""
        holders, repeats, bit, end = self.holders, self.repeats[rank], 1 << rank, len(lines)
        while index < end and holders[line := lines[index]] == bit:
            if repeats and line in repeats:
                self.remove(rank, line)
            else:
                del holders[line]
            index += 1
        return index


class LineFolder:
    """add() takes what ranks print, take_ready() returns what is to be printed now. If it is not enabled, nothing
    waits and nothing is folded."""

    def __init__(self, num_ranks: int, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._queues: list[deque[_Batch]] = []
        self._running_ranks = 0  # ranks that may print more, or have a line that waits
        self._exited_ranks: set[int] = set()
        self._waiting_lines = {"out": _WaitingLines(), "err": _WaitingLines()}
        self._ranks_to_check: deque[int] = deque()  # ranks whose first line may be printed now
        self._waiting_bytes = 0
        self._ready: list[FoldedLines] = []
        self._joined_lines: list[bytes] = []  # lines that become one FoldedLines
        self._joined_key: tuple[tuple[int, ...], StdStream, float] = ((), "out", 0.0)
        for rank in range(num_ranks):
            self.rank_started(rank)

    def rank_started(self, rank: int) -> None:
        """Called when a process of this rank may print from now on: of a new rank, or again of one that has exited."""
        while len(self._queues) <= rank:
            self._queues.append(deque())
            for waiting_lines in self._waiting_lines.values():
                waiting_lines.repeats.append({})
        self._exited_ranks.discard(rank)
        self._running_ranks |= 1 << rank

    def add(self, rank: int, stream: StdStream, text: StreamText, now_s: float) -> None:
        if not self._enabled or len(self._queues) == 1 or rank in self._exited_ranks:
            self._ready.append(FoldedLines((rank,), stream, text, now_s))
            return
        self._waiting_bytes += len(text.data)
        if not text.continued and text.data.endswith(b"\n"):
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
        """Called when nothing more comes from the rank, or nothing that is folded. Lines of others do not wait for it
        any longer."""
        self._exited_ranks.add(rank)
        if not self._queues[rank]:
            self._remove_rank(rank)

    def take_ready(self, now_s: float, *, flush: bool = False) -> list[FoldedLines]:
        """Return what is to be printed now, in order; with `flush`, everything."""
        if flush or self._waiting_bytes > _MAX_WAITING_BYTES:
            now_s = float("inf")
        waiting = sorted((queue[0].due_s, rank) for rank, queue in enumerate(self._queues) if queue)
        self._ranks_to_check.extend(rank for due_s, rank in waiting if due_s <= now_s)
        self._emit_ready(now_s)
        forced = True
        while forced:  # the first lines are due, but also stand further back in some queue
            forced = False
            for _, rank in waiting:
                queue = self._queues[rank]
                if queue and queue[0].due_s + FOLD_WINDOW_S <= now_s:
                    self._emit_line(queue[0])
                    self._emit_ready(now_s)
                    forced = True
        self._flush_joined()
        ready, self._ready = self._ready, []
        return ready

    def next_due_s(self, now_s: float) -> float | None:
        """Return when take_ready() has more to return, if nothing is added until then."""
        times = (queue[0].due_s for queue in self._queues if queue)
        return min((due_s if due_s > now_s else due_s + FOLD_WINDOW_S for due_s in times), default=None)

    def _emit_ready(self, now_s: float) -> None:
        """Emit what may be printed, until nothing changes any more."""
        while self._ranks_to_check:
            rank = self._ranks_to_check.popleft()
            queue = self._queues[rank]
            while queue and self._emit_head(rank, queue[0], now_s):
                pass

    def _emit_head(self, rank: int, batch: _Batch, now_s: float) -> bool:
        """Emit from the head of a queue what may be printed. Return whether that was anything."""
        if batch.text is not None:
            self._flush_joined()
            self._ready.append(FoldedLines((rank,), batch.stream, batch.text, batch.received_s))
            self._waiting_bytes -= len(batch.text.data)
        else:
            waiting, line = self._waiting_lines[batch.stream], batch.lines[batch.index]
            heads, holders = waiting.heads[line], waiting.holders[line]
            if heads != self._running_ranks and (batch.due_s > now_s or holders != heads):
                return False
            if heads == self._running_ranks or heads != 1 << rank:
                self._emit_line(batch)
                return True
            # As many lines of the batch as no other rank has: nearly all, when ranks print much.
            begin = batch.index
            del waiting.heads[line]
            batch.index = waiting.remove_unique(rank, batch.lines, begin)
            self._join_lines((rank,), batch.stream, batch.lines[begin : batch.index], batch.received_s)
        if batch.index == len(batch.lines):
            self._queues[rank].popleft()
        self._update_head(rank)
        return True

    def _emit_line(self, batch: _Batch) -> None:
        """Emit the next line of a batch, for all ranks that have it at their heads."""
        waiting_lines, line = self._waiting_lines[batch.stream], batch.lines[batch.index]
        ranks = _ranks_of_mask(waiting_lines.heads.pop(line))
        self._join_lines(ranks, batch.stream, [line], min([self._queues[rank][0].received_s for rank in ranks]))
        for rank in ranks:
            waiting_lines.remove(rank, line)
            queue = self._queues[rank]
            head = queue[0]
            head.index += 1
            if head.index == len(head.lines):
                queue.popleft()
            self._update_head(rank)

    def _join_lines(self, ranks: tuple[int, ...], stream: StdStream, lines: list[bytes], received_s: float) -> None:
        """Emit lines. Those of the same ranks, stream and time are joined."""
        self._waiting_bytes -= (sum(map(len, lines)) + len(lines)) * len(ranks)
        key = (ranks, stream, received_s)
        if self._joined_key != key:
            self._flush_joined()
            self._joined_key = key
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
        waiting_lines, line = self._waiting_lines[batch.stream], batch.lines[batch.index]
        heads = waiting_lines.heads[line] = waiting_lines.heads.get(line, 0) | 1 << rank
        if heads in (waiting_lines.holders[line], self._running_ranks):
            self._ranks_to_check.extend(_ranks_of_mask(heads))

    def _remove_rank(self, rank: int) -> None:
        self._running_ranks &= ~(1 << rank)
        for waiting_lines in self._waiting_lines.values():
            for heads in waiting_lines.heads.values():
                if heads == self._running_ranks:
                    self._ranks_to_check.extend(_ranks_of_mask(heads)[:1])


@lru_cache(maxsize=4096)
def _ranks_of_mask(mask: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(mask.bit_length()) if mask >> rank & 1)
