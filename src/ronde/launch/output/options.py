"""How the output of ranks is shown. Made by the command line, used by the Printer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

__all__ = ["Place", "PrintOptions", "Target"]


class Target(NamedTuple):
    """Where the lines go: binary files, such as `sys.stdout.buffer` and `sys.stderr.buffer`."""

    out: BinaryIO
    err: BinaryIO


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What the two files of a target are."""

    out_terminal: bool = False
    """Standard output is a terminal."""
    err_terminal: bool = False
    """Standard error is a terminal."""
    shared: bool = False
    """Both lead to the same terminal, pipe or file."""
    height: int = 24
    """Rows of the terminal."""

    def __post_init__(self) -> None:
        """Check it at once."""
        if self.height < 1:
            raise ValueError(f"a terminal has at least one row, got {self.height}")

    @classmethod
    def of(cls, target: Target) -> Place:
        """Look at real files."""
        terminals = tuple(file.isatty() for file in target)
        height = 0
        for file, terminal in zip(target, terminals, strict=True):
            if terminal:
                height = os.get_terminal_size(file.fileno()).lines
        return cls(
            out_terminal=terminals[0],
            err_terminal=terminals[1],
            shared=os.path.sameopenfile(target.out.fileno(), target.err.fileno()),
            height=height or 24,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PrintOptions:
    """Everything about the output that the user decides, and where it goes."""

    fold: bool = True
    """Show a line that several ranks print once, as `[0-7] line`."""
    timestamps: bool = False
    """Begin each line with the time at which it arrived."""
    color: bool = False
    """A colour per rank. (For the command line to decide: a terminal, and NO_COLOR is not set.)"""
    folder: str = ""
    """Write what each rank prints to files in here, byte for byte; empty for none. Files of an earlier run are
    overwritten, as with `>`, or removed where this one has fewer ranks; other files are left alone."""
    as_horovod: bool = False
    """Labels, times and files as those have them who read Horovod's by program: `[1]<stdout>:line`, the time before
    the label, and files `rank.1/stdout`."""
    place: Place = Place()
    """What the target is: `Place.of(target)`."""
    raw_rank: int | None = None
    """This rank has the terminal (`--debug`), which is in raw mode: its bytes go through as they are, everything
    else is shown around them."""
