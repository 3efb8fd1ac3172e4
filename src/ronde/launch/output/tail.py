"""The last output of a rank, for the report of a job that failed: the traceback that explains its exit, or last lines.

Not every traceback explains an exit: programs also print those of errors that they handle. The exit code, and how much
was printed after the traceback, tell them apart.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from ronde.launch.protocol import StdStream

_FAULTHANDLER_HEADER = "Fatal Python error: "
"""Printed by faulthandler after a crash in native code."""
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
"""Python prints these before the tracebacks of errors that do not end the process."""
_WARNING = re.compile(r"\S+:\d+: \w*Warning: |(\[rank\d+\]:)?\[W\d")
"""The first line of a warning of Python (such as that of leaked semaphores) or of PyTorch."""
_INTRODUCTION_PREFIXES = ("Exception in thread ", "Process ")
_FRAME_PREFIXES = (" ", "│", "╭", "╰", "Current thread", "Thread 0x", "Python runtime state: ")
_UNCAUGHT_CODE = 1
"""The exit code of Python after an uncaught exception."""
_MAX_LINES_AFTER = 100
"""A message may be long, and more may be printed at exit. With more lines after the traceback, the program went on."""
_MAX_LINES_AFTER_SHOWN = 12
"""Lines shown after a traceback, and again so many of the last."""


def find_fatal_traceback(lines: Sequence[str], exit_code: int) -> list[str]:
    """Return the last traceback, if it explains why a process exited with this code: with the exceptions it came from,
    the line that introduces it, and what follows it. Otherwise nothing."""
    chain = _last_chain(lines)
    if not chain:
        return []
    begin, end = chain[0], chain[-1] + 1
    while end < len(lines) and (not lines[end] or lines[end].startswith(_FRAME_PREFIXES)):
        end += 1
    end = min(len(lines), end + 1)  # with the first line of the message; where that ends cannot be known
    after = _drop_nonfatal(lines[end:])
    while after and not after[-1]:
        after.pop()
    signal_number = -exit_code if exit_code < 0 else exit_code - 128  # the second is that of a child of a shell
    if 0 < signal_number < signal.NSIG:
        is_interrupt = signal_number == signal.SIGINT and lines[end - 1].startswith("KeyboardInterrupt")
        explains = is_interrupt or lines[chain[-1]].startswith(_FAULTHANDLER_HEADER)
    else:  # a program that chose its exit code prints the reason last
        explains = exit_code == _UNCAUGHT_CODE or not after
    if not explains or len(after) > _MAX_LINES_AFTER:
        return []
    if begin and lines[begin - 1].startswith(_INTRODUCTION_PREFIXES):
        begin -= 1
    num_left_out = len(after) - 2 * _MAX_LINES_AFTER_SHOWN
    if num_left_out > 1:
        after[_MAX_LINES_AFTER_SHOWN:-_MAX_LINES_AFTER_SHOWN] = [f"… {num_left_out} lines …"]
    return [*_keep_crashed_thread(lines[begin:end]), *after]


def _last_chain(lines: Sequence[str]) -> list[int]:
    """Return the indices of the headers of the last exception and of those it came from, without nonfatal ones."""
    chains: list[list[int]] = []
    for header in (index for index, line in enumerate(lines) if _HEADER.match(line)):
        if chains and any(line in _CHAIN_LINES for line in lines[chains[-1][-1] + 1 : header]):
            chains[-1].append(header)
        else:
            chains.append([header])
    fatal = [chain for chain in chains if not (chain[0] and lines[chain[0] - 1].startswith(_NONFATAL_HEADERS))]
    return fatal[-1] if fatal else []


def _drop_nonfatal(lines: Sequence[str]) -> list[str]:
    """Return the lines without warnings and the tracebacks that Python prints at exit."""
    kept: list[str] = []
    nonfatal = message = False  # inside a nonfatal traceback or warning; its message is still to come
    for line in lines:
        if line.startswith(_NONFATAL_HEADERS) or _WARNING.match(line):
            nonfatal, message = True, line.startswith(_NONFATAL_HEADERS)
        elif nonfatal and _HEADER.match(line):
            message = True
        elif nonfatal and (not line or line in _CHAIN_LINES or line.startswith(_FRAME_PREFIXES)):
            continue
        elif nonfatal and message:
            message = False
        else:
            nonfatal = False
            kept.append(line)
    return kept


def _keep_crashed_thread(lines: Sequence[str]) -> list[str]:
    """Return a crash with only the thread in which it happened: faulthandler prints all threads, in any order."""
    if not any(line.startswith("Current thread 0x") for line in lines):
        return [*lines]
    kept: list[str] = []
    other_thread = False
    for line in lines:
        other_thread = line.startswith("Thread 0x") or (other_thread and line != "")
        if not other_thread and not (line == "" and kept[-1:] == [""]) and not line.startswith("Extension modules: "):
            kept.append(line)
    return kept


_KEPT_BYTES = 64 * 1024
_MAX_LINES_PER_STREAM = 20
"""Lines of each stream that are shown when there is no traceback."""
_MAX_LINES = 160
_MAX_CHARACTERS = 16 * 1024
_MAX_LINE_CHARACTERS = 1000

_ESCAPE = re.compile(
    r"\x1b\[[0-9;:<=>?]*[ -/]*[@-~]"  # colours and cursor movements
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # titles, links
    r"|\x1b[@-_]|[\x00-\x08\x0b-\x1f\x7f]"
)


class OutputTail:
    """Keeps the last bytes of the two streams of one rank."""

    def __init__(self) -> None:
        self._chunks: dict[StdStream, list[bytes]] = {"out": [], "err": []}
        self._num_bytes: dict[StdStream, int] = {"out": 0, "err": 0}

    def add(self, stream: StdStream, data: bytes) -> None:
        chunks = self._chunks[stream]
        chunks.append(data[-_KEPT_BYTES:])
        self._num_bytes[stream] += len(chunks[-1])
        if self._num_bytes[stream] > 2 * _KEPT_BYTES:
            kept = b"".join(chunks)[-_KEPT_BYTES:]
            self._chunks[stream], self._num_bytes[stream] = [kept], len(kept)

    def text(self, exit_code: int) -> str:
        """Return the traceback that explains this exit code, or else the last lines of both streams."""
        out, err = (_readable_lines(b"".join(chunks)) for chunks in self._chunks.values())
        # On a terminal of its own, or after 2>&1, a rank prints its traceback to standard output.
        found = find_fatal_traceback(err or out, exit_code)
        if found:
            return "\n".join(_drop_middle(found)).rstrip("\n")
        shown = []
        for name, lines in (("error", err), ("output", out)):
            if lines:
                shown += [f"last lines of standard {name}:", *_drop_middle(lines[-_MAX_LINES_PER_STREAM:])]
        return "\n".join(shown)


def _readable_lines(data: bytes) -> list[str]:
    """Return the lines without control characters, progress bars as they were last, no empty lines around."""
    shown = []
    for line in data.decode(errors="replace").split("\n"):
        text = _ESCAPE.sub("", line.rstrip("\r").rpartition("\r")[2]).rstrip()
        shown.append(text if len(text) <= _MAX_LINE_CHARACTERS else text[:_MAX_LINE_CHARACTERS] + " …")
    text = "\n".join(shown).strip("\n")
    return text.split("\n") if text else []


def _drop_middle(lines: list[str]) -> list[str]:
    """Leave out the middle of what is too long."""
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
