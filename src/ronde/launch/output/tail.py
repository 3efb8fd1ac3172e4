"""The Python traceback that says why a rank has ended, in what it printed. Pure; used for the summary of a job that
failed.

Not every traceback is a reason: programs print those of errors that they have got over, too. What tells them apart is
how the process ended, and how much it has printed since.

The end of what each rank printed, kept for the summary of a job that failed. Used by the Printer.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from ronde.launch.protocol import StdStream

__all__ = ["OutputTail", "find_fatal_traceback"]

_FAULTHANDLER_HEADER = "Fatal Python error: "
"""faulthandler's: a crash in native code."""
_HEADER = re.compile(
    r"Traceback \(most recent call last\):"
    r"|  \+ Exception Group Traceback \(most recent call last\):"
    r"|╭─+ Traceback \(most recent call last\)"  # as rich prints it
    rf"|{_FAULTHANDLER_HEADER}"
)
_CHAIN_LINES = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_NONFATAL_HEADERS = (
    "Exception ignored in",
    "Exception ignored on",
    "Error in atexit._run_exitfuncs",
    "Error in sys.excepthook",
)
"""Tracebacks that are not the reason for an end."""
_WARNING = re.compile(r"\S+:\d+: \w*Warning: |(\[rank\d+\]:)?\[W\d")
"""Python's (such as those of leaked semaphores), and PyTorch's."""
_INTRODUCTION_PREFIXES = ("Exception in thread ", "Process ")
_FRAME_PREFIXES = (" ", "│", "╭", "╰", "Current thread", "Thread 0x", "Python runtime state: ")
_UNCAUGHT_CODE = 1
"""Python's own, after an exception that nobody caught."""
_MAX_LINES_AFTER = 100
"""Messages may be long, and more may be printed at exit. With more lines after it, the program went on."""
_MAX_LINES_AFTER_SHOWN = 24
"""Of what follows a traceback."""


def find_fatal_traceback(lines: Sequence[str], exit_code: int) -> list[str]:
    """The last traceback, if it says why a process ended with this code: with the exceptions it came from, the line
    that introduces it, and what follows it. Otherwise nothing."""
    chain = _last_chain(lines)
    if not chain:
        return []
    begin, end = chain[0], _find_end(lines, chain[-1])
    after = _drop_nonfatal(lines[end:])
    while after and not after[-1]:
        after.pop()
    if not _explains(lines[chain[-1]], lines[end - 1], exit_code) or len(after) > _max_lines_after(exit_code):
        return []
    if begin and lines[begin - 1].startswith(_INTRODUCTION_PREFIXES):
        begin -= 1
    return [*_keep_crashed_thread(lines[begin:end]), *_shorten_lines_after(after)]


def _last_chain(lines: Sequence[str]) -> list[int]:
    """The headers of the last exception and of those it came from; asides do not count."""
    chains: list[list[int]] = []
    for header in (index for index, line in enumerate(lines) if _HEADER.match(line)):
        if chains and any(line in _CHAIN_LINES for line in lines[chains[-1][-1] + 1 : header]):
            chains[-1].append(header)
        else:
            chains.append([header])
    meant = [chain for chain in chains if not (chain[0] and lines[chain[0] - 1].startswith(_NONFATAL_HEADERS))]
    return meant[-1] if meant else []


def _find_end(lines: Sequence[str], header: int) -> int:
    """After the frames, which are indented, the message follows. Where that ends nobody can tell: its first line."""
    frames = header + 1
    while frames < len(lines) and (not lines[frames] or lines[frames].startswith(_FRAME_PREFIXES)):
        frames += 1
    return min(len(lines), frames + 1)


