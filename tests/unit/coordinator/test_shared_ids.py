"""Operations that the members of one host announce in shared memory: who may, since when, and how all come back."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from ronde.coordinator import negotiation
from ronde.coordinator.negotiation import Negotiator
from ronde.net.messages import (
    AnnounceOperations,
    CoordinatorMessage,
    OperationRejected,
    OperationRequest,
    RefuseOperation,
    RevokeSharedIds,
    RunOperations,
    UnknownOperationId,
)
from ronde.types import DType, OperationKind
from tests.unit.coordinator.requests import allreduce


def make_negotiator(size: int = 2, *, sharing: int | None = None, max_cached: int = 100) -> Negotiator:
    """All ranks, or the first so many, can announce in shared memory."""
    negotiator = Negotiator(size, fusion_bytes=1 << 20, max_cached=max_cached)
    for rank in range(size if sharing is None else sharing):
        negotiator.share_ids(rank, 0)
    return negotiator


def announce(negotiator: Negotiator, ranks: range, *requests: OperationRequest) -> list[CoordinatorMessage]:
    """These ranks announce the same; returns what is sent to all."""
    for rank in ranks:
        negotiator.announce(rank, AnnounceOperations(requests), 0)
    return [message for _, message in negotiator.take_sends()]


def shared_ids(messages: list[CoordinatorMessage]) -> dict[str, int]:
    runs = [message for message in messages if isinstance(message, RunOperations)]
    return {item.name: item.shared_id for run in runs for item in run.operations}


BOTH = range(2)


def test_what_runs_twice_alike_gets_a_shared_id_if_all_members_share_memory() -> None:
    negotiator = make_negotiator()
    assert shared_ids(announce(negotiator, BOTH, allreduce("a"), allreduce("b"))) == {"a": -1, "b": -1}
    assert shared_ids(announce(negotiator, BOTH, allreduce("b"))) == {"b": 0}
    assert shared_ids(announce(negotiator, BOTH, allreduce("a"))) == {"a": 1}
    partly = make_negotiator(3, sharing=2)
    for _ in range(3):
        assert shared_ids(announce(partly, range(3), allreduce("a"))) == {"a": -1}


@pytest.mark.parametrize(
    ("request_", "is_shared"),
    [
        (allreduce("a", (4,), (5,)), True),
        (OperationRequest(0, "a", OperationKind.ALLGATHER, DType.FLOAT32, ((4,), (5,))), False),
        (OperationRequest(0, "a", OperationKind.ALLGATHER, DType.FLOAT32, ((4,),)), True),
        (OperationRequest(0, "a", OperationKind.BARRIER, DType.FLOAT32, ()), True),
    ],
    ids=["several arrays", "allgather of several", "allgather", "barrier"],
)
def test_an_operation_of_several_calls_gets_none(request_: OperationRequest, is_shared: bool) -> None:
    negotiator = make_negotiator()
    announce(negotiator, BOTH, request_)
    assert (shared_ids(announce(negotiator, BOTH, request_))["a"] >= 0) is is_shared


def test_rows_may_differ_between_members() -> None:
    negotiator = make_negotiator()
    for _ in range(2):
        for rank in BOTH:
            request = OperationRequest(0, "g", OperationKind.ALLGATHER, DType.FLOAT32, ((rank + 1,),))
            negotiator.announce(rank, AnnounceOperations((request,)), 0)
        [(_, message)] = negotiator.take_sends()
    assert isinstance(message, RunOperations)
    [item] = message.operations
    assert (item.shared_id, item.row_counts) == (0, (1, 2))


def test_who_announces_it_at_the_coordinator_brings_all_members_back_before_it_can_run() -> None:
    negotiator = make_negotiator()
    for _ in range(2):
        announce(negotiator, BOTH, allreduce("a"), allreduce("b"))
    negotiator.announce(1, AnnounceOperations((allreduce("a", (9,)), allreduce("b", (9,)))), 0)
    [(ranks, message)] = negotiator.take_sends()
    assert (ranks, message) == ((0, 1), RevokeSharedIds(0, (0, 1)))
    # Rank 0 is back, too. It runs, and the same id stands for what they agree on when it has run twice.
    assert shared_ids(announce(negotiator, range(1), allreduce("a", (9,)))) == {"a": -1}
    assert shared_ids(announce(negotiator, BOTH, allreduce("a", (9,)))) == {"a": 0}


def test_after_a_mismatch_the_name_gets_its_id_again() -> None:
    negotiator = make_negotiator()
    for _ in range(2):
        announce(negotiator, BOTH, allreduce("b"))
    for _ in range(2):
        announce(negotiator, BOTH, allreduce("a"))
    negotiator.announce(0, AnnounceOperations((allreduce("a", (9,)),)), 0)
    negotiator.announce(1, AnnounceOperations((allreduce("a", (8,)),)), 0)
    [(_, revoked), (_, rejected)] = negotiator.take_sends()
    assert revoked == RevokeSharedIds(0, (1,))
    assert isinstance(rejected, OperationRejected)
    announce(negotiator, BOTH, allreduce("a"))
    assert shared_ids(announce(negotiator, BOTH, allreduce("a"))) == {"a": 1}


def test_a_join_brings_all_operations_back_until_all_have_joined() -> None:
    negotiator = make_negotiator()
    for _ in range(2):
        announce(negotiator, BOTH, allreduce("a"), allreduce("b"))
    join = OperationRequest(0, "join", OperationKind.JOIN, 0, ())
    assert announce(negotiator, range(1), join) == [RevokeSharedIds(0, (0, 1))]
    for _ in range(3):
        negotiator.announce(1, AnnounceOperations((allreduce("a"),)), 0)
        assert set(shared_ids([message for _, message in negotiator.take_sends()]).values()) == {-1}
    announce(negotiator, range(1, 2), join)
    announce(negotiator, BOTH, allreduce("a"))
    assert shared_ids(announce(negotiator, BOTH, allreduce("a"))) == {"a": 0}


def test_a_name_that_a_rank_refuses_is_rejected_on_all_members_from_then_on() -> None:
    negotiator = make_negotiator()
    announce(negotiator, BOTH, allreduce("pending"))
    for _ in range(2):
        announce(negotiator, BOTH, allreduce("shared"))
    negotiator.announce(1, AnnounceOperations((allreduce("pending"),)), 0)
    for name in ("pending", "shared", "new"):
        for _ in range(2):  # the first reason counts
            negotiator.refuse(0, RefuseOperation(0, name, f"{name} twice"))
    negotiator.refuse(0, RefuseOperation(7, "other", "no such group"))
    revoked, rejected = RevokeSharedIds(0, (0,)), OperationRejected(0, "pending", "pending twice")
    assert sorted(negotiator.take_sends(), key=lambda send: send.ranks) == [((0, 1), revoked), ((1,), rejected)]
    for rank in BOTH:
        for name in ("pending", "shared", "new"):
            negotiator.announce(rank, AnnounceOperations((allreduce(name),)), 0)
            assert negotiator.take_sends() == [((rank,), OperationRejected(0, name, f"{name} twice"))]
    assert list(negotiator.pending(10)) == []
    assert shared_ids(announce(negotiator, BOTH, allreduce("another"))) == {"another": -1}


def test_names_with_a_shared_id_are_not_forgotten_and_there_is_a_limit_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(negotiation, "MAX_SHARED_IDS", 2)
    negotiator = make_negotiator(max_cached=2)
    for name in ("a", "b", "c"):
        announce(negotiator, BOTH, allreduce(name))
        assert shared_ids(announce(negotiator, BOTH, allreduce(name))) == {name: {"a": 0, "b": 1, "c": -1}[name]}
    announce(negotiator, BOTH, *(allreduce(f"other {i}") for i in range(5)))
    negotiator.announce(0, AnnounceOperations((allreduce("a"),)), 0)
    [(_, message)] = negotiator.take_sends()
    assert message == RevokeSharedIds(0, (0,))


# --- the whole protocol, with every order of events ------------------------------------------------------------------

NAMES = ("a", "b", "c")
Step = dict[str, OperationRequest] | None
"""What a rank starts together, or None for join()."""


@dataclass
class UnderWay:
    """One operation of a rank."""

    name: str
    request: OperationRequest
    shared_id: int = -1
    is_running: bool = False
    ran_with: frozenset[OperationRequest] | None = None
    is_rejected: bool = False


@dataclass
class SimulatedRank:
    """What comm/named_operations and the ready log of native/src/link do, one event at a time."""

    steps: deque[Step]
    known: dict[str, tuple[int, OperationRequest, int]] = field(default_factory=dict)
    """By name: the id, what it stands for, and the shared id."""
    under_way: dict[str, UnderWay] = field(default_factory=dict)
    to_start: list[tuple[str, OperationRequest]] = field(default_factory=list)
    inbox: deque[CoordinatorMessage] = field(default_factory=deque)
    outbox: deque[AnnounceOperations] = field(default_factory=deque)
    position: int = 0
    """Of the next entry of the shared log."""
    is_joined: bool = False
    ended: list[UnderWay] = field(default_factory=list)


class Simulation:
    """Ranks, a negotiator, and messages that take any time. Every event is chosen by `choose`."""

    def __init__(self, programs: list[deque[Step]], seed: int) -> None:
        self.ranks = [SimulatedRank(steps) for steps in programs]
        self.negotiator = make_negotiator(len(programs))
        self.choose = random.Random(seed)
        self.arrived: dict[int, dict[int, UnderWay]] = {}
        self.log: list[dict[int, UnderWay]] = []
        """Ready in shared memory, with the ranks that have not begun to execute it."""
        self.num_shared = self.num_withdrawn = 0

    def run(self) -> None:
        while True:
            events = [(event, rank) for rank in range(len(self.ranks)) for event in self.enabled(rank)]
            if events:
                event, rank = self.choose.choice(events)
                getattr(self, event)(rank)
            elif not self.send_answers():
                return

    def send_answers(self) -> bool:
        sends = self.negotiator.take_sends()
        for ranks, message in sends:
            for receiver in ranks:
                self.ranks[receiver].inbox.append(message)
        return bool(sends)

    def enabled(self, rank: int) -> list[str]:
        this = self.ranks[rank]
        events = []
        if this.to_start:
            events.append("start")
        elif not this.under_way and not this.is_joined and this.steps:
            events.append("next_step")
        if this.outbox:
            events.append("deliver_to_coordinator")
        if this.inbox:
            events.append("receive")
        if this.position < len(self.log):
            events.append("execute")
        return events

    def next_step(self, rank: int) -> None:
        this = self.ranks[rank]
        step = this.steps.popleft()
        if step is None:
            this.is_joined = True
            this.outbox.append(AnnounceOperations((OperationRequest(0, "join", OperationKind.JOIN, 0, ()),)))
        else:
            this.to_start = list(step.items())
            self.choose.shuffle(this.to_start)

    def start(self, rank: int) -> None:
        this = self.ranks[rank]
        name, request = this.to_start.pop()
        assert name not in this.under_way
        operation = this.under_way[name] = UnderWay(name, request)
        known = this.known.get(name)
        if known is None or known[1] != request:
            this.outbox.append(AnnounceOperations((request,)))
        elif known[2] < 0:
            this.outbox.append(AnnounceOperations((), (known[0],)))
        else:
            operation.shared_id = known[2]
            arrived = self.arrived.setdefault(known[2], {})
            assert rank not in arrived
            arrived[rank] = operation
            if len(arrived) == len(self.ranks):
                del self.arrived[known[2]]
                self.log.append(arrived)
                self.num_shared += 1

    def deliver_to_coordinator(self, rank: int) -> None:
        self.negotiator.announce(rank, self.ranks[rank].outbox.popleft(), 0)
        if self.choose.random() < 0.7:  # else it reads more messages before it answers
            self.send_answers()

    def execute(self, rank: int) -> None:
        """Begin with the next entry of the log. It ends, on all ranks, when all have begun with it."""
        this = self.ranks[rank]
        entry = self.log[this.position]
        this.position += 1
        entry[rank].is_running = True
        if all(operation.is_running for operation in entry.values()):
            requests = frozenset(operation.request for operation in entry.values())
            assert len(requests) == 1, "a wrong number"
            for other, operation in entry.items():
                self.end(other, operation, requests)

    def end(self, rank: int, operation: UnderWay, requests: frozenset[OperationRequest]) -> None:
        this = self.ranks[rank]
        assert this.under_way.pop(operation.name) is operation
        operation.ran_with = requests
        this.ended.append(operation)

    def receive(self, rank: int) -> None:
        this = self.ranks[rank]
        message = this.inbox.popleft()
        if isinstance(message, RunOperations):
            for item in message.operations:
                if item.name == "join":
                    this.is_joined = False
                elif item.request is not None:
                    this.known.pop(item.name, None)  # zeros
                else:
                    operation = this.under_way[item.name]
                    assert operation.shared_id < 0
                    this.known[item.name] = (item.id, operation.request, item.shared_id)
                    self.end(rank, operation, frozenset([operation.request]))
        elif isinstance(message, OperationRejected):
            this.known.pop(message.name, None)
            operation = this.under_way.pop(message.name)
            assert operation.shared_id < 0
            operation.is_rejected = True
            this.ended.append(operation)
        elif isinstance(message, RevokeSharedIds):
            for name, (id, request, shared_id) in list(this.known.items()):
                if shared_id in message.ids:
                    this.known[name] = (id, request, -1)
            for operation in this.under_way.values():
                if operation.shared_id in message.ids and rank in self.arrived.get(operation.shared_id, {}):
                    del self.arrived[operation.shared_id][rank]
                    operation.shared_id = -1
                    this.outbox.append(AnnounceOperations((operation.request,)))
                    self.num_withdrawn += 1
        else:
            assert isinstance(message, UnknownOperationId)
            [name] = [name for name, known in this.known.items() if known[0] == message.id]
            del this.known[name]
            this.outbox.append(AnnounceOperations((this.under_way[name].request,)))


def make_programs(size: int, seed: int) -> list[deque[Step]]:
    """The same steps on all ranks, apart from a request that differs on one of them, or steps that only some do."""
    choose = random.Random(seed)
    programs: list[deque[Step]] = [deque() for _ in range(size)]
    shapes = {name: (4,) for name in NAMES}
    for _ in range(choose.randint(4, 14)):
        what = choose.random()
        if what < 0.15:
            shapes[choose.choice(NAMES)] = (choose.randint(2, 9),)
        if what > 0.85:
            for program in programs:
                for _ in range(choose.randint(0, 3)):
                    program.append({name: allreduce(name, shapes[name]) for name in NAMES})
                program.append(None)
            continue
        odd = choose.randrange(size) if what > 0.7 else -1
        for rank, program in enumerate(programs):
            step = {name: allreduce(name, shapes[name]) for name in NAMES}
            if rank == odd:
                step["b"] = allreduce("b", (100,))
            program.append(step)
    return programs


def test_in_whatever_order_things_happen_every_operation_ends_alike_on_all_members() -> None:
    num_shared = num_withdrawn = num_rejected = 0
    for seed in range(600):
        size = 2 + seed % 3
        programs = make_programs(size, seed)
        num_operations = [sum(len(step) for step in program if step is not None) for program in programs]
        simulation = Simulation(programs, seed)
        simulation.run()
        for rank, this in enumerate(simulation.ranks):
            assert not this.under_way, f"seed {seed}: rank {rank} waits for ever"
            assert not this.is_joined
            assert not this.steps
            assert len(this.ended) == num_operations[rank]
        assert not any(simulation.arrived.values())
        num_shared += simulation.num_shared
        num_withdrawn += simulation.num_withdrawn
        num_rejected += sum(operation.is_rejected for this in simulation.ranks for operation in this.ended)
    assert min(num_shared, num_withdrawn, num_rejected) > 100  # all of it was tried
