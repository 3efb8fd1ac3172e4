"""How many operations ran, how many bytes they moved, how long they waited and moved.

OperationCounters are used by every operation. Each thread adds to sums of its own, so that no thread waits for another
and no addition is lost; a snapshot adds up all threads. An entry is replaced as a whole (a new tuple), so that a
snapshot never sees an operation without its bytes.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import TypeAlias

import msgspec

Counts: TypeAlias = tuple[int, int, int, int]
"""Operations, bytes, nanoseconds of waiting, nanoseconds of moving."""

CountsByKind: TypeAlias = dict[tuple[int, str], Counts]

ZERO_COUNTS: Counts = (0, 0, 0, 0)


class MetricsRow(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of the operations of one kind in one group; in a total, group and kind are None."""

    group: int | None = None
    kind: str | None = None
    operations: int = 0
    bytes: int = 0
    wait_s: float = 0.0
    """Time from the call until the last member had arrived."""
    move_s: float = 0.0
    """Time from then on until the end: data moved."""


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of one rank at one moment."""

    rank: int
    rows: tuple[MetricsRow, ...] = ()
    """Sorted by group and kind."""
    total: MetricsRow = MetricsRow()

    def of(self, group: int, kind: str) -> MetricsRow:
        """Return the sums of this kind in this group; zeros if none ran."""
        for row in self.rows:
            if row.group == group and row.kind == kind:
                return row
        return MetricsRow(group=group, kind=kind)


class OperationCounters:
    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt its owner
        self._ended_threads: CountsByKind = {}
        """The sums of threads that have ended, and of sources that were removed."""
        self._threads: list[tuple[weakref.ref[_ThreadMarker], CountsByKind]] = []
        self._this_thread = _ThreadCounts(self._register)
        self._sources: list[tuple[int, str, Callable[[], Counts]]] = []

    def add(self, group: int, kind: str, num_bytes: int, wait_ns: int, move_ns: int) -> None:
        key = (group, kind)
        entries = self._this_thread.entries
        operations, total_bytes, total_wait, total_move = entries.get(key, ZERO_COUNTS)
        entries[key] = (operations + 1, total_bytes + num_bytes, total_wait + wait_ns, total_move + move_ns)

    def add_source(self, group: int, kind: str, counts: Callable[[], Counts]) -> None:
        """Include operations that are counted elsewhere: `counts` returns their sums so far."""
        with self._lock:
            self._sources.append((group, kind, counts))

    def remove_source(self, group: int, kind: str, counts: Callable[[], Counts]) -> None:
        """Keep the sums of a source, given as to add_source(), and not the source: it counts nothing any more."""
        with self._lock:
            self._sources.remove((group, kind, counts))
            if (counted := counts()) != ZERO_COUNTS:
                _merge(self._ended_threads, {(group, kind): counted})

    def snapshot(self, rank: int) -> Metrics:
        with self._lock:
            self._merge_ended_threads()
            merged = self._ended_threads.copy()
            for _, entries in self._threads:
                _merge(merged, entries.copy())  # a copy, because its thread goes on adding keys
            for group, kind, counts in self._sources:
                if (counted := counts()) != ZERO_COUNTS:
                    _merge(merged, {(group, kind): counted})
        rows = tuple(_make_row(entry, group, kind) for (group, kind), entry in sorted(merged.items()))
        total = functools.reduce(_add_counts, merged.values(), ZERO_COUNTS)
        return Metrics(rank=rank, rows=rows, total=_make_row(total, None, None))

    def renew_lock(self) -> None:
        """Called in a forked child: a thread of the parent may have held it."""
        self._lock = threading.RLock()

    def _register(self, marker: _ThreadMarker) -> CountsByKind:
        entries: CountsByKind = {}
        with self._lock:
            self._merge_ended_threads()  # a program may start a thread per operation
            self._threads.append((weakref.ref(marker), entries))
        return entries

    def _merge_ended_threads(self) -> None:
        running = []
        for marker, entries in self._threads:
            if marker() is None:
                _merge(self._ended_threads, entries)
            else:
                running.append((marker, entries))
        self._threads = running


class _ThreadMarker:
    """Referenced only by the local storage of a thread: it is freed when the thread ends."""


class _ThreadCounts(threading.local):
    """The sums of the calling thread. Python runs __init__ in each thread, at its first access."""

    def __init__(self, register: Callable[[_ThreadMarker], CountsByKind]) -> None:
        self.marker = _ThreadMarker()
        self.entries = register(self.marker)


def _merge(into: CountsByKind, entries: CountsByKind) -> None:
    for key, counts in entries.items():
        into[key] = _add_counts(into.get(key, ZERO_COUNTS), counts)


def _add_counts(a: Counts, b: Counts) -> Counts:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


def _make_row(entry: Counts, group: int | None, kind: str | None) -> MetricsRow:
    operations, num_bytes, wait_ns, move_ns = entry
    return MetricsRow(
        group=group, kind=kind, operations=operations, bytes=num_bytes, wait_s=wait_ns / 1e9, move_s=move_ns / 1e9
    )
