"""The coordinator's core: events in, messages out, at times that the test sets."""

from __future__ import annotations

import pytest

from ronde.coordinator.coordinator import (
    EXIT_REPORT_GRACE_NS,
    REASON_GRACE_NS,
    CoordinatorCore,
    MessageReceived,
    ProcessExited,
    RankConnected,
    RankDisconnected,
)
from ronde.coordinator.membership import MembershipEnd
from ronde.coordinator.negotiation import Send
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
    RankLost,
    RoundStarted,
    StackReply,
    StackRequest,
    WorkerMessage,
)
from ronde.observe.stacks import RankStack
from ronde.settings import Settings
from ronde.types import Member
from tests.unit.coordinator.scripted_ranks import allreduce

S = 10**9
GONE = MembershipEnd(LeaveReason.PROCESS_GONE)
PORT = 4711


class Script:
    """A core, the time, and what every rank was sent."""

    def __init__(self, size: int, *, rounds: int | None = 1, state: str = "", **settings: float) -> None:
        self.size = size
        self.now_ns = 1000 * S
        self.core = CoordinatorCore(
            size, Settings.load(settings, environ={}), rounds=rounds, process_state=lambda join: state
        )
        self.sent: dict[int, list[CoordinatorMessage]] = {rank: [] for rank in range(size)}
        self._num_connections = 0

    def admit(self, rank: int, attempt: str = "first", purpose: str = LIVENESS) -> AdmissionStatus:
        return self.core.admit(ConnectionRequest(purpose, rank, attempt), PORT).status

    def connect(self, rank: int, attempt: str = "first") -> int:
        """Be admitted and connected; returns the number of the connection."""
        assert self.admit(rank, attempt) is AdmissionStatus.ADMITTED
        self._num_connections += 1
        self.core.handle(RankConnected(rank, self._num_connections, attempt), self.now_ns)
        return self._num_connections

    def disconnect(self, rank: int, connection: int) -> None:
        self.core.handle(RankDisconnected(rank, connection, GONE), self.now_ns)

    def send(self, rank: int, message: WorkerMessage) -> None:
        self._deliver(self.core.handle(MessageReceived(rank, message), self.now_ns))

    def join(self, rank: int) -> None:
        self.send(rank, JoinRound(VERSION, 0, self.size, Member(rank, "here", 100 + rank, "")))

    def advance(self, seconds: float = 0.0) -> None:
        """Time goes by; the core is called when it says so, and at the end."""
        end_ns = self.now_ns + int(seconds * S)
        while (due_ns := self.core.next_due_ns(self.now_ns)) < end_ns:
            self.now_ns = max(due_ns, self.now_ns + 1)
            self._deliver(self.core.advance(self.now_ns))
        self.now_ns = end_ns
        self._deliver(self.core.advance(self.now_ns))

    def start(self) -> list[int]:
        """A round with all ranks; returns their connections."""
        connections = [self.connect(rank) for rank in range(self.size)]
        for rank in range(self.size):
            self.join(rank)
        self.advance()
        assert all(isinstance(self.sent[rank].pop(), RoundStarted) for rank in range(self.size))
        return connections

    def _deliver(self, sends: list[Send]) -> None:
        for ranks, message in sends:
            for rank in ranks:
                self.sent[rank].append(message)


# --- admission -------------------------------------------------------------------------------------------------------


def test_a_rank_that_joins_before_its_connection_is_there_is_waited_for_and_can_then_be_lost() -> None:
    script = Script(2)
    script.connect(0)
    script.admit(1)
    for rank in (0, 1):
        script.join(rank)
    script.advance(1)
    assert script.sent == {0: [], 1: []}, "the round started although the death of rank 1 would go unnoticed"
    script.core.handle(RankConnected(1, 77, "first"), script.now_ns)
    script.advance()
    assert all(isinstance(script.sent[rank].pop(), RoundStarted) for rank in (0, 1))
    script.disconnect(1, 77)
    script.advance(1)
    assert script.sent[0] == [RankLost(1, "its process is gone")]


def test_a_rank_that_dies_before_the_round_starts_is_in_no_round() -> None:
    script = Script(2)
    script.connect(0)
    connection = script.connect(1)
    script.join(0)
    script.join(1)
    script.disconnect(1, connection)
    script.advance(1)
    assert script.sent[0] == [JoinRefused("rank 1 ended before the round began (its process is gone)")]


def test_a_process_that_connects_again_in_one_attempt_replaces_its_former_connection() -> None:
    script = Script(2)
    script.connect(0)
    former = script.connect(1, "same")
    script.connect(1, "same")
    script.disconnect(1, former)
    script.join(0)
    script.join(1)
    script.advance(1)
    assert [type(message) for message in script.sent[0]] == [RoundStarted], "the end of the former connection counted"


