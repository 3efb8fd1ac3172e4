"""How a channel of the mpi backend stands: what was finished here, who left, who gave up. And one call's waiting.

Which waits end when a member is gone:

    my call                     its notice            my wait
    collective number i         finished up to > i    goes on: its part is done, the data is on the way
    collective number i         finished up to <= i   ends: it will never come
    message i with that member  likewise, by the number of messages finished between us
    message with another one    closed                goes on
    message with another one    aborted               ends: an abort is for everybody
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

from ronde.comm.backend import VERDICT_S, Call, ChannelSpec
from ronde.comm.mpi.notices import Notice, NoticeBoard, Saying
from ronde.comm.mpi.requests import PATIENT_S, URGENT_S, Request, abandon, complete
from ronde.errors import OperationTimeout, PeerLost, RondeError, RoundEnded
from ronde.observe.events import name_ranks
from ronde.types import Deadline, Kind

__all__ = ["NAMING_S", "Lane", "Standing", "Wait", "lane_of"]

Lane: TypeAlias = tuple[Kind, int]
"""Calls of one lane are in order. All collectives are one; so is each direction of each pair of members."""

COLLECTIVE: Lane = (Kind.BARRIER, -1)

TELL_S = 0.1
"""After this long a wait is told to the others; after twice as long, who told nothing is missing."""

NAMING_S = 5 * TELL_S
"""A collective call is not given up before it has waited this long, whatever is left of its time limit: the others need
that long to tell that they wait, on a busy machine too, and a timeout has to name those that do not."""

WHY_LIMIT = 1024


def lane_of(call: Call) -> Lane:
    """The lane in which a call runs."""
    return (call.kind, call.peer) if call.kind in (Kind.SEND, Kind.RECEIVE) else COLLECTIVE


class Standing:
    """What all waits of a channel look at. Safe from any thread."""

    def __init__(self, spec: ChannelSpec, board: NoticeBoard) -> None:
        self.spec = spec
        self.rank = spec.members[spec.me]
        self.board = board
        self.num_finished: Counter[Lane] = Counter()
        self.aborted: tuple[int, str] | None = None
        self.broken = False
        """Whether MPI was left with requests that never complete."""
        self._lock = threading.Lock()
        self._ended_at: float | None = None

    def abort(self, lost: int, why: str) -> None:
        """End all waits, here and at the other members. The first abort wins."""
        with self._lock:
            if self.aborted is not None:
                return
            self.aborted = (lost, why)
        self.tell(Saying.ABORTED, lost, why)

    def tell(self, saying: Saying, lost: int = -1, why: str = "") -> None:
        """A notice to all other members, to each with what was finished between us."""
        for member in range(len(self.spec.members)):
            if member != self.spec.me:
                notice = Notice(
                    saying,
                    self.num_finished[COLLECTIVE],
                    self.num_finished[Kind.SEND, member],
                    self.num_finished[Kind.RECEIVE, member],
                    lost,
                    why[:WHY_LIMIT],
                )
                self.board.tell(member, notice)

    def check(self, call: Call) -> None:
        """Raises when this call, the next one of its lane, can never complete."""
        if self.aborted is not None:
            raise self._ended(call, *self.aborted)
        self.board.read()
        for member, notice in self.board.gone.items():
            if self._needs(member, notice, lane_of(call)) and (
                notice.saying is Saying.ABORTED or self._waited_for_why()
            ):
                raise self._ended(call, notice.lost, notice.why)

    def missing(self) -> tuple[int, ...]:
        """Members that did not tell that they wait in the same collective call as I do."""
        here = self.num_finished[COLLECTIVE]
        others = (member for member in range(len(self.spec.members)) if member != self.spec.me)
        return tuple(member for member in others if self.board.waiting.get(member, -1) < here)

    def _needs(self, member: int, notice: Notice, lane: Lane) -> bool:
        """Whether the lane's next call needs something of a member that is gone."""
        kind, peer = lane
        if lane == COLLECTIVE:
            return notice.num_rounds <= self.num_finished[lane]
        if member == peer:
            finished = notice.num_received if kind is Kind.SEND else notice.num_sent
            return finished <= self.num_finished[lane]
        return notice.saying is Saying.ABORTED

    def _waited_for_why(self) -> bool:
        now = time.monotonic()
        self._ended_at = self._ended_at or now
        return now - self._ended_at >= VERDICT_S

    def _ended(self, call: Call, lost: int, why: str) -> RondeError:
        if lost >= 0:
            return PeerLost(rank=self.rank, peer=lost, op=call.text, why=why)
        return RoundEnded(f"{call.text} cannot finish: {why}")


class Wait:
    """The waiting of one call: until when, and what for."""

    def __init__(self, standing: Standing, call: Call, deadline: Deadline) -> None:
        self.call = call
        self.ready_ns = 0
        self._standing = standing
        self._deadline = deadline
        self._since = time.monotonic()
        self._told = False

    def until(self, requests: Sequence[Request]) -> None:
        """Wait for requests; when they never will complete, raises why and leaves them behind."""
        try:
            complete(requests, self.check, URGENT_S if self.ready_ns else PATIENT_S)
        except BaseException:
            self._standing.broken = True
            abandon(requests, self.call)
            raise

    def ready(self) -> None:
        """Every member has arrived."""
        self.ready_ns = time.monotonic_ns()

    def next_round(self) -> None:
        """For a member that has joined: wait for what the others do next. The deadline is for each round: how long
        they go on is not this member's business."""
        self.ready_ns = 0
        self._deadline = Deadline(self._deadline.seconds)
        self._since = time.monotonic()
        self._told = False

    def check(self) -> None:
        """Raises when waiting has no sense any more; tells the others when it takes long."""
        self._standing.check(self.call)
        is_late = self._deadline.passed
        if is_late and self._can_name():
            raise OperationTimeout(f"{self.call.text} took over {self._deadline.seconds:g} s{self.for_whom()}")
        if not self._told and (is_late or self._waited_s() > TELL_S) and lane_of(self.call) == COLLECTIVE:
            self._told = True
            self._standing.tell(Saying.WAITING)

    def for_whom(self) -> str:
        """The missing members as the end of a sentence: ", waiting for rank 1"; empty when none is known."""
        missing = self.missing()
        return f", waiting for {name_ranks(self._standing.spec.members[each] for each in missing)}" if missing else ""

    def missing(self) -> tuple[int, ...]:
        """Members that have not arrived; none as long as that is not known."""
        lane = lane_of(self.call)
        if self.ready_ns:
            return ()
        if lane != COLLECTIVE:
            return (lane[1],)
        return self._standing.missing() if self._waited_s() > 2 * TELL_S else ()

    def _can_name(self) -> bool:
        """Whether a timeout now would name those that are missing."""
        return bool(self.ready_ns) or lane_of(self.call) != COLLECTIVE or self._waited_s() > NAMING_S

    def _waited_s(self) -> float:
        return time.monotonic() - self._since
