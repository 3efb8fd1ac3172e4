"""Where lines end up: a terminal with a live region at its bottom, or a pipe or file. Used by the Printer.

What stands on the last line of a console is one of: nothing; a line that somebody has not ended yet (*open*), whose
owner may go on with it until somebody else prints; on a terminal, the *region*: rows that are erased before anything is
printed and drawn again after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import BinaryIO

from ronde.launch.messages import Stream
from ronde.launch.output.outlet import FULL_BYTES, Outlet
from ronde.launch.output.rows import Text
from ronde.launch.output.screen import Gone

__all__ = ["Console", "Owner"]

Owner = tuple[tuple[int, ...], Stream]
"""Whose line it is."""

_RESET = b"\x1b[0m"
_ROW_BYTES = 4096
"""No row of a terminal needs more."""
_RAW: Owner = ((-1,), "out")


class Console:
    """Collects bytes for the files that lead to one place, and writes them with `flush`."""

    def __init__(self, files: Mapping[Stream, BinaryIO], *, terminal: bool, raw: bool = False) -> None:
        self.streams = tuple(files)
        self.terminal = terminal
        self.region: tuple[bytes, ...] = ()
        """The rows that stand at the bottom now."""
        self.hidden = False
        """The cursor is."""
        self._outlet = Outlet(files)
        self._raw = raw
        self._open: Owner | None = None
        self._prompt = b""  # what the rank with the terminal has on its last line

    @property
    def gone(self) -> Gone | None:
        """Why nothing can be written any more."""
        return self._outlet.gone

    @property
    def full(self) -> bool:
        """Whether its reader is far behind."""
        return self._outlet.num_bytes >= FULL_BYTES

    @property
    def waits(self) -> bool:
        """Whether its reader has not taken everything."""
        return self._outlet.num_bytes > 0

    @property
    def open(self) -> bool:
        """Whether the last line belongs to somebody who has not ended it: no place for a region."""
        return self._open is not None

    def print(self, owner: Owner, prefix: bytes, text: Text) -> None:
        """Whole lines or a piece, each line with the prefix."""
        self._erase()
        stream = owner[1]
        goes_on = text.continued and self._open == owner
        if text.continued and not goes_on and text.data == b"\n":
            return  # somebody else's line has ended it already
        if not goes_on:
            self._end_open()
        ended = text.data.endswith(b"\n")
        data = text.data[:-1] if ended else text.data
        end = _RESET + b"\n" if self.terminal and b"\x1b" in data else b"\n"
        if b"\n" in data:
            data = data.replace(b"\n", end + prefix)
        self._add(stream, b"".join((b"" if goes_on else prefix, data, end if ended else b"")))
        self._open = None if ended else owner

    def pass_through(self, stream: Stream, data: bytes) -> None:
        """Bytes of the rank that has the terminal."""
        if self._open not in (None, _RAW):
            self._end_open()
        self._outlet.add(stream, data)
        last = data.rfind(b"\n") + 1
        self._prompt = (data[last:] if last else self._prompt + data)[-_ROW_BYTES:]
        self._open = _RAW if self._prompt else None

    def draw(self, rows: Sequence[bytes], *, hide: bool) -> None:
        """Show these rows at the bottom, until the next print. For a terminal without an open line only."""
        self._erase()
        if hide != self.hidden:
            self.hidden = hide
            self._add(self.streams[-1], b"\x1b[?25l" if hide else b"\x1b[?25h")
        if rows:
            # Without wrapping a row stays a row, however wide it is, and however narrow the terminal becomes.
            drawn = b"\n".join(row[:_ROW_BYTES] + _RESET for row in rows)
            self._add(self.streams[-1], b"\x1b[?7l" + drawn + b"\x1b[?7h")
        self.region = tuple(rows)

    def flush(self) -> None:
        """Write what was collected, as far as it is taken now."""
        if self._prompt and self._open is None:  # others printed: the prompt appears again below
            self._outlet.add(self.streams[0], self._prompt)
            self._open = _RAW
        self._outlet.flush()

    def close(self, give_up_s: float | None = None) -> None:
        """End an open line, erase the region, show the cursor; see Screen.close."""
        self._prompt = b""
        self._end_open()
        self.draw((), hide=False)
        self._outlet.flush(wait=True, give_up_s=give_up_s)

    def _add(self, stream: Stream, data: bytes) -> None:
        self._outlet.add(stream, data.replace(b"\n", b"\r\n") if self._raw else data)

    def _erase(self) -> None:
        if self.region:
            up = b"\x1b[%dA" % (len(self.region) - 1) if len(self.region) > 1 else b""
            self._add(self.streams[-1], b"\r" + up + b"\x1b[J")
            self.region = ()

    def _end_open(self) -> None:
        if self._open is not None:
            stream = self._open[1] if self._open != _RAW else self.streams[0]
            self._add(stream, _RESET + b"\n" if self.terminal else b"\n")
            self._open = None
