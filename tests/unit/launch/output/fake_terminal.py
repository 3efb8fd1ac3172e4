"""A terminal of endless height for tests: what a user would see of the bytes written to it."""

from __future__ import annotations

import re

_PART = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Terminal:
    """Understands what TerminalWriter writes, and fails on anything else."""

    def __init__(self) -> None:
        self.rows = [""]
        self.row = self.column = 0
        self.cursor_shown = True

    def feed(self, data: bytes) -> None:
        text = data.decode()
        position = 0
        while position < len(text):
            match = _PART.match(text, position)
            assert match is not None, f"unknown bytes: {text[position : position + 20]!r}"
            position = match.end()
            parameters, final, move, printed = match.groups()
            if printed:
                self._print(printed)
            elif move:
                self._move(move)
            else:
                self._sequence(parameters, final)

    def visible(self) -> list[str]:
        """The lines, without blanks at their ends and without blank ones at the bottom."""
        lines = [row.rstrip() for row in self.rows]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def _print(self, text: str) -> None:
        row = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = row[: self.column] + text + row[self.column + len(text) :]
        self.column += len(text)

    def _move(self, move: str) -> None:
        self.column = 0
        if move == "\n":
            self.row += 1
            if self.row == len(self.rows):
                self.rows.append("")

    def _sequence(self, parameters: str, final: str) -> None:
        if final == "A":
            self.row -= int(parameters)
            assert self.row >= 0, "above the top"
        elif final == "J":
            del self.rows[self.row + 1 :]
            self.rows[self.row] = self.rows[self.row][: self.column]
        elif final in "hl" and parameters == "?25":
            self.cursor_shown = final == "h"
        else:
            assert final == "m" or parameters == "?7", f"unknown sequence: {parameters}{final}"
