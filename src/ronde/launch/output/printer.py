"""The Screen of `ronde run`: what ranks print, with their numbers, on the user's terminal, and in files.

output → files, tail
tick   → Rows (lines and bars of each stream) → Fold (equal lines of many ranks) → Console (terminal, pipe or file)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from ronde.launch.messages import Stream
from ronde.launch.output.console import Console
from ronde.launch.output.files import RankFiles
from ronde.launch.output.fold import Fold, Print
from ronde.launch.output.labels import OWN, asctime, label, stamp, tag
from ronde.launch.output.options import PrintOptions, Target
from ronde.launch.output.rows import Rows, Text
from ronde.launch.output.screen import Gone
from ronde.launch.output.tail import Tail

__all__ = ["Printer"]

_DRAW_S = 0.05
"""Bars are drawn again no faster than this."""
_AGAIN_S = 0.02
"""A reader that was behind is tried again after so long."""
_INBOX_BYTES = 4 * 1024 * 1024
"""When more than this was handed over without a tick, it is printed at once."""

Key: TypeAlias = tuple[int, Stream]


class _Chunk(NamedTuple):
    rank: int
    stream: Stream
    data: bytes


class _End(NamedTuple):
    rank: int


class _Note(NamedTuple):
    text: str


class Printer:
    """Implements Screen. The target stays open; `wall` tells the time for timestamps."""

    def __init__(
        self, target: Target, *, num_ranks: int, options: PrintOptions, wall: Callable[[], float] = time.time
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"a job has at least one rank, got {num_ranks}")
        self._options = options
        self._wall = wall
        self._consoles = _consoles(target, options)
        self._rows: dict[Key, Rows] = {}
        self._unsettled: set[Key] = set()  # streams with open rows
        self._fold = Fold(num_ranks) if options.fold and num_ranks > 1 else None
        self._tails = [Tail() for _ in range(num_ranks)]
        self._inbox: list[_Chunk | _End | _Note] = []
        self._inbox_bytes = 0
        self._now_s = 0.0
        self._wall_ahead_s = 0.0
        self._drawn_s = 0.0
        self._closed = False
        self._files: RankFiles | None = None
        if options.folder:
            self._files = RankFiles(options.folder, num_ranks=num_ranks, tell=self.note, nested=options.as_horovod)
        if self._fold is not None and options.raw_rank is not None:
            self._fold.end(options.raw_rank)  # nobody waits for it

    def output(self, rank: int, stream: Stream, data: bytes) -> None:
        """See Screen."""
        if self._closed:
            return
        if self._files is not None:
            self._files.write(rank, stream, data)
        self._tails[rank].add(stream, data)
        self._inbox.append(_Chunk(rank, stream, data))
        self._inbox_bytes += len(data)
        if self._inbox_bytes > _INBOX_BYTES:
            self.tick(self._now_s)

    def ended(self, rank: int) -> None:
        """See Screen."""
        self._inbox.append(_End(rank))

    def note(self, text: str) -> None:
        """See Screen."""
        self._inbox.append(_Note(text))

    def tail(self, rank: int, code: int) -> str:
        """See Screen."""
        return self._tails[rank].text(code)

    def gone(self) -> Gone | None:
        """See Screen."""
        return next((console.gone for console in self._consoles.values() if console.gone), None)

    def full(self) -> bool:
        """See Screen."""
        return any(console.full for console in self._consoles.values())

    def tick(self, now_s: float) -> float | None:
        """See Screen."""
        self._now_s = max(now_s, self._now_s)
        self._wall_ahead_s = self._wall() - self._now_s
        self._empty_inbox()
        for key in tuple(self._unsettled):
            self._settled(key, self._rows[key].rest(self._now_s))
        if self._fold is not None:
            self._print_all(self._fold.take(self._now_s))
        redraw_s = self._draw()
        for console in self._places():
            console.flush()
        return self._next_s(redraw_s)

    def close(self, *, give_up_s: float | None = None) -> None:
        """See Screen."""
        if self._closed:
            return
        self._empty_inbox()
        self._closed = True
        for rank in range(len(self._tails)):
            self._end(rank)
        self._flush_fold()
        if self._files is not None:
            self._files.close()
        self._empty_inbox()  # what the files had to say
        for console in self._places():
            console.close(give_up_s)

    # --- from the inbox to the consoles ------------------------------------------------------------------------

    def _empty_inbox(self) -> None:
        inbox, self._inbox, self._inbox_bytes = self._inbox, [], 0
        for event in inbox:
            if isinstance(event, _Chunk):
                self._take(event)
            elif isinstance(event, _End):
                self._end(event.rank)
            else:
                self._flush_fold()
                text = Text(event.text.rstrip("\n").encode(errors="replace") + b"\n")
                self._print(Print(OWN, "err", text, self._now_s))

    def _take(self, chunk: _Chunk) -> None:
        console = self._consoles[chunk.stream]
        if chunk.rank == self._options.raw_rank:
            console.pass_through(chunk.stream, chunk.data)
            return
        key = (chunk.rank, chunk.stream)
        rows = self._rows.get(key)
        if rows is None:
            rows = self._rows[key] = Rows(shown=self._has_region(console))
        self._settled(key, rows.feed(chunk.data, self._now_s))
        if rows.idle():
            self._unsettled.discard(key)
        else:
            self._unsettled.add(key)

    def _end(self, rank: int) -> None:
        streams: tuple[Stream, ...] = ("out", "err")
        for stream in streams:
            rows = self._rows.pop((rank, stream), None)
            if rows is not None:
                self._settled((rank, stream), rows.end())
                self._unsettled.discard((rank, stream))
        if self._fold is not None:
            self._fold.end(rank)

    def _settled(self, key: Key, texts: list[Text]) -> None:
        for text in texts:
            if self._fold is not None:
                self._fold.put(*key, text, self._now_s)
            else:
                self._print(Print(key[:1], key[1], text, self._now_s))

    def _flush_fold(self) -> None:
        if self._fold is not None:
            self._print_all(self._fold.take(self._now_s, everything=True))

    def _print_all(self, prints: list[Print]) -> None:
        for item in prints:
            self._print(item)

    def _print(self, item: Print) -> None:
        console = self._consoles[item.stream]
        prefix = self._label(item.ranks, item.stream, color=console.terminal)
        if self._options.timestamps:
            wall_s = item.at_s + self._wall_ahead_s
            prefix = asctime(int(wall_s)) + prefix if self._options.as_horovod else prefix + stamp(round(wall_s * 1000))
        console.print((item.ranks, item.stream), prefix, item.text)

    def _label(self, ranks: tuple[int, ...], stream: Stream, *, color: bool) -> bytes:
        if self._options.as_horovod:
            return tag(ranks, stream)
        return label(ranks, color=color and self._options.color)

    # --- the live region -------------------------------------------------------------------------------------

    def _has_region(self, console: Console) -> bool:
        return console.terminal and self._options.raw_rank is None

    def _draw(self) -> float | None:
        """Draw the regions, where they changed. Answers when it has to be done again."""
        again_s = None
        for console in self._places():
            if not self._has_region(console) or console.open:
                continue
            rows = self._region(console)
            hide = any(self._rows[key].hidden for key in self._unsettled)
            if rows == console.region and hide == console.hidden:
                continue
            if console.region and self._now_s < self._drawn_s + _DRAW_S:
                again_s = self._drawn_s + _DRAW_S
                continue
            console.draw(rows, hide=hide)
            self._drawn_s = self._now_s
        return again_s

    def _region(self, console: Console) -> tuple[bytes, ...]:
        """The open rows of all ranks, equal ones folded, as many as there is room for."""
        groups: dict[tuple[Stream, tuple[bytes, ...]], list[int]] = {}
        for rank, stream in sorted(self._unsettled):
            rows = self._rows[rank, stream].visible(self._now_s) if stream in console.streams else ()
            if rows:
                groups.setdefault((stream, rows), []).append(rank)
        limit = max(1, self._options.place.height * 2 // 3)
        drawn = []
        for (stream, rows), ranks in groups.items():
            for owners in [tuple(ranks)] if self._options.fold else [(rank,) for rank in ranks]:
                prefix = self._label(owners, stream, color=True)
                drawn += [prefix + row for row in rows[-limit:]]
        if len(drawn) > limit:
            drawn[limit - 1 :] = [b"... and %d more" % (len(drawn) - limit + 1)]
        return tuple(drawn)

    # --- time --------------------------------------------------------------------------------------------------

    def _next_s(self, redraw_s: float | None) -> float | None:
        waits = any(console.waits for console in self._consoles.values())
        times = [redraw_s, self._now_s + _AGAIN_S if waits else None]
        times += [self._fold.next_s(self._now_s) if self._fold is not None else None]
        for key in tuple(self._unsettled):
            times += self._rows[key].times_s(self._now_s)
        return min((moment for moment in times if moment is not None), default=None)

    def _places(self) -> Iterator[Console]:
        yield from dict.fromkeys(self._consoles.values())


def _consoles(target: Target, options: PrintOptions) -> dict[Stream, Console]:
    """One for both streams when they lead to the same place, otherwise one each."""
    place, raw = options.place, options.raw_rank is not None
    if place.shared:
        terminal = place.out_terminal or place.err_terminal
        both = Console({"out": target.out, "err": target.err}, terminal=terminal, raw=raw and terminal)
        return {"out": both, "err": both}
    return {
        "out": Console({"out": target.out}, terminal=place.out_terminal, raw=raw and place.out_terminal),
        "err": Console({"err": target.err}, terminal=place.err_terminal, raw=raw and place.err_terminal),
    }
