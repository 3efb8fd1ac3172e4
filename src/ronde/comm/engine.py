"""The worker's thread for everything that is not data: announcements, answers, losses, heartbeats. One per round.

User threads put named works and messages into a queue; the engine sends all that is there as one message. It sleeps in
one poll of the control socket and the lifeline, and is woken when somebody puts something into the empty queue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ronde.comm.named import Named
from ronde.comm.presence import Presence
from ronde.comm.pulse import Pulse
from ronde.comm.tracer import Tracer
from ronde.comm.watch import LaneWatch
from ronde.comm.wording import ranks_text
from ronde.comm.work import Board, NamedWork
from ronde.errors import Mismatch, OperationTimeout, PeerLost, RondeError, RoundEnded
from ronde.net.messages import (
    Announce,
    Beat,
    BeatBack,
    Bye,
    Ended,
    Failed,
    FromCoordinator,
    FromWorker,
    GroupChanged,
    GroupWanted,
    Leave,
    Lost,
    Missing,
    Request,
    Run,
    StackQuery,
    StackReply,
    Stalled,
    Trace,
    TraceChanged,
    TraceWanted,
    Unknown,
)
from ronde.net.sockets import find_error, unreachable
from ronde.observe.clock import ClockOffset
from ronde.observe.events import PeerGone, StallReported
from ronde.observe.recorder import Recorder
from ronde.observe.stacks import where_is_main_thread
from ronde.types import Deadline

__all__ = ["Control", "Engine"]

BEAT_NS = 1_000_000_000
FIRST_BEATS = 16
"""So many follow each other at once: the clocks' distance is known as well as the quickest of them was."""
LAST_WORDS_S = 0.2
"""After the lifeline has ended, the reason may still be on its way."""

logger = logging.getLogger("ronde.comm")


class Control(Protocol):
    """The way to the coordinator, as net.control.ControlClient has it. Only wake() is for other threads."""

    def send(self, message: FromWorker) -> None:
        """Say something, without waiting."""

    def poll(self, timeout_s: float) -> list[FromCoordinator]:
        """What was said, oldest first."""

    def unwatch(self, fd: int) -> None:
        """Stop watching this descriptor."""

    def readable(self) -> set[int]:
        """The watched descriptors that were readable at the end of the last poll()."""

    def wake(self) -> None:
        """End a poll early."""

    def close(self) -> None:
        """Send what was said last, and free everything."""


