"""The Python traceback that says why a rank has ended, in what it printed. Pure; used for the summary of a job that
failed.

Not every traceback is a reason: programs print those of errors that they have got over, too. What tells them apart is
how the process ended, and how much it has printed since.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

__all__ = ["last_traceback"]

_CRASH = "Fatal Python error: "
"""faulthandler's: a crash in native code."""
_HEADER = re.compile(
    r"Traceback \(most recent call last\):"
    r"|  \+ Exception Group Traceback \(most recent call last\):"
    r"|╭─+ Traceback \(most recent call last\)"  # as rich prints it
    rf"|{_CRASH}"
)
_CHAIN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_ASIDE = ("Exception ignored in", "Exception ignored on", "Error in atexit._run_exitfuncs", "Error in sys.excepthook")
"""Tracebacks that are not the reason for an end."""
_WARNING = re.compile(r"\S+:\d+: \w*Warning: |(\[rank\d+\]:)?\[W\d")
"""Python's (such as those of leaked semaphores), and PyTorch's."""
_INTRODUCTION = ("Exception in thread ", "Process ")
_FRAME = (" ", "│", "╭", "╰", "Current thread", "Thread 0x", "Python runtime state: ")
_UNCAUGHT_CODE = 1
"""Python's own, after an exception that nobody caught."""
_NEAR_LINES = 100
"""Messages may be long, and more may be printed at exit. With more lines after it, the program went on."""
_SHOWN_LINES = 24
"""Of what follows a traceback."""


def last_traceback(lines: Sequence[str], code: int) -> list[str]:
    """The last traceback, if it says why a process ended with this code: with the exceptions it came from, the line
    that introduces it, and what follows it. Otherwise nothing."""
    chain = _last_chain(lines)
    if not chain:
        return []
    begin, end = chain[0], _end(lines, chain[-1])
    after = _without_asides(lines[end:])
    while after and not after[-1]:
        after.pop()
    if not _explains(lines[chain[-1]], lines[end - 1], code) or len(after) > _num_allowed(code):
        return []
    if begin and lines[begin - 1].startswith(_INTRODUCTION):
        begin -= 1
    return [*_without_bystanders(lines[begin:end]), *_cut(after)]


def _last_chain(lines: Sequence[str]) -> list[int]:
    """The headers of the last exception and of those it came from; asides do not count."""
    chains: list[list[int]] = []
    for header in (index for index, line in enumerate(lines) if _HEADER.match(line)):
        if chains and any(line in _CHAIN for line in lines[chains[-1][-1] + 1 : header]):
            chains[-1].append(header)
        else:
            chains.append([header])
    meant = [chain for chain in chains if not (chain[0] and lines[chain[0] - 1].startswith(_ASIDE))]
    return meant[-1] if meant else []


def _end(lines: Sequence[str], header: int) -> int:
    """After the frames, which are indented, the message follows. Where that ends nobody can tell: its first line."""
    frames = header + 1
    while frames < len(lines) and (not lines[frames] or lines[frames].startswith(_FRAME)):
        frames += 1
    return min(len(lines), frames + 1)


def _signal_of(code: int) -> int:
    """The signal that ended a process, also one below a shell; 0 for none."""
    number = -code if code < 0 else code - 128
    return number if 0 < number < signal.NSIG else 0


def _explains(header: str, message: str, code: int) -> bool:
    number = _signal_of(code)
    if number == signal.SIGINT and message.startswith("KeyboardInterrupt"):
        return True
    return not number or header.startswith(_CRASH)


def _num_allowed(code: int) -> int:
    """So many lines may follow: who exits by itself prints its reason last."""
    return _NEAR_LINES if code == _UNCAUGHT_CODE or _signal_of(code) else 0


def _without_asides(lines: Sequence[str]) -> list[str]:
    """Without what Python says while it ends, and warnings."""
    kept: list[str] = []
    aside = message = False  # inside of one; its message is still to come
    for line in lines:
        if line.startswith(_ASIDE) or _WARNING.match(line):
            aside, message = True, line.startswith(_ASIDE)
        elif aside and _HEADER.match(line):
            message = True
        elif aside and (not line or line in _CHAIN or line.startswith(_FRAME)):
            continue
        elif aside and message:
            message = False
        else:
            aside = False
            kept.append(line)
    return kept


def _without_bystanders(lines: Sequence[str]) -> list[str]:
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


def _cut(after: list[str]) -> list[str]:
    """Where a message began and what was printed last say most."""
    num_left_out = len(after) - _SHOWN_LINES
    if num_left_out <= 1:
        return after
    half = _SHOWN_LINES // 2
    return [*after[:half], f"… {num_left_out} lines …", *after[-half:]]
