"""How a running job is: what each rank does with its time, and who holds up the others. Pure; kept by the coordinator.

Workers send a Reading about once per second: sums since they started, so that a reading that is missed costs nothing.
Rates and shares are those of the last seconds, between the oldest reading kept and the newest.

    wall time = computing + waiting + moving        waiting: blocked, while members were missing
                                                    moving: blocked, while data travelled

Operations that run while the caller computes block nobody, and do not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from ronde.observe.stragglers import ArrivalSample, StragglerDetector
from ronde.text import format_ranks, shorten

__all__ = [
    "ActivitySample",
    "ActivityTracker",
    "CurrentOperation",
    "JobActivity",
    "RankActivity",
    "RankState",
    "find_slowest",
]

WINDOW_NS = 5_000_000_000
"""What "lately" means in rates and shares."""
HELD_UP_WINDOW_NS = 10_000_000_000
"""The same for held-up time: it is known only when all members have told of an operation."""
MIN_STUCK_NS = 300_000_000
"""A wait under way that is shorter than this is a part of the daily work, and may be over by now."""
MIN_SLOW_SHARE = 0.03
"""A rank for which each other rank waits less than this share of its time is not called slow."""

RankState: TypeAlias = Literal["starting", "running", "left", "lost"]


class CurrentOperation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The operation a caller is blocked in right now."""

    op: str
    since_ns: int
    missing: tuple[int, ...] = ()
    """Ranks that have not come; empty when data moves."""
    is_waiting: bool = True
    """Whether it waits for others, or moves data."""
    named_operation: tuple[int, str] | None = None
    """Group and name of an operation that has not begun: only the coordinator knows who is missing."""


