"""What each rank does with its time, and which rank holds up the others. The coordinator keeps it; pure.

Ranks send an ActivitySample about once per second. It has sums since the round began, so a lost sample costs nothing.
Rates and shares are those of the last seconds, between the oldest sample kept and the newest.

    wall time = computing + waiting + moving        waiting: blocked, while members were missing
                                                    moving: blocked, while data travelled

Operations that run while the caller computes block nobody, and do not count.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, TypeAlias

import msgspec

from ronde.observe.stragglers import StragglerDetector
from ronde.text import format_ranks, shorten

WINDOW_NS = 5_000_000_000
"""The time that rates and shares cover."""
HELD_UP_WINDOW_NS = 10_000_000_000
"""The same for held-up time, which is known only when all members have reported an operation."""
MIN_CURRENT_WAIT_NS = 300_000_000
"""A current wait that is shorter than this is normal, and may be over by now."""
MIN_SLOW_SHARE = 0.03
"""A rank is called slow when each other rank waits for it at least this share of its time."""

RankState: TypeAlias = Literal["starting", "running", "left", "lost"]


class CurrentOperation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The operation a caller is blocked in right now."""

    op: str
    since_ns: int
    missing: tuple[int, ...] = ()
    """Members that have not arrived; empty when data moves."""
    is_waiting: bool = True
    """Whether it waits for other members; otherwise data moves."""
    named_operation: tuple[int, str] | None = None
    """Group and name of a named operation that has not started: only the coordinator knows who is missing."""