def _signal_of(exit_code: int) -> int:
    """The signal that ended a process, also one below a shell; 0 for none."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    return number if 0 < number < signal.NSIG else 0


def _explains(header: str, message: str, exit_code: int) -> bool:
    number = _signal_of(exit_code)
    if number == signal.SIGINT and message.startswith("KeyboardInterrupt"):
        return True
    return not number or header.startswith(_FAULTHANDLER_HEADER)


def _max_lines_after(exit_code: int) -> int:
    """So many lines may follow: who exits by itself prints its reason last."""
    return _MAX_LINES_AFTER if exit_code == _UNCAUGHT_CODE or _signal_of(exit_code) else 0


def _drop_nonfatal(lines: Sequence[str]) -> list[str]:
    """Without what Python says while it ends, and warnings."""
    kept: list[str] = []
    aside = message = False  # inside of one; its message is still to come
    for line in lines:
        if line.startswith(_NONFATAL_HEADERS) or _WARNING.match(line):
            aside, message = True, line.startswith(_NONFATAL_HEADERS)
        elif aside and _HEADER.match(line):
            message = True
        elif aside and (not line or line in _CHAIN_LINES or line.startswith(_FRAME_PREFIXES)):
            continue
        elif aside and message:
            message = False
        else:
            aside = False
            kept.append(line)
    return kept


def _keep_crashed_thread(lines: Sequence[str]) -> list[str]:
    """Of a crash only the thread in which it happened: faulthandler shows all there are, in any order."""
    if not any(line.startswith("Current thread 0x") for line in lines):
        return [*lines]
    kept: list[str] = []
    bystander = False
    for line in lines:
        bystander = line.startswith("Thread 0x") or (bystander and line != "")
        if not bystander and not (line == "" and kept[-1:] == [""]) and not line.startswith("Extension modules: "):
            kept.append(line)
    return kept


def _shorten_lines_after(after: list[str]) -> list[str]:
    """Where a message began and what was printed last say most."""
    num_left_out = len(after) - _MAX_LINES_AFTER_SHOWN
    if num_left_out <= 1:
        return after
    half = _MAX_LINES_AFTER_SHOWN // 2
    return [*after[:half], f"… {num_left_out} lines …", *after[-half:]]


_STREAMS: tuple[StdStream, ...] = ("err", "out")
_KEPT_BYTES = 64 * 1024
_MAX_LINES_PER_STREAM = 20
"""Without a traceback, so many lines of each stream say enough."""
_MAX_LINES = 160
_MAX_CHARACTERS = 16 * 1024
_MAX_LINE_CHARACTERS = 1000

_ESCAPE = re.compile(
    r"\x1b\[[0-9;:<=>?]*[ -/]*[@-~]"  # colours and cursor movements
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # titles, links
    r"|\x1b[@-_]|[\x00-\x08\x0b-\x1f\x7f]"
)


class OutputTail:
    """The last bytes of the two streams of one rank."""

    def __init__(self) -> None:
        self._chunks: dict[StdStream, list[bytes]] = {"out": [], "err": []}
        self._num_bytes: dict[StdStream, int] = {"out": 0, "err": 0}

    def add(self, stream: StdStream, data: bytes) -> None:
        """Take a chunk; forget what is too old."""
        chunks = self._chunks[stream]
        chunks.append(data[-_KEPT_BYTES:])
        self._num_bytes[stream] += len(chunks[-1])
        if self._num_bytes[stream] > 2 * _KEPT_BYTES:
            kept = b"".join(chunks)[-_KEPT_BYTES:]
            self._chunks[stream], self._num_bytes[stream] = [kept], len(kept)

    def text(self, exit_code: int) -> str:
        """Why the rank ended with this code: the traceback that says so, or else the last lines of both streams."""
        err, out = (_readable_lines(b"".join(self._chunks[stream])) for stream in _STREAMS)
        # On a terminal of its own, or after 2>&1, a rank prints its traceback to standard output.
        found = find_fatal_traceback(err or out, exit_code)
        if found:
            return "\n".join(_drop_middle(found)).rstrip("\n")
        named = {"last lines of standard error:": err, "last lines of standard output:": out}
        return "\n".join(
            line
            for name, lines in named.items()
            if lines
            for line in (name, *_drop_middle(lines[-_MAX_LINES_PER_STREAM:]))
        )


def _readable_lines(data: bytes) -> list[str]:
    """Decoded, without colours and control characters, with progress bars as they last stood; no empty lines around."""
    text = "\n".join(_visible_text(line) for line in data.decode(errors="replace").split("\n")).strip("\n")
    return text.split("\n") if text else []


def _visible_text(line: str) -> str:
    shown = _ESCAPE.sub("", line.rstrip("\r").rpartition("\r")[2]).rstrip()
    return shown if len(shown) <= _MAX_LINE_CHARACTERS else shown[:_MAX_LINE_CHARACTERS] + " …"


def _drop_middle(lines: list[str]) -> list[str]:
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
