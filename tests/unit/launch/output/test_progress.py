"""Chunks become lines, and progress bars do not become many."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ronde.launch.output.progress import IDLE_DELAY_S, MAX_LINE_BYTES, LiveRows, StreamText
from tests.unit.launch.output.printer_kit import rich_progress, tqdm_bar, tqdm_nested


def lines_of(chunks: list[bytes]) -> list[str]:
    """All that a stream makes final, to its end."""
    rows = LiveRows(on_terminal=False)
    texts = [text for chunk in chunks for text in rows.feed(chunk, 0.0)]
    texts += rows.finish()
    return b"".join(text.data for text in texts).decode().splitlines()


def test_a_very_long_line_is_printed_in_pieces() -> None:
    rows = LiveRows(on_terminal=False)
    size = 0
    for _ in range(100):
        texts = rows.feed(b"x" * 65536, 0.0)
        assert all(not text.data.endswith(b"\n") and len(text.data) <= MAX_LINE_BYTES + 65536 for text in texts)
        size += sum(len(text.data) for text in texts)
    texts = rows.feed(b"\n", 0.0)
    assert size + sum(len(text.data) for text in texts) == 100 * 65536 + 1


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"a\r\nb\r\n"], ["a", "b"]),
        ([b"a\r", b"\nb\r", b"\n"], ["a", "b"]),
        ([b"1%\r2%\r3%\n"], ["3%"]),
        ([b"1%\r", b"2%\r", b"3%\r"], ["3%"]),
        ([b"\r1%", b"\r2%", b"\ndone\n"], ["2%", "done"]),
        ([b"1/9\b\b\b2/9\b\b\b", b"3/9\n"], ["3/9"]),
        (["ä|\b/\bö\n".encode()], ["äö"]),
        ([b"long text\r\x1b[Kshort\n"], ["short"]),
        ([b"one\x1b[2Ktwo\n"], ["two"]),
        ([b"a\n\x1b[1Gb\n"], ["a", "b"]),
        ([b"\x1b[31mred\x1b[0m\n"], ["\x1b[31mred\x1b[0m"]),
        ([b"\x1b", b"[3", b"1mred\x1b[", b"0m\n"], ["\x1b[31mred\x1b[0m"]),
        ([b"no end"], ["no end"]),
        ([b"cut \x1b["], ["cut \x1b["]),
        ([b"\n\n"], ["", ""]),
        ([b"\x1b[Hclear\x1b[2J me\n"], ["clear me"]),
        ([b"\x1b[9999999999A\x1b[99999999999999Bdeep\n"], ["deep"]),
    ],
)
def test_what_stands_at_the_end_of_a_line_is_the_line(chunks: list[bytes], lines: list[str]) -> None:
    assert lines_of(chunks) == lines


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        (tqdm_bar("train", total=20), ["train: 100%|####################| 20/20"]),
        (tqdm_bar("train", total=20, leave=False), []),
        # What came before the first move upwards is a line already; nothing is repeated after that.
        (tqdm_nested(outer=3, inner=50), ["outer: 0/3", "outer: 3/3"]),
        (rich_progress(steps=5), ["train \x1b[32m5/5\x1b[0m", "check \x1b[32m5/5\x1b[0m"]),
        (rich_progress(steps=5, transient=True), []),
    ],
    ids=["tqdm", "tqdm taken away", "tqdm nested", "rich", "rich taken away"],
)
def test_bars_are_drawn_in_place(chunks: list[bytes], lines: list[str]) -> None:
    for last in ([], ["done"]):
        shown = lines_of([*chunks, *(line.encode() + b"\n" for line in last)])
        assert [line.rstrip() for line in shown] == [*lines, *last]


@pytest.mark.parametrize("bars", [1, 2, 3])
def test_lines_printed_above_the_bars_of_rich_are_final_when_the_bars_are_drawn_again(bars: int) -> None:
    rows = LiveRows(on_terminal=True)
    final: list[str] = []
    for chunk in rich_progress(steps=30, bars=bars, log=True):
        final += b"".join(text.data for text in rows.feed(chunk, 0.0)).decode().splitlines()
        assert len(rows.visible_rows(0.0)) <= bars + 1
    final += b"".join(text.data for text in rows.finish()).decode().splitlines()
    assert final[:-bars] == [f"step \x1b[1;36m{step}\x1b[0m" for step in range(30)]


@pytest.mark.parametrize("bars", [1, 2, 3])
def test_it_makes_no_difference_how_a_terminal_cuts_what_rich_writes(bars: int) -> None:
    data = b"".join(rich_progress(steps=5, bars=bars, log=True)).replace(b"\n", b"\r\n")
    assert lines_of([bytes([byte]) for byte in data]) == lines_of([data])


def test_a_stream_that_is_idle_below_its_bars_has_finished_them() -> None:
    rows = LiveRows(on_terminal=False)
    for chunk in tqdm_nested(outer=2, inner=2):
        rows.feed(chunk, 0.0)
    rows.feed(b"evaluating\nloss 1\n", 1.0)
    assert rows.idle_due_s() == 1.0 + IDLE_DELAY_S
    final = b"".join(text.data for text in rows.take_idle(1.0 + IDLE_DELAY_S))
    assert final.split(b"\n")[-3:] == [b"evaluating", b"loss 1", b""]
    assert rows.feed(b"plain again\n", 9.0) == [StreamText(b"plain again\n")]


def test_rows_wait_as_long_as_the_cursor_is_hidden() -> None:
    rows = LiveRows(on_terminal=False)
    rows.feed(b"\x1b[?25lbar 1\nbar 2", 0.0)
    assert rows.cursor_hidden
    assert rows.take_idle(3600.0) == []


def test_endless_lines_with_a_hidden_cursor_keep_little() -> None:
    rows = LiveRows(on_terminal=True)
    rows.feed(b"\x1b[?25l", 0.0)
    num_final = sum(text.data.count(b"\n") for text in rows.feed(b"line\n" * 10_000, 0.0))
    assert num_final > 9_900


def test_an_endless_climb_keeps_little() -> None:
    rows = LiveRows(on_terminal=True)
    rows.feed(b"\x1b[A" * 10_000 + b"top" + b"\n\x1b[A\x1b[A" * 10_000, 0.0)
    assert len(rows.visible_rows(0.0)) <= 64


PLAIN_BYTES = st.binary(max_size=400).map(lambda data: data.translate(None, b"\r\b\x1b"))


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({min(place, len(data)) for place in places} | {0, len(data)})
    return [data[begin:end] for begin, end in pairwise(edges)]


@settings(deadline=None)
@given(PLAIN_BYTES, st.lists(st.integers(0, 400)), st.booleans())
def test_plain_bytes_come_out_as_they_went_in_however_they_are_cut(data: bytes, places: list[int], slow: bool) -> None:
    rows = LiveRows(on_terminal=False)
    texts: list[StreamText] = []
    for index, chunk in enumerate(cut(data, places)):
        texts += rows.feed(chunk, float(index))
        if slow:
            texts += rows.take_idle(index + 0.9)
    texts += rows.finish()
    end = b"\n" if data and not data.endswith(b"\n") else b""
    assert b"".join(text.data for text in texts) == data + end
    for before, text in pairwise(texts):
        assert text.continued == (not before.data.endswith(b"\n"))


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([b"text", b"\n", b"\r", b"\b", b"\x1b[A", b"\x1b[2K", b"\x1b[J", b"\x1b[?25l", b"\xff"]))
)
def test_no_mixture_of_movements_confuses_it(parts: list[bytes]) -> None:
    whole, single = LiveRows(on_terminal=False), LiveRows(on_terminal=False)
    texts = [*whole.feed(b"".join(parts), 0.0), *whole.finish()]
    one_by_one = [text for part in parts for text in single.feed(part, 0.0)] + single.finish()
    assert b"".join(text.data for text in texts) == b"".join(text.data for text in one_by_one)
