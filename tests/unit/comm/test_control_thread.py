"""The control thread against a coordinator that the test plays: what it sends, what answers do, and how it ends."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from ronde.comm.channel import Channel
from ronde.comm.control_thread import ControlThread
from ronde.comm.named_operations import OpenChannels
from ronde.errors import Mismatch, OperationTimeout, PeerLost, RoundEnded
from ronde.net.control import ControlClient
from ronde.net.event_loop import EventLoop
from ronde.net.keys import JobKey
from ronde.net.listener import MAX_PENDING_HANDSHAKES, Listener
from ronde.net.messages import (
    ActivityReport,
    AgreedOperation,
    AnnounceOperations,
    ChangeGroups,
    EndRound,
    GroupsChanged,
    LeaveConfirmed,
    LeaveReason,
    LeaveRound,
    MissingRanks,
    MissingRanksQuery,
    OperationRejected,
    RankHeartbeat,
    RankHeartbeatReply,
    RankLost,
    RunOperations,
    SetTracing,
    StackReply,
    StackRequest,
    StallReport,
    TimelineReply,
    TimelineRequest,
    TraceBatch,
    TraceFlushed,
    UnknownOperationId,
    WorkerMessage,
)
from ronde.observe.events import PeerGone, StallReported
from ronde.observe.recorder import Recorder
from ronde.settings import Settings
from ronde.types import Deadline
from tests.conformance.threads_backend import ThreadsBackend, ThreadsHub
from tests.limits import PATIENCE_S, promised_s
from tests.unit.comm.scripted_channel import ScriptedChannel
from tests.unit.comm.scripted_control import ScriptedRound
from tests.unit.net.polled import PolledServer


def test_what_is_queued_together_is_announced_together(scripted: ScriptedRound) -> None:
    scripted.control.expect(RankHeartbeat)
    with scripted.control._changed:  # the control thread cannot send meanwhile
        works = [scripted.announce(str(index)) for index in range(50)]
    names: list[str] = []
    while len(names) < 50:
        names += [request.name for request in scripted.control.expect(AnnounceOperations).new]
    assert names == [str(index) for index in range(50)]
    scripted.control.tell(RunOperations(0, tuple(AgreedOperation(index + 1, str(index)) for index in range(50))))
    works[0]._wait_for_start(Deadline(10))
    assert len(scripted.channel.running_calls) == 1
    assert len(scripted.channel.running_calls[0].submitted.spans) == 50
    assert scripted.channel.running_calls[0].submitted.pre_agreed
    scripted.finish(*works)
    assert scripted.recorder.metrics().of(0, "allreduce").operations == 50


def test_what_is_known_is_announced_by_its_id(scripted: ScriptedRound) -> None:
    for known in ((), (41,)):
        work = scripted.announce("w")
        announce = scripted.control.expect(AnnounceOperations)
        assert (len(announce.new), announce.known_ids) == (0 if known else 1, known)
        scripted.control.tell(RunOperations(0, (AgreedOperation(41, "w"),)))
        work._wait_for_start(Deadline(10))
        scripted.finish(work)
    scripted.announce("w", count=4)
    assert scripted.control.expect(AnnounceOperations).new[0].shapes == ((4,),)


def test_an_id_that_was_forgotten_is_announced_in_full_again(scripted: ScriptedRound) -> None:
    work = scripted.announce("w")
    scripted.control.expect(AnnounceOperations)
    scripted.control.tell(RunOperations(0, (AgreedOperation(41, "w"),)))
    work._wait_for_start(Deadline(10))
    scripted.finish(work)
    again = scripted.announce("w")
    assert scripted.control.expect(AnnounceOperations).known_ids == (41,)
    scripted.control.tell(UnknownOperationId(41))
    assert scripted.control.expect(AnnounceOperations).new[0].name == "w"
    scripted.control.tell(RunOperations(0, (AgreedOperation(42, "w"),)))
    again._wait_for_start(Deadline(10))
    scripted.finish(again)
    scripted.announce("w")
    assert scripted.control.expect(AnnounceOperations).known_ids == (42,)


def test_a_name_is_free_again_when_its_operation_is_over(scripted: ScriptedRound) -> None:
    work = scripted.announce("w")
    scripted.control.expect(AnnounceOperations)
    with pytest.raises(ValueError, match="allreduce 'w' of group 0 is still under way on this rank"):
        scripted.announce("w")
    scripted.control.tell(RunOperations(0, (AgreedOperation(1, "w"),)))
    work._wait_for_start(Deadline(10))
    with pytest.raises(ValueError, match="still under way"):
        scripted.announce("w")
    scripted.channel.running_calls[0].end()
    scripted.announce("w")


def test_a_disagreement_fails_that_work_only(scripted: ScriptedRound) -> None:
    wrong, right = scripted.announce("wrong"), scripted.announce("right")
    scripted.control.tell(
        OperationRejected(0, "wrong", "ranks disagree"), RunOperations(0, (AgreedOperation(1, "right"),))
    )
    with pytest.raises(Mismatch, match="ranks disagree"):
        wrong.wait(10)
    right._wait_for_start(Deadline(10))
    scripted.finish(right)
    scripted.announce("wrong")


def test_a_rank_that_has_joined_gives_zeros(scripted: ScriptedRound) -> None:
    work = scripted.announce("mine")
    request = scripted.control.expect(AnnounceOperations).new[0]
    scripted.control.tell(RunOperations(0, (AgreedOperation(1, "mine"), AgreedOperation(2, "theirs", request))))
    work._wait_for_start(Deadline(10))
    call = scripted.channel.running_calls[0].submitted
    assert [part.count for part in call.spans] == [3, 3]
    scripted.finish(work)


def test_a_lost_rank_ends_what_it_was_part_of(scripted: ScriptedRound) -> None:
    work = scripted.announce("w")
    scripted.control.tell(RankLost(2, "it fell"))
    with pytest.raises(PeerLost, match=r"rank 0 lost rank 2 .it fell"):
        work.wait(10)
    assert scripted.channel.aborted == [(2, "it fell")]
    with pytest.raises(PeerLost):
        scripted.announce("later")
    late = ScriptedChannel(members=(0, 2))
    scripted.open_channels.add(Channel(late, 1, scripted.recorder, 10.0))
    assert late.aborted == [(2, "it fell")]
    unharmed = ScriptedChannel(members=(0, 1))
    scripted.open_channels.add(Channel(unharmed, 2, scripted.recorder, 10.0))
    assert unharmed.aborted == []
    (event,) = scripted.recorder.events()
    assert isinstance(event, PeerGone) and (event.peer, event.why) == (2, "it fell")


def test_the_end_of_the_round_ends_everything(scripted: ScriptedRound) -> None:
    work = scripted.announce("w")
    scripted.control.tell(EndRound("the coordinator was closed"))
    with pytest.raises(RoundEnded, match="the coordinator was closed"):
        work.wait(10)
    assert scripted.channel.aborted == [(-1, "the coordinator was closed")]
    with pytest.raises(RoundEnded):
        scripted.control_thread.request_groups(ChangeGroups((0, 1)), Deadline(10))


def test_the_end_of_the_lifeline_is_the_end_of_the_round(scripted: ScriptedRound) -> None:
    work = scripted.announce("w")
    scripted.hang_up()
    with pytest.raises(RoundEnded, match="the coordinator is gone"):
        work.wait(10)


def test_the_last_words_say_more_than_the_end_of_the_lifeline(scripted: ScriptedRound) -> None:
    work = scripted.announce("w")
    scripted.control.tell(EndRound("out of memory"))
    scripted.hang_up()
    with pytest.raises(RoundEnded, match="out of memory"):
        work.wait(10)


def test_a_coordinator_that_rank_0_hosted_is_lost_with_it() -> None:
    scripted = ScriptedRound(coordinator_rank=0)
    try:
        work = scripted.announce("w")
        scripted.hang_up()
        with pytest.raises(PeerLost, match=r"lost rank 0 .it hosted the coordinator"):
            work.wait(10)
    finally:
        scripted.close()


def test_a_wait_asks_before_its_end_whom_the_work_waits_for(scripted: ScriptedRound) -> None:
    work = scripted.announce("w")
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(work.wait, 1.0)
        assert scripted.control.expect(MissingRanksQuery) == MissingRanksQuery(0, "w")
        scripted.control.tell(MissingRanks(0, "w.1", (0,)), MissingRanks(0, "w", (1, 2)))
        with pytest.raises(OperationTimeout, match=r"'w' of group 0 did not start .* 1 s; it waits for ranks 1, 2$"):
            waits.result(10)


def test_a_wait_that_gets_no_answer_ends_in_time(scripted: ScriptedRound) -> None:
    work = scripted.announce("w")
    for limit_s, asks in ((0.1, True), (0.001, False)):
        with pytest.raises(OperationTimeout, match=rf"allreduce 'w' of group 0 did not start within {limit_s} s$"):
            work.wait(limit_s)
        scripted.control.tell(StackRequest(4))
        scripted.control.expect(StackReply)
        assert any(isinstance(said, MissingRanksQuery) for said in scripted.control.said) == asks
        scripted.control.said.clear()


def test_a_stall_is_an_event(scripted: ScriptedRound) -> None:
    scripted.control.tell(StallReport("allreduce 'w' sum float32[3]", 0, 5.0, (1, 2), "report"), StackRequest(4))
    assert scripted.control.expect(StackReply).query_id == 4
    (event,) = scripted.recorder.events()
    assert isinstance(event, StallReported) and (event.missing, event.report) == ((1, 2), "report")


def test_it_says_where_the_main_thread_is(scripted: ScriptedRound) -> None:
    scripted.control.tell(StackRequest(9))
    reply = scripted.control.expect(StackReply)
    assert reply.query_id == 9
    assert "test_control_thread.py" in reply.stack


def test_changes_of_groups_are_handed_to_who_asked(scripted: ScriptedRound) -> None:
    answers: list[GroupsChanged] = []

    def ask(wanted: ChangeGroups) -> None:
        answers.append(scripted.control_thread.request_groups(wanted, Deadline(10)))

    threads = [threading.Thread(target=ask, args=(w,)) for w in (ChangeGroups((0, 1)), ChangeGroups((1, 2), 5))]
    for thread in threads:
        thread.start()
    scripted.control.expect(ChangeGroups)
    scripted.control.expect(ChangeGroups)
    scripted.control.tell(GroupsChanged((1, 2), 5, removed=True), GroupsChanged((0, 1), 6))
    for thread in threads:
        thread.join(10)
    assert {(answer.id, answer.removed) for answer in answers} == {(5, True), (6, False)}
    with pytest.raises(OperationTimeout, match="not every rank of the job asked to make a group of ranks 0, 2"):
        scripted.control_thread.request_groups(ChangeGroups((0, 2)), Deadline(0.001))


def test_an_orderly_goodbye_waits_for_the_answer(scripted: ScriptedRound) -> None:
    left = threading.Event()

    def leave() -> None:
        scripted.control_thread.leave(LeaveRound(LeaveReason.SHUTDOWN), Deadline(10))
        left.set()

    thread = threading.Thread(target=leave)
    thread.start()
    assert scripted.control.expect(LeaveRound).reason is LeaveReason.SHUTDOWN
    assert not left.is_set()
    scripted.control.tell(LeaveConfirmed())
    thread.join(10)
    assert left.is_set()


def test_a_goodbye_in_disorder_does_not_wait_but_is_sent(scripted: ScriptedRound) -> None:
    scripted.control_thread.leave(LeaveRound(LeaveReason.FAILED, "ValueError: x"), Deadline(10))
    scripted.control_thread.stop()
    assert scripted.control.expect(LeaveRound).detail == "ValueError: x"


def test_the_clock_of_the_same_host_is_not_corrected(scripted: ScriptedRound) -> None:
    sent = scripted.control.expect(RankHeartbeat).sent_ns
    scripted.control.tell(RankHeartbeatReply(sent, sent), StackRequest(1))
    scripted.control.expect(StackReply)
    assert scripted.control_thread._offset_ns == 0
    scripted.control.tell(RankHeartbeatReply(sent, sent + 10**15), StackRequest(2))
    scripted.control.expect(StackReply)


def test_an_engine_that_breaks_ends_the_round(scripted: ScriptedRound, caplog: pytest.LogCaptureFixture) -> None:
    work = scripted.announce("w")
    scripted.control.tell(RunOperations(0, (AgreedOperation(1, "nobody announced this"),)))
    with pytest.raises(RoundEnded, match="ronde's control thread failed: KeyError"):
        work.wait(10)
    assert "the control thread failed" in caplog.text


def test_without_a_launcher_nobody_is_told_how_it_is(scripted: ScriptedRound) -> None:
    scripted.control.expect(RankHeartbeat)
    assert not any(isinstance(message, ActivityReport) for message in scripted.control.said)


def test_a_launcher_is_told_how_it_is_at_the_start_and_before_leaving() -> None:
    scripted = ScriptedRound(watched=True)
    try:
        assert scripted.control.expect(ActivityReport).activity.steps == 0
        scripted.recorder.steps += 1
        scripted.control_thread.leave(LeaveRound(LeaveReason.FAILED), Deadline(10))
        deadline = Deadline(10)
        while scripted.control.expect(ActivityReport).activity.steps != 1:
            assert not deadline.expired
    finally:
        scripted.close()


def test_who_waits_for_a_named_operation_knows_whom_it_waited_for(scripted: ScriptedRound) -> None:
    work = scripted.announce("w")
    scripted.control.expect(AnnounceOperations)
    waiter = threading.Thread(target=work.wait)
    waiter.start()
    while scripted.control_thread.waits.blocked_operation() is None:
        pass
    doing = scripted.control_thread.waits.blocked_operation()
    assert doing is not None and (doing.op, doing.named_operation) == ("allreduce 'w' of group 0", (0, "w"))
    # Rank 2 came last, rank 1 an hour before it; so did this rank, says the coordinator.
    scripted.control.tell(RunOperations(0, (AgreedOperation(1, "w"),), stragglers=((2, 0), (0, 1), (1, 3600 * 10**9))))
    work._wait_for_start(Deadline(10))
    scripted.finish(work)
    waiter.join()
    reading = scripted.recorder.sample_activity(0, None)
    blamed = dict(reading.waited_for)
    assert blamed[2] > 0 == blamed[1] and 0 not in blamed
    assert reading.waiting_ns >= blamed[2]
    assert scripted.control_thread.waits.blocked_operation() is None


def is_tracing(scripted: ScriptedRound) -> bool:
    return scripted.recorder.tracing


def test_a_timeline_begins_and_ends_when_the_coordinator_says_so(scripted: ScriptedRound) -> None:
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(scripted.control_thread.request_timeline, TimelineRequest("/tmp/t.json"), Deadline(10))
        scripted.control.expect(TimelineRequest)
        scripted.control.tell(SetTracing(True), TimelineReply())
        assert asked.result(10) == ""
    assert is_tracing(scripted)
    scripted.recorder.record_operation("allreduce", "w", 0, 4, 1, 2, 3)
    scripted.control.expect(TraceBatch, lambda batch: any(b"allreduce w" in event for event in batch.events))
    scripted.recorder.record_operation("allreduce", "last", 0, 4, 1, 2, 3)
    scripted.control.tell(SetTracing(False))
    scripted.control.expect(TraceFlushed)
    assert not is_tracing(scripted)
    scripted.control.expect(TraceBatch, lambda batch: any(b"allreduce last" in event for event in batch.events))


def test_a_timeline_that_cannot_be_is_refused_and_nobody_waits_for_ever(scripted: ScriptedRound) -> None:
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(scripted.control_thread.request_timeline, TimelineRequest("/no/t.json"), Deadline(10))
        scripted.control.expect(TimelineRequest)
        scripted.control.tell(TimelineReply("cannot be written"))
        assert asked.result(10) == "cannot be written"
    with pytest.raises(OperationTimeout, match="not begun in time"):
        scripted.control_thread.request_timeline(TimelineRequest("/tmp/t.json"), Deadline(0.01))
    scripted.control.tell(EndRound("enough"))
    with pytest.raises(RoundEnded, match="enough"):
        scripted.control_thread.request_timeline(TimelineRequest(""), Deadline(10))


# --- the loop never waits --------------------------------------------------------------------------------------------

BACKLOG = [OperationRejected(99, "of no group", "x" * (1 << 20))] * 100
NUM_HALF_OPEN = MAX_PENDING_HANDSHAKES


def test_half_open_handshakes_and_a_backlog_of_messages_delay_nobody() -> None:
    """Stack requests and the death of the coordinator are callbacks of one loop: it has to come round quickly while
    64 peers do not finish their handshake and 100 MB of messages are read."""
    key = JobKey("5a" * 32)
    with ExitStack() as stack:
        server = PolledServer("127.0.0.1", key)
        stack.callback(server.close)
        client = ControlClient(f"127.0.0.1:{server.port}", key, 0)
        stack.callback(client.close)
        loop, recorder = EventLoop(), Recorder(0)
        listener = Listener(key, unix=True, tcp_host=None, loop=loop)
        stack.callback(listener.close)
        here, there = (stack.enter_context(end) for end in socket.socketpair())
        open_channels = OpenChannels(0, 3, ThreadsBackend(ThreadsHub()), recorder, Settings())
        thread = ControlThread(loop, client, open_channels, recorder, liveness_fd=here.fileno())
        stack.callback(thread.stop)
        gaps: list[float] = []
        last_s = time.monotonic()

        def tick() -> None:
            nonlocal last_s
            now_s = time.monotonic()
            gaps.append(now_s - last_s)
            last_s = now_s
            loop.call_later(0.005, tick)

        loop.call_later(0.0, tick)
        thread.start()
        for _ in range(NUM_HALF_OPEN):
            peer = stack.enter_context(socket.socket(socket.AF_UNIX))
            peer.connect("\0" + listener.unix_name)
            peer.sendall(b"RON")
        assert server.poll(PATIENCE_S)  # its first heartbeat: it is connected
        for message in BACKLOG:
            server.send(0, message)
        server.send(0, StackRequest(7))
        deadline = Deadline(PATIENCE_S)
        replies: list[WorkerMessage] = []
        while not replies and not deadline.expired:
            replies = [message for _, message in server.poll(1.0) if isinstance(message, StackReply)]
        assert replies
        there.close()
        while open_channels.closed_error is None and not deadline.expired:
            time.sleep(0.01)
        assert isinstance(open_channels.closed_error, RoundEnded)
        assert len(gaps) > 1 and max(gaps) < promised_s(0.2), max(gaps)
