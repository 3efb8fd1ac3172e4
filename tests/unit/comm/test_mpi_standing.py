"""Which waits end when a member is gone, and who is named as missing. Without MPI: notices are given, not sent."""

from __future__ import annotations

from typing import cast

import pytest

from ronde.comm.backend import Call, ChannelSpec
from ronde.comm.mpi.notices import Notice, NoticeBoard, Saying
from ronde.comm.mpi.standing import COLLECTIVE, Standing, Wait
from ronde.errors import OperationTimeout, PeerLost, RoundEnded
from ronde.types import Deadline, Kind

BARRIER = Call(Kind.BARRIER, text="barrier")
SOON = 10.0


class Board:
    """A notice board that keeps what would be sent."""

    def __init__(self) -> None:
        self.waiting: dict[int, int] = {}
        self.gone: dict[int, Notice] = {}
        self.told: dict[int, list[Notice]] = {}

    def tell(self, member: int, notice: Notice) -> None:
        self.told.setdefault(member, []).append(notice)

    def read(self) -> None:
        pass


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def standing(board: Board, monkeypatch: pytest.MonkeyPatch) -> Standing:
    """Of member 1, which is rank 20, of the ranks 10, 20 and 30."""
    monkeypatch.setattr("ronde.comm.mpi.standing.VERDICT_S", 0.0)
    return Standing(ChannelSpec(id="1.ordered", members=(10, 20, 30), me=1), cast(NoticeBoard, board))


def message(kind: Kind, peer: int) -> Call:
    return Call(kind, peer=peer, text=f"{kind.name.lower()} {peer}")


def test_a_call_that_the_closing_member_has_finished_goes_on(standing: Standing, board: Board) -> None:
    board.gone[0] = Notice(Saying.CLOSED, num_rounds=1, why="rank 10 has closed it")
    standing.check(BARRIER)
    standing.num_finished[COLLECTIVE] += 1
    with pytest.raises(RoundEnded, match="barrier cannot finish: rank 10 has closed it"):
        standing.check(BARRIER)


def test_why_a_member_closed_may_come_a_moment_later(
    standing: Standing, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ronde.comm.mpi.standing.VERDICT_S", SOON)
    board.gone[0] = Notice(Saying.CLOSED, 0, why="rank 10 has closed it")
    standing.check(BARRIER)
    standing.abort(10, "killed")
    with pytest.raises(PeerLost, match=r"lost rank 10 during barrier \(killed\)"):
        standing.check(BARRIER)


@pytest.mark.parametrize("kind", [Kind.SEND, Kind.RECEIVE])
def test_a_message_that_the_closing_member_has_finished_goes_on(kind: Kind, standing: Standing, board: Board) -> None:
    is_send = kind is Kind.SEND
    board.gone[0] = Notice(Saying.CLOSED, 0, num_sent=int(not is_send), num_received=int(is_send))
    standing.check(message(kind, 0))
    standing.num_finished[kind, 0] += 1
    with pytest.raises(RoundEnded):
        standing.check(message(kind, 0))


def test_a_message_with_another_member_ends_by_an_abort_only(standing: Standing, board: Board) -> None:
    board.gone[0] = Notice(Saying.CLOSED, 0)
    standing.check(message(Kind.SEND, 2))
    board.gone[0] = Notice(Saying.ABORTED, 0, lost=30, why="killed")
    with pytest.raises(PeerLost, match=r"rank 20 lost rank 30 during send 2 \(killed\)"):
        standing.check(message(Kind.SEND, 2))


def test_the_first_abort_wins_and_all_others_are_told_what_was_finished(standing: Standing, board: Board) -> None:
    standing.num_finished[COLLECTIVE] = 4
    standing.num_finished[Kind.SEND, 0] = 2
    standing.num_finished[Kind.RECEIVE, 2] = 3
    standing.abort(30, "killed")
    standing.abort(-1, "too late")
    assert board.told == {
        0: [Notice(Saying.ABORTED, 4, num_sent=2, lost=30, why="killed")],
        2: [Notice(Saying.ABORTED, 4, num_received=3, lost=30, why="killed")],
    }
    with pytest.raises(PeerLost, match="lost rank 30"):
        standing.check(BARRIER)


def test_a_notice_survives_the_way() -> None:
    notice = Notice(Saying.ABORTED, 4, 1, 2, 30, "killed")
    assert Notice.decode(notice.encode()) == notice


def test_a_passed_deadline_ends_the_wait_and_names_the_operation_and_who_is_missing(
    standing: Standing, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ronde.comm.mpi.standing.TELL_S", -1.0)
    monkeypatch.setattr("ronde.comm.mpi.standing.NAMING_S", -1.0)
    board.waiting = {0: 0}
    with pytest.raises(OperationTimeout, match="barrier took over 0 s, waiting for rank 30"):
        Wait(standing, BARRIER, Deadline(0)).check()


def test_a_wait_that_begins_after_its_deadline_tells_at_once_and_ends_when_it_can_name_who_is_missing(
    standing: Standing, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = Wait(standing, BARRIER, Deadline(0))
    wait.check()
    assert board.told == {0: [Notice(Saying.WAITING, 0)], 2: [Notice(Saying.WAITING, 0)]}
    monkeypatch.setattr("ronde.comm.mpi.standing.TELL_S", -1.0)
    monkeypatch.setattr("ronde.comm.mpi.standing.NAMING_S", -1.0)
    with pytest.raises(OperationTimeout, match="waiting for ranks 10, 30"):
        wait.check()
    wait.ready()
    with pytest.raises(OperationTimeout, match=r"barrier took over 0 s$"):
        wait.check()


def test_a_wait_for_a_message_names_its_other_side(standing: Standing) -> None:
    wait = Wait(standing, message(Kind.RECEIVE, 2), Deadline(0))
    assert wait.missing() == (2,)
    with pytest.raises(OperationTimeout, match="waiting for rank 30"):
        wait.check()


def test_who_told_to_be_waiting_is_not_missing(standing: Standing, board: Board) -> None:
    standing.num_finished[COLLECTIVE] = 5
    board.waiting = {0: 5, 2: 4}
    assert standing.missing() == (2,)


def test_a_long_wait_is_told_once_per_round(standing: Standing, board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ronde.comm.mpi.standing.TELL_S", -1.0)
    wait = Wait(standing, BARRIER, Deadline(SOON))
    assert wait.missing() == (0, 2)
    wait.check()
    wait.check()
    assert board.told == {0: [Notice(Saying.WAITING, 0)], 2: [Notice(Saying.WAITING, 0)]}
    wait.ready()
    assert wait.missing() == ()
    wait.next_round()
    wait.check()
    assert len(board.told[0]) == 2


def test_nobody_is_accused_before_the_others_could_tell(standing: Standing) -> None:
    assert Wait(standing, BARRIER, Deadline(SOON)).missing() == ()
