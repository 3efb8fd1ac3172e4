"""Equal lines of many ranks become one, nothing is lost, and nothing is reordered within a rank."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ronde.launch.output.folding import FOLD_WINDOW_S, FoldedLines, LineFolder
from ronde.launch.output.progress import StreamText
from ronde.launch.protocol import StdStream
from ronde.text import format_rank_ranges


def put(fold: LineFolder, rank: int, *lines: str, at_s: float = 0.0) -> None:
    fold.add(rank, "out", StreamText("".join(f"{line}\n" for line in lines).encode()), at_s)


def shown(ready: list[FoldedLines]) -> list[str]:
    return [
        f"[{format_rank_ranges(item.ranks)}] {line}" for item in ready for line in item.text.data.decode().splitlines()
    ]


def test_a_line_of_all_ranks_goes_at_once() -> None:
    fold = LineFolder(3)
    put(fold, 0, "a")
    put(fold, 1, "a")
    assert fold.take_ready(0.0) == []
    put(fold, 2, "a")
    assert shown(fold.take_ready(0.0)) == ["[0-2] a"]
    assert fold.next_due_s(0.0) is None


def test_a_line_waits_for_others_only_so_long() -> None:
    fold = LineFolder(4)
    put(fold, 0, "a")
    put(fold, 2, "a", at_s=0.05)
    put(fold, 3, "a", at_s=0.06)
    assert fold.take_ready(0.09) == []
    assert fold.next_due_s(0.09) == FOLD_WINDOW_S
    assert shown(fold.take_ready(FOLD_WINDOW_S)) == ["[0,2-3] a"]


def test_lines_that_differ_do_not_keep_equal_lines_apart() -> None:
    fold = LineFolder(4)
    for rank in range(4):
        put(fold, rank, f"hello from {rank}", "", "building", "", "epoch 0", at_s=rank / 100)
    hellos = [f"[{rank}] hello from {rank}" for rank in range(4)]
    lines = [line for now in (0.1, 0.11, 0.12, 0.13) for line in shown(fold.take_ready(now))]
    assert lines == [*hellos, "[0-3] ", "[0-3] building", "[0-3] ", "[0-3] epoch 0"]


def test_a_line_that_stands_further_back_elsewhere_waits_twice_as_long_at_most() -> None:
    fold = LineFolder(2)
    put(fold, 0, "a", "b")
    put(fold, 1, "b", "a")
    assert fold.take_ready(FOLD_WINDOW_S) == []
    assert fold.next_due_s(FOLD_WINDOW_S) == 2 * FOLD_WINDOW_S
    assert shown(fold.take_ready(2 * FOLD_WINDOW_S)) == ["[0] a", "[0-1] b", "[1] a"]


def test_a_line_repeated_by_one_rank_does_not_wait_for_itself() -> None:
    fold = LineFolder(2)
    put(fold, 0, *["again"] * 5)
    assert shown(fold.take_ready(FOLD_WINDOW_S)) == ["[0] again"] * 5


def test_nobody_waits_for_ranks_that_have_ended() -> None:
    fold = LineFolder(3)
    put(fold, 0, "a")
    put(fold, 1, "a")
    fold.rank_exited(2)
    assert shown(fold.take_ready(0.0)) == ["[0-1] a"]
    put(fold, 0, "b")
    fold.rank_exited(1)
    assert shown(fold.take_ready(0.0)) == ["[0] b"]


def test_the_last_lines_of_an_ended_rank_still_fold() -> None:
    fold = LineFolder(2)
    put(fold, 0, "bye")
    fold.rank_exited(0)
    assert fold.take_ready(0.0) == []
    put(fold, 1, "bye", at_s=0.05)
    assert shown(fold.take_ready(0.05)) == ["[0-1] bye"]


def test_the_two_streams_do_not_fold_into_each_other_but_keep_their_order() -> None:
    fold = LineFolder(2)
    for rank in range(2):
        fold.add(rank, "out" if rank else "err", StreamText(b"a\n"), 0.0)
        fold.add(rank, "out", StreamText(b"b\n"), 0.0)
    ready = fold.take_ready(0.0, flush=True)
    assert [(item.ranks, item.stream, item.text.data) for item in ready] == [
        ((0,), "err", b"a\n"),
        ((1,), "out", b"a\n"),
        ((0, 1), "out", b"b\n"),
    ]


def test_a_piece_of_an_open_line_does_not_wait_but_keeps_its_place() -> None:
    fold = LineFolder(2)
    put(fold, 0, "before")
    fold.add(0, "out", StreamText(b"piece"), 0.0)
    fold.add(0, "out", StreamText(b" end\n", continued=True), 0.0)
    assert fold.take_ready(0.0) == []
    assert [item.text.data for item in fold.take_ready(FOLD_WINDOW_S)] == [b"before\n", b"piece", b" end\n"]


def test_what_was_on_the_screen_as_a_bar_does_not_wait() -> None:
    fold = LineFolder(2)
    fold.add(0, "out", StreamText(b"100%\n", urgent=True), 0.0)
    assert shown(fold.take_ready(0.0)) == ["[0] 100%"]


def test_when_very_much_waits_it_goes_without_waiting() -> None:
    fold = LineFolder(2)
    for index in range(400):
        put(fold, 0, f"{index}" + "x" * 10_000)
    assert len(shown(fold.take_ready(0.0))) == 400


def test_a_print_tells_when_its_first_line_arrived() -> None:
    fold = LineFolder(2)
    put(fold, 1, "a", at_s=1.0)
    put(fold, 0, "a", at_s=1.05)
    assert [item.received_s for item in fold.take_ready(1.05)] == [1.0]


RANKS = 4
EVENT = st.tuples(
    st.integers(0, RANKS - 1),
    st.sampled_from(["out", "err"]),
    st.lists(st.sampled_from([b"", b"a", b"b", b"c"]), max_size=6),
    st.sampled_from([0.0, 0.001, 0.04, 0.11, 0.3]),
)


@settings(deadline=None)
@given(st.lists(EVENT, max_size=60), st.sets(st.integers(0, RANKS - 1)))
def test_every_rank_keeps_all_its_lines_in_order(
    events: list[tuple[int, StdStream, list[bytes], float]], ended: set[int]
) -> None:
    fold = LineFolder(RANKS)
    given_lines: list[list[tuple[str, bytes]]] = [[] for _ in range(RANKS)]
    ready: list[FoldedLines] = []
    now_s = 0.0
    for rank, stream, lines, pause_s in events:
        if lines:
            fold.add(rank, stream, StreamText(b"\n".join([*lines, b""])), now_s)
            given_lines[rank] += [(stream, line) for line in lines]
        now_s += pause_s
        ready += fold.take_ready(now_s)
        next_s = fold.next_due_s(now_s)
        assert next_s is None or now_s < next_s <= now_s + 2 * FOLD_WINDOW_S + 1e-6  # floats are rounded
    for rank in ended:
        fold.rank_exited(rank)
    end_s = now_s + 2 * FOLD_WINDOW_S + 1e-6
    ready += fold.take_ready(end_s)
    assert fold.next_due_s(end_s) is None
    for rank in range(RANKS):
        mine = [item for item in ready if rank in item.ranks]
        assert [(item.stream, line) for item in mine for line in item.text.data.split(b"\n")[:-1]] == given_lines[rank]
