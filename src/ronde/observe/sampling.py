"""Which operations of a channel are told to the coordinator, with when this rank came. Filled by comm/lane.

To find who was late, the arrivals of *all* members at *one* operation are needed, so the members have to choose the
same ones without asking each other. An operation has a number, the same on all members. At *level* 0 every operation is
noted, at level n one of each block of 2**n. Which one is drawn from the numbers themselves, as in a knockout: of two
neighbouring blocks one wins. So the choice does not beat in time with the steps of a training, and what a member notes
at a higher level is part of what it would note at a lower one.

Few operations take most of the waiting, so none of them may slip through: who has waited for long notes that at every
level. Who has not noted such an operation came to it shortly before its end.
"""

from __future__ import annotations

from collections import deque
from typing import Annotated

import msgspec

__all__ = ["Note", "Notebook", "chosen_after", "long_wait_ns", "num_notes"]

NEVER = 1 << 62
MOST_LEVEL = 30
_BITS = (1 << 64) - 1


class Note(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One operation, as one member saw it."""

    number: int
    """Equal on all members of the channel."""
    level: Annotated[int, msgspec.Meta(ge=0, le=MOST_LEVEL)]
    """One operation of 2**level is noted."""
    arrived_ns: int
    waited_ns: int
    """From then on, until every member had arrived."""
    blocked_ns: int
    """The last part of this, in which a caller did nothing but wait."""


def num_notes(num_members: int) -> int:
    """About how many operations a member notes per second: fewer where there are many members, as all of their notes
    go to one coordinator."""
    return max(64, min(1024, 65_536 // num_members))


def long_wait_ns(num_members: int) -> int:
    """A wait that is noted in any case. Nobody can have more of them in a second than it may note."""
    return 1_000_000_000 // num_notes(num_members)


def chosen_after(number: int, level: int) -> int:
    """The next operation behind `number` that is noted at this level."""
    block = (number + 1) >> level
    found = _winner(block, level)
    return found if found > number else _winner(block + 1, level)


def _winner(block: int, level: int) -> int:
    """The number that stands for a block of 2**level numbers."""
    for size in range(level, 0, -1):
        block = 2 * block + _coin(block, size)
    return block


def _coin(block: int, size: int) -> int:
    """0 or 1, without a pattern, but always the same for the same block."""
    mixed = (block * 0x9E3779B97F4A7C15 + size * 0xD1B54A32D192ED03) & _BITS
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _BITS
    return mixed >> 63


class Notebook:
    """The notes of one channel until they are fetched. Who is in a hurry calls add() only when the number has reached
    `next`, or the wait `long_ns`.

    add() is for the threads that run operations, take() for one other thread.
    """

    def __init__(self, num_members: int) -> None:
        """Nobody has to wait where there is but one member, or none: then nothing is noted."""
        self.next = 0 if num_members > 1 else NEVER
        """The number of the next operation to note."""
        self.long_ns = long_wait_ns(num_members) if num_members > 1 else NEVER
        """A wait that is noted in any case."""
        self._limit = num_notes(num_members) if num_members > 1 else 0
        """With more notes between two fetches, the level rises."""
        self._level = 0
        self._room = self._limit
        self._notes: deque[Note] = deque()

    def add(self, number: int, arrived_ns: int, waited_ns: int, blocked_ns: int) -> None:
        """Note an operation if it is one to be noted. Those in the background may be told out of their order."""
        if not self._limit:
            return
        if waited_ns >= self.long_ns or chosen_after(number - 1, self._level) == number:
            self._notes.append(Note(number, self._level, arrived_ns, waited_ns, blocked_ns))
        if number >= self.next:
            self._room -= 1
            if self._room <= 0 and self._level < MOST_LEVEL:
                self._level += 1
                self._room = self._limit
            self.next = chosen_after(number, self._level)

    def skip_to(self, number: int) -> None:
        """The next operation has this number."""
        if self._limit:
            self.next = chosen_after(number - 1, self._level)

    def take(self, offset_ns: int = 0) -> tuple[Note, ...]:
        """All notes since the last call, moved by the offset to another clock. Called about once per second."""
        num = len(self._notes)
        taken = [self._notes.popleft() for _ in range(num)]
        if num < self._limit // 4 and self._level > 0:
            self._level -= 1
        self._room = self._limit
        if offset_ns:
            return tuple([msgspec.structs.replace(note, arrived_ns=note.arrived_ns + offset_ns) for note in taken])
        return tuple(taken)
