"""The coordinator's core: events in, messages out, at times that the test sets."""

from __future__ import annotations

import itertools

import pytest

from ronde.coordinator.coordinator import (
    EXIT_REPORT_GRACE_NS,
    REASON_GRACE_NS,
    CoordinatorCore,
    MessageReceived,
    MessagesLost,
    ProcessExited,
    RankConnected,
    RankDisconnected,
)
from ronde.coordinator.negotiation import Send
from ronde.coordinator.rounds import MembershipEnd
from ronde.net.handshake import ConnectionRequest
from ronde.net.messages import (
    LIVENESS,
    VERSION,
    ActivityReport,
    AdmissionStatus,
    ArrivalSamples,
    CoordinatorMessage,
    EndRound,
    JoinRefused,
    JoinRound,
    LeaveConfirmed,
    LeaveReason,
    LeaveRound,
    RankHeartbeat,
    RankHeartbeatReply,
    RankLost,
    RoundStarted,
    StackReply,
    StackRequest,
    StallReport,
    WorkerMessage,
)
from ronde.observe.activity import ActivitySample, CurrentOperation
from ronde.observe.stacks import RankStack
from ronde.observe.stragglers import ArrivalSample
from ronde.settings import Settings
from ronde.types import Member
from tests.unit.coordinator.requests import announce

S = 10**9
GONE = MembershipEnd(LeaveReason.PROCESS_GONE)
PORT = 4711


class Script:
    """A core, the time, and what every rank was sent."""

    def __init__(self, size: int, *, rounds: int | None = 1, state: str = "", **settings: float) -> None:
        self.size = size
        self.now_ns = 1000 * S
        self.core = CoordinatorCore(
            size,
            Settings.load(settings, environ={}),
            rounds=rounds,
            process_state=lambda member: state,
            new_round_id=itertools.count(500).__next__,
        )
        self.sent: dict[int, list[CoordinatorMessage]] = {rank: [] for rank in range(size)}
        self.sent_to: dict[str, list[CoordinatorMessage]] = {}
        """The same by control connection."""

    def admit(self, rank: int, attempt: str = "first", purpose: str = LIVENESS, *, worker: str = "") -> AdmissionStatus:
        return self.core.admit(ConnectionRequest(purpose, rank, attempt, worker or f"worker{rank}"), PORT).status

    def connect(self, rank: int, attempt: str = "first", *, worker: str = "") -> str:
        """Be admitted and connected; returns the name of the connection."""
        assert self.admit(rank, attempt, worker=worker) is AdmissionStatus.ADMITTED
        name = self.core.senders[rank]
        self.core.handle(RankConnected(rank, name, attempt), self.now_ns)
        return name

    def disconnect(self, rank: int, connection: str) -> None:
        self.core.handle(RankDisconnected(rank, connection, GONE), self.now_ns)

    def send(self, rank: int, message: WorkerMessage, *, sender: str = "", round: int = 0) -> None:
        """A message of the worker that is this rank now, or of another one."""
        sender = sender or self.core.senders.get(rank, "nobody-0")
        self._deliver(self.core.handle(MessageReceived(sender, round, message), self.now_ns))

    def join(self, rank: int, *, sender: str = "", worker: str = "") -> None:
        member = Member(rank, "here", 100 + rank, "", worker=worker or f"worker{rank}")
        self.send(rank, JoinRound(VERSION, self.size, member), sender=sender)

    def advance(self, seconds: float = 0.0) -> None:
        """Time goes by; the core is called when it says so, and at the end."""
        end_ns = self.now_ns + int(seconds * S)
        while (due_ns := self.core.next_due_ns(self.now_ns)) < end_ns:
            self.now_ns = max(due_ns, self.now_ns + 1)
            self._deliver(self.core.advance(self.now_ns))
        self.now_ns = end_ns
        self._deliver(self.core.advance(self.now_ns))

    def start(self, attempt: str = "first") -> list[str]:
        """A round with all ranks; returns their connections."""
        connections = [self.connect(rank, attempt) for rank in range(self.size)]
        for rank in range(self.size):
            self.join(rank)
        self.advance()
        assert all(isinstance(self.sent[rank].pop(), RoundStarted) for rank in range(self.size))
        return connections

    def exit(self, rank: int, how: str) -> None:
        self.core.handle(ProcessExited(rank, how), self.now_ns)

    def leave(self, rank: int, reason: LeaveReason = LeaveReason.SHUTDOWN, detail: str = "") -> None:
        self.send(rank, LeaveRound(reason, detail))
        assert self.sent[rank].pop() == LeaveConfirmed()

    def states(self) -> list[tuple[str, str]]:
        return [(rank.state, rank.why) for rank in self.core.queries.activity(self.now_ns).ranks]

    def _deliver(self, sends: list[Send]) -> None:
        for ranks, message in sends:
            for rank in ranks:
                self.sent[rank].append(message)
                self.sent_to.setdefault(self.core.senders[rank], []).append(message)


