"""The output of one stream of one rank, cut into lines; progress bars become the line that they end as.

Most output is plain lines, which pass in blocks without a look at single characters. The rest goes through a very small
terminal: rows, a cursor that can move up, and `\r`, after which text overwrites its row. A row is *final* when the
stream cannot come back to it:

- in a plain stream, at its end of line;
- in a *live* stream (its cursor has moved up before, or is hidden, as tqdm and rich do), when the stream draws again
  below the row, when the row has scrolled out of reach, or when the stream is idle below it for a while.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_LINE_BYTES = 256 * 1024
"""A longer line is printed in pieces."""
OPEN_LINE_DELAY_S = 0.25
"""A line without its end, such as a prompt, is printed after this time."""
IDLE_DELAY_S = 0.2
"""A stream that writes nothing for this time does not come back to rows above its cursor, unless it hid the cursor."""
MAX_ROWS = 64
"""How many rows up a cursor can move."""

_NON_COLOR_ESCAPE = re.compile(rb"\x1b(?!\[[0-9;:]*m)")
"""An escape sequence other than a colour."""
_CURSOR_CONTROL = re.compile(rb"(\n|\r|\x08+|\x1b\[[0-9;:<=>?]*[ -/]*[@-ln-~]|\x1b[78DEMc=>])")
"""What moves the cursor, or may move it. Colours (which end with m) count as text."""
_INCOMPLETE_ESCAPE = re.compile(rb"\x1b(?:\[[0-9;:<=>?]{0,24}[ -/]?)?\Z")
"""The beginning of an escape sequence whose rest comes with the next chunk."""


class StreamText(NamedTuple):
    """Final output: whole lines, or a piece of an open line."""

    data: bytes
    """Without a newline at its end, the last line stays open."""
    continued: bool = False
    """It continues the line that the text before left open. Then it holds no other line."""
    urgent: bool = False
    """It has been on the terminal already, as a progress bar, and must not vanish for a moment."""


class LiveRows:
    """The rows of a stream that can still change. feed() returns what has become final. On a terminal, open rows are
    shown in the live region (visible_rows); elsewhere they are printed in pieces after OPEN_LINE_DELAY_S."""

    def __init__(self, *, on_terminal: bool) -> None:
        self.cursor_hidden = False
        """Only while live."""
        self._on_terminal = on_terminal
        self._rows = [b""]
        self._cursor = 0
        self._overwrite_next = False  # after \r: the next text overwrites the row
        self._overwritten = False  # the row has been overwritten before
        self._live = False
        self._written = False  # something was written since the cursor came to this row
        self._moved_up = False  # the cursor moved up, and nothing was written since
        self._num_unwritten_rows = 0  # the first rows, made by moving up, to which nothing was written
        self._emitted_partially = False  # the beginning of the first row was printed in pieces
        self._incomplete_escape = b""
        self._final: list[StreamText] = []
        self._open_since_s = 0.0  # age of what stands in the open row
        self._last_fed_s = 0.0

    def feed(self, data: bytes, now_s: float) -> list[StreamText]:
        """Take a chunk. Return what has become final, in order."""
        empty = not self._rows[0]
        if b"\r\n" in data:  # from a pseudo-terminal
            data = data.replace(b"\r\n", b"\n")
        if (
            self._overwrite_next
            or self._incomplete_escape
            or self._live
            or b"\r" in data
            or b"\b" in data
            or (b"\x1b" in data and _NON_COLOR_ESCAPE.search(data) is not None)
        ):
            self._feed_controls(data)
        else:
            self._feed_plain(data)
        if empty or self._final:
            self._open_since_s = now_s
        self._last_fed_s = now_s
        return self._take_final()

    def take_idle(self, now_s: float) -> list[StreamText]:
        """Return what has become final because time has passed."""
        due_s = self.idle_due_s()
        if due_s is not None and now_s >= due_s:
            if self._live:
                self._emit_rows(self._cursor)
                self._live = len(self._rows) > 1
            elif not self._on_terminal:
                self._emit_partial()
        return self._take_final()

    def idle_due_s(self) -> float | None:
        """Return when take_idle() has something to return."""
        if self._live:
            can_be_idle = not self.cursor_hidden and (self._cursor or len(self._rows) == 1)
            return self._last_fed_s + IDLE_DELAY_S if can_be_idle else None
        if self._on_terminal or self._overwritten or not self._rows[0]:
            return None
        return self._open_since_s + OPEN_LINE_DELAY_S

    def visible_rows(self, now_s: float) -> tuple[bytes, ...]:
        """Return the rows for the live region of a terminal."""
        if self._emitted_partially:
            return ()
        if not (self._live or self._overwritten) and now_s < self._open_since_s + OPEN_LINE_DELAY_S:
            return ()
        rows = self._rows[self._num_unwritten_rows :]
        while rows and not rows[-1].strip():
            rows.pop()
        return tuple(rows)

    def change_times_s(self, now_s: float) -> list[float]:
        """Return when take_idle() or visible_rows() returns something else, if nothing is fed."""
        times = [] if (due_s := self.idle_due_s()) is None else [due_s]
        if self._on_terminal and self._rows[0] and not (self._live or self._overwritten or self._emitted_partially):
            times.append(self._open_since_s + OPEN_LINE_DELAY_S)
        return [moment for moment in times if moment > now_s]

    def is_empty(self) -> bool:
        return not (self._live or self._rows[0] or self._incomplete_escape)

    def finish(self) -> list[StreamText]:
        """Return everything. Called when nothing more comes."""
        if self._incomplete_escape:
            escape, self._incomplete_escape = self._incomplete_escape, b""
            self._write_text(escape)
        is_drawn = self._live or self._overwritten
        while self._rows and not (self._rows[-1].strip() if is_drawn else self._rows[-1]):
            self._rows.pop()
        self._emit_rows(len(self._rows))
        self._end_partial()
        self._rows, self._cursor, self._live, self.cursor_hidden = [b""], 0, False, False
        return self._take_final()

    def _take_final(self) -> list[StreamText]:
        final, self._final = self._final, []
        return final

    def _feed_plain(self, data: bytes) -> None:
        cut = data.rfind(b"\n") + 1
        if cut:
            first, self._rows[0] = self._rows[0], data[cut:]
            self._emit_lines(first + data[:cut] if first else data[:cut])
        else:
            self._rows[0] += data
        if len(self._rows[0]) > MAX_LINE_BYTES:
            self._emit_partial()

    def _emit_lines(self, lines: bytes) -> None:
        """Emit whole lines. The first may be the end of a line whose beginning was emitted before."""
        if self._emitted_partially:
            self._emitted_partially = False
            cut = lines.index(b"\n") + 1
            self._final.append(StreamText(lines[:cut], continued=True))
            lines = lines[cut:]
        if lines:
            self._final.append(StreamText(lines, urgent=self._on_terminal and (self._overwritten or self._live)))
        self._overwritten = False

    def _emit_partial(self) -> None:
        self._final.append(StreamText(self._rows[0], continued=self._emitted_partially))
        self._rows[0] = b""
        self._emitted_partially = True

    def _end_partial(self) -> None:
        if self._emitted_partially:
            self._emitted_partially = False
            self._final.append(StreamText(b"\n", continued=True))

    def _feed_controls(self, data: bytes) -> None:
        data = self._incomplete_escape + data
        cut_off = _INCOMPLETE_ESCAPE.search(data, max(0, len(data) - 32))
        self._incomplete_escape = cut_off[0] if cut_off else b""
        parts = _CURSOR_CONTROL.split(data[: len(data) - len(self._incomplete_escape)])
        for index, part in enumerate(parts):
            if index % 2 == 0:
                if part:
                    self._write_text(part)
            elif part == b"\n":
                self._handle_newline()
            elif part == b"\r":
                self._overwrite_next = True
            elif part[0] == 0x08:
                row = self._rows[self._cursor].decode("utf-8", "surrogateescape")
                self._rows[self._cursor] = row[: max(0, len(row) - len(part))].encode("utf-8", "surrogateescape")
                self._overwritten = True
            elif part[1:2] == b"[":
                self._handle_escape(part[-1:], part[2:-1])

    def _write_text(self, text: bytes) -> None:
        if self._moved_up or (self._overwrite_next and self._written):
            self._emit_rows(self._cursor)  # who moves back to draw again begins at the top of what is drawn
            self._moved_up = False
        if self._overwrite_next:
            self._end_partial()
            self._rows[self._cursor] = b""
            self._overwrite_next, self._overwritten = False, True
        self._rows[self._cursor] += text
        self._written = True
        self._num_unwritten_rows = min(self._num_unwritten_rows, self._cursor)
        if len(self._rows[self._cursor]) > MAX_LINE_BYTES:
            self._rows.append(self._rows.pop(self._cursor))  # nobody draws such a row: the others are final
            self._num_unwritten_rows = min(self._num_unwritten_rows, len(self._rows) - 1)
            self._emit_rows(len(self._rows) - 1)
            self._live = self.cursor_hidden
            self._emit_partial()

    def _handle_newline(self) -> None:
        if self._moved_up:
            self._emit_rows(self._cursor)
        self._overwrite_next = self._written = self._moved_up = False
        if not self._live:
            self._emit_rows(1)
            self._rows = [b""]
            return
        self._cursor += 1
        if self._cursor < len(self._rows):
            self._overwrite_next = True
            return
        self._rows.append(b"")
        if len(self._rows) > MAX_ROWS:
            self._emit_rows(1 if self.cursor_hidden else self._cursor)
            self._live = self.cursor_hidden

    def _emit_rows(self, count: int) -> None:
        if count > self._num_unwritten_rows:
            self._emit_lines(b"\n".join(self._rows[self._num_unwritten_rows : count]) + b"\n")
        del self._rows[:count]
        self._cursor = max(0, self._cursor - count)
        self._num_unwritten_rows = max(0, self._num_unwritten_rows - count)

    def _handle_escape(self, final: bytes, parameters: bytes) -> None:
        number = int(parameters[:4]) if parameters.isdigit() else 0
        if final in b"AF":
            self._end_partial()
            self._cursor -= max(1, number)
            if self._cursor < 0:  # rows from before the stream was live are out of reach: leave room for them
                room = min(-self._cursor, MAX_ROWS - len(self._rows))
                self._rows[:0] = [b""] * room
                self._num_unwritten_rows += room
                self._cursor = 0
            self._live = self._moved_up = True
            self._written = False
        elif final in b"BE":
            self._cursor = min(self._cursor + max(1, number), len(self._rows) - 1)
            self._written = False
        if final in b"EF" or (final == b"G" and number <= 1):
            self._overwrite_next = True
        elif final == b"K" and (number == 2 or (number == 0 and self._overwrite_next)):
            self._rows[self._cursor] = b""
            self._overwrite_next = True
        elif final == b"J" and number == 0:
            del self._rows[self._cursor + 1 :]
            if self._overwrite_next:
                self._rows[self._cursor] = b""
        elif final in b"hl" and parameters == b"?25":
            self.cursor_hidden = final == b"l"
            self._live = True  # what was drawn while the cursor was hidden may still be overwritten
