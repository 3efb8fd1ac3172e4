"""Progress bars and prompts, on a terminal and on a pipe."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ronde.launch.output.printer import OutputOptions
from ronde.launch.output.terminal import TerminalInfo
from tests.unit.launch.output.bars import rich_progress, tqdm_bar, tqdm_nested
from tests.unit.launch.output.screens import PLAIN, Screens

SHARED = replace(PLAIN, terminal_info=TerminalInfo(same_file=True))


def test_a_bar_on_a_pipe_is_one_line() -> None:
    screens = Screens(2, SHARED)
    for write in tqdm_bar("train", total=20):
        screens.say(0, write, stream="err")
        screens.say(1, b"step\n")
        screens.wait(0.3)
    assert screens.printed().count("train") == 1
    assert screens.printed().count("step") == 22


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_bar_stays_at_the_bottom_of_a_terminal(num_ranks: int) -> None:
    screens = Screens.on_terminal(num_ranks)
    for number, write in enumerate(tqdm_bar("train", total=5)[:-1]):
        screens.say(0, write, stream="err")
        screens.say(num_ranks - 1, b"line %d\n" % number)
        screens.wait(0.2)
        bar = f"[0] train: {number * 20}%|{'#' * number:<5}| {number}/5"
        assert screens.seen() == [*(f"[{num_ranks - 1}] line {index}" for index in range(number + 1)), bar]
    screens.say(0, b"\n", stream="err")
    screens.say(0, b"done\n")
    screens.wait(0.2)
    assert screens.seen()[-2:] == ["[0] train: 100%|#####| 5/5", "[0] done"]


def test_bars_of_several_ranks_stand_below_each_other_and_equal_ones_are_folded() -> None:
    screens = Screens.on_terminal(4)
    for rank, bar in enumerate([b"\r10%", b"\r10%", b"\r20%", b"\r10%"]):
        screens.say(rank, bar)
    screens.wait(0.2)
    assert screens.seen() == ["[0-1,3] 10%", "[2] 20%"]


def test_more_bars_than_a_terminal_has_rows_are_counted() -> None:
    screens = Screens.on_terminal(100)
    for rank in range(100):
        screens.say(rank, b"\r%d%%" % rank)
    screens.wait(0.2)
    assert len(screens.seen()) == 16
    assert screens.seen()[-1] == "... and 85 more"


def test_bars_are_not_drawn_faster_than_one_can_see() -> None:
    screens = Screens.on_terminal(1)
    for step in range(1000):
        screens.say(0, b"\r%d" % step)
        screens.now_s += 0.001
    assert 15 < screens.out.getvalue().count(b"[0]") < 30
    screens.wait(0.1)
    assert screens.seen() == ["[0] 999"]


def test_nested_bars_survive_on_a_terminal() -> None:
    screens = Screens.on_terminal(2)
    for number, write in enumerate(tqdm_nested(outer=2, inner=3)):
        screens.say(0, write)
        if number == 16:
            screens.say(1, b"between\n")
            screens.wait(0.15)
            assert screens.seen() == ["[0] outer: 0/2", "[1] between", "[0] outer: 1/2"]
    screens.close()
    assert screens.seen() == ["[0] outer: 0/2", "[1] between", "[0] outer: 2/2"]


def test_the_bars_of_rich_survive_on_a_terminal() -> None:
    screens = Screens.on_terminal(2)
    writes = rich_progress(steps=4)
    for number, write in enumerate(writes):
        screens.say(0, write)
        screens.say(1, b"line %d\n" % number)
        screens.wait(0.2)
        others = [line for line in screens.seen() if line.startswith("[1]")]
        assert len(others) == number + 1
    screens.close()
    assert [line for line in screens.seen() if line.startswith("[0]")] == ["[0] train 4/4", "[0] check 4/4"]


def test_the_cursor_is_hidden_as_the_rank_wants_it_and_shown_in_the_end() -> None:
    screens = Screens.on_terminal(1)
    screens.say(0, b"\x1b[?25lbar")
    assert (screens.seen(), screens.cursor_shown()) == (["[0] bar"], False)
    screens.say(0, b"\x1b[?25h\n")
    screens.wait(1.0)
    assert screens.cursor_shown()
    screens.say(0, b"\x1b[?25lbar")
    screens.close()
    assert screens.cursor_shown()


def test_a_prompt_stays_below_what_others_print_on_a_terminal() -> None:
    screens = Screens.on_terminal(2)
    screens.say(0, b"name? ")
    screens.wait(0.3)
    screens.say(1, b"hello\n")
    screens.wait(0.3)
    assert screens.seen() == ["[1] hello", "[0] name?"]
    screens.say(0, b"Ada\n")
    screens.wait(0.3)
    assert screens.seen() == ["[1] hello", "[0] name? Ada"]


def test_a_bar_on_stderr_shows_although_stdout_goes_to_a_file() -> None:
    screens = Screens(1, OutputOptions(terminal_info=TerminalInfo(err_is_terminal=True)))
    screens.say(0, b"result\n")
    screens.say(0, b"\r10%", stream="err")
    assert screens.printed() == "[0] result\n"
    assert b"[0] 10%" in screens.err.getvalue()
