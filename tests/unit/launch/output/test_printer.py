"""What the user of `ronde run` sees: lines, prefixes, open lines, progress bars, files."""

from __future__ import annotations

import io
import os
import pty
import threading
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ronde.launch.output.printer import OutputOptions, Printer, line_prefix, timestamp_prefix
from ronde.launch.output.terminal import OutputClosed, StandardStreams, TerminalInfo
from ronde.launch.protocol import StdStream
from tests.unit.launch.output.printer_kit import FOLDED, PLAIN, TERMINAL, MemoryPrinter, tqdm_bar

SHARED = replace(PLAIN, terminal_info=TerminalInfo(same_file=True))


@pytest.mark.parametrize(
    ("options", "out"),
    [
        ({"timestamps": True}, b"[0] 2026-01-05 14:03:22.123 a\n"),
        ({"horovod_format": True}, b"[0]<stdout>:a\n"),
        ({"horovod_format": True, "timestamps": True}, b"Mon Jan  5 14:03:22 2026[0]<stdout>:a\n"),
        ({"terminal_info": TERMINAL, "color": True}, b"\x1b[36m[0]\x1b[0m a\n"),
        ({"terminal_info": TERMINAL}, b"[0] a\n"),
        ({"color": True}, b"[0] a\n"),
    ],
)
def test_a_line_begins_as_the_options_say(options: dict[str, Any], out: bytes) -> None:
    printer = MemoryPrinter(2, replace(PLAIN, **options), wall_s=datetime(2026, 1, 5, 14, 3, 22, 123_000).timestamp())
    printer.write(0, b"a\n")
    assert printer.out.getvalue() == out


def test_a_folded_line_has_the_time_at_which_it_arrived() -> None:
    printer = MemoryPrinter(2, replace(FOLDED, timestamps=True))
    printer.write(0, b"a\nb\n")
    printer.wait(1.0)
    arrived = timestamp_prefix(-100).decode()  # the wall clock stands at 0, and the line has waited for 0.1 s
    assert printer.printed() == f"[0] {arrived}a\n[0] {arrived}b\n"


def test_every_rank_has_a_colour_of_its_own_and_folded_lines_have_none() -> None:
    assert len({line_prefix((rank,), "out", color=True).split(b"m")[0] for rank in range(10)}) == 10
    assert line_prefix((0, 2, 3), "out", color=True) == b"\x1b[1m[0,2-3]\x1b[0m "


def test_colours_of_a_rank_do_not_run_into_the_next_line() -> None:
    printer = MemoryPrinter.on_terminal(1)
    printer.write(0, b"\x1b[31mred\nstill\n")
    assert printer.out.getvalue() == b"[0] \x1b[31mred\x1b[0m\n[0] still\x1b[0m\n"


def test_a_message_comes_after_what_was_printed_before_it() -> None:
    printer = MemoryPrinter(2, replace(FOLDED, terminal_info=TerminalInfo(same_file=True)))
    printer.sink.write(0, "out", b"goodbye\n")
    printer.sink.print_message("rank 0 failed\nexit code 1\n")
    printer.sink.refresh(printer.now_s)
    assert printer.printed() == "[0] goodbye\n[ronde] rank 0 failed\n[ronde] exit code 1\n"


# --- open lines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        ([(0, b"name? "), 0.2], ""),
        ([(0, b"name? "), 0.3], "[0] name? "),
        ([(0, b"name? "), 0.3, (0, b"Ada\n")], "[0] name? Ada\n"),
        ([(0, b"working ..."), 0.3, (1, b"hello\n"), (0, b" done\n")], "[0] working ...\n[1] hello\n[0]  done\n"),
        ([(0, b"working ..."), 0.3, (1, b"hello\n"), (0, b"\n")], "[0] working ...\n[1] hello\n"),
        ([(0, b"no end"), 0, (1, b"next\n")], "[0] no end\n[1] next\n"),
    ],
)
def test_a_line_without_its_end_shows_after_a_moment_and_is_ended_once(
    steps: list[tuple[int, bytes] | float], shown: str
) -> None:
    """A number is a pause; 0 the exit of rank 0."""
    printer = MemoryPrinter(2, SHARED)
    for step in steps:
        if isinstance(step, tuple):
            printer.write(step[0], step[1], stream="err" if step[0] else "out")
        elif step:
            printer.wait(step)
        else:
            printer.sink.rank_exited(0)
    assert printer.printed() == shown
    closed = printer.close()
    printer.write(0, b"late\n")
    assert printer.close() == closed


# --- progress bars and prompts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_bar_stays_at_the_bottom_of_a_terminal(num_ranks: int) -> None:
    printer = MemoryPrinter.on_terminal(num_ranks)
    for number, write in enumerate(tqdm_bar("train", total=5)[:-1]):
        printer.write(0, write, stream="err")
        printer.write(num_ranks - 1, b"line %d\n" % number)
        printer.wait(0.2)
        bar = f"[0] train: {number * 20}%|{'#' * number:<5}| {number}/5"
        assert printer.visible() == [*(f"[{num_ranks - 1}] line {index}" for index in range(number + 1)), bar]
    printer.write(0, b"\n", stream="err")
    printer.write(0, b"done\n")
    printer.wait(0.2)
    assert printer.visible()[-2:] == ["[0] train: 100%|#####| 5/5", "[0] done"]