# --- admission -------------------------------------------------------------------------------------------------------


def test_a_rank_that_joins_before_its_connection_is_there_is_waited_for_and_can_then_be_lost() -> None:
    script = Script(2)
    script.connect(0)
    script.admit(1)
    for rank in (0, 1):
        script.join(rank)
    script.advance(1)
    assert script.sent == {0: [], 1: []}, "the round started although the death of rank 1 would go unnoticed"
    script.core.handle(RankConnected(1, script.core.senders[1], "first"), script.now_ns)
    script.advance()
    assert all(isinstance(script.sent[rank].pop(), RoundStarted) for rank in (0, 1))
    script.disconnect(1, script.core.senders[1])
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


def test_a_second_process_that_comes_before_the_round_starts_has_it_refused() -> None:
    script = Script(2)
    script.connect(0)
    assert script.admit(0, "second") is AdmissionStatus.REFUSED
    script.join(0)
    script.advance()
    assert script.sent[0] == [JoinRefused("two processes say that they are rank 0; give each its own RONDE_RANK")]


@pytest.mark.parametrize(("rank", "purpose"), [(2, LIVENESS), (-1, LIVENESS), (0, "data")])
def test_who_cannot_be_a_rank_of_this_job_is_refused(rank: int, purpose: str) -> None:
    assert Script(2).admit(rank, purpose=purpose) is AdmissionStatus.REFUSED


def test_who_comes_for_a_round_that_this_coordinator_does_not_serve_retries() -> None:
    script = Script(1)
    script.start()
    script.leave(0)
    assert script.admit(0, "next") is AdmissionStatus.RETRY
    closing = Script(1, rounds=None)
    closing.core.stop_admitting()
    assert closing.admit(0) is AdmissionStatus.RETRY


def test_after_a_refusal_the_former_connection_does_not_prevent_another_attempt() -> None:
    script = Script(2)
    script.connect(0)
    script.join(0)
    script.exit(1, "exited with code 3")
    script.advance()
    assert script.sent[0] == [JoinRefused("rank 1 ended before the round began (exited with code 3)")]
    assert script.admit(0, "again") is AdmissionStatus.ADMITTED


# --- workers and ranks -----------------------------------------------------------------------------------------------


def replaced_rank_1() -> tuple[Script, str, str]:
    """Rank 1 of the first round is gone, and another process was admitted as rank 1 of the next; the names of both."""
    script = Script(2, rounds=None)
    former = script.start()[1]
    script.disconnect(1, former)
    script.advance(1)
    script.leave(0)
    latter = script.connect(1, "second", worker="newcomer")
    script.sent[0].clear()
    return script, former, latter


