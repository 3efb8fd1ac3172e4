"""The control thread against a coordinator that the test plays: what it sends, what answers do, and how it ends."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from ronde.comm.backends.base import CurrentCall
from ronde.comm.backends.native_library import NativeStatus
from ronde.comm.channel import Channel
from ronde.errors import Mismatch, OperationTimeout, PeerLost, RondeError, RoundEnded
from ronde.net import messages
from ronde.net.control_connection import ControlClient
from ronde.net.event_loop import EventLoop
from ronde.net.keys import JobKey
from ronde.net.listener import MAX_PENDING_HANDSHAKES, Listener
from ronde.observe.events import PeerGone, StallReported
from ronde.observe.recorder import Recorder
from ronde.settings import Settings
from ronde.types import Deadline, OperationKind
from tests.limits import PATIENCE_S, promised_s
from tests.unit.comm.scripted import ScriptedChannel, ScriptedRound, make_control_thread
from tests.unit.net.polled import PolledServer


def test_what_is_queued_together_is_announced_together(scripted: ScriptedRound) -> None:
    scripted.control.expect(messages.RankHeartbeat)
    with scripted.control._changed:  # the control thread cannot send meanwhile
        works = [scripted.announce(str(index)) for index in range(50)]
    names: list[str] = []
    while len(names) < 50:
        names += [request.name for request in scripted.control.expect(messages.AnnounceOperations).new]
    assert names == [str(index) for index in range(50)]
    scripted.run(*works)
    (running_call,) = scripted.channel.running_calls
    assert len(running_call.submitted.spans) == 50 and running_call.submitted.pre_agreed
    scripted.finish(*works)
    assert scripted.recorder.metrics().of(0, "allreduce").operations == 50


def test_what_is_known_is_announced_by_its_id_as_long_as_it_is_the_same(scripted: ScriptedRound) -> None:
    for known in ((), (41,)):
        work = scripted.announce("w")
        announce = scripted.control.expect(messages.AnnounceOperations)
        assert (len(announce.new), announce.known_ids) == (0 if known else 1, known)
        scripted.run(work, id=41)
        scripted.finish(work)
    scripted.announce("w", count=4)
    assert scripted.control.expect(messages.AnnounceOperations).new[0].shapes == ((4,),)


def test_an_id_that_was_forgotten_is_announced_in_full_again(scripted: ScriptedRound) -> None:
    work = scripted.announce("w")
    scripted.control.expect(messages.AnnounceOperations)
    scripted.run(work, id=41)
    scripted.finish(work)
    again = scripted.announce("w")
    assert scripted.control.expect(messages.AnnounceOperations).known_ids == (41,)
    scripted.control.tell(messages.UnknownOperationId(41))
    assert scripted.control.expect(messages.AnnounceOperations).new[0].name == "w"
    scripted.run(again, id=42)
    scripted.finish(again)
    scripted.announce("w")
    assert scripted.control.expect(messages.AnnounceOperations).known_ids == (42,)


def test_a_name_is_free_again_when_its_operation_is_over(scripted: ScriptedRound) -> None:
    work = scripted.announce("w")
    scripted.control.expect(messages.AnnounceOperations)
    with pytest.raises(ValueError, match="allreduce 'w' of group 0 is still under way on this rank"):
        scripted.announce("w")
    scripted.run(work)
    with pytest.raises(ValueError, match="still under way"):
        scripted.announce("w")
    scripted.channel.running_calls[0].end()
    scripted.announce("w")


def test_a_disagreement_fails_that_work_only(scripted: ScriptedRound) -> None:
    wrong, right = scripted.announce("wrong"), scripted.announce("right")
    scripted.control.tell(messages.OperationRejected(0, "wrong", "ranks disagree", joined=(1,)))
    scripted.run(right)
    with pytest.raises(Mismatch, match="ranks disagree") as caught:
        wrong.wait(10)
    assert caught.value.joined == (1,)
    scripted.finish(right)
    scripted.announce("wrong")


@pytest.mark.parametrize("error", [RondeError("no thread could be started"), MemoryError("no memory")])
def test_what_all_have_agreed_on_and_this_rank_cannot_execute_is_the_end_of_the_channel_for_all(
    scripted: ScriptedRound, error: Exception
) -> None:
    work = scripted.announce("w")
    scripted.channel.refusal = error
    scripted.control.tell(messages.RunOperations(0, (messages.AgreedOperation(1, "w"),)))
    with pytest.raises(type(error), match=str(error)):
        work.wait(10)
    assert scripted.channel.aborted == [(0, str(error))]
    told = scripted.control.expect(messages.AbortChannel)
    assert told == messages.AbortChannel("0.ordered", NativeStatus.PEER_LOST, 0, 0, str(error))


def test_what_is_agreed_on_when_this_rank_has_closed_its_channel_ends_nothing_else(scripted: ScriptedRound) -> None:
    work = scripted.announce("w")
    scripted.channel.refusal = RoundEnded("the channel was closed")
    scripted.control.tell(messages.RunOperations(0, (messages.AgreedOperation(1, "w"),)), messages.StackRequest(1))
    with pytest.raises(RoundEnded, match="the channel was closed"):
        work.wait(10)
    scripted.control.expect(messages.StackReply)
    assert scripted.channel.aborted == []
    assert not any(isinstance(said, messages.AbortChannel) for said in scripted.control.said)


def test_a_lost_rank_ends_what_it_was_part_of(scripted: ScriptedRound) -> None:
    work = scripted.announce("w")
    scripted.control.tell(messages.RankLost(2, "it fell"))
    with pytest.raises(PeerLost, match=r"rank 0 lost rank 2 .it fell"):
        work.wait(10)
    assert scripted.channel.aborted == [(2, "it fell")]
    with pytest.raises(PeerLost):
        scripted.announce("later")
    for members, aborted in (((0, 2), [(2, "it fell")]), ((0, 1), [])):
        late = ScriptedChannel(members)
        scripted.open_channels.add(Channel(late, 1, scripted.recorder, 10.0))
        assert late.aborted == aborted
    (event,) = scripted.recorder.events()
    assert isinstance(event, PeerGone) and (event.peer, event.why) == (2, "it fell")


def test_the_end_of_the_round_ends_everything(scripted: ScriptedRound) -> None:
    work = scripted.announce("w")
    scripted.control.tell(messages.EndRound("out of memory"))
    scripted.hang_up()  # the reason that was sent says more
    with pytest.raises(RoundEnded, match="out of memory"):
        work.wait(10)
    assert scripted.channel.aborted == [(-1, "out of memory")]
    with pytest.raises(RoundEnded, match="out of memory"):
        scripted.control_thread.request_groups(messages.ChangeGroups((0, 1)), Deadline(10))
    with pytest.raises(RoundEnded, match="out of memory"):
        scripted.control_thread.request_timeline(messages.TimelineRequest(""), Deadline(10))


@pytest.mark.parametrize(
    ("coordinator_rank", "error", "words"),
    [(-1, RoundEnded, "the coordinator is gone"), (0, PeerLost, r"lost rank 0 .it hosted the coordinator")],
)
def test_the_end_of_the_coordinator_is_the_end_of_the_round(
    coordinator_rank: int, error: type[Exception], words: str
) -> None:
    with closing(ScriptedRound(coordinator_rank)) as scripted:
        work = scripted.announce("w")
        scripted.hang_up()
        with pytest.raises(error, match=words):
            work.wait(10)


def test_lost_messages_end_the_round_and_the_coordinator_is_told_over_the_other_connection(
    scripted: ScriptedRound,
) -> None:
    work = scripted.announce("w")
    scripted.control.lose_messages("2 messages got lost")
    with pytest.raises(RoundEnded, match=r"rank 0 cannot go on: 2 messages got lost; check the network"):
        work.wait(10)
    scripted.coordinator_end.settimeout(PATIENCE_S)
    leave = messages.decode_from_worker(scripted.coordinator_end.recv(4096))
    assert leave == messages.LeaveRound(messages.LeaveReason.MESSAGES_LOST, "2 messages got lost")
    assert scripted.coordinator_end.recv(1) == b""


def test_after_leaving_nothing_can_get_lost(scripted: ScriptedRound) -> None:
    scripted.control.tell(messages.LeaveConfirmed())
    scripted.control.lose_messages("2 messages got lost")
    scripted.control.tell(messages.StackRequest(1))
    scripted.control.expect(messages.StackReply)
    assert scripted.channel.aborted == []


def test_a_wait_asks_before_its_end_whom_the_work_waits_for(scripted: ScriptedRound) -> None:
    work = scripted.announce("w")
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(work.wait, 1.0)
        assert scripted.control.expect(messages.MissingRanksQuery) == messages.MissingRanksQuery(0, "w")
        scripted.control.tell(messages.MissingRanks(0, "w.1", (0,)), messages.MissingRanks(0, "w", (1, 2)))
        with pytest.raises(OperationTimeout, match=r"'w' of group 0 did not start .* 1 s; it waits for ranks 1, 2$"):
            waits.result(10)


def test_a_wait_that_gets_no_answer_ends_in_time(scripted: ScriptedRound) -> None:
    work = scripted.announce("w")
    for limit_s, asks in ((0.1, True), (0.001, False)):
        with pytest.raises(OperationTimeout, match=rf"allreduce 'w' of group 0 did not start within {limit_s} s$"):
            work.wait(limit_s)
        scripted.control.tell(messages.StackRequest(4))
        scripted.control.expect(messages.StackReply)
        assert any(isinstance(said, messages.MissingRanksQuery) for said in scripted.control.said) == asks
        scripted.control.said.clear()


def test_it_records_stalls_and_says_where_the_main_thread_is(scripted: ScriptedRound) -> None:
    stalled = messages.StallReport("allreduce 'w' sum float32[3]", 0, 5.0, (1, 2), "report")
    scripted.control.tell(stalled, messages.StackRequest(9))
    reply = scripted.control.expect(messages.StackReply)
    assert reply.query_id == 9
    assert "test_control_thread.py" in reply.stack
    (event,) = scripted.recorder.events()
    assert isinstance(event, StallReported) and (event.missing, event.report) == ((1, 2), "report")


def test_changes_of_groups_are_handed_to_who_asked(scripted: ScriptedRound) -> None:
    changes = messages.ChangeGroups((0, 1)), messages.ChangeGroups((1, 2), 5)
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(scripted.control_thread.request_groups, each, Deadline(10)) for each in changes]
        for _ in changes:
            scripted.control.expect(messages.ChangeGroups)
        scripted.control.tell(messages.GroupsChanged((1, 2), 5, removed=True), messages.GroupsChanged((0, 1), 6))
        assert [(each.result(10).id, each.result(10).removed) for each in asked] == [(6, False), (5, True)]
    with pytest.raises(OperationTimeout, match="not every rank of the job asked to make a group of ranks 0, 2"):
        scripted.control_thread.request_groups(messages.ChangeGroups((0, 2)), Deadline(0.001))


def test_an_orderly_goodbye_waits_for_the_answer(scripted: ScriptedRound) -> None:
    with ThreadPoolExecutor(1) as thread:
        left = thread.submit(
            scripted.control_thread.leave, messages.LeaveRound(messages.LeaveReason.SHUTDOWN), Deadline(10)
        )
        assert scripted.control.expect(messages.LeaveRound).reason is messages.LeaveReason.SHUTDOWN
        assert not left.done()
        scripted.control.tell(messages.LeaveConfirmed())
        left.result(10)


def test_a_goodbye_in_disorder_does_not_wait_but_is_sent(scripted: ScriptedRound) -> None:
    failed = messages.LeaveRound(messages.LeaveReason.FAILED, "ValueError: x")
    scripted.control_thread.leave(failed, Deadline(10))
    scripted.control_thread.stop(Deadline(PATIENCE_S))
    assert scripted.control.expect(messages.LeaveRound) == failed


def test_the_clock_of_the_same_host_is_not_corrected(scripted: ScriptedRound) -> None:
    sent = scripted.control.expect(messages.RankHeartbeat).sent_ns
    scripted.control.tell(messages.RankHeartbeatReply(sent, sent), messages.StackRequest(1))
    scripted.control.expect(messages.StackReply)
    assert scripted.control_thread._offset_ns == 0


def test_an_engine_that_breaks_ends_the_round(scripted: ScriptedRound, caplog: pytest.LogCaptureFixture) -> None:
    work = scripted.announce("w")
    scripted.control.tell(messages.RunOperations(0, (messages.AgreedOperation(1, "nobody announced this"),)))
    with pytest.raises(RoundEnded, match="ronde's control thread failed: KeyError"):
        work.wait(10)
    assert "the control thread failed" in caplog.text
    expect_last_message(scripted, "ronde's control thread failed: KeyError('nobody announced this')")


def expect_last_message(scripted: ScriptedRound, why: str) -> None:
    """The others must not wait until the program of this rank learns of it."""
    scripted.coordinator_end.settimeout(PATIENCE_S)
    leave = messages.decode_from_worker(scripted.coordinator_end.recv(4096))
    assert leave == messages.LeaveRound(messages.LeaveReason.FAILED, why)
    assert scripted.coordinator_end.recv(1) == b""


def test_a_launcher_is_told_how_it_is_at_the_start_and_before_leaving() -> None:
    with closing(ScriptedRound(watched=True)) as scripted:
        assert scripted.control.expect(messages.ActivityReport).activity.steps == 0
        scripted.recorder.steps += 1
        scripted.control_thread.leave(messages.LeaveRound(messages.LeaveReason.FAILED), Deadline(10))
        scripted.control.expect(messages.ActivityReport, lambda report: report.activity.steps == 1)


def test_who_waits_for_a_named_operation_knows_whom_it_waited_for(scripted: ScriptedRound) -> None:
    work = scripted.announce("w")
    scripted.control.expect(messages.AnnounceOperations)
    waiter = threading.Thread(target=work.wait)
    waiter.start()
    while (doing := scripted.control_thread.waits.blocked_operation()) is None:
        pass
    assert (doing.op, doing.named_operation) == ("allreduce 'w' of group 0", (0, "w"))
    # Rank 2 came last, rank 1 an hour before it; so did this rank, says the coordinator.
    scripted.run(work, stragglers=((2, 0), (0, 1), (1, 3600 * 10**9)))
    scripted.finish(work)
    waiter.join()
    reading = scripted.recorder.sample_activity(0, None)
    blamed = dict(reading.waited_for)
    assert blamed[2] > 0 == blamed[1] and 0 not in blamed
    assert reading.waiting_ns >= blamed[2]
    assert scripted.control_thread.waits.blocked_operation() is None


def test_a_timeline_begins_and_ends_when_the_coordinator_says_so(scripted: ScriptedRound) -> None:
    def expect_traced(name: bytes) -> None:
        scripted.control.expect(messages.TraceBatch, lambda batch: any(name in event for event in batch.events))

    request = messages.TimelineRequest("/tmp/t.json")
    with ThreadPoolExecutor(1) as thread:
        for reply in (messages.TimelineReply("cannot be written"), messages.TimelineReply()):
            asked = thread.submit(scripted.control_thread.request_timeline, request, Deadline(10))
            scripted.control.expect(messages.TimelineRequest)
            scripted.control.tell(messages.SetTracing(not reply.reason), reply)
            assert asked.result(10) == reply.reason
    scripted.recorder.record_operation("allreduce", "w", 0, 4, 1, 2, 3)
    expect_traced(b"allreduce w")
    scripted.control.said.clear()
    scripted.recorder.record_operation("allreduce", "last", 0, 4, 1, 2, 3)
    scripted.control.tell(messages.SetTracing(False))
    scripted.control.expect(messages.TraceFlushed)
    assert not scripted.recorder.tracing
    expect_traced(b"allreduce last")
    with pytest.raises(OperationTimeout, match="not begun in time"):
        scripted.control_thread.request_timeline(request, Deadline(0.01))


# --- the loop never waits --------------------------------------------------------------------------------------------

BACKLOG = [messages.OperationRejected(99, "of no group", "x" * (1 << 20))] * 100
NUM_HALF_OPEN = MAX_PENDING_HANDSHAKES


def test_half_open_handshakes_and_a_backlog_of_messages_delay_nobody() -> None:
    """Stack requests and the death of the coordinator are callbacks of one loop: it has to come round quickly while
    64 peers do not finish their handshake and 100 MB of messages are read."""
    key = JobKey("5a" * 32)
    with ExitStack() as stack:
        server = PolledServer("127.0.0.1", key)
        stack.callback(server.close)
        client = ControlClient(f"127.0.0.1:{server.port}", key, "worker0-0")
        stack.callback(client.close)
        loop, recorder = EventLoop(), Recorder(0)
        listener = Listener(key, unix=True, tcp_host=None, loop=loop)
        stack.callback(listener.close)
        here, there = (stack.enter_context(end) for end in socket.socketpair())
        settings = Settings(stall_s=0.0)
        open_channels, thread = make_control_thread(settings, client, recorder, here.fileno(), -1, loop)
        stack.callback(thread.stop, Deadline(PATIENCE_S))
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
            server.send("worker0-0", message)
        server.send("worker0-0", messages.StackRequest(7))
        deadline = Deadline(PATIENCE_S)
        replies: list[messages.WorkerMessage] = []
        while not replies and not deadline.expired:
            replies = [message for _, message in server.poll(1.0) if isinstance(message, messages.StackReply)]
        assert replies
        there.close()
        while open_channels.closed_error is None and not deadline.expired:
            time.sleep(0.01)
        assert isinstance(open_channels.closed_error, RoundEnded)
        assert len(gaps) > 1 and max(gaps) < promised_s(0.2), max(gaps)


# --- elastic rounds ------------------------------------------------------------------------------------------------


def test_the_wish_of_newcomers_is_passed_on(scripted: ScriptedRound) -> None:
    scripted.control.tell(messages.RoundChangeWanted("worker 4 will join after the step under way"))
    assert scripted.change_wanted.wait(PATIENCE_S)


def test_in_an_elastic_round_others_that_wait_are_reported_even_without_stall_reports() -> None:
    with closing(ScriptedRound(is_elastic=True, suspend_s=0.01)) as scripted:
        since_ns = time.monotonic_ns()
        scripted.channel.reported_call = CurrentCall(OperationKind.ALLREDUCE, "allreduce", since_ns, missing=(2,))
        waiting = scripted.control.expect(messages.WaitingTooLong, lambda message: message.op == "allreduce")
        assert waiting.missing == (2,)


def test_ranks_that_an_elastic_round_cannot_begin_without_are_reported_once() -> None:
    with closing(ScriptedRound(is_elastic=True, suspend_s=0.01)) as scripted:
        opening = scripted.control.expect(messages.WaitingTooLong)
        assert (opening.op, opening.missing) == ("opening of the first channels", (1, 2))
        assert scripted.control_thread.opening_since_ns is None


@pytest.mark.parametrize("has_reason", [False, True])
def test_a_coordinator_that_ends_without_a_reason_is_gone(has_reason: bool) -> None:
    with closing(ScriptedRound()) as scripted:
        if has_reason:
            scripted.control.tell(messages.EndRound("the job is over"))
        else:
            scripted.hang_up()
        assert scripted.control_thread._leave_confirmed.wait(PATIENCE_S)
        assert scripted.control_thread.coordinator_is_gone is not has_reason
