"""The end of what each rank printed, kept for the summary of a job that failed. Used by the Printer."""

from __future__ import annotations

import re

from ronde.launch.messages import Stream
from ronde.launch.output.tracebacks import last_traceback, without_bystanders

__all__ = ["Tail"]

_KEEP_BYTES = 64 * 1024
_NUM_LINES = 20
"""Without a traceback, so many lines say enough."""
_MAX_LINES = 160
_MAX_CHARACTERS = 16 * 1024
_LINE_CHARACTERS = 1000

_ESCAPE = re.compile(
    r"\x1b\[[0-9;:<=>?]*[ -/]*[@-~]"  # colours and cursor movements
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # titles, links
    r"|\x1b[@-_]|[\x00-\x08\x0b-\x1f\x7f]"
)


class Tail:
    """The last bytes of the two streams of one rank."""

    def __init__(self) -> None:
        self._chunks: dict[Stream, list[bytes]] = {"out": [], "err": []}
        self._size: dict[Stream, int] = {"out": 0, "err": 0}

    def add(self, stream: Stream, data: bytes) -> None:
        """Take a chunk; forget what is too old."""
        chunks = self._chunks[stream]
        chunks.append(data[-_KEEP_BYTES:])
        self._size[stream] += len(chunks[-1])
        if self._size[stream] > 2 * _KEEP_BYTES:
            kept = b"".join(chunks)[-_KEEP_BYTES:]
            self._chunks[stream], self._size[stream] = [kept], len(kept)

    def text(self) -> str:
        """The last traceback, or the last lines, of stderr; of stdout when that is empty."""
        return last_words(b"".join(self._chunks["err"])) or last_words(b"".join(self._chunks["out"]))


def last_words(data: bytes) -> str:
    """The last traceback, or the last lines: decoded, without colours and control characters, and
    with progress bars as they last stood."""
    lines = [_visible(line) for line in data.decode(errors="replace").split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    found = last_traceback(lines)
    lines = without_bystanders(lines[found.start : found.stop]) if found else lines[-_NUM_LINES:]
    return "\n".join(_shorten(lines)).strip("\n")


def _visible(line: str) -> str:
    shown = _ESCAPE.sub("", line.rstrip("\r").rpartition("\r")[2]).rstrip()
    return shown if len(shown) <= _LINE_CHARACTERS else shown[:_LINE_CHARACTERS] + " …"


def _shorten(lines: list[str]) -> list[str]:
    """Leave out the middle of what is too long: where it began and how it ended say most."""
    kept, num_characters = 0, 0
    for line in reversed(lines):
        num_characters += len(line) + 1
        if num_characters > _MAX_CHARACTERS or kept == _MAX_LINES:
            break
        kept += 1
    if kept == len(lines):
        return lines
    left_out = len(lines) - kept
    return [lines[0], f"… {left_out - 1} lines …", *lines[len(lines) - kept :]] if left_out > 1 else lines
