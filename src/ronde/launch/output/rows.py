"""One stream of one rank, as far as it can still change: cut into lines, with progress bars taken for what they are.

Most output is plain lines, and they pass in blocks without a look at single characters. The rest is a very small
terminal: rows, a cursor that can go up again, and `\\r`, after which text overwrites its row. A row is *settled* when
the stream cannot come back to it any more:

- in a plain stream, at its end of line;
- in a *live* stream (the cursor has gone up before, or is hidden, as tqdm and rich do), when the stream draws again
  below it, when it has scrolled out of reach, or when the stream rests below it for a while.

Used by the Printer.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["LIMIT_BYTES", "OPEN_S", "REST_S", "Rows", "Text"]

LIMIT_BYTES = 256 * 1024
"""A longer line goes on in pieces."""
OPEN_S = 0.25
"""A line without its end, such as a prompt, is shown after so long."""
REST_S = 0.2
"""A stream that writes nothing for so long does not come back to the rows above its cursor, unless it hid that."""
MAX_ROWS = 64
"""How far up a stream can go."""

_NO_COLOR = re.compile(rb"\x1b(?!\[[0-9;:]*m)")
"""A sequence that does something else."""
_CONTROL = re.compile(rb"(\n|\r|\x08+|\x1b\[[0-9;:<=>?]*[ -/]*[@-ln-~]|\x1b[78DEMc=>])")
"""What moves the cursor, or may. Colours (which end with m) count as text."""
_CUT_OFF = re.compile(rb"\x1b(?:\[[0-9;:<=>?]{0,24}[ -/]?)?\Z")
"""The beginning of a sequence whose rest comes with the next chunk."""


class Text(NamedTuple):
    """Settled output: whole lines, or a piece of an open one."""

    data: bytes
    """Ends with a newline, or the line stays open."""
    continued: bool = False
    """Begins in the middle of the line that the text before left open; then it holds no other line."""
    urgent: bool = False
    """Has been on the screen already, as a progress bar: better not away for a moment."""

    @property
    def whole(self) -> bool:
        """Only whole lines."""
        return not self.continued and self.data.endswith(b"\n")


class Rows:
    """Feed it chunks; it answers with what is settled. Open rows either show on a terminal (`visible`), or are handed
    out in pieces after a moment."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._rows = [b""]
        self._cursor = 0
        self._fresh = False  # the next text overwrites the row: \r came
        self._bar = False  # the row has been overwritten
        self._live = False
        self._hidden = False  # only while live
        self._written = False  # something was, since the cursor came to this row
        self._climbed = False  # the cursor went up, and nothing has been written since
        self._room = 0  # so many first rows were made by going up, and nothing was written to them
        self._spilled = False  # the beginning of the first row was handed out in pieces
        self._carry = b""
        self._done: list[Text] = []
        self._since_s = 0.0  # age of what stands in the open row
        self._fed_s = 0.0

    @property
    def hidden(self) -> bool:
        """Whether the stream hid the cursor."""
        return self._hidden

    def feed(self, data: bytes, now_s: float) -> list[Text]:
        """Take a chunk. Answers what it settled, in order."""
        empty = not self._rows[0]
        if b"\r\n" in data:  # from a pseudo-terminal
            data = data.replace(b"\r\n", b"\n")
        if self._has_cursor() or _moves_cursor(data):
            self._feed_controls(data)
        else:
            self._feed_plain(data)
        if empty or self._done:
            self._since_s = now_s
        self._fed_s = now_s
        return self._take()

    def rest(self, now_s: float) -> list[Text]:
        """What is settled because time has passed."""
        due_s = self.due_s()
        if due_s is not None and now_s >= due_s:
            if self._live:
                self._commit(self._cursor)
                self._live = len(self._rows) > 1
            elif not self._shown:
                self._spill()
        return self._take()

    def due_s(self) -> float | None:
        """When `rest` has something to do."""
        if self._live:
            rests = not self._hidden and (self._cursor or len(self._rows) == 1)
            return self._fed_s + REST_S if rests else None
        if self._shown or self._bar or not self._rows[0]:
            return None
        return self._since_s + OPEN_S

    def visible(self, now_s: float) -> tuple[bytes, ...]:
        """The rows for a terminal's live region."""
        if self._spilled:
            return ()
        if not (self._live or self._bar) and now_s < self._since_s + OPEN_S:
            return ()
        rows = self._rows[self._room :]
        while rows and not rows[-1].strip():
            rows.pop()
        return tuple(rows)

    def times_s(self, now_s: float) -> list[float]:
        """When something of this changes by itself: `rest` has something to do, or more is visible."""
        times = [] if (due_s := self.due_s()) is None else [due_s]
        if self._shown and self._rows[0] and not (self._live or self._bar or self._spilled):
            times.append(self._since_s + OPEN_S)
        return [moment for moment in times if moment > now_s]

    def idle(self) -> bool:
        """Nothing is open."""
        return not (self._live or self._rows[0] or self._carry)

    def end(self) -> list[Text]:
        """Nothing more comes: everything is settled."""
        if self._carry:
            carry, self._carry = self._carry, b""
            self._put(carry)
        if self._live or self._bar:
            while len(self._rows) > 1 and not self._rows[-1].strip():
                self._rows.pop()
            if not self._rows[-1].strip():
                self._rows.pop()
        elif not self._rows[-1]:
            self._rows.pop()
        self._commit(len(self._rows))
        self._close_spilled()
        self._rows, self._cursor, self._live, self._hidden = [b""], 0, False, False
        return self._take()

    def _has_cursor(self) -> bool:
        return bool(self._fresh or self._carry or self._live)

    def _take(self) -> list[Text]:
        done, self._done = self._done, []
        return done

    # --- plain lines -------------------------------------------------------------------------------------------

    def _feed_plain(self, data: bytes) -> None:
        cut = data.rfind(b"\n") + 1
        if cut:
            first, self._rows[0] = self._rows[0], data[cut:]
            self._emit(first + data[:cut] if first else data[:cut])
        else:
            self._rows[0] += data
        if len(self._rows[0]) > LIMIT_BYTES:
            self._spill()

    def _emit(self, lines: bytes) -> None:
        """Whole lines are settled, the first of them perhaps the end of a spilled one."""
        if self._spilled:
            self._spilled = False
            cut = lines.index(b"\n") + 1
            self._done.append(Text(lines[:cut], continued=True))
            lines = lines[cut:]
        if lines:
            self._done.append(Text(lines, urgent=self._shown and (self._bar or self._live)))
        self._bar = False

    def _spill(self) -> None:
        """Hand out the beginning of the open row."""
        self._done.append(Text(self._rows[0], continued=self._spilled))
        self._rows[0] = b""
        self._spilled = True

    def _close_spilled(self) -> None:
        if self._spilled:
            self._spilled = False
            self._done.append(Text(b"\n", continued=True))

    # --- with a cursor -----------------------------------------------------------------------------------------

    def _feed_controls(self, data: bytes) -> None:
        data = self._carry + data
        cut_off = _CUT_OFF.search(data, max(0, len(data) - 32))
        self._carry = cut_off[0] if cut_off else b""
        parts = _CONTROL.split(data[: len(data) - len(self._carry)])
        for index, part in enumerate(parts):
            if index % 2:
                self._control(part)
            elif part:
                self._put(part)

    def _control(self, control: bytes) -> None:
        if control == b"\n":
            self._newline()
        elif control == b"\r":
            self._fresh = True
        elif control[0] == 0x08:
            self._step_back(len(control))
        elif control[1:2] == b"[":
            self._sequence(control[-1:], control[2:-1])

    def _put(self, text: bytes) -> None:
        if self._climbed or (self._fresh and self._written):
            self._commit(self._cursor)  # who goes back to draw again begins at the top of what he draws
            self._climbed = False
        if self._fresh:
            self._close_spilled()
            self._rows[self._cursor] = b""
            self._fresh, self._bar = False, True
        self._rows[self._cursor] += text
        self._written = True
        self._room = min(self._room, self._cursor)
        if len(self._rows[self._cursor]) > LIMIT_BYTES:
            self._rows.append(self._rows.pop(self._cursor))  # nobody draws such a thing: the others are done
            self._room = min(self._room, len(self._rows) - 1)
            self._commit(len(self._rows) - 1)
            self._live = self._hidden
            self._spill()

    def _newline(self) -> None:
        if self._climbed:
            self._commit(self._cursor)
        self._fresh = self._written = self._climbed = False
        if not self._live:
            self._commit(1)
            self._rows = [b""]
            return
        self._cursor += 1
        if self._cursor < len(self._rows):
            self._fresh = True
            return
        self._rows.append(b"")
        if len(self._rows) > MAX_ROWS:
            self._commit(1 if self._hidden else self._cursor)
            self._live = self._hidden

    def _commit(self, count: int) -> None:
        """The first rows are settled."""
        if count > self._room:
            self._emit(b"\n".join(self._rows[self._room : count]) + b"\n")
        del self._rows[:count]
        self._cursor = max(0, self._cursor - count)
        self._room = max(0, self._room - count)

    def _step_back(self, count: int) -> None:
        row = self._rows[self._cursor]
        end = len(row)
        for _ in range(min(count, end)):
            end -= 1
            while end > 0 and row[end] & 0xC0 == 0x80:  # inside a character of UTF-8
                end -= 1
        self._rows[self._cursor] = row[: max(0, end)]
        self._bar = True

    def _sequence(self, final: bytes, parameters: bytes) -> None:
        number = int(parameters[:4]) if parameters.isdigit() else 0
        if final in b"AF":
            self._up(max(1, number))
        elif final in b"BE":
            self._cursor = min(self._cursor + max(1, number), len(self._rows) - 1)
            self._written = False
        if final in b"EF" or (final == b"G" and number <= 1):
            self._fresh = True
        elif final == b"K" and (number == 2 or (number == 0 and self._fresh)):
            self._rows[self._cursor] = b""
            self._fresh = True
        elif final == b"J" and number == 0:
            del self._rows[self._cursor + 1 :]
            if self._fresh:
                self._rows[self._cursor] = b""
        elif final in b"hl" and parameters == b"?25":
            self._hidden = final == b"l"
            self._live = True  # what was drawn while it was hidden may still be taken back

    def _up(self, count: int) -> None:
        self._close_spilled()
        self._cursor -= count
        if self._cursor < 0:  # rows of before it was live are out of reach: leave room for them
            room = min(-self._cursor, MAX_ROWS - len(self._rows))
            self._rows[:0] = [b""] * room
            self._room += room
            self._cursor = 0
        self._live = self._climbed = True
        self._written = False


def _moves_cursor(data: bytes) -> bool:
    """More than plain lines with colours."""
    return b"\r" in data or b"\b" in data or (b"\x1b" in data and _NO_COLOR.search(data) is not None)
