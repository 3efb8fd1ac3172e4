"""The engine against a control that the test plays: what it says, what it does with answers, how it ends."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ronde.comm.channel import Channel
from ronde.errors import Mismatch, OperationTimeout, PeerLost, RoundEnded
from ronde.net.messages import (
    AgreedOperation,
    AnnounceOperations,
    ChangeGroups,
    EndRound,
    GroupsChanged,
    LeaveConfirmed,
    LeaveRound,
    MissingRanks,
    MissingRanksQuery,
    OperationRejected,
    RankHeartbeat,
    RankHeartbeatReply,
    RankLost,
    RunOperations,
    StackReply,
    StackRequest,
    StallReport,
    UnknownOperationId,
)
from ronde.types import Deadline
from tests.unit.comm.scripted_channel import ScriptedChannel
from tests.unit.comm.scripted_control import Stage


def test_what_is_queued_together_is_announced_together(stage: Stage) -> None:
    stage.control.expect(RankHeartbeat)
    with stage.control._changed:  # the engine cannot send meanwhile
        works = [stage.announce(str(index)) for index in range(50)]
    names: list[str] = []
    while len(names) < 50:
        names += [request.name for request in stage.control.expect(AnnounceOperations).new]
    assert names == [str(index) for index in range(50)]
    stage.control.tell(RunOperations(0, tuple(AgreedOperation(index + 1, str(index)) for index in range(50))))
    works[0]._wait_for_start(Deadline(10))
    assert len(stage.channel.running_calls) == 1
    assert len(stage.channel.running_calls[0].submitted.spans) == 50
    assert stage.channel.running_calls[0].submitted.pre_agreed
    stage.finish(*works)
    assert stage.recorder.metrics().of(0, "allreduce").operations == 50


def test_what_is_known_is_announced_by_its_id(stage: Stage) -> None:
    for known in ((), (41,)):
        work = stage.announce("w")
        announce = stage.control.expect(AnnounceOperations)
        assert (len(announce.new), announce.known_ids) == (0 if known else 1, known)
        stage.control.tell(RunOperations(0, (AgreedOperation(41, "w"),)))
        work._wait_for_start(Deadline(10))
        stage.finish(work)
    stage.announce("w", count=4)
    assert stage.control.expect(AnnounceOperations).new[0].shapes == ((4,),)


def test_an_id_that_was_forgotten_is_announced_in_full_again(stage: Stage) -> None:
    work = stage.announce("w")
    stage.control.expect(AnnounceOperations)
    stage.control.tell(RunOperations(0, (AgreedOperation(41, "w"),)))
    work._wait_for_start(Deadline(10))
    stage.finish(work)
    again = stage.announce("w")
    assert stage.control.expect(AnnounceOperations).known_ids == (41,)
    stage.control.tell(UnknownOperationId(41))
    assert stage.control.expect(AnnounceOperations).new[0].name == "w"
    stage.control.tell(RunOperations(0, (AgreedOperation(42, "w"),)))
    again._wait_for_start(Deadline(10))
    stage.finish(again)
    stage.announce("w")
    assert stage.control.expect(AnnounceOperations).known_ids == (42,)


def test_a_name_is_free_again_when_its_operation_is_over(stage: Stage) -> None:
    work = stage.announce("w")
    stage.control.expect(AnnounceOperations)
    with pytest.raises(ValueError, match="allreduce 'w' of group 0 is still under way on this rank"):
        stage.announce("w")
    stage.control.tell(RunOperations(0, (AgreedOperation(1, "w"),)))
    work._wait_for_start(Deadline(10))
    with pytest.raises(ValueError, match="still under way"):
        stage.announce("w")
    stage.channel.running_calls[0].end()
    stage.announce("w")


def test_a_disagreement_fails_that_work_only(stage: Stage) -> None:
    wrong, right = stage.announce("wrong"), stage.announce("right")
    stage.control.tell(
        OperationRejected(0, "wrong", "ranks disagree"), RunOperations(0, (AgreedOperation(1, "right"),))
    )
    with pytest.raises(Mismatch, match="ranks disagree"):
        wrong.wait(10)
    right._wait_for_start(Deadline(10))
    stage.finish(right)
    stage.announce("wrong")


def test_a_rank_that_has_joined_gives_zeros(stage: Stage) -> None:
    work = stage.announce("mine")
    request = stage.control.expect(AnnounceOperations).new[0]
    stage.control.tell(RunOperations(0, (AgreedOperation(1, "mine"), AgreedOperation(2, "theirs", request))))
    work._wait_for_start(Deadline(10))
    call = stage.channel.running_calls[0].submitted
    assert [part.count for part in call.spans] == [3, 3]
    stage.finish(work)


def test_a_lost_rank_ends_what_it_was_part_of(stage: Stage) -> None:
    work = stage.announce("w")
    stage.control.tell(RankLost(2, "it fell"))
    with pytest.raises(PeerLost, match=r"rank 0 lost rank 2 .it fell"):
        work.wait(10)
    assert stage.channel.aborted == [(2, "it fell")]
    with pytest.raises(PeerLost):
        stage.announce("later")
    late = ScriptedChannel(members=(0, 2))
    stage.presence.add(Channel(late, 1, stage.recorder, 10.0))
    assert late.aborted == [(2, "it fell")]
    unharmed = ScriptedChannel(members=(0, 1))
    stage.presence.add(Channel(unharmed, 2, stage.recorder, 10.0))
    assert unharmed.aborted == []
    assert [event.words() for event in stage.recorder.events()] == ["lost rank 2: it fell"]


def test_the_end_of_the_round_ends_everything(stage: Stage) -> None:
    work = stage.announce("w")
    stage.control.tell(EndRound("the coordinator was closed"))
    with pytest.raises(RoundEnded, match="the coordinator was closed"):
        work.wait(10)
    assert stage.channel.aborted == [(-1, "the coordinator was closed")]
    with pytest.raises(RoundEnded):
        stage.engine.request_groups(ChangeGroups((0, 1)), Deadline(10))


def test_the_end_of_the_lifeline_is_the_end_of_the_round(stage: Stage) -> None:
    work = stage.announce("w")
    stage.control.hang_up()
    with pytest.raises(RoundEnded, match="the coordinator is gone"):
        work.wait(10)


def test_the_last_words_say_more_than_the_end_of_the_lifeline(stage: Stage) -> None:
    work = stage.announce("w")
    stage.control.tell(EndRound("out of memory"))
    stage.control.hang_up()
    with pytest.raises(RoundEnded, match="out of memory"):
        work.wait(10)


def test_a_coordinator_that_rank_0_hosted_is_lost_with_it() -> None:
    stage = Stage(coordinator_rank=0)
    try:
        work = stage.announce("w")
        stage.control.hang_up()
        with pytest.raises(PeerLost, match=r"lost rank 0 .it hosted the coordinator"):
            work.wait(10)
    finally:
        stage.engine.stop()


def test_a_wait_asks_before_its_end_whom_the_work_waits_for(stage: Stage) -> None:
    work = stage.announce("w")
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(work.wait, 1.0)
        assert stage.control.expect(MissingRanksQuery) == MissingRanksQuery(0, "w")
        stage.control.tell(MissingRanks(0, "w.1", (0,)), MissingRanks(0, "w", (1, 2)))
        with pytest.raises(OperationTimeout, match=r"'w' of group 0 did not start .* 1 s; it waits for ranks 1, 2$"):
            waits.result(10)


def test_a_wait_that_gets_no_answer_ends_in_time(stage: Stage) -> None:
    work = stage.announce("w")
    for limit_s, asks in ((0.1, True), (0.001, False)):
        with pytest.raises(OperationTimeout, match=rf"allreduce 'w' of group 0 did not start within {limit_s} s$"):
            work.wait(limit_s)
        stage.control.tell(StackRequest(4))
        stage.control.expect(StackReply)
        assert any(isinstance(said, MissingRanksQuery) for said in stage.control.said) == asks
        stage.control.said.clear()


def test_a_stall_is_an_event(stage: Stage) -> None:
    stage.control.tell(StallReport("allreduce 'w' sum float32[3]", 0, 5.0, (1, 2), "report"), StackRequest(4))
    assert stage.control.expect(StackReply).query_id == 4
    assert [event.words() for event in stage.recorder.events()] == ["report"]


def test_it_says_where_the_main_thread_is(stage: Stage) -> None:
    stage.control.tell(StackRequest(9))
    reply = stage.control.expect(StackReply)
    assert reply.query_id == 9
    assert "test_engine.py" in reply.stack


def test_changes_of_groups_are_handed_to_who_asked(stage: Stage) -> None:
    answers: list[GroupsChanged] = []

    def ask(wanted: ChangeGroups) -> None:
        answers.append(stage.engine.request_groups(wanted, Deadline(10)))

    threads = [threading.Thread(target=ask, args=(w,)) for w in (ChangeGroups((0, 1)), ChangeGroups((1, 2), 5))]
    for thread in threads:
        thread.start()
    stage.control.expect(ChangeGroups)
    stage.control.expect(ChangeGroups)
    stage.control.tell(GroupsChanged((1, 2), 5, removed=True), GroupsChanged((0, 1), 6))
    for thread in threads:
        thread.join(10)
    assert {(answer.id, answer.removed) for answer in answers} == {(5, True), (6, False)}
    with pytest.raises(OperationTimeout, match="not every rank of the job asked to make a group of ranks 0, 2"):
        stage.engine.request_groups(ChangeGroups((0, 2)), Deadline(0.001))


def test_an_orderly_goodbye_waits_for_the_answer(stage: Stage) -> None:
    left = threading.Event()

    def leave() -> None:
        stage.engine.leave(LeaveRound(True), Deadline(10))
        left.set()

    thread = threading.Thread(target=leave)
    thread.start()
    assert stage.control.expect(LeaveRound).orderly
    assert not left.is_set()
    stage.control.tell(LeaveConfirmed())
    thread.join(10)
    assert left.is_set()


def test_a_goodbye_in_disorder_does_not_wait_but_is_sent(stage: Stage) -> None:
    stage.engine.leave(LeaveRound(False, "ValueError: x"), Deadline(10))
    stage.engine.stop()
    assert stage.control.expect(LeaveRound).reason == "ValueError: x"


def test_the_clock_of_the_same_host_is_not_corrected(stage: Stage) -> None:
    sent = stage.control.expect(RankHeartbeat).sent_ns
    stage.control.tell(RankHeartbeatReply(sent, sent), StackRequest(1))
    stage.control.expect(StackReply)
    assert stage.engine._offset_ns == 0
    stage.control.tell(RankHeartbeatReply(sent, sent + 10**15), StackRequest(2))
    stage.control.expect(StackReply)


def test_an_engine_that_breaks_ends_the_round(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    work = stage.announce("w")
    stage.control.tell(RunOperations(0, (AgreedOperation(1, "nobody announced this"),)))
    with pytest.raises(RoundEnded, match="ronde's engine broke: KeyError"):
        work.wait(10)
    assert "the engine broke" in caplog.text


def test_a_sleeping_engine_is_woken_once(stage: Stage) -> None:
    stage.control.expect(RankHeartbeat)
    before = stage.control.num_wakes
    with stage.control._changed:
        for index in range(100):
            stage.announce(str(index))
    stage.control.expect(AnnounceOperations)
    assert stage.control.num_wakes - before <= 2
