"""Brings the ranks together, round by round, and speaks for all of them. Run by a launcher, or by rank 0 in a thread.

It only carries out: who is in a round is decided by membership, what happens in it by round. What it adds is the wire
(a door for lifelines, a control server for messages), the clock, and the care that nobody ever waits for it in vain:
whatever ends it, every rank hears Ended or sees its lifeline close.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from ronde.comm.coordination.errands import Errands
from ronde.comm.coordination.greeting import LIFE, later, never, welcome
from ronde.comm.coordination.lifelines import Lifelines, Line, Seat
from ronde.comm.coordination.membership import Decision, Departure, Gathering, How
from ronde.comm.coordination.negotiator import Send
from ronde.comm.coordination.round import NEVER_NS, Round, RoundRules
from ronde.comm.coordination.sight import Sight
from ronde.comm.coordination.tracing import Tracing
from ronde.comm.coordination.watching import StackPoll, Watching
from ronde.net.addresses import format_address
from ronde.net.control import ControlServer
from ronde.net.door import Caller, Door
from ronde.net.keys import JobKey
from ronde.net.messages import (
    LEAVING_S,
    Beat,
    BeatBack,
    Bye,
    Ended,
    FromWorker,
    Join,
    Leave,
    Refused,
    StackQuery,
    StackReply,
    Stalled,
    TraceBatch,
    TraceOver,
    TraceWanted,
    Vitals,
)
from ronde.observe.events import name_ranks, shorten
from ronde.observe.stacks import RankStack
from ronde.observe.stall import Whereabouts
from ronde.observe.vitals import JobVitals
from ronde.settings import Settings
from ronde.types import Deadline, Member

__all__ = ["Coordinator"]

LAST_WORDS_NS = 10_000_000
"""A rank has died: its own last words may be a moment behind."""
LAUNCHER_NS = 200_000_000
"""Its line has ended: the launcher is about to say how."""
CLOSING_S = 5.0
"""Beyond all waits that were asked for: how long the thread may take to close its sockets."""

logger = logging.getLogger("ronde.coordinator")
stall_logger = logging.getLogger("ronde.stall")


class _Death(NamedTuple):
    """A rank whose end was seen; it is told to the others a moment later."""

    due_ns: int
    departure: Departure


class Coordinator:
    """Serves `rounds` rounds of `size` ranks; None for as many as come. start() it, and close() it at the end.

    It listens from the beginning, so that ranks may call before start().
    """

    def __init__(
        self, host: str, port: int, size: int, key: JobKey, *, settings: Settings, rounds: int | None = 1
    ) -> None:
        self._size = size
        self._shutdown_s = settings.shutdown_s
        self._rounds_left = rounds
        self._num_rounds = 0
        self._first_lost: tuple[int, str] | None = None
        """Of the rounds that are over."""
        self._last_whereabouts: Whereabouts | None = None
        """Of the same round."""
        self._round: Round | None = None
        self._sight = Sight()
        self._watching = Watching(size, self._sight.state)
        # The ranks' own clocks began a little earlier; whoever runs out of time should hear why, and from here.
        self._gathering = Gathering(size, settings.start_s - min(1.0, 0.1 * settings.start_s))
        self._rules = RoundRules(
            fusion_bytes=settings.fusion_bytes,
            stall_s=settings.stall_s,
            leaving_s=min(LEAVING_S, settings.shutdown_s),
            state=self._sight.state,
            host_name=self._sight.host_name,
        )
        self._dying: dict[int, _Death] = {}
        self._patience_ns = LAUNCHER_NS if rounds is None else LAST_WORDS_NS
        self._said = ""
        self._closing: Deadline | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        with ExitStack() as opened:
            self._tracing = Tracing(settings.timeline, settings.timeline_events)
            opened.callback(self._tracing.close)
            self._server = ControlServer(host, key)
            opened.callback(self._server.close, 0)
            self._events = Errands(self._server.wake)
            self._lifelines = Lifelines(self._server)
            # Last: from here on ranks come, and everything they need has to be there.
            self._door = self._open_door(host, port, key, settings.heartbeat_s)
            opened.pop_all()
        self.address = format_address(host, self._door.tcp_port)
        """`host:port` where ranks find it: what goes into RONDE_COORDINATOR."""

    def _open_door(self, host: str, port: int, key: JobKey, heartbeat_s: float) -> Door:
        return Door(
            key,
            unix=False,
            tcp=host,
            port=port,
            greet=lambda caller: self._refusal(caller) or self._let_in(caller),
            arrived=self._arrive,
            heartbeat_s=heartbeat_s,
        )

    def start(self, host_names: Sequence[str] = ()) -> None:
        """Begin to serve, in a thread. A launcher knows by what names its user calls the hosts, here by rank."""
        self._sight.host_names = host_names
        # Owned by the coordinator. Touches all state but for what the door's thread reads: the lifelines, which have a
        # lock, and whether rounds are left. Other threads reach it by self._events.
        self._thread = threading.Thread(target=self._serve, name="ronde-coordinator", daemon=True)
        self._thread.start()

    def lost(self, rank: int, why: str) -> None:
        """A rank's process has ended, says who started it. From every thread; also when the rank had left before."""
        self._events.put(lambda now_ns: self._hear_of_death(rank, why, now_ns))

    def first_lost(self) -> tuple[int, str] | None:
        """The first rank that was lost in the newest round that lost one, and why. From every thread.

        Its peers may have ended before it: they were told of the loss while it was still printing its traceback.
        """
        current = self._round
        return (current.first_lost if current is not None else None) or self._first_lost

    def whereabouts(self) -> Whereabouts | None:
        """Where ranks were when the rank of first_lost() failed, if that was for an operation. From every thread."""

        def find(now_ns: int) -> Whereabouts | None:
            current = self._round
            lost_now = current is not None and current.first_lost is not None
            return current.whereabouts() if current is not None and lost_now else self._last_whereabouts

        return self._events.ask(find, self._runs)

    def vitals(self) -> JobVitals:
        """How all ranks are. From every thread."""
        return self._events.ask(lambda now_ns: self._watching.vitals(self._gathering, now_ns), self._runs)

    def ask_stacks(self, deadline: Deadline) -> tuple[RankStack, ...]:
        """Where the programs of all ranks are, as far as they answer before the deadline. From every thread."""
        poll = StackPoll()

        def ask(now_ns: int) -> None:
            for rank in self._watching.begin_poll(poll):
                self._server.send(rank, StackQuery(poll.ticket))

        self._events.ask(ask, self._runs)
        poll.over.wait(deadline.left_s)
        return self._events.ask(lambda now_ns: self._watching.end_poll(poll, self._gathering), self._runs)

    def join(self, timeout_s: float) -> bool:
        """Wait until all rounds were served; whether they were."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self._runs()

    def _runs(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """End. If it serves a counted number of rounds, members of the last one get shutdown_s to leave before."""
        with self._lock:
            if self._closing is None:
                self._closing = Deadline(0.0 if self._rounds_left is None else self._shutdown_s)
        self._server.wake()
        if self._thread is None:
            self._close_all()
        elif not self.join(self._closing.left_s + CLOSING_S):
            logger.error("the coordinator's thread did not end; its sockets stay open")

    def __enter__(self) -> Coordinator:
        """Itself, started."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    # --- the door's thread -----------------------------------------------------------------------------------------

    def _refusal(self, caller: Caller) -> bytes | None:
        """Why a caller cannot come in, if so."""
        rank = caller.rank
        if caller.purpose != LIFE:
            return never(f"the coordinator has no use for {shorten(caller.purpose)!r}")
        if not 0 <= rank < self._size:
            return never(f"there is no rank {rank} among the {self._size} of this job; check RONDE_RANK and RONDE_SIZE")
        seat = self._lifelines.seat(rank, caller.note)
        if seat is Seat.HELD:
            self._events.put(lambda now_ns: self._hear_of_double(rank))
            return never(f"another process already is rank {rank} of this job; give each its own RONDE_RANK")
        if seat is Seat.ENDED or self._rounds_left == 0 or self._closing is not None:
            return later("the round before is not over")
        return None

    def _let_in(self, caller: Caller) -> bytes:
        # Before it hears the greeting, so that it is known before its Join comes.
        again = self._lifelines.vacate(caller.rank, caller.note)
        self._events.put(lambda now_ns: self._hear_of_coming(caller.rank, again), wake=False)
        return welcome(self._server.port)

    def _arrive(self, caller: Caller, line: Line) -> bool:
        """Take in a caller that was welcomed. Its Join may have come before; the round waits for this."""
        if self._lifelines.add(caller.rank, line, caller.note) is Seat.HELD:
            self._events.put(lambda now_ns: self._hear_of_double(caller.rank))
        self._server.wake()
        return True

    # --- the coordinator's thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        why = "the coordinator was closed by its host (the launcher, or rank 0)"
        try:
            while self._is_needed():
                self._step()
        except Exception as error:  # the thread's edge: nobody may wait for a coordinator that is no more
            logger.exception("the coordinator broke; the round ends")
            why = f"the coordinator broke: {error!r}"
        finally:
            self._say_the_end(why)
            self._close_all()

    def _is_needed(self) -> bool:
        if self._closing is None:
            return self._rounds_left != 0 or self._round is not None
        return self._round is not None and not self._closing.passed

    def _step(self) -> None:
        """Hear everything that was said, then act on it once: what came together may travel together."""
        messages = self._server.poll(self._patience_s(time.monotonic_ns()))
        now_ns = time.monotonic_ns()
        self._events.run_all(now_ns)
        self._lifelines.watch_new()
        for rank, message in messages:
            self._hear(rank, message, now_ns)
        for rank, how in self._lifelines.find_ended(self._server.readable()).items():
            self._dying.setdefault(rank, _Death(now_ns + self._patience_ns, how))
        if self._dying:
            self._bury(now_ns)
        self._gather(now_ns)
        if self._round is not None:
            self._send(self._round.advance(now_ns))
            for rank in self._round.vanished & self._round.present:
                self._dying.setdefault(rank, _Death(now_ns + self._patience_ns, Departure(How.PROCESS_GONE)))
            self._send(self._tracing.settle(self._round.present))
            if not self._round.present:
                self._end_round()

    def _patience_s(self, now_ns: int) -> float:
        due_ns = [death.due_ns for death in self._dying.values()]
        if self._round is not None:
            due_ns.append(self._round.due_ns(now_ns))
        if self._gathering.joins:
            due_ns.append(self._gathering.since_ns + int(self._gathering.limit_s * 1e9))
        if self._closing is not None:
            due_ns.append(now_ns + int(self._closing.left_s * 1e9))
        # Rounded up, or the last millisecond would be spent polling.
        return min(60.0, max(0.0, (min(due_ns, default=NEVER_NS) - now_ns) / 1e9 + 0.0005))

    def _hear(self, rank: int, message: FromWorker, now_ns: int) -> None:
        here = self._round is not None and rank in self._round.present
        if here and self._round is not None and self._round.hear(rank, message, now_ns):
            return
        if isinstance(message, Beat):
            self._server.send(rank, BeatBack(message.sent_ns, time.monotonic_ns()))
        elif isinstance(message, Vitals):
            if here:
                self._watching.note(rank, message, now_ns)
        elif isinstance(message, StackReply):
            self._watching.answer(rank, message)
        elif isinstance(message, TraceBatch | TraceWanted | TraceOver):
            self._send(self._tracing.hear(rank, message, self._round.present if self._round is not None else ()))
        elif isinstance(message, Leave):
            self._hear_leave(rank, message, now_ns)
        elif isinstance(message, Join) and not here:
            self._hear_join(rank, message, now_ns)
        else:  # late words of a rank that was given up, or of one that is out of step
            logger.info("dropped %s of rank %d, which is not said now", type(message).__name__, rank)

    def _hear_join(self, rank: int, message: Join, now_ns: int) -> None:
        if not 0 <= rank < self._size:
            self._server.send(rank, Refused(f"there is no rank {rank} among the {self._size} of this job"))
        elif self._rounds_left == 0:
            self._server.send(rank, Refused("the only round of this coordinator has begun without it"))
        else:
            self._gathering.join(rank, message, now_ns)

    def _hear_leave(self, rank: int, message: Leave, now_ns: int) -> None:
        departure = Departure.of_leave(message)
        self._dying.pop(rank, None)
        self._lifelines.release(rank)
        if self._round is not None and rank in self._round.present:
            if departure.is_loss:
                self._round.lose(rank, departure)
            else:
                self._round.leave(rank, departure, now_ns)
        self._gathering.withdraw(rank, departure.detail or "it gave up")
        self._server.send(rank, Bye())

    def _hear_of_coming(self, rank: int, again: bool) -> None:
        """A process was welcomed. `again`: it had a connection before, in the same attempt, and has given that up."""
        if again:
            self._dying.pop(rank, None)
        self._gathering.come(rank)

    def _hear_of_death(self, rank: int, why: str, now_ns: int) -> None:
        """From the launcher. It knows better than the kernel's "gone", but not as well as the rank itself."""
        if self._waits_with_others(rank):
            self._dying[rank] = _Death(now_ns + LAST_WORDS_NS, Departure(How.PROCESS_ENDED, why))
        else:
            self._gathering.end(rank, why)

    def _waits_with_others(self, rank: int) -> bool:
        return rank in self._gathering.joins or (self._round is not None and rank in self._round.present)

    def _hear_of_double(self, rank: int) -> None:
        logger.warning("a second process says that it is rank %d; it was sent away", rank)
        if self._round is None or rank not in self._round.present:
            self._gathering.double(rank)

    def _bury(self, now_ns: int) -> None:
        """Those whose time for last words is over are lost."""
        for rank in [rank for rank, death in self._dying.items() if death.due_ns <= now_ns]:
            departure = self._dying.pop(rank).departure
            if self._waits_with_others(rank):
                logger.warning("rank %d is lost: %s", rank, departure.words)
                self._gathering.end(rank, departure.words)
                if self._round is not None and rank in self._round.present:
                    self._round.lose(rank, departure)
            self._lifelines.release(rank)
            self._server.forget(rank)

    # --- rounds ----------------------------------------------------------------------------------------------------

    def _gather(self, now_ns: int) -> None:
        if not self._gathering.joins:
            return
        busy = frozenset(self._round.present) if self._round is not None else frozenset[int]()
        decision = self._gathering.decide(now_ns, self._lifelines.watched(), busy)
        if decision is None:
            return
        if decision.reason != self._said:
            self._said = decision.reason
            logger.info("round %d: %s", self._num_rounds, decision.reason)
        if decision.members is not None:
            self._begin_round(decision, decision.members, now_ns)
        elif decision.refused:
            refused = self._gathering.settle(decision)
            self._send([Send(refused, Refused(decision.reason))])
            for rank in refused:  # each may try anew, and its former connection is not to be in its way
                self._lifelines.release(rank)

    def _begin_round(self, decision: Decision, members: tuple[Member, ...], now_ns: int) -> None:
        if self._round is not None:
            self._end_round()
        groups = self._gathering.joins[0].groups
        self._sight.begin(self._gathering.joins.values())
        self._gathering.settle(decision)
        self._round = Round(members, groups, self._rules, now_ns)
        self._round.welcome(self._num_rounds)
        self._watching.begin(self._round, self._num_rounds, now_ns)
        self._num_rounds += 1
        if self._rounds_left is not None:
            self._rounds_left -= 1

    def _end_round(self) -> None:
        assert self._round is not None
        logger.info("round %d is over", self._num_rounds - 1)
        if self._round.first_lost is not None:
            self._first_lost, self._last_whereabouts = self._round.first_lost, self._round.whereabouts()
        self._tracing.end_round()
        self._round = None
        self._said = ""

    def _send(self, sends: list[Send]) -> None:
        send = self._server.send
        for ranks, message in sends:
            if type(message) is Stalled:
                stall_logger.warning("%s", message.report)
            for rank in ranks:
                send(rank, message)

    def _say_the_end(self, why: str) -> None:
        try:
            if self._round is not None and self._round.present:
                logger.info("the round ends with %s still in it: %s", name_ranks(self._round.present), why)
                self._send([Send(tuple(self._round.present), Ended(why))])
            self._send([Send(tuple(self._gathering.joins), Refused(why))])
        except Exception:  # they learn it from their lifelines
            logger.exception("the end could not be told")

    def _close_all(self) -> None:
        self._door.close()
        self._server.close()  # sends what was said last: who also sees the end of its line should hear why first
        self._lifelines.close()
        self._watching.close()
        self._tracing.close()
