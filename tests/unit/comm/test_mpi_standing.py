"""Which waits end when a member is gone, and who is named as missing. Without MPI: notices are given, not sent."""

from __future__ import annotations

from typing import cast

import pytest

from ronde.comm.backends.base import ChannelSpec
from ronde.comm.backends.mpi.failure_detection import (
    COLLECTIVE_QUEUE,
    FailureDetector,
    MpiWait,
    NoticeExchange,
    NoticeKind,
    PeerNotice,
)
from ronde.comm.call import Call
from ronde.errors import OperationTimeout, PeerLost, RoundEnded
from ronde.types import Deadline, OperationKind

BARRIER = Call(OperationKind.BARRIER, description="barrier")
SOON = 10.0


class RecordedNotices:
    """A notice board that keeps what would be sent."""

    def __init__(self) -> None:
        self.waiting_at: dict[int, int] = {}
        self.final_notices: dict[int, PeerNotice] = {}
        self.told: dict[int, list[PeerNotice]] = {}

    def send(self, member: int, notice: PeerNotice) -> None:
        self.told.setdefault(member, []).append(notice)

    def receive(self) -> None:
        pass


@pytest.fixture
def board() -> RecordedNotices:
    return RecordedNotices()


@pytest.fixture
def standing(board: RecordedNotices, monkeypatch: pytest.MonkeyPatch) -> FailureDetector:
    """Of member 1, which is rank 20, of the ranks 10, 20 and 30."""
    monkeypatch.setattr("ronde.comm.backends.mpi.failure_detection.LOSS_REASON_S", 0.0)
    return FailureDetector(
        ChannelSpec(id="1.ordered", members=(10, 20, 30), member_index=1), cast(NoticeExchange, board)
    )


def message(kind: OperationKind, peer: int) -> Call:
    return Call(kind, peer=peer, description=f"{kind.name.lower()} {peer}")


def test_a_call_that_the_closing_member_has_finished_goes_on(standing: FailureDetector, board: RecordedNotices) -> None:
    board.final_notices[0] = PeerNotice(NoticeKind.CLOSED, num_collectives=1, why="rank 10 has closed it")
    standing.check(BARRIER)
    standing.num_finished[COLLECTIVE_QUEUE] += 1
    with pytest.raises(RoundEnded, match="barrier cannot finish: rank 10 has closed it"):
        standing.check(BARRIER)


