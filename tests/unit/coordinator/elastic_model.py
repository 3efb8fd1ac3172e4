"""A model of an elastic job for model checks: the real CoordinatorCore, and workers that are a few numbers each.

A worker synchronizes its state at the start of a round, then takes steps, then meets the others in a barrier, and
leaves with FINISHED. Each of these is a collective: it can be finished by a member when all members of the round have
contributed. State is the history of the steps: the round in which each of them was finished.

What may happen is an action; every order of actions is possible. A worker that knows of a lost rank may abandon its
round, and may also finish what all have contributed to, as the messages race with the data. Messages of the coordinator
arrive at once, but for RoundChangeWanted and those to suspended workers: an earlier arrival allows nothing else.
"""

from __future__ import annotations

import copy
import enum
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from ronde.coordinator.coordinator import (
    CoordinatorCore,
    MessageReceived,
    ProcessExited,
    RankConnected,
    RankDisconnected,
)
from ronde.coordinator.elastic_rounds import ElasticRounds
from ronde.coordinator.negotiation import Send
from ronde.coordinator.round_planning import ElasticLimits
from ronde.coordinator.rounds import MembershipEnd
from ronde.net.handshake import ConnectionRequest
from ronde.net.messages import (
    LIVENESS,
    VERSION,
    AdmissionStatus,
    CoordinatorMessage,
    EndRound,
    JoinRefused,
    JoinRound,
    LeaveConfirmed,
    LeaveReason,
    LeaveRound,
    RankHeartbeat,
    RankLost,
    RefusalKind,
    RoundChangeWanted,
    RoundStarted,
    WaitingTooLong,
    WorkerMessage,
)
from ronde.settings import Settings
from ronde.types import Member

S = 10**9
SETTINGS = Settings.load({}, environ={})
SUSPEND_S = 5.0
SHORT_S = 1.5
"""Longer than all grace periods, and shorter than the silence after which a worker is not started with."""
LONG_S = 12.0
"""Longer than it takes until a suspended member is left behind."""


class Stage(enum.Enum):
    """Where a worker is. It is in the round in the first two."""

    COMPUTING = enum.auto()
    WAITING = enum.auto()
    """It has contributed to the next collective."""
    LEFT = enum.auto()
    """It has left the round, and will connect again."""
    JOINING = enum.auto()
    DEAD = enum.auto()
    DONE = enum.auto()
    """It has finished the job, or was told that others have."""
    PREEMPTED = enum.auto()
    REFUSED = enum.auto()
    """It was told that it was left behind."""


IN_ROUND = (Stage.COMPUTING, Stage.WAITING)
ENDED = (Stage.DEAD, Stage.DONE, Stage.PREEMPTED, Stage.REFUSED)


class Action(NamedTuple):
    name: str
    number: int = -1


FAULTS = ("kill", "kill leaving", "suspend", "hang", "preempt", "add")


@dataclass
class Worker:
    number: int
    stage: Stage = Stage.LEFT
    round: int = 0
    """The id of its round."""
    members: tuple[str, ...] = ()
    num_collectives: int = 0
    """Those of the round that it has finished; the first one is the synchronization."""
    history: tuple[int, ...] | None = None
    """The round in which each of its steps was finished; None for a newcomer, which holds no state."""
    sender: str = ""
    inbox: list[CoordinatorMessage] = field(default_factory=list)
    is_suspended: bool = False
    hangs: bool = False
    """Whether its program is stuck in something that is not ronde's. It is heard."""
    knows_loss: bool = False
    wants_change: bool = False
    is_preempted: bool = False
    is_fresh: bool = True
    """Whether it is in init(), or has begun with the state of its script, and not as one that gets it from others."""
    disconnect_unseen: bool = False
    exit_unseen: bool = False

    @property
    def identity(self) -> str:
        return f"worker{self.number}"


_T = TypeVar("_T")


def _copy(original: _T) -> _T:
    """A copy of the object and of the containers in it."""
    made = copy.copy(original)
    for name, value in getattr(made, "__dict__", {}).items():
        if isinstance(value, dict | set | list):
            setattr(made, name, value.copy())
    return made