class ActivitySample(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one rank has done since its round began. Times are on the coordinator's clock."""

    at_ns: int
    steps: int = 0
    operations: int = 0
    bytes: int = 0
    waiting_ns: int = 0
    moving_ns: int = 0
    waited_for: tuple[tuple[int, int], ...] = ()
    """(rank, nanoseconds) as far as this rank knows by itself whom it waited for: named operations and messages."""
    current_operation: CurrentOperation | None = None


class RankActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. None stands for what is not known (yet)."""

    rank: int
    state: RankState
    why: str = ""
    """More about the state, such as how a rank was lost."""
    host: str = ""
    pid: int = 0
    steps: int = 0
    """As marked by ronde.mark_step(), which optimizers call."""
    steps_per_s: float | None = None
    operations: int = 0
    operations_per_s: float | None = None
    bytes_per_s: float | None = None
    computing: float | None = None
    """Share of its time in which it was not blocked in an operation."""
    waiting: float | None = None
    """Share of its time in which it was blocked and members were missing."""
    moving: float | None = None
    """Share of its time in which it was blocked and data travelled."""
    held_up_s: float = 0.0
    """How long other ranks have waited for this one in this round, all of them added up."""
    holding_up: float = 0.0
    """Share of its time that each other rank has lately waited for this one, on average."""
    doing: str = ""
    """What it is blocked in right now, in words."""
    silent_s: float | None = None
    """How long ago it was last heard of."""


class JobActivity(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks at one moment."""

    size: int
    round: int = -1
    """Number of the round under way, or of the last; -1 before the first."""
    slowest: int | None = None
    """The rank that the others waited for most lately, if for any."""
    ranks: tuple[RankActivity, ...] = ()


class ActivityTracker:
    """The readings of one round."""

    def __init__(self, size: int, now_ns: int) -> None:
        self._size = size
        self._stragglers = StragglerDetector()
        self._samples: dict[int, deque[ActivitySample]] = {}
        self._attributed_ns: dict[tuple[int, int], int] = {}
        """(who waited, for whom): of what it told, how much has been charged."""
        self._held_up_history: deque[tuple[int, dict[int, float]]] = deque([(now_ns, {})])
        """(when, held-up time by rank by then), about one per second."""

    def add_sample(self, rank: int, sample: ActivitySample) -> None:
        """A rank tells how it is."""
        kept = self._samples.setdefault(rank, deque())
        if kept and sample.at_ns <= kept[-1].at_ns:
            return  # its clock was set anew; the next one will do
        kept.append(sample)
        while len(kept) > 2 and sample.at_ns - kept[1].at_ns >= WINDOW_NS:
            kept.popleft()
        for other, waited_ns in sample.waited_for:
            if 0 <= other < self._size:
                new_ns = waited_ns - self._attributed_ns.get((rank, other), 0)
                self._attributed_ns[rank, other] = waited_ns
                self._stragglers.add_wait(other, max(0, new_ns))

    def add_arrivals(
        self, rank: int, channel: str, members: tuple[int, ...], samples: Iterable[ArrivalSample], now_ns: int
    ) -> None:
        """A rank tells when it came to operations of a channel."""
        self._stragglers.add(rank, channel, members, samples, now_ns)

    def held_up_ns(self) -> dict[int, float]:
        """By rank, how long others have waited for it; waits that are still under way included."""
        found = dict(self._stragglers.held_up_ns)
        for rank, missing in self._find_blocked().items():
            last = self._samples[rank][-1]
            if last.current_operation is not None:
                for other in missing:
                    found[other] = found.get(other, 0.0) + (last.at_ns - last.current_operation.since_ns) / len(missing)
        return found

    def rank_reported(self, rank: int, now_ns: int) -> None:
        """A rank has told all that it has to tell by now. Remembers who has held up the others."""
        self._stragglers.rank_reported(rank, now_ns)
        if now_ns - self._held_up_history[-1][0] < 1_000_000_000:
            return
        self._held_up_history.append((now_ns, self.held_up_ns()))
        while len(self._held_up_history) > 2 and now_ns - self._held_up_history[1][0] >= HELD_UP_WINDOW_NS:
            self._held_up_history.popleft()

    def finish(self) -> None:
        """All ranks have left: nobody tells anything any more."""
        self._stragglers.finish()

    def holding_up(self, now_ns: int) -> dict[int, float]:
        """By rank, the share of its time that each other rank has lately waited for it."""
        since_ns, before = self._held_up_history[0]
        if self._size < 2 or now_ns <= since_ns:
            return {}
        scale = 1.0 / (now_ns - since_ns) / (self._size - 1)
        now = self.held_up_ns()
        return {rank: max(0.0, scale * (held_ns - before.get(rank, 0.0))) for rank, held_ns in now.items()}

    def snapshot(self, now_ns: int) -> list[RankActivity]:
        """All ranks, as far as readings tell. State, host and process are for others to add."""
        held_up_ns, holding_up, stuck = self.held_up_ns(), self.holding_up(now_ns), self._find_blocked()
        return [
            msgspec.structs.replace(
                self._rank_snapshot(rank, now_ns, stuck.get(rank)),
                held_up_s=held_up_ns.get(rank, 0.0) / 1e9,
                holding_up=holding_up.get(rank, 0.0),
            )
            for rank in range(self._size)
        ]

    def _rank_snapshot(self, rank: int, now_ns: int, missing: tuple[int, ...] | None) -> RankActivity:
        kept = self._samples.get(rank)
        if not kept:
            return RankActivity(rank=rank, state="starting")
        first, last = kept[0], kept[-1]
        now = RankActivity(
            rank=rank,
            state="running",
            steps=last.steps,
            operations=last.operations,
            doing=_describe_current_operation(last.current_operation, missing, now_ns)
            if last.current_operation is not None and missing is not None
            else "",
            silent_s=max(0.0, (now_ns - last.at_ns) / 1e9),
        )
        wall_ns = last.at_ns - first.at_ns
        if wall_ns <= 0:
            return now
        waiting = min(1.0, max(0.0, (last.waiting_ns - first.waiting_ns) / wall_ns))
        moving = min(1.0 - waiting, max(0.0, (last.moving_ns - first.moving_ns) / wall_ns))
        return msgspec.structs.replace(
            now,
            steps_per_s=(last.steps - first.steps) * 1e9 / wall_ns if last.steps else None,
            operations_per_s=(last.operations - first.operations) * 1e9 / wall_ns,
            bytes_per_s=(last.bytes - first.bytes) * 1e9 / wall_ns,
            computing=1.0 - waiting - moving,
            waiting=waiting,
            moving=moving,
        )

    def _find_blocked(self) -> dict[int, tuple[int, ...]]:
        """The ranks that were blocked for some time when last heard of, each with those that its operation misses.

        A rank may name its neighbour, who waits himself: who is blocked in the same operation is not missing.
        """
        together: dict[str, list[tuple[int, CurrentOperation]]] = {}
        for rank, kept in self._samples.items():
            doing = kept[-1].current_operation
            if doing is not None and kept[-1].at_ns - doing.since_ns >= MIN_STUCK_NS:
                together.setdefault(doing.op, []).append((rank, doing))
        found: dict[int, tuple[int, ...]] = {}
        for same in together.values():
            here = {rank for rank, _ in same}
            missing = tuple(sorted({other for _, doing in same for other in doing.missing} - here))
            found.update(dict.fromkeys(here, missing))
        return found


def find_slowest(holding_up: dict[int, float]) -> int | None:
    """The rank that the others wait for most, if that is worth telling."""
    if not holding_up:
        return None
    rank = max(holding_up, key=lambda each: (holding_up[each], -each))
    return rank if holding_up[rank] >= MIN_SLOW_SHARE else None


def _describe_current_operation(current_operation: CurrentOperation, missing: tuple[int, ...], now_ns: int) -> str:
    """Such as `waits 3.2 s for rank 2 in allreduce sum float32[3]`."""
    whom = f" for {format_ranks(missing)}" if missing else ""
    what = "waits" if current_operation.is_waiting or missing else "moves data for"
    return f"{what} {max(0, now_ns - current_operation.since_ns) / 1e9:.1f} s{whom} in {shorten(current_operation.op)}"