class Engine:
    """One thread does everything; others may only call announce, ask, ask_trace, leave and stop."""

    def __init__(
        self,
        control: Control,
        presence: Presence,
        recorder: Recorder,
        *,
        lifeline: int = -1,
        coordinator_rank: int = -1,
        stall_s: float = 0.0,
        watched: bool = False,
        early: Sequence[FromCoordinator] = (),
    ) -> None:
        self.board = Board(recorder, self._put)
        self._control = control
        self._presence = presence
        self._recorder = recorder
        self._lifeline = lifeline
        self._coordinator_rank = coordinator_rank
        """The rank that hosts the coordinator; -1 when the launcher does."""
        self._watch = LaneWatch(stall_s)
        self._pulse = Pulse(recorder, presence, self.board) if watched else None
        """Only when somebody listens: a launcher that hosts the coordinator."""
        self._tracer = Tracer(recorder, control.send)
        self._clock = ClockOffset()
        self._offset_ns = 0
        self._num_beats_back = 0
        self._queue: deque[NamedWork | FromWorker] = deque()
        self._asleep = False
        self._stopping = False
        self._goodbye = threading.Event()
        self._early = early
        self._answers: list[GroupChanged] = []
        """Changes of groups that nobody has fetched yet; under the board's lock."""
        self._trace_answers: list[TraceChanged] = []
        """As well."""
        self._handlers = self._make_handlers()
        # Owned by the engine. Touches the control client, and through the presence lanes and named works.
        self._thread = threading.Thread(target=self._work, name="ronde-engine", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    # --- for other threads -----------------------------------------------------------------------------------------

    def announce(self, named: Named, work: NamedWork) -> None:
        """This rank is ready for a named operation."""
        named.begin(work)
        self._put(work)

    def ask(self, wanted: GroupWanted, deadline: Deadline) -> GroupChanged:
        """Ask for a change of groups, and wait until all ranks have."""
        self._put(wanted)
        changed = self.board.changed
        with changed:
            while True:
                for answer in self._answers:
                    if answer.id == wanted.id if wanted.id else answer.ranks == wanted.ranks and not answer.removed:
                        self._answers.remove(answer)
                        return answer
                if self._presence.over is not None:
                    raise self._presence.over
                if not changed.wait(deadline.left_s) and deadline.passed:
                    what = f"remove group {wanted.id}" if wanted.id else f"make a group of {ranks_text(wanted.ranks)}"
                    raise OperationTimeout(f"not every rank of the job asked to {what} within {deadline.seconds:g} s")

    def ask_trace(self, wanted: TraceWanted, deadline: Deadline) -> str:
        """Ask for a timeline, or for its end, and wait until it is so. Why it cannot be; empty when it is. For one
        thread at a time."""
        self._put(wanted)
        changed = self.board.changed
        with changed:
            while not self._trace_answers:
                if self._presence.over is not None:
                    raise self._presence.over
                if not changed.wait(deadline.left_s) and deadline.passed:
                    raise OperationTimeout(f"the timeline was not {'begun' if wanted.path else 'ended'} in time")
            return self._trace_answers.pop().why

    def now_ns(self) -> int:
        """The time on the coordinator's clock, as well as it is known."""
        return time.monotonic_ns() + self._offset_ns

    def leave(self, leave: Leave, deadline: Deadline) -> None:
        """Say goodbye. An orderly goodbye waits for the answer."""
        self._put(leave)
        if leave.orderly and self._presence.over is None:
            self._goodbye.wait(deadline.left_s)

    def stop(self) -> None:
        """Send what is left to say and end the thread. Idempotent."""
        if self._thread.is_alive():
            self._stopping = True
            self._control.wake()
            self._thread.join()

    def _put(self, item: NamedWork | FromWorker) -> None:
        self._queue.append(item)
        # The engine says that it sleeps before it looks at the queue for the last time; we look whether it sleeps
        # after filling the queue. So one of us always sees the other.
        if self._asleep:
            self._asleep = False
            self._control.wake()

    # --- the engine's thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._handle(self._early)
            next_beat_ns = 0
            while not self._stopping:
                next_beat_ns = self._turn(next_beat_ns)
            self._send_queue()
        except Exception as error:  # the thread's edge: everybody who waits must learn of it
            logger.exception("the engine broke")
            self._end(RoundEnded(f"ronde's engine broke: {error!r}"))

    def _turn(self, next_beat_ns: int) -> int:
        now_ns = time.monotonic_ns()
        if now_ns >= next_beat_ns:
            next_beat_ns = now_ns + BEAT_NS
            self._beat(now_ns)
        for waiting in self._watch.due(self._presence.lanes, now_ns, self._offset_ns):
            self._control.send(waiting)
        self._tracer.send_due(now_ns)
        self._asleep = True
        if not self._queue:
            left_s = (next_beat_ns - now_ns) / 1e9
            self._listen(min(left_s, self._watch.left_s(now_ns), self._tracer.left_s(now_ns)))
        self._asleep = False
        self._send_queue()
        return next_beat_ns

    def _listen(self, timeout_s: float) -> None:
        self._handle(self._control.poll(timeout_s))
        if self._lifeline in self._control.readable():
            self._lifeline_ended()

    def _handle(self, messages: Sequence[FromCoordinator]) -> None:
        for message in messages:
            handle = self._handlers.get(type(message))
            if handle is not None:  # a Welcome may come twice
                handle(message)

    def _send_queue(self) -> None:
        queue = self._queue
        new: list[Request] = []
        known: list[int] = []
        while queue:
            item = queue.popleft()
            if isinstance(item, NamedWork):
                named = self._presence.named(item.group)
                how = None if named is None else named.announcement(item)
                if isinstance(how, int):
                    known.append(how)
                elif how is not None:
                    new.append(how)
            else:
                self._send_announce(new, known)
                if isinstance(item, Leave):
                    self._send_vitals(time.monotonic_ns())
                    self._tracer.send()
                self._control.send(item)
        self._send_announce(new, known)

    def _send_announce(self, new: list[Request], known: list[int]) -> None:
        if new or known:
            self._control.send(Announce(tuple(new), tuple(known)))
            new.clear()
            known.clear()

    def _beat(self, now_ns: int) -> None:
        self._control.send(Beat(now_ns))
        self._send_vitals(now_ns)

    def _send_vitals(self, now_ns: int) -> None:
        if self._pulse is not None:
            self._control.send(self._pulse.take(now_ns, self._offset_ns))

    def _lifeline_ended(self) -> None:
        cut_off = unreachable(find_error(self._lifeline))
        self._control.unwatch(self._lifeline)
        self._lifeline = -1
        if not self._goodbye.is_set():
            self._listen(LAST_WORDS_S)
        if self._goodbye.is_set():  # we have left, or have heard why the round is over
            return
        if self._coordinator_rank >= 0:
            why = cut_off or "it hosted the coordinator, which is gone"
            self._end(PeerLost(rank=self._recorder.rank, peer=self._coordinator_rank, why=why))
        else:
            gone = f"the coordinator is gone ({cut_off})" if cut_off else "the coordinator is gone"
            self._end(RoundEnded(f"{gone}; look at the output of the launcher"))

    def _end(self, error: RondeError) -> None:
        self._presence.end(error)
        self._goodbye.set()
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        with self.board.changed:
            self.board.changed.notify_all()

    # --- what the coordinator says ---------------------------------------------------------------------------------

    def _make_handlers(self) -> dict[type[Any], Callable[[Any], None]]:
        return {
            Run: self._on_run,
            Failed: self._on_failed,
            Unknown: self._on_unknown,
            Missing: self._on_missing,
            Lost: self._on_lost,
            Ended: self._on_ended,
            GroupChanged: self._on_group_changed,
            StackQuery: self._on_stack_query,
            Stalled: self._on_stalled,
            Trace: self._tracer.hear,
            TraceChanged: self._on_trace_changed,
            BeatBack: self._on_beat_back,
            Bye: self._on_bye,
        }

    def _on_run(self, run: Run) -> None:
        named = self._presence.named(run.group)
        if named is not None:
            named.run(run.items, run.late)

    def _on_failed(self, failed: Failed) -> None:
        named = self._presence.named(failed.group)
        if named is not None:
            named.fail(failed.name, Mismatch(failed.why))

    def _on_unknown(self, unknown: Unknown) -> None:
        for named in self._presence.all_named:
            request = named.forgotten(unknown.id)
            if request is not None:
                self._control.send(Announce(new=(request,)))

    def _on_missing(self, missing: Missing) -> None:
        named = self._presence.named(missing.group)
        if named is not None:
            named.note_missing(missing.name, missing.ranks)

    def _on_lost(self, lost: Lost) -> None:
        rank = self._recorder.rank
        self._recorder.emit(PeerGone(at_ns=time.monotonic_ns(), rank=rank, peer=lost.rank, why=lost.why))
        self._presence.lose(lost.rank, lost.why)
        self._wake_waiters()

    def _on_ended(self, ended: Ended) -> None:
        self._end(RoundEnded(ended.why))

    def _on_group_changed(self, changed: GroupChanged) -> None:
        with self.board.changed:
            self._answers.append(changed)
            self.board.changed.notify_all()

    def _on_trace_changed(self, changed: TraceChanged) -> None:
        with self.board.changed:
            self._trace_answers.append(changed)
            self.board.changed.notify_all()

    def _on_stack_query(self, query: StackQuery) -> None:
        line, stack = where_is_main_thread()
        self._control.send(StackReply(query.ticket, line, stack))

    def _on_stalled(self, stalled: Stalled) -> None:
        self._recorder.emit(
            StallReported(
                at_ns=time.monotonic_ns(),
                rank=self._recorder.rank,
                op=stalled.op,
                group=stalled.group,
                waited_s=stalled.waited_s,
                missing=stalled.missing,
                report=stalled.report,
            )
        )

    def _on_beat_back(self, answer: BeatBack) -> None:
        now_ns = time.monotonic_ns()
        self._num_beats_back += 1
        if self._num_beats_back < FIRST_BEATS:
            self._control.send(Beat(now_ns))
        if self._clock.add(answer.sent_ns, answer.coordinator_ns, now_ns):
            offset_ns, error_ns = self._clock.offset_ns, self._clock.error_ns(now_ns) or 0.0
            # Clocks that differ by less than one can measure are one clock: this host's.
            self._offset_ns = 0 if abs(offset_ns) <= error_ns else offset_ns
            self._recorder.set_clock_offset(self._offset_ns)

    def _on_bye(self, bye: Bye) -> None:
        self._goodbye.set()