class ActivitySample(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one rank has done since its round began. Times are on the coordinator's clock."""

    at_ns: int
    steps: int = 0
    operations: int = 0
    bytes: int = 0
    waiting_ns: int = 0
    moving_ns: int = 0
    waited_for: tuple[tuple[int, int], ...] = ()
    """(rank, nanoseconds), where this rank knows by itself for whom it waited: named operations and messages."""
    current_operation: CurrentOperation | None = None
    pushes: tuple[int, int, int] = (0, 0, 0)
    """To a parameter server: how many, the sum of their staleness, and the largest."""


class RankActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. None stands for what is not known (yet)."""

    rank: int
    state: RankState
    why: str = ""
    """More about the state, such as how a rank was lost."""
    host: str = ""
    pid: int = 0
    worker: str = ""
    """The identity of its process; ranks may go to other processes in the next round."""
    steps: int = 0
    """As marked by ronde.mark_step(), which optimizers call, or pushed to a parameter server."""
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
    staleness: float | None = None
    """Of its last pushes to a parameter server, if there are any: how many updates of others came between a read and
    the push that used it, in the mean."""
    max_staleness: int | None = None
    """The largest staleness of all its pushes."""
    held_up_s: float = 0.0
    """How long other ranks have waited for this one in this round, all of them added up."""
    holding_up: float = 0.0
    """Share of its time that each other rank has lately waited for this one, on average."""
    doing: str = ""
    """What it is blocked in right now, as a sentence."""
    silent_s: float | None = None
    """Time since its last sample."""


class JobActivity(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks at one moment."""

    size: int
    round: int = -1
    """Number of the round under way, or of the last; -1 before the first."""
    slowest: int | None = None
    """The rank for which the others waited most lately, if for any."""
    ranks: tuple[RankActivity, ...] = ()


class ActivityTracker:
    """Keeps the samples of one round."""

    def __init__(self, size: int, now_ns: int) -> None:
        self._size = size
        self.stragglers = StragglerDetector()
        """Takes the arrivals that ranks report."""
        self._samples: dict[int, deque[ActivitySample]] = {}
        self._attributed_ns: dict[tuple[int, int], int] = {}
        """(who waited, for whom) -> how much of what it reported has been attributed."""
        self._held_up_history: deque[tuple[int, dict[int, float]]] = deque([(now_ns, {})])
        """(when, held-up time by rank until then), about one per second."""

    def add_sample(self, rank: int, sample: ActivitySample) -> None:
        kept = self._samples.setdefault(rank, deque())
        if kept and sample.at_ns <= kept[-1].at_ns:
            return  # its clock offset has changed; the next sample will do
        kept.append(sample)
        while len(kept) > 2 and sample.at_ns - kept[1].at_ns >= WINDOW_NS:
            kept.popleft()
        for other, waited_ns in sample.waited_for:
            if 0 <= other < self._size:
                new_ns = waited_ns - self._attributed_ns.get((rank, other), 0)
                self._attributed_ns[rank, other] = waited_ns
                self.stragglers.add_wait(other, max(0, new_ns))

    def held_up_ns(self) -> dict[int, float]:
        """Return by rank how long others have waited for it, current waits included."""
        found = dict(self.stragglers.held_up_ns)
        for rank, (current, missing) in self._find_blocked().items():
            for other in missing:
                waited_ns = self._samples[rank][-1].at_ns - current.since_ns
                found[other] = found.get(other, 0.0) + waited_ns / len(missing)
        return found

    def rank_reported(self, rank: int, now_ns: int) -> None:
        """Called when a rank has sent all its samples up to now."""
        self.stragglers.rank_reported(rank, now_ns)
        if now_ns - self._held_up_history[-1][0] < 1_000_000_000:
            return
        self._held_up_history.append((now_ns, self.held_up_ns()))
        while len(self._held_up_history) > 2 and now_ns - self._held_up_history[1][0] >= HELD_UP_WINDOW_NS:
            self._held_up_history.popleft()

    def holding_up(self, now_ns: int) -> dict[int, float]:
        """Return by rank the share of its time that each other rank has lately waited for it."""
        since_ns, before = self._held_up_history[0]
        if self._size < 2 or now_ns <= since_ns:
            return {}
        scale = 1.0 / (now_ns - since_ns) / (self._size - 1)
        now = self.held_up_ns()
        return {rank: max(0.0, scale * (held_ns - before.get(rank, 0.0))) for rank, held_ns in now.items()}

    def snapshot(self, now_ns: int) -> list[RankActivity]:
        """Return all ranks, as far as samples tell. The caller adds state, host and process."""
        held_up_ns, holding_up, blocked = self.held_up_ns(), self.holding_up(now_ns), self._find_blocked()
        return [
            msgspec.structs.replace(
                self._rank_snapshot(rank, now_ns, blocked.get(rank)),
                held_up_s=held_up_ns.get(rank, 0.0) / 1e9,
                holding_up=holding_up.get(rank, 0.0),
            )
            for rank in range(self._size)
        ]

    def _rank_snapshot(
        self, rank: int, now_ns: int, blocked: tuple[CurrentOperation, tuple[int, ...]] | None
    ) -> RankActivity:
        kept = self._samples.get(rank)
        if not kept:
            return RankActivity(rank=rank, state="starting")
        first, last = kept[0], kept[-1]
        now = RankActivity(
            rank=rank,
            state="running",
            steps=last.steps,
            staleness=_mean_staleness(first, last),
            max_staleness=last.pushes[2] if last.pushes[0] else None,
            operations=last.operations,
            doing=_describe_wait(*blocked, now_ns) if blocked else "",
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

    def _find_blocked(self) -> dict[int, tuple[CurrentOperation, tuple[int, ...]]]:
        """Return the ranks that were blocked for some time at their last samples, each with its operation and the
        members that this misses. A rank may name a neighbour that waits in the same operation: that is not missing."""
        by_operation: dict[str, list[tuple[int, CurrentOperation]]] = {}
        for rank, kept in self._samples.items():
            current = kept[-1].current_operation
            if current is not None and kept[-1].at_ns - current.since_ns >= MIN_CURRENT_WAIT_NS:
                by_operation.setdefault(current.op, []).append((rank, current))
        found: dict[int, tuple[CurrentOperation, tuple[int, ...]]] = {}
        for same in by_operation.values():
            missing = {other for _, current in same for other in current.missing} - {rank for rank, _ in same}
            found.update({rank: (current, tuple(sorted(missing))) for rank, current in same})
        return found


def _mean_staleness(first: ActivitySample, last: ActivitySample) -> float | None:
    """Return the mean of the pushes between two samples, or of all if there was none between."""
    before = first.pushes if last.pushes[0] > first.pushes[0] else (0, 0, 0)
    number = last.pushes[0] - before[0]
    return (last.pushes[1] - before[1]) / number if number else None


def find_slowest(holding_up: dict[int, float]) -> int | None:
    """Return the rank for which the others wait most, if they wait for at least MIN_SLOW_SHARE."""
    if not holding_up:
        return None
    rank = max(holding_up, key=lambda each: (holding_up[each], -each))
    return rank if holding_up[rank] >= MIN_SLOW_SHARE else None


def _describe_wait(current: CurrentOperation, missing: tuple[int, ...], now_ns: int) -> str:
    """Return a sentence such as `waits 3.2 s for rank 2 in allreduce sum float32[3]`."""
    whom = f" for {format_ranks(missing)}" if missing else ""
    what = "waits" if current.is_waiting or missing else "moves data for"
    return f"{what} {max(0, now_ns - current.since_ns) / 1e9:.1f} s{whom} in {shorten(current.op)}"
