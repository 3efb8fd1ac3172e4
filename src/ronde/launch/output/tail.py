"""The end of what each rank printed, kept for the summary of a job that failed. Used by the Printer."""

from __future__ import annotations

import re

from ronde.launch.messages import Stream
from ronde.launch.output.tracebacks import last_traceback

__all__ = ["Tail"]

_STREAMS: tuple[Stream, ...] = ("err", "out")
_KEEP_BYTES = 64 * 1024
_NUM_LINES = 20
"""Without a traceback, so many lines of each stream say enough."""
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

    def text(self, code: int) -> str:
        """Why the rank ended with this code: the traceback that says so, or else the last lines of both streams."""
        err, out = (_readable(b"".join(self._chunks[stream])) for stream in _STREAMS)
        # On a terminal of its own, or after 2>&1, a rank prints its traceback to standard output.
        found = last_traceback(err or out, code)
        if found:
            return "\n".join(_shorten(found)).rstrip("\n")
        named = {"last lines of standard error:": err, "last lines of standard output:": out}
        return "\n".join(
            line for name, lines in named.items() if lines for line in (name, *_shorten(lines[-_NUM_LINES:]))
        )


def _readable(data: bytes) -> list[str]:
    """Decoded, without colours and control characters, with progress bars as they last stood; no empty lines around."""
    text = "\n".join(_visible(line) for line in data.decode(errors="replace").split("\n")).strip("\n")
    return text.split("\n") if text else []


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