class ElasticModel:
    """`num_workers` workers are in the first round. The job has `num_steps` steps."""

    def __init__(self, num_workers: int, num_steps: int, *, max_ranks: int | None = None) -> None:
        self.num_steps = num_steps
        self.now_ns = 1000 * S
        self.core = CoordinatorCore(
            num_workers,
            SETTINGS,
            rounds=None,
            limits=ElasticLimits(start_ranks=num_workers, max_ranks=max_ranks, suspend_s=SUSPEND_S, timeout_s=1e9),
            new_round_id=self._next_round,
        )
        self.workers = [Worker(number, history=()) for number in range(num_workers)]
        self.contributions: dict[tuple[int, int], dict[str, bool]] = {}
        """By round and collective, who has contributed to it, and whether that worker wants a change."""
        self.state_of_round: dict[int, tuple[int, ...]] = {}
        """By round, the state that its members take at its start."""
        self.newest_round = 0
        self.num_attempts = 0
        self.problems: list[str] = []
        for worker in self.workers:
            self._connect(worker)
        assert all(worker.stage is Stage.COMPUTING for worker in self.workers)

    def copy(self) -> ElasticModel:
        """A model that goes another way from here. What no action here depends on is shared: queries, the timeline, and
        the negotiation of named operations, of which there are none."""
        made = _copy(self)
        made.workers = [_copy(worker) for worker in self.workers]
        made.contributions = {key: dict(given) for key, given in self.contributions.items()}
        core = made.core = _copy(self.core)
        core._new_round_id = made._next_round
        core._connections = {number: _copy(connection) for number, connection in core._connections.items()}
        core._round = _copy(core._round) if core._round is not None else None
        elastic = core._elastic = _copy(made.elastic)
        elastic._workers = {number: _copy(worker) for number, worker in elastic._workers.items()}
        return made

    @property
    def elastic(self) -> ElasticRounds:
        assert self.core._elastic is not None
        return self.core._elastic

    def _next_round(self) -> int:
        return self.newest_round + 1

    def key(self) -> Hashable:
        """Equal for two models in which the same can happen from now on."""
        core, elastic = self.core, self.elastic
        known = tuple(
            (
                number,
                worker.rank,
                worker.is_member,
                worker.join is not None,
                min(elastic._now_ns - worker.heard_ns, int(SUSPEND_S * S)) if self.workers[number].is_suspended else 0,
                worker.is_missed,
            )
            for number, worker in sorted(elastic._workers.items())
        )
        round = core._round
        in_round = (
            (tuple(sorted(round.present)), tuple(sorted(round._leaving)), tuple(sorted(round.late))) if round else ()
        )
        exits = tuple(sorted((number, end.reason) for number, (_, end) in core._reported_exits.items()))
        open_connections = tuple(sorted((number, each.is_open) for number, each in core._connections.items()))
        flags = (elastic._has_loss, elastic._is_finished, core._change_wanted_in, self.newest_round)
        workers = tuple(
            (
                *(worker.stage, worker.round, worker.num_collectives, worker.history, worker.is_suspended),
                *(worker.knows_loss, worker.wants_change, worker.is_preempted, worker.is_fresh, worker.hangs),
                *(worker.disconnect_unseen, worker.exit_unseen, tuple(map(repr, worker.inbox))),
            )
            for worker in self.workers
        )
        contributions = tuple(
            (key, tuple(sorted(given.items())))
            for key, given in sorted(self.contributions.items())
            if any(worker.round == key[0] and worker.stage in IN_ROUND for worker in self.workers)
        )
        return known, in_round, exits, open_connections, flags, workers, contributions, tuple(sorted(elastic._lost))

    # --- what may happen -------------------------------------------------------------------------------------------

    def actions(self) -> list[Action]:
        """All that may happen now, but for faults."""
        found = []
        for worker in self.workers:
            number = worker.number
            if worker.disconnect_unseen:
                found.append(Action("see disconnect", number))
            if worker.exit_unseen:
                found.append(Action("see exit", number))
            if worker.is_suspended or worker.hangs or worker.stage in ENDED:
                continue
            if worker.stage is Stage.COMPUTING:
                found.append(Action("contribute", number))
            if worker.stage is Stage.WAITING and self._is_complete(worker):
                found.append(Action("finish", number))
            if worker.stage in IN_ROUND and worker.knows_loss:
                found.append(Action("abandon", number))
            if worker.stage is Stage.WAITING and any(self.workers[other].hangs for other in self._missing(worker)):
                found.append(Action("time out", number))
            if worker.inbox and worker.stage in IN_ROUND:
                found.append(Action("hear of newcomers", number))
            if worker.stage is Stage.LEFT:
                found.append(Action("connect", number))
        if self.core._reported_exits or (self.core._round is not None and self.core._round._leaving):
            found.append(Action("a second passes"))
        return found

    def slow_actions(self) -> list[Action]:
        """What happens to suspended workers, and to those that hang."""
        suspended = [worker for worker in self.workers if worker.is_suspended or worker.hangs]
        found = [Action("wake", worker.number) for worker in suspended]
        if any(worker.number in self.elastic._workers for worker in suspended):
            found.append(Action("a long time passes"))
        return found

    def faults(self) -> list[Action]:
        found = [Action("add")]
        for worker in self.workers:
            if worker.stage in ENDED:
                continue
            found.append(Action("kill", worker.number))
            if worker.stage in IN_ROUND and not worker.is_suspended and worker.knows_loss:
                found.append(Action("kill leaving", worker.number))
            if not (worker.is_suspended or worker.hangs):
                found.append(Action("suspend", worker.number))
                if worker.stage is Stage.COMPUTING:
                    found.append(Action("hang", worker.number))
            if not worker.is_preempted and worker.stage in IN_ROUND:
                found.append(Action("preempt", worker.number))
        return found

    def do(self, action: Action) -> None:
        if action.name == "add":
            self.workers.append(Worker(len(self.workers)))
            self._connect(self.workers[-1])
        elif action.name == "a second passes":
            self._pass_time(SHORT_S)
        elif action.name == "a long time passes":
            self._pass_time(LONG_S)
        else:
            actions: dict[str, Callable[[Worker], None]] = {
                "see disconnect": self._see_disconnect,
                "see exit": self._see_exit,
                "contribute": self._contribute,
                "finish": self._finish,
                "abandon": lambda worker: self._leave(worker, LeaveReason.REJOINING),
                "time out": self._time_out,
                "hear of newcomers": self._hear_of_newcomers,
                "connect": self._connect,
                "wake": self._wake,
                "kill": self._kill,
                "kill leaving": self._kill_leaving,
                "suspend": lambda worker: setattr(worker, "is_suspended", True),
                "hang": lambda worker: setattr(worker, "hangs", True),
                "preempt": self._preempt,
            }
            actions[action.name](self.workers[action.number])
        self._check_histories()

    # --- in the round ----------------------------------------------------------------------------------------------

    def _is_complete(self, worker: Worker) -> bool:
        given = self.contributions.get((worker.round, worker.num_collectives), {})
        return set(worker.members) <= given.keys()

    def _missing(self, worker: Worker) -> list[int]:
        """The workers that have not contributed to what this one waits in."""
        given = self.contributions.get((worker.round, worker.num_collectives), {})
        return [other.number for other in self.workers if other.identity in {*worker.members} - given.keys()]

    def _time_out(self, worker: Worker) -> None:
        missing = tuple(worker.members.index(self.workers[number].identity) for number in self._missing(worker))
        self._leave(worker, LeaveReason.REJOINING, missing)

    def _contribute(self, worker: Worker) -> None:
        given = self.contributions.setdefault((worker.round, worker.num_collectives), {})
        given[worker.identity] = worker.wants_change
        worker.stage = Stage.WAITING

    def _finish(self, worker: Worker) -> None:
        given = self.contributions[worker.round, worker.num_collectives]
        is_sync = worker.num_collectives == 0
        worker.num_collectives += 1
        worker.stage = Stage.COMPUTING
        if is_sync:
            worker.history = self.state_of_round[worker.round]
            return
        assert worker.history is not None
        if len(worker.history) == self.num_steps:  # that was the barrier
            self._leave(worker, LeaveReason.FINISHED)
            return
        worker.history = (*worker.history, worker.round)
        if worker.round != self.newest_round and not self._is_lost(worker):
            self.problems.append(f"worker {worker.number} took a step in a round after a later one had started")
        if any(given[identity] for identity in worker.members):
            self._leave(worker, LeaveReason.PREEMPTED if worker.is_preempted else LeaveReason.REJOINING)

    def _leave(self, worker: Worker, reason: LeaveReason, missing: tuple[int, ...] = ()) -> None:
        ends = {LeaveReason.FINISHED: Stage.DONE, LeaveReason.PREEMPTED: Stage.PREEMPTED}
        worker.stage = ends.get(reason, Stage.LEFT)
        worker.inbox.clear()
        round, worker.knows_loss, worker.wants_change = worker.round, False, worker.is_preempted
        self._send(worker, LeaveRound(reason, missing=missing), round)
        if worker.stage in ENDED:
            worker.exit_unseen = True

    def _hear_of_newcomers(self, worker: Worker) -> None:
        worker.inbox.clear()
        worker.wants_change = True

    # --- connections and faults ------------------------------------------------------------------------------------

    def _connect(self, worker: Worker) -> None:
        """Connect and ask to be in the next round."""
        self.num_attempts += 1
        attempt = str(self.num_attempts)
        is_ready = not worker.is_fresh or worker.history is not None
        request = ConnectionRequest(LIVENESS, worker.number, attempt, worker.identity, ready=is_ready)
        admission = self.core.admit(request, 1)
        if admission.status is AdmissionStatus.CANDIDATE:
            worker.is_fresh = False
        if admission.status in (AdmissionStatus.RETRY, AdmissionStatus.CANDIDATE):
            return
        if admission.status is AdmissionStatus.REFUSED:
            self._refused(worker, admission.refusal_kind)
            return
        worker.sender, worker.stage = admission.sender, Stage.JOINING
        self._deliver(self.core.handle(RankConnected(worker.number, worker.sender, attempt), self.now_ns))
        self._join(worker)

    def _join(self, worker: Worker) -> None:
        member = Member(-1, "here", worker.number, "", worker=worker.identity)
        self._send(worker, JoinRound(VERSION, 0, member, has_state=worker.is_fresh or worker.history is not None), 0)

    def _refused(self, worker: Worker, kind: RefusalKind) -> None:
        if kind is RefusalKind.BEGUN:
            worker.stage, worker.is_fresh = Stage.LEFT, False
            return
        worker.stage = Stage.DONE if kind is RefusalKind.FINISHED else Stage.REFUSED
        worker.exit_unseen = True
        if kind is RefusalKind.STATE_LOST:  # the launcher starts another one in its place
            self.workers.append(Worker(len(self.workers)))
            return
        if kind is not RefusalKind.FINISHED and not self._is_lost(worker):
            self.problems.append(f"worker {worker.number} was refused ({kind.name}) although it was not lost")

    def _kill(self, worker: Worker) -> None:
        worker.disconnect_unseen = worker.stage in (*IN_ROUND, Stage.JOINING)
        worker.exit_unseen = True
        worker.stage, worker.is_suspended, worker.hangs = Stage.DEAD, False, False
        worker.inbox.clear()

    def _kill_leaving(self, worker: Worker) -> None:
        """It dies right after it has sent LeaveRound, which comes after the end of its connection was seen."""
        round = worker.round
        self._kill(worker)
        self._see_disconnect(worker)
        self._send(worker, LeaveRound(LeaveReason.REJOINING), round)

    def _see_disconnect(self, worker: Worker) -> None:
        worker.disconnect_unseen = False
        end = MembershipEnd(LeaveReason.PROCESS_GONE)
        self._deliver(self.core.handle(RankDisconnected(worker.number, worker.sender, end), self.now_ns))
        self._advance()

    def _see_exit(self, worker: Worker) -> None:
        worker.exit_unseen = False
        self._deliver(self.core.handle(ProcessExited(worker.number, "killed"), self.now_ns))
        self._advance()

    def _preempt(self, worker: Worker) -> None:
        worker.is_preempted = worker.wants_change = True

    def _wake(self, worker: Worker) -> None:
        worker.is_suspended = worker.hangs = False
        messages, worker.inbox = worker.inbox, []
        for message in messages:
            self._receive(worker, message)

    def _pass_time(self, seconds: float) -> None:
        """Workers that are not suspended send heartbeats, and report for whom they have waited."""
        end_ns = self.now_ns + int(seconds * S)
        while self.now_ns < end_ns:
            self.now_ns = min(end_ns, self.now_ns + S // 2)
            for worker in self.workers:
                if worker.is_suspended or worker.stage not in (*IN_ROUND, Stage.JOINING):
                    continue
                if worker.stage is Stage.JOINING:
                    self._join(worker)
                self._send(worker, RankHeartbeat(0), 0)
                if worker.stage is Stage.WAITING and seconds == LONG_S:
                    given = self.contributions[worker.round, worker.num_collectives]
                    missing = tuple(rank for rank, other in enumerate(worker.members) if other not in given)
                    self._send(worker, WaitingTooLong("step", 0, 0, missing, "0 1"), worker.round)
            self._advance()

    # --- the coordinator -------------------------------------------------------------------------------------------

    def _send(self, worker: Worker, message: WorkerMessage, round: int) -> None:
        self._deliver(self.core.handle(MessageReceived(worker.sender, round, message), self.now_ns))
        self._advance()

    def _advance(self) -> None:
        self._deliver(self.core.advance(self.now_ns))

    def _deliver(self, sends: list[Send]) -> None:
        for numbers, message in sends:
            if isinstance(message, RoundStarted):
                self._check_start(numbers, message)
            for number in numbers:
                worker = self.workers[number]
                if worker.stage in ENDED:
                    continue
                if worker.is_suspended or isinstance(message, RoundChangeWanted):
                    worker.inbox.append(message)
                else:
                    self._receive(worker, message)

    def _receive(self, worker: Worker, message: CoordinatorMessage) -> None:
        match message:
            case RoundStarted():
                worker.stage, worker.round, worker.num_collectives = Stage.COMPUTING, message.round, 0
                worker.members = tuple(member.worker for member in message.members)
            case RankLost() | EndRound():
                worker.knows_loss = worker.stage in IN_ROUND
            case JoinRefused():
                self._refused(worker, message.kind)
            case RoundChangeWanted():
                worker.wants_change = True
            case LeaveConfirmed() | _:
                pass

    def _is_lost(self, worker: Worker) -> bool:
        return worker.number in self.elastic._lost

    # --- what must hold --------------------------------------------------------------------------------------------

    def _check_start(self, numbers: tuple[int, ...], started: RoundStarted) -> None:
        if started.round in self.state_of_round:
            return
        before = next((w.members for w in self.workers if w.round == self.newest_round and w.members), ())
        by_identity = {worker.identity: worker for worker in self.workers}
        members = [by_identity[member.worker] for member in started.members]
        if [member.rank for member in started.members] != list(range(len(members))):
            self.problems.append("the ranks of a round are not 0 to n - 1")
        if [worker.number for worker in members] != list(numbers) or len(set(numbers)) != len(numbers):
            self.problems.append("a round does not have those members that are told of it, each once")
        survivors = [worker.identity for worker in members if worker.identity in before]
        if survivors != [identity for identity in before if identity in survivors]:
            self.problems.append("survivors have changed their order")
        if any(self._is_lost(worker) for worker in members):
            self.problems.append("a lost worker is a member again")
        if [worker.identity for worker in members[: len(survivors)]] != survivors:
            self.problems.append("a newcomer has a lower rank than a survivor")
        for worker in self.workers:
            if worker.stage in IN_ROUND and worker not in members and not self._is_lost(worker):
                self.problems.append(f"the round started while worker {worker.number} was in the one before")
        held = [worker.history for worker in members if worker.history is not None]
        if not held and not all(worker.is_fresh for worker in members):
            self.problems.append("nobody in a round has state, and a worker has not loaded that of its script")
        self.state_of_round[started.round] = max(held, key=len, default=())
        self.newest_round = started.round

    def _check_histories(self) -> None:
        """All state that may still be taken over is of one history, and nobody is more than a step ahead: no step is
        counted twice, and no two rounds go on side by side."""
        histories = sorted(
            (
                w.history
                for w in self.workers
                if w.history is not None and w.stage not in ENDED and not self._is_lost(w)
            ),
            key=len,
        )
        for shorter, longer in itertools.pairwise(histories):
            if longer[: len(shorter)] != shorter:
                self.problems.append(f"two histories: {shorter} and {longer}")
        if histories and len(histories[-1]) - len(histories[0]) > 1:
            self.problems.append("a worker is two steps ahead of another one")

    def run_to_the_end(self) -> None:
        """Nothing more goes wrong, and all that can happen does."""
        num_idle = 0
        while num_idle < 3:
            usual = [action for action in self.actions() if action.name != "a second passes"]
            complete = [action for action in usual if action.name != "abandon"]
            if usual:
                self.do((complete or usual)[0])
                num_idle = 0
            else:
                self._pass_time(LONG_S)
                num_idle += 1

    def describe_unfinished(self) -> str:
        """What is wrong if nothing more happens; empty if nothing is."""
        stuck = [worker for worker in self.workers if worker.is_suspended or worker.hangs]
        unfinished = [worker for worker in self.workers if worker.stage not in ENDED and worker not in stuck]
        known = [worker for worker in self.elastic._workers.values() if worker.is_member]
        is_missed = any(worker.is_missed for worker in known)
        if known and all(self.workers[worker.number] in stuck for worker in known) and not is_missed:
            return ""  # newcomers wait until they wake: they alone hold the state of training
        if unfinished:
            return f"these workers wait for ever: {unfinished}; {self.core._membership}"
        done = [worker for worker in self.workers if worker.stage is Stage.DONE]
        if done and not any(len(worker.history or ()) == self.num_steps for worker in done):
            return "the job is finished, and nobody has taken all steps"
        return ""