def test_bars_of_several_ranks_stand_below_each_other_and_equal_ones_are_folded() -> None:
    printer = MemoryPrinter.on_terminal(4)
    for rank, bar in enumerate([b"\r10%", b"\r10%", b"\r20%", b"\r10%"]):
        printer.write(rank, bar)
    printer.wait(0.2)
    assert printer.visible() == ["[0-1,3] 10%", "[2] 20%"]


def test_more_bars_than_a_terminal_has_rows_are_counted() -> None:
    printer = MemoryPrinter.on_terminal(100)
    for rank in range(100):
        printer.write(rank, b"\r%d%%" % rank)
    printer.wait(0.2)
    assert len(printer.visible()) == 16
    assert printer.visible()[-1] == "... and 85 more"


def test_bars_are_not_drawn_faster_than_one_can_see() -> None:
    printer = MemoryPrinter.on_terminal(1)
    for step in range(1000):
        printer.write(0, b"\r%d" % step)
        printer.now_s += 0.001
    assert 15 < printer.out.getvalue().count(b"[0]") < 30
    printer.wait(0.1)
    assert printer.visible() == ["[0] 999"]


def test_the_cursor_is_hidden_as_the_rank_wants_it_and_shown_in_the_end() -> None:
    printer = MemoryPrinter.on_terminal(1)
    printer.write(0, b"\x1b[?25lbar")
    assert (printer.visible(), printer.cursor_shown()) == (["[0] bar"], False)
    printer.write(0, b"\x1b[?25h\n")
    printer.wait(1.0)
    assert printer.cursor_shown()
    printer.write(0, b"\x1b[?25lbar")
    printer.close()
    assert printer.cursor_shown()


def test_a_prompt_stays_below_what_others_print_on_a_terminal() -> None:
    printer = MemoryPrinter.on_terminal(2)
    printer.write(0, b"name? ")
    printer.wait(0.3)
    printer.write(1, b"hello\n")
    printer.wait(0.3)
    assert printer.visible() == ["[1] hello", "[0] name?"]
    printer.write(0, b"Ada\n")
    printer.wait(0.3)
    assert printer.visible() == ["[1] hello", "[0] name? Ada"]


def test_a_bar_on_stderr_shows_although_stdout_goes_to_a_file() -> None:
    printer = MemoryPrinter(1, OutputOptions(terminal_info=TerminalInfo(err_is_terminal=True)))
    printer.write(0, b"result\n")
    printer.write(0, b"\r10%", stream="err")
    assert printer.printed() == "[0] result\n"
    assert b"[0] 10%" in printer.err.getvalue()


# --- the terminal of one rank --------------------------------------------------------------------------------------


def test_the_rank_with_the_terminal_gets_it_raw_and_its_prompt_appears_again() -> None:
    printer = MemoryPrinter(2, OutputOptions(terminal_info=TERMINAL, debug_rank=1))
    printer.write(1, b"> train.py(3)\r\n(Pdb) ")
    printer.write(0, b"hello\n")
    printer.wait(0.2)
    printer.write(1, b"n\r\n")
    assert printer.out.getvalue() == b"> train.py(3)\r\n(Pdb) \x1b[0m\r\n[0] hello\r\n(Pdb) n\r\n"


# --- processes that are no ranks -------------------------------------------------------------------------------------


def test_processes_that_are_no_ranks_have_names_in_output_and_files(tmp_path: Path) -> None:
    (tmp_path / "server-3.out").write_text("of an earlier run")
    names = {2: "the scheduler", 3: "server 0"}
    printer = MemoryPrinter(2, replace(FOLDED, names=names, output_dir=str(tmp_path)))
    for number in names:
        printer.sink.rank_started(number)
    for number in range(4):
        printer.write(number, b"ready\n")
    printer.wait(1.0)
    assert sorted(printer.printed().splitlines()) == ["[0-1] ready", "[scheduler] ready", "[server 0] ready"]
    printer.sink.close()
    outputs = sorted(path.name for path in tmp_path.glob("*.out"))
    assert outputs == ["rank-0.out", "rank-1.out", "scheduler.out", "server-0.out"]


# --- files, and what goes wrong ------------------------------------------------------------------------------------