def test_why_a_member_closed_may_come_a_moment_later(
    standing: FailureDetector, board: RecordedNotices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ronde.comm.backends.mpi.failure_detection.LOSS_REASON_S", SOON)
    board.final_notices[0] = PeerNotice(NoticeKind.CLOSED, 0, why="rank 10 has closed it")
    standing.check(BARRIER)
    standing.abort(10, "killed")
    with pytest.raises(PeerLost, match=r"lost rank 10 during barrier \(killed\)"):
        standing.check(BARRIER)


@pytest.mark.parametrize("kind", [OperationKind.SEND, OperationKind.RECEIVE])
def test_a_message_that_the_closing_member_has_finished_goes_on(
    kind: OperationKind, standing: FailureDetector, board: RecordedNotices
) -> None:
    is_send = kind is OperationKind.SEND
    board.final_notices[0] = PeerNotice(NoticeKind.CLOSED, 0, num_sent=int(not is_send), num_received=int(is_send))
    standing.check(message(kind, 0))
    standing.num_finished[kind, 0] += 1
    with pytest.raises(RoundEnded):
        standing.check(message(kind, 0))


def test_a_message_with_another_member_ends_by_an_abort_only(standing: FailureDetector, board: RecordedNotices) -> None:
    board.final_notices[0] = PeerNotice(NoticeKind.CLOSED, 0)
    standing.check(message(OperationKind.SEND, 2))
    board.final_notices[0] = PeerNotice(NoticeKind.ABORTED, 0, lost_rank=30, why="killed")
    with pytest.raises(PeerLost, match=r"rank 20 lost rank 30 during send 2 \(killed\)"):
        standing.check(message(OperationKind.SEND, 2))


def test_the_first_abort_wins_and_all_others_are_told_what_was_finished(
    standing: FailureDetector, board: RecordedNotices
) -> None:
    standing.num_finished[COLLECTIVE_QUEUE] = 4
    standing.num_finished[OperationKind.SEND, 0] = 2
    standing.num_finished[OperationKind.RECEIVE, 2] = 3
    standing.abort(30, "killed")
    standing.abort(-1, "too late")
    assert board.told == {
        0: [PeerNotice(NoticeKind.ABORTED, 4, num_sent=2, lost_rank=30, why="killed")],
        2: [PeerNotice(NoticeKind.ABORTED, 4, num_received=3, lost_rank=30, why="killed")],
    }
    with pytest.raises(PeerLost, match="lost rank 30"):
        standing.check(BARRIER)


def test_a_notice_survives_the_way() -> None:
    notice = PeerNotice(NoticeKind.ABORTED, 4, 1, 2, 30, "killed")
    assert PeerNotice.decode(notice.encode()) == notice


def test_a_passed_deadline_ends_the_wait_and_names_the_operation_and_who_is_missing(
    standing: FailureDetector, board: RecordedNotices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ronde.comm.backends.mpi.failure_detection.NOTICE_DELAY_S", -1.0)
    monkeypatch.setattr("ronde.comm.backends.mpi.failure_detection.MIN_WAIT_TO_NAME_S", -1.0)
    board.waiting_at = {0: 0}
    with pytest.raises(OperationTimeout, match="barrier took over 0 s, waiting for rank 30") as raised:
        MpiWait(standing, BARRIER, Deadline(0)).check()
    assert raised.value.missing == (30,)


def test_a_wait_that_begins_after_its_deadline_tells_at_once_and_ends_when_it_can_name_who_is_missing(
    standing: FailureDetector, board: RecordedNotices, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = MpiWait(standing, BARRIER, Deadline(0))
    wait.check()
    assert board.told == {0: [PeerNotice(NoticeKind.WAITING, 0)], 2: [PeerNotice(NoticeKind.WAITING, 0)]}
    monkeypatch.setattr("ronde.comm.backends.mpi.failure_detection.NOTICE_DELAY_S", -1.0)
    monkeypatch.setattr("ronde.comm.backends.mpi.failure_detection.MIN_WAIT_TO_NAME_S", -1.0)
    with pytest.raises(OperationTimeout, match="waiting for ranks 10, 30"):
        wait.check()
    wait.mark_ready()
    with pytest.raises(OperationTimeout, match=r"barrier took over 0 s$"):
        wait.check()


def test_a_wait_for_a_message_names_its_other_side(standing: FailureDetector) -> None:
    wait = MpiWait(standing, message(OperationKind.RECEIVE, 2), Deadline(0))
    assert wait.missing() == (2,)
    with pytest.raises(OperationTimeout, match="waiting for rank 30"):
        wait.check()


def test_who_told_to_be_waiting_is_not_missing(standing: FailureDetector, board: RecordedNotices) -> None:
    standing.num_finished[COLLECTIVE_QUEUE] = 5
    board.waiting_at = {0: 5, 2: 4}
    assert standing.missing() == (2,)


def test_a_long_wait_is_told_once_per_round(
    standing: FailureDetector, board: RecordedNotices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ronde.comm.backends.mpi.failure_detection.NOTICE_DELAY_S", -1.0)
    wait = MpiWait(standing, BARRIER, Deadline(SOON))
    assert wait.missing() == (0, 2)
    wait.check()
    wait.check()
    assert board.told == {0: [PeerNotice(NoticeKind.WAITING, 0)], 2: [PeerNotice(NoticeKind.WAITING, 0)]}
    wait.mark_ready()
    assert wait.missing() == ()
    wait.next_collective()
    wait.check()
    assert len(board.told[0]) == 2


def test_nobody_is_accused_before_the_others_could_tell(standing: FailureDetector) -> None:
    assert MpiWait(standing, BARRIER, Deadline(SOON)).missing() == ()
