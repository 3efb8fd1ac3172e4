"""The last Python traceback in what a rank printed. Pure; used for the summary of a job that failed."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["last_traceback", "without_bystanders"]

_HEADER = re.compile(
    r"Traceback \(most recent call last\):"
    r"|  \+ Exception Group Traceback \(most recent call last\):"
    r"|╭─+ Traceback \(most recent call last\)"  # as rich prints it
    r"|Fatal Python error: "  # faulthandler: a crash in native code
)
_CHAIN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_ASIDE = ("Exception ignored in", "Exception ignored on", "Error in atexit._run_exitfuncs", "Error in sys.excepthook")
"""Tracebacks that are not the reason for an end."""
_INTRODUCTION = ("Exception in thread ", "Process ")
_FRAME = (" ", "│", "╭", "╰", "Current thread", "Thread 0x")
_MESSAGE_LINES = 24
"""Where a message ends nobody can tell: so many lines after its first are taken along."""


def last_traceback(lines: Sequence[str]) -> range | None:
    """Where the last traceback stands, with the exceptions it came from and the line that introduces it."""
    headers = [index for index, line in enumerate(lines) if _HEADER.match(line)]
    chains: list[list[int]] = []
    for header in headers:
        if chains and any(line in _CHAIN for line in lines[chains[-1][-1] + 1 : header]):
            chains[-1].append(header)
        else:
            chains.append([header])
    if not chains:
        return None
    meant = [chain for chain in chains if not _is_aside(lines, chain[0])]
    chain = (meant or chains)[-1]
    begin, end = chain[0], _end(lines, chain[-1])
    later = [header for header in headers if header > chain[-1]]
    if later:
        end = min(end, later[0] - _is_aside(lines, later[0]))
    if begin and lines[begin - 1].startswith(_INTRODUCTION):
        begin -= 1
    return range(begin, end)


def without_bystanders(lines: Sequence[str]) -> list[str]:
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


def _is_aside(lines: Sequence[str], header: int) -> bool:
    return header > 0 and lines[header - 1].startswith(_ASIDE)


def _end(lines: Sequence[str], header: int) -> int:
    """After the frames, which are indented, the message follows."""
    frames = header + 1
    while frames < len(lines) and (not lines[frames] or lines[frames].startswith(_FRAME)):
        frames += 1
    return min(len(lines), frames + 1 + _MESSAGE_LINES)