def test_a_second_process_of_a_rank_is_refused_while_the_first_lives_and_retries_until_it_is_lost() -> None:
    script = Script(2, rounds=None)
    connections = script.start()
    assert script.admit(1, "second") is AdmissionStatus.REFUSED
    script.disconnect(1, connections[1])
    assert script.admit(1, "second") is AdmissionStatus.RETRY
    script.advance(1)
    assert script.admit(1, "second") is AdmissionStatus.ADMITTED


@pytest.mark.parametrize(("rank", "purpose"), [(2, LIVENESS), (-1, LIVENESS), (0, "data")])
def test_who_cannot_be_a_rank_of_this_job_is_refused(rank: int, purpose: str) -> None:
    assert Script(2).admit(rank, purpose=purpose) is AdmissionStatus.REFUSED


def test_who_comes_for_a_round_that_this_coordinator_does_not_serve_retries() -> None:
    script = Script(1)
    script.start()
    script.send(0, LeaveRound(LeaveReason.SHUTDOWN))
    assert script.admit(0, "next") is AdmissionStatus.RETRY
    closing = Script(1, rounds=None)
    closing.core.stop_admitting()
    assert closing.admit(0) is AdmissionStatus.RETRY


def test_after_a_refusal_the_former_connection_does_not_prevent_another_attempt() -> None:
    script = Script(2)
    script.connect(0)
    script.join(0)
    script.core.handle(ProcessExited(1, "exited with code 3"), script.now_ns)
    script.advance()
    assert script.sent[0] == [JoinRefused("rank 1 ended before the round began (exited with code 3)")]
    assert script.admit(0, "again") is AdmissionStatus.ADMITTED


# --- who is lost, when, and why --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rounds", "grace_ns"), [(1, REASON_GRACE_NS), (None, EXIT_REPORT_GRACE_NS)])
def test_a_closed_connection_waits_for_a_better_reason(rounds: int | None, grace_ns: int) -> None:
    script = Script(2, rounds=rounds)
    connections = script.start()
    script.disconnect(1, connections[1])
    script.advance((grace_ns - 1) / S)
    assert script.sent[0] == []
    script.advance(0.001)
    assert script.sent[0] == [RankLost(1, "its process is gone")]


def test_the_launcher_knows_more_than_the_connection_and_the_rank_more_than_the_launcher() -> None:
    script = Script(3, rounds=None)
    connections = script.start()
    for rank in (1, 2):
        script.disconnect(rank, connections[rank])
        script.core.handle(ProcessExited(rank, "exited with code 1"), script.now_ns)
    script.send(2, LeaveRound(LeaveReason.FAILED, "ValueError: boom"))
    assert script.sent[2] == [LeaveConfirmed()]
    script.advance(1)
    assert script.sent[0] == [RankLost(2, "ValueError: boom"), RankLost(1, "exited with code 1")]
    assert script.core.first_lost == (2, MembershipEnd(LeaveReason.FAILED, "ValueError: boom"))


def test_a_member_whose_process_is_gone_is_lost_though_its_connection_is_open() -> None:
    script = Script(2, stall_s=5, state="gone")
    script.start()
    script.send(0, allreduce("w"))
    script.advance(7)
    assert RankLost(1, "its process is gone") in script.sent[0]


def test_an_exit_is_remembered_until_another_process_of_the_rank_connects() -> None:
    script = Script(2, rounds=None)
    script.core.handle(ProcessExited(1, "killed by signal 9"), script.now_ns)
    script.connect(0)
    script.connect(1)
    script.join(0)
    script.join(1)
    script.advance()
    assert isinstance(script.sent[0][-1], RoundStarted)


# --- queries and the end ---------------------------------------------------------------------------------------------


def test_stacks_are_handed_over_when_all_have_answered_or_the_time_is_over() -> None:
    script = Script(2)
    script.start()
    found: list[tuple[RankStack, ...]] = []
    for _ in range(2):
        script._deliver(script.core.start_stack_query(script.now_ns + S, found.append))
    complete, late = (message for message in script.sent[0] if isinstance(message, StackRequest))
    script.send(0, StackReply(complete.query_id, "a.py:1", ""))
    script.send(0, StackReply(late.query_id, "a.py:1", ""))
    assert not found
    script.send(1, StackReply(complete.query_id, "b.py:2", ""))
    assert [stack.line for stack in found[0]] == ["a.py:1", "b.py:2"]
    script.advance(1)
    assert [(stack.line, bool(stack.why)) for stack in found[1]] == [("a.py:1", False), ("", True)]


def test_at_the_end_members_and_joining_ranks_get_the_reason_and_queries_their_answer() -> None:
    script = Script(2, rounds=None)
    script.start()
    script.send(1, LeaveRound(LeaveReason.SHUTDOWN))
    script.connect(1, "next")
    script.join(1)
    found: list[tuple[RankStack, ...]] = []
    script.core.start_stack_query(script.now_ns + S, found.append)
    assert script.core.close("enough") == [Send((0,), EndRound("enough")), Send((1,), JoinRefused("enough"))]
    assert len(found) == 1
    script.core.start_stack_query(script.now_ns + S, found.append)
    assert len(found) == 2, "nobody would end this query"
