"""Which operations in program order have waited too long here. Asked by the engine on every turn of its loop.

Named operations are watched by the coordinator, which knows who has announced them. Of an operation without a name
only its members know; each that waits too long says so once, and the coordinator asks the missing ones where they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ronde.comm.lane import Lane
from ronde.net.messages import Waiting

__all__ = ["LaneWatch"]

LOOKS_PER_LIMIT = 4


class LaneWatch:
    """Looks at the lanes now and then: that costs little, and the operations themselves pay nothing."""

    def __init__(self, limit_s: float) -> None:
        self._limit_ns = int(limit_s * 1e9)
        self._every_ns = self._limit_ns // LOOKS_PER_LIMIT
        self._next_ns = 0
        self._reported: dict[int, int] = {}
        """By lane: when the last operation that was reported began."""

    def left_s(self, now_ns: int) -> float:
        """Until the next look."""
        return max(0.0, (self._next_ns - now_ns) / 1e9) if self._limit_ns else math.inf

    def due(self, lanes: Sequence[Lane], now_ns: int, offset_ns: int = 0) -> list[Waiting]:
        """What became late since the last look. The offset leads to the coordinator's clock; a limit of 0 turns the
        watch off."""
        if not self._limit_ns or now_ns < self._next_ns:
            return []
        self._next_ns = now_ns + self._every_ns
        self._reported = {key: since for key, since in self._reported.items() if any(id(lane) == key for lane in lanes)}
        found = (self._look(lane, now_ns, offset_ns) for lane in lanes)
        return [waiting for waiting in found if waiting is not None]

    def _look(self, lane: Lane, now_ns: int, offset_ns: int) -> Waiting | None:
        looking = lane.look()
        if looking is None or not looking.missing or looking.text == "join":
            return None  # who has joined waits for nothing that is late
        if now_ns - looking.since_ns < self._limit_ns or self._reported.get(id(lane)) == looking.since_ns:
            return None
        self._reported[id(lane)] = looking.since_ns
        missing = tuple(lane.members[index] for index in looking.missing)
        call = f"{lane.channel.spec.id} {looking.number}" if looking.number >= 0 else ""
        return Waiting(looking.text, lane.group, looking.since_ns + offset_ns, missing, call)