def test_a_reader_that_exited_is_reported_and_files_go_on(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb", buffering=0) as pipe:
        printer = Printer(
            StandardStreams(pipe, io.BytesIO()),
            num_ranks=1,
            options=replace(PLAIN, output_dir=str(tmp_path)),
        )
        assert printer.closed() is None
        printer.write(0, "out", b"a\n")
        printer.refresh(0.0)
        assert printer.closed() == OutputClosed(
            "cannot write to standard output: [Errno 32] Broken pipe", broken_pipe=True
        )
        printer.write(0, "out", b"b\n")
        printer.close()
    assert (tmp_path / "rank-0.out").read_bytes() == b"a\nb\n"


def test_a_reader_far_behind_is_reported_and_tried_again() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "wb", buffering=0) as pipe, os.fdopen(read, "rb") as reader:
        printer = Printer(StandardStreams(pipe, io.BytesIO()), num_ranks=1, options=PLAIN)
        printer.write(0, "out", b"x" * 199_999 + b"\n")
        assert printer.refresh(1.0) == pytest.approx(1.02)
        assert not printer.is_backlogged()
        printer.write(0, "out", b"x" * 1_999_999 + b"\n")
        printer.refresh(1.01)
        assert printer.is_backlogged()
        thread = threading.Thread(target=reader.read)
        thread.start()
        printer.close()
        assert not printer.is_backlogged()
        pipe.close()
        thread.join()


def test_the_terminal_is_detected() -> None:
    leader, follower = pty.openpty()
    with os.fdopen(follower, "wb", buffering=0) as tty, Path("/dev/null").open("wb") as null:
        both = TerminalInfo.detect(StandardStreams(tty, tty))
        assert (both.out_is_terminal, both.err_is_terminal, both.same_file) == (True, True, True)
        split = TerminalInfo.detect(StandardStreams(null, tty))
        assert (split.out_is_terminal, split.err_is_terminal, split.same_file) == (False, True, False)
    os.close(leader)


# --- whatever is printed -------------------------------------------------------------------------------------------

CHUNK = st.tuples(
    st.integers(0, 2),
    st.sampled_from(["out", "err"]),
    st.lists(st.sampled_from([b"a", b"bb", b"\n", b"\n", b"\xff", "é".encode(), b"\x1b[1m"]), max_size=8).map(b"".join),
    st.sampled_from([0.0, 0.01, 0.11, 0.3]),
)


@given(st.lists(CHUNK, max_size=40), st.booleans(), st.booleans())
@settings(deadline=None)
def test_what_every_rank_printed_comes_out_whole_and_in_order(
    chunks: list[tuple[int, StdStream, bytes, float]], fold: bool, shared: bool
) -> None:
    printer = MemoryPrinter(3, OutputOptions(fold=fold, terminal_info=TerminalInfo(same_file=shared)))
    written: dict[tuple[int, str], bytes] = {}
    for rank, stream, data, pause_s in chunks:
        printer.write(rank, data, stream=stream)
        written[rank, stream] = written.get((rank, stream), b"") + data
        if pause_s:
            printer.wait(pause_s)
    printer.close()
    for rank in range(3):
        for stream, file in (("out", printer.out), ("err", printer.err)):
            if not shared:
                assert printed_by(rank, file.getvalue()) == written.get((rank, stream), b"").replace(b"\n", b"")
    if shared:
        for rank in range(3):
            everything = b"".join(written.get((rank, stream), b"") for stream in ("out", "err")).replace(b"\n", b"")
            assert sorted(printed_by(rank, printer.out.getvalue())) == sorted(everything)


def printed_by(rank: int, printed: bytes) -> bytes:
    """What a rank printed, without its ends of lines: an open line may have been ended for another rank."""
    parts = []
    for line in printed.split(b"\n"):
        name, _, text = line.partition(b"] ")
        spans = [span.split("-") for span in name.removeprefix(b"[").decode().split(",") if span]
        if any(int(span[0]) <= rank <= int(span[-1]) for span in spans):
            parts.append(text)
    return b"".join(parts)


def test_a_rank_that_comes_later_is_folded_with_the_others_and_has_files_of_its_own(tmp_path: Path) -> None:
    printer = MemoryPrinter(1, replace(FOLDED, output_dir=str(tmp_path)))
    printer.write(0, b"alone\n")
    printer.sink.rank_started(1)
    for rank in (0, 1):
        printer.write(rank, b"both\n")
    assert printer.close() == "[0] alone\n[0-1] both\n"
    assert (tmp_path / "rank-1.out").read_bytes() == b"both\n"
    assert printer.sink.tail(1, 3).endswith("\nboth")


def test_a_rank_that_is_started_again_goes_on_in_its_file_and_begins_a_new_tail(tmp_path: Path) -> None:
    printer = MemoryPrinter(2, replace(FOLDED, output_dir=str(tmp_path)))
    printer.write(0, b"first\n")
    printer.sink.rank_exited(0)
    printer.sink.rank_exited(1)
    for rank in (0, 1):
        printer.sink.rank_started(rank)
    for rank in (0, 1):
        printer.write(rank, b"again\n")
    assert printer.close() == "[0] first\n[0-1] again\n"
    assert (tmp_path / "rank-0.out").read_bytes() == b"first\nagain\n"
    assert printer.sink.tail(0, 3) == "last lines of standard output:\nagain"
