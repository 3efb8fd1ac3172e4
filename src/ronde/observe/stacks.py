"""Where a process is right now: its Python stacks, and the state of the process.

A rank replies to the coordinator's StackRequest with dump_stacks(), from its control thread, while the main thread
waits or computes. process_state() is for a process that does not reply. `ronde stack` shows the stacks of all ranks,
equal ones together.
"""

from __future__ import annotations

import gc
import itertools
import linecache
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Literal, TypeAlias

import msgspec

from ronde.text import escape_surrogates, shorten

MAX_SOURCE_CHARS = 120
MAX_FRAMES = 100
"""Innermost frames of one thread: endless recursion is deeper than anyone reads."""
MAX_STACK_CHARS = 64 * 1024
"""The whole text travels in one message."""

ProcessState: TypeAlias = Literal["running", "sleeping", "blocked", "stopped", "gone"]
GONE: ProcessState = "gone"
RUNNING: ProcessState = "running"

_STATES: dict[str, ProcessState] = {
    "R": "running",
    "S": "sleeping",
    "I": "sleeping",
    "D": "blocked",  # in the kernel, waiting for a disk, a network file system or a device
    "T": "stopped",
    "t": "stopped",  # by a debugger
    "Z": "gone",
    "X": "gone",
}

_OWN_THREAD_PREFIX = "ronde-"
"""These threads only wait for messages, on every rank alike."""
_RONDE_PATH = str(Path(__file__).parents[1]) + os.sep
# os.__file__ is the standard library by the name it was imported under; sysconfig knows what symbolic links hide.
_STDLIB_PATHS = tuple(
    {path + os.sep for path in (str(Path(os.__file__).parent), *map(sysconfig.get_path, ("stdlib", "platstdlib")))}
)
_LIBRARY_PATH_PARTS = [f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"]
"""In the paths of packages, which are not the user's code."""


class RankStack(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank is; or in `why` the reason why that is not known, to follow the name of the rank."""

    rank: int
    host: str = ""
    pid: int = 0
    line: str = ""
    """The innermost line of the user's code in the main thread."""
    stack: str = ""
    """The stacks of all threads, main thread first."""
    why: str = ""


def group_stacks(stacks: Iterable[RankStack]) -> list[tuple[tuple[int, ...], RankStack]]:
    """Return groups of ranks with equal stacks: the ranks, and the stack of the first. The largest group is first."""
    groups: dict[tuple[str, str, str], list[RankStack]] = {}
    for stack in stacks:
        groups.setdefault((stack.line, stack.stack, stack.why), []).append(stack)
    ordered = sorted(groups.values(), key=lambda group: (-len(group), group[0].rank))
    return [(tuple(each.rank for each in group), group[0]) for group in ordered]


def treat_as_library(directory: str | os.PathLike[str]) -> None:
    """Treat what is in this directory like packages in site-packages: a line in it is not the user's code. Called by
    packages on top of ronde, which may be run from a checkout."""
    path = os.fspath(directory) + os.sep
    if path not in _LIBRARY_PATH_PARTS:
        _LIBRARY_PATH_PARTS.append(path)


def dump_stacks() -> tuple[str, str]:
    """Return the innermost line of the user's code in the main thread, such as `train.py:42 in step: loss.backward()`,
    and the stacks of all threads but ronde's own, main thread first."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    # The lines of all threads, innermost first, before any source: reading source lets the other threads go on.
    walked = {
        ident: [
            (each.f_code.co_filename, number, each.f_code.co_name, each.f_globals)
            for each, number in itertools.islice(traceback.walk_stack(frame), MAX_FRAMES)
        ]
        for ident, frame in sorted(_current_frames().items(), key=lambda item: (item[0] != main, item[0]))
    }
    # StackSummary.extract() would ask the file system whether each source has changed, which may hang.
    seen = {
        ident: [
            traceback.FrameSummary(file, number, name, line=linecache.getline(file, number or 0, variables).strip())
            for file, number, name, variables in frames
        ]
        for ident, frames in walked.items()
    }
    line = _describe_user_frame(seen[main]) if main in seen else "the end of its main thread"
    texts = []
    for ident, frames in seen.items():
        name = names.get(ident, str(ident))
        if ident == main or (ident != threading.get_ident() and not name.startswith(_OWN_THREAD_PREFIX)):
            title = "main thread" if ident == main else f"thread {shorten(name)}"
            texts.append(f"{title}:\n{''.join(traceback.format_list(frames[::-1]))}")
    stack = escape_surrogates("\n".join(texts))
    return line, stack if len(stack) <= MAX_STACK_CHARS else stack[: MAX_STACK_CHARS - 1] + "…"


def _current_frames() -> dict[int, FrameType]:
    """The frames of all threads. While Python collects them it holds a lock that the finalizer of a threading.local
    needs, too, so garbage that is collected meanwhile could stop the process for ever."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


def where_was_raised(error: BaseException) -> str:
    """Return the innermost line of the user's code in the error's traceback; empty when it was never raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return _describe_user_frame(frames[::-1]) if frames else ""


def pid_namespace() -> str:
    """Return the namespace of this process's id. It is equal for processes that see each other's ids; "" if unknown."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # hidden in some containers
        return ""


def process_state(pid: int) -> ProcessState:
    """Return the state of a process of this host; "gone" also when it only waits to be reaped."""
    try:
        fields = split_proc_stat(Path(f"/proc/{pid}/stat").read_bytes())
    except OSError:  # no such process, or it exited meanwhile
        return "gone"
    return _STATES.get(fields[0], "sleeping") if fields else "gone"


def split_proc_stat(data: bytes) -> list[str]:
    """Return the fields of /proc/PID/stat from the third one (the state) on. The second is the name in brackets, which
    may itself contain brackets and spaces."""
    return data.decode(errors="replace").rpartition(")")[2].split()


def _describe_user_frame(frames: Sequence[traceback.FrameSummary]) -> str:
    """Describe the innermost frame of the user's code; else of an installed package; else the innermost of all."""
    outside = [frame for frame in frames if not frame.filename.startswith((_RONDE_PATH, "<frozen "))]
    installed = [frame for frame in outside if any(part in frame.filename for part in _LIBRARY_PATH_PARTS)]
    own = [frame for frame in outside if frame not in installed and not frame.filename.startswith(_STDLIB_PATHS)]
    frame = next(iter(own or installed or frames))
    location = f"{shorten(Path(frame.filename).name)}:{frame.lineno} in {shorten(frame.name)}"
    return f"{location}: {shorten(frame.line, MAX_SOURCE_CHARS)}" if frame.line else location