@pytest.mark.parametrize(
    "late",
    [
        JoinRound(VERSION, 2, Member(1, "here", 101, "", worker="worker1")),
        LeaveRound(LeaveReason.FAILED, "it is late"),
        announce("late"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_late_message_of_the_former_rank_1_is_not_taken_for_one_of_the_new_rank_1(late: WorkerMessage) -> None:
    script, former, latter = replaced_rank_1()
    script.send(1, late, sender=former)
    script.connect(0, "second")
    script.join(0)
    script.advance()
    assert script.sent == {0: [], 1: []}, "it was taken for the new rank 1, which has not sent anything"
    script.join(1, worker="newcomer")
    script.send(1, late, sender=former)
    script.advance()
    (started,) = script.sent[0]
    assert isinstance(started, RoundStarted)
    assert [member.worker for member in started.members] == ["worker0", "newcomer"]
    assert script.sent_to[latter] == [started] and started not in script.sent_to[former]


def test_a_late_message_of_the_former_rank_1_does_nothing_in_the_round_of_the_new_one() -> None:
    script, former, _ = replaced_rank_1()
    script.connect(0, "second")
    script.join(0)
    script.join(1, worker="newcomer")
    script.advance()
    for rank in (0, 1):
        script.sent[rank].clear()
    script.send(0, announce("w"))
    script.send(1, announce("w"), sender=former)
    script.send(1, LeaveRound(LeaveReason.FAILED), sender=former)
    script.core.handle(MessagesLost(former, 3), script.now_ns)
    script.disconnect(1, former)
    script.advance(1)
    assert script.sent == {0: [], 1: []}
    assert script.states() == [("running", "")] * 2


def test_a_message_of_an_earlier_round_counts_for_nothing_in_a_later_one_of_the_same_worker() -> None:
    script = Script(1, rounds=None)
    script.connect(0)
    script.join(0)
    script.advance()
    first = script.sent[0].pop()
    script.leave(0)
    script.connect(0, "again")
    script.join(0)
    script.advance()
    second = script.sent[0].pop()
    assert isinstance(first, RoundStarted) and isinstance(second, RoundStarted) and first.round != second.round
    script.send(0, announce("w"), round=first.round)
    script.send(0, RankHeartbeat(7), round=first.round)
    script.send(0, LeaveRound(LeaveReason.FAILED), round=first.round)
    script.advance()
    assert script.sent[0] == [RankHeartbeatReply(7, script.now_ns), LeaveConfirmed()], "only that nobody waits in vain"
    assert script.states() == [("running", "")]
    script.send(0, announce("w"), round=second.round)
    script.advance()
    assert [type(message).__name__ for message in script.sent[0]][2:] == ["RunOperations"]


def test_workers_that_change_their_ranks_wait_for_those_who_had_them() -> None:
    script = Script(2, rounds=None)
    script.start()
    script.leave(0)
    assert script.admit(1, "second", worker="worker0") is AdmissionStatus.RETRY, "worker1 is rank 1, and about to leave"
    assert script.admit(1, "other", worker="stranger") is AdmissionStatus.REFUSED
    script.leave(1)
    for rank in (0, 1):
        script.connect(rank, "second", worker=f"worker{1 - rank}")
        script.join(rank, worker=f"worker{1 - rank}")
    script.advance()
    (started,) = script.sent[0]
    assert isinstance(started, RoundStarted) and script.sent[1] == [started]
    assert [member.worker for member in started.members] == ["worker1", "worker0"]


@pytest.mark.parametrize("worker", ["", "x" * 33, "a-1", "a\n", "A"])
def test_a_process_without_a_proper_identity_is_refused(worker: str) -> None:
    request = ConnectionRequest(LIVENESS, 0, "first", worker)
    assert Script(1).core.admit(request, PORT).status is AdmissionStatus.REFUSED


# --- messages that get lost ------------------------------------------------------------------------------------------


def test_a_member_whose_messages_got_lost_is_lost_and_told_why() -> None:
    script = Script(3, rounds=None)
    script.start()
    script._deliver(script.core.handle(MessagesLost(script.core.senders[1], 2), script.now_ns))
    script.advance()
    why = "its control connection to the coordinator broke, and 2 messages to it got lost"
    assert script.sent == {0: [RankLost(1, why)], 1: [EndRound(f"rank 1 cannot go on: {why}")], 2: [RankLost(1, why)]}
    assert script.admit(1, "second") is AdmissionStatus.ADMITTED, "it may join the next round"


def test_lost_messages_of_a_rank_that_joins_change_nothing() -> None:
    script = Script(2)
    for rank in (0, 1):
        script.connect(rank)
        script.core.handle(MessagesLost(script.core.senders[rank], 1), script.now_ns)
        script.join(rank)
    script.advance()
    assert all(isinstance(script.sent[rank].pop(), RoundStarted) for rank in (0, 1))


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (MembershipEnd(LeaveReason.MESSAGES_LOST), "messages between it and the coordinator got lost"),
        (MembershipEnd(LeaveReason.FAILED, "its control thread failed"), "its control thread failed"),
    ],
    ids=["messages lost", "failed"],
)
def test_a_rank_that_says_itself_why_it_cannot_go_on_is_lost_at_once(end: MembershipEnd, why: str) -> None:
    script = Script(2, rounds=None)
    connections = script.start()
    script.core.handle(RankDisconnected(1, connections[1], end), script.now_ns)
    script.advance()
    assert script.sent[0] == [RankLost(1, why)]


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
        script.exit(rank, "exited with code 1")
    script.leave(2, LeaveReason.FAILED, "ValueError: boom")
    script.advance(1)
    assert script.sent[0] == [RankLost(2, "ValueError: boom"), RankLost(1, "exited with code 1")]
    assert script.core.first_lost == (2, MembershipEnd(LeaveReason.FAILED, "ValueError: boom"))


@pytest.mark.parametrize("state", ["gone", "stopped", ""])
def test_a_late_member_whose_process_is_gone_is_lost_though_its_connection_is_open(state: str) -> None:
    script = Script(2, stall_s=5, state=state)
    script.start()
    script.send(0, announce("w"))
    lost = RankLost(1, "its process is gone")
    script.advance(4)
    assert lost not in script.sent[0], "nobody has waited for it too long"
    script.advance(3)
    assert (lost in script.sent[0]) == (state == "gone")


def test_a_rank_whose_script_just_ends_is_missed_but_not_shown_as_lost() -> None:
    script = Script(2, rounds=None)
    script.start()
    script.leave(1, LeaveReason.SCRIPT_ENDED)
    script.advance(2)
    assert script.sent[0] == [RankLost(1, "exited without shutdown")]
    assert script.states()[1] == ("left", "has come to the end of its script")
    assert script.core.first_lost == (1, MembershipEnd(LeaveReason.SCRIPT_ENDED))


def test_a_later_round_that_loses_a_rank_counts_and_one_that_loses_none_does_not() -> None:
    script = Script(2, rounds=None)
    for number, lost in enumerate((None, 1, None, 0)):
        before = script.core.first_lost
        script.start(f"attempt {number}")
        if lost is not None:
            script.leave(lost, LeaveReason.FAILED, f"rank {lost} broke")
        for rank in {0, 1} - {lost}:
            script.leave(rank)
        script.advance()
        expected = before if lost is None else (lost, MembershipEnd(LeaveReason.FAILED, f"rank {lost} broke"))
        assert script.core.first_lost == expected


def test_who_comes_early_to_the_next_round_waits_until_the_others_have_left_this_one() -> None:
    script = Script(2, rounds=None)
    script.start()
    script.leave(0)
    script.connect(0, "next")
    script.join(0)
    script.advance(2)
    assert script.sent[0] == []
    script.leave(1)
    script.connect(1, "next")
    script.join(1)
    script.advance()
    [started] = script.sent[0]
    assert isinstance(started, RoundStarted) and started.round == 501


@pytest.mark.parametrize("names", [(), ("a", "b")], ids=["no launcher", "a launcher"])
def test_a_stall_names_the_host_as_the_launcher_does(names: tuple[str, ...]) -> None:
    script = Script(2, stall_s=5, state="stopped")
    script.core.host_names = dict(enumerate(names))
    script.start()
    script.send(0, announce("w"))
    script.advance(7)
    [stalled] = (message for message in script.sent[0] if isinstance(message, StallReport))
    host = "b" if names else "here"
    assert f"rank 1 on host {host}, pid 101, does not answer; its process is stopped" in stalled.report


# --- queries and the end ---------------------------------------------------------------------------------------------


def test_a_heartbeat_is_answered_with_the_clock() -> None:
    script = Script(1)
    script.connect(0)
    script.send(0, RankHeartbeat(42))
    assert script.sent[0] == [RankHeartbeatReply(42, script.now_ns)]


def test_the_states_of_a_rank() -> None:
    script = Script(3, rounds=None)
    not_called = ("starting", "has not called ronde.init() yet")
    assert script.states() == [not_called] * 3
    script.connect(0)
    script.join(0)
    assert script.states() == [("starting", "is in init(), which waits for ranks 1, 2"), not_called, not_called]
    first, second = script.core.queries.activity(script.now_ns).ranks[:2]
    assert (first.host, first.pid, second.pid) == ("here", 100, 0)
    connections = [script.connect(rank) for rank in (1, 2)]
    for rank in (1, 2):
        script.join(rank)
    script.advance()
    assert script.states() == [("running", "")] * 3
    script.leave(1)
    script.disconnect(2, connections[1])
    script.advance(1)
    left, lost = ("left", "has left the round by shutdown()"), ("lost", "its process is gone")
    assert script.states() == [("running", ""), left, lost]


def test_what_ranks_report_about_their_activity_is_put_together() -> None:
    script = Script(2, rounds=None)
    script.start()
    for second in (1, 2):
        for rank in (0, 1):
            waited_ns = S // 2 if rank == 0 else 0
            arrival = ArrivalSample(second, 0, S // 2 - waited_ns, waited_ns, waited_ns)
            arrivals = (ArrivalSamples("0.ordered", 0, (arrival,)), ArrivalSamples("9.ordered", 9, (arrival,)))
            sample = ActivitySample(second * S, 10 * second, waiting_ns=waited_ns * second)
            script.send(rank, ActivityReport(sample, arrivals))
    first, other = script.core.queries.activity(script.now_ns).ranks
    assert (first.steps, first.steps_per_s, first.computing, first.waiting) == (20, 10.0, 0.5, 0.5)
    assert (other.computing, other.waiting) == (1.0, 0.0)
    assert (first.held_up_s, other.held_up_s) == (0.0, 1.0)


def test_a_named_operation_that_waits_shows_for_whom() -> None:
    script = Script(3, rounds=None)
    script.start()
    script.advance(4)
    for rank in (0, 1):
        script.send(rank, announce("w"))
        current = CurrentOperation("allreduce 'w' of group 0", S, named_operation=(0, "w"))
        script.send(rank, ActivityReport(ActivitySample(4 * S, current_operation=current)))
    activity = script.core.queries.activity(script.now_ns)
    assert activity.slowest == 2
    assert [rank.held_up_s for rank in activity.ranks] == [0.0, 0.0, 6.0]
    assert activity.ranks[0].doing.endswith(" for rank 2 in allreduce 'w' of group 0")


def test_stacks_are_handed_over_when_all_have_answered_or_the_time_is_over() -> None:
    script = Script(3, state="stopped")
    connections = script.start()
    script.disconnect(2, connections[2])
    script.advance(1)
    script.sent[0].clear()
    found: list[tuple[RankStack, ...]] = []
    for _ in range(2):
        script._deliver(script.core.queries.start_stack_query(script.now_ns + S, found.append))
    complete, late = (message for message in script.sent[0] if isinstance(message, StackRequest))
    script.send(0, StackReply(complete.query_id, "a.py:1", ""))
    script.send(0, StackReply(late.query_id, "a.py:1", ""))
    script.send(1, StackReply(late.query_id - 1, "an answer to another question", ""))
    assert not found
    script.send(1, StackReply(complete.query_id, "b.py:2", ""))
    lost = ("", "is lost: its process is gone")
    assert [(stack.line, stack.why) for stack in found[0]] == [("a.py:1", ""), ("b.py:2", ""), lost]
    script.advance(1)
    silent = ("", "does not answer; its process is stopped")
    assert [(stack.line, stack.why) for stack in found[1]] == [("a.py:1", ""), silent, lost]


def test_at_the_end_members_and_joining_ranks_get_the_reason_and_queries_their_answer() -> None:
    script = Script(2, rounds=None)
    script.start()
    script.leave(1)
    script.connect(1, "next")
    script.join(1)
    found: list[tuple[RankStack, ...]] = []
    script.core.queries.start_stack_query(script.now_ns + S, found.append)
    assert script.core.close("enough") == [Send((0,), EndRound("enough")), Send((1,), JoinRefused("enough"))]
    assert len(found) == 1
    script.core.queries.start_stack_query(script.now_ns + S, found.append)
    assert len(found) == 2, "nobody would end this query"
