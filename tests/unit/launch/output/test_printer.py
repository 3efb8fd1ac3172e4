"""What the user of `ronde run` sees."""

from __future__ import annotations

import io
import os
import pty
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ronde.launch.output.printer import OutputOptions, OutputSink, Printer, horovod_timestamp_prefix, timestamp_prefix
from ronde.launch.output.terminal import OutputClosed, StandardStreams, TerminalInfo
from ronde.launch.protocol import StdStream
from tests.unit.launch.output.screens import FOLDED, PLAIN, TERMINAL, Screens

SHARED = replace(PLAIN, terminal_info=TerminalInfo(same_file=True))


def test_it_is_a_screen() -> None:
    screen: OutputSink = Screens().printer
    screen.close()


def test_lines_carry_their_rank_and_go_to_their_stream() -> None:
    screens = Screens(2)
    screens.say(0, b"a\nb\n")
    screens.say(1, b"warning\n", stream="err")
    assert screens.printed() == "[0] a\n[0] b\n"
    assert screens.err.getvalue() == b"[1] warning\n"


def test_equal_lines_are_folded_and_the_rest_is_not_held_up() -> None:
    screens = Screens(4, FOLDED)
    for rank in range(4):
        screens.say(rank, b"loading\nI am %d\nready\n" % rank)
    screens.wait(0.2)
    assert screens.printed() == "[0-3] loading\n" + "".join(f"[{r}] I am {r}\n" for r in range(4)) + "[0-3] ready\n"


def test_one_rank_alone_never_waits() -> None:
    screens = Screens(1, FOLDED)
    assert screens.say(0, b"a\n") is None
    assert screens.printed() == "[0] a\n"


def test_timestamps_tell_when_a_line_arrived() -> None:
    screens = Screens(2, replace(FOLDED, timestamps=True))
    screens.say(0, b"a\nb\n")
    screens.wait(1.0)
    arrived = timestamp_prefix(
        -100
    ).decode()  # the wall clock of the test says 0 at each tick; the line waited for 0.1 s
    assert screens.printed() == f"[0] {arrived}a\n[0] {arrived}b\n"


def test_lines_can_begin_as_those_of_horovod_do() -> None:
    screens = Screens(2, replace(PLAIN, horovod_format=True))
    screens.say(0, b"a\n\nb\n")
    screens.say(1, b"warning\n", stream="err")
    assert screens.printed() == "[0]<stdout>:a\n[0]<stdout>:\n[0]<stdout>:b\n"
    assert screens.err.getvalue() == b"[1]<stderr>:warning\n"


def test_the_time_stands_before_the_label_then() -> None:
    screens = Screens(1, replace(PLAIN, horovod_format=True, timestamps=True))
    screens.say(0, b"a\n")
    assert screens.printed() == f"{horovod_timestamp_prefix(0).decode()}[0]<stdout>:a\n"


def test_colours_are_for_terminals_and_for_those_who_want_them() -> None:
    assert Screens(1, replace(PLAIN, color=True)).say(0, b"a\n") is None
    for place, color, expected in [
        (TERMINAL, True, b"\x1b[36m[0]\x1b[0m a\n"),
        (TERMINAL, False, b"[0] a\n"),
        (TerminalInfo(), True, b"[0] a\n"),
    ]:
        screens = Screens(1, OutputOptions(terminal_info=place, color=color))
        screens.say(0, b"a\n")
        assert screens.out.getvalue() == expected


def test_colours_of_a_rank_do_not_run_into_the_next_line() -> None:
    screens = Screens.on_terminal(1)
    screens.say(0, b"\x1b[31mred\nstill\n")
    assert screens.out.getvalue() == b"[0] \x1b[31mred\x1b[0m\n[0] still\x1b[0m\n"


def test_a_note_comes_after_what_was_printed_before_it() -> None:
    screens = Screens(2, replace(FOLDED, terminal_info=TerminalInfo(same_file=True)))
    screens.printer.write(0, "out", b"last words\n")
    screens.printer.print_message("rank 0 failed\nexit code 1\n")
    screens.printer.refresh(screens.now_s)
    assert screens.printed() == "[0] last words\n[ronde] rank 0 failed\n[ronde] exit code 1\n"


# --- open lines ----------------------------------------------------------------------------------------------------


def test_a_prompt_shows_after_a_moment_and_goes_on() -> None:
    screens = Screens(2)
    assert screens.say(0, b"name? ") == pytest.approx(screens.now_s + 0.25)
    assert screens.printed() == ""
    screens.wait(0.3)
    assert screens.printed() == "[0] name? "
    screens.say(0, b"Ada\n")
    assert screens.printed() == "[0] name? Ada\n"


def test_a_line_of_another_rank_ends_an_open_one_first() -> None:
    screens = Screens(2, SHARED)
    screens.say(0, b"working ...")
    screens.wait(0.3)
    screens.say(1, b"hello\n", stream="err")
    screens.say(0, b" done\n")
    assert screens.printed() == "[0] working ...\n[1] hello\n[0]  done\n"


def test_an_open_line_that_was_ended_by_another_does_not_end_twice() -> None:
    screens = Screens(2, SHARED)
    screens.say(0, b"working ...")
    screens.wait(0.3)
    screens.say(1, b"hello\n")
    screens.say(0, b"\n")
    assert screens.close() == "[0] working ...\n[1] hello\n"


def test_streams_that_lead_to_different_places_do_not_end_each_others_lines() -> None:
    screens = Screens(2)
    screens.say(0, b"working ...")
    screens.wait(0.3)
    screens.say(1, b"hello\n", stream="err")
    screens.say(0, b" done\n")
    assert screens.printed() == "[0] working ... done\n"


def test_what_a_rank_leaves_open_is_ended_with_it() -> None:
    screens = Screens(2, SHARED)
    screens.say(0, b"no newline")
    screens.printer.rank_exited(0)
    screens.say(1, b"next\n")
    assert screens.printed() == "[0] no newline\n[1] next\n"


def test_a_line_of_50_megabytes_passes_as_one_with_little_memory() -> None:
    class Count(io.BytesIO):
        size = largest = 0

        def write(self, data: object) -> int:
            length = len(memoryview(data))  # type: ignore[arg-type]
            self.size += length
            self.largest = max(self.largest, length)
            return length

    out = Count()
    printer = Printer(StandardStreams(out, io.BytesIO()), num_ranks=2, options=FOLDED)
    for index in range(800):
        printer.write(0, "out", b"x" * 65536)
        printer.refresh(index / 1000)
    printer.write(0, "out", b"\n")
    printer.close()
    assert out.size == len("[0] ") + 800 * 65536 + 1
    assert out.largest < 1_000_000


def test_garbage_passes() -> None:
    screens = Screens(2, FOLDED)
    garbage = bytes(byte for byte in range(256) if byte not in b"\r\b\x1b") * 10
    screens.say(1, garbage)
    screens.close()
    lines = screens.out.getvalue().removeprefix(b"[1] ").replace(b"\n[1] ", b"\n")
    assert lines == garbage + b"\n"


# --- the terminal of one rank --------------------------------------------------------------------------------------


def test_the_rank_with_the_terminal_gets_it_raw_and_its_prompt_appears_again() -> None:
    screens = Screens(2, OutputOptions(terminal_info=TERMINAL, debug_rank=1))
    screens.say(1, b"> train.py(3)\r\n(Pdb) ")
    screens.say(0, b"hello\n")
    screens.wait(0.2)
    screens.say(1, b"n\r\n")
    assert screens.out.getvalue() == b"> train.py(3)\r\n(Pdb) \x1b[0m\r\n[0] hello\r\n(Pdb) n\r\n"


# --- files, and what goes wrong ------------------------------------------------------------------------------------


def test_files_hold_the_raw_bytes_and_a_full_disk_is_told(tmp_path: Path) -> None:
    (tmp_path / "rank-1.out").symlink_to("/dev/full")
    screens = Screens(2, replace(FOLDED, output_dir=str(tmp_path)))
    for rank in range(2):
        screens.say(rank, b"\r10%", b"\r100%\r\n")
    screens.wait(0.2)
    screens.close()
    assert (tmp_path / "rank-0.out").read_bytes() == b"\r10%\r100%\r\n"
    assert screens.printed() == "[0] 100%\n[1] 100%\n"
    told = screens.err.getvalue().decode()
    assert told.count("No space left on device") == 1
    assert told.splitlines()[-1] == f"[ronde] incomplete output files: {tmp_path}/rank-1.out"


def test_a_reader_that_left_is_told_and_files_go_on(tmp_path: Path) -> None:
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


def test_a_reader_far_behind_is_told_and_tried_again() -> None:
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


def test_closing_twice_and_printing_after_it_do_nothing() -> None:
    screens = Screens(2, FOLDED)
    screens.say(0, b"a\nopen")
    assert screens.close() == "[0] a\n[0] open\n"
    screens.say(0, b"late\n")
    assert screens.close() == "[0] a\n[0] open\n"


def test_the_tail_of_a_rank_is_known() -> None:
    screens = Screens(2, FOLDED)
    screens.say(1, b"ValueError: no\n", stream="err")
    assert screens.printer.tail(0, 1) == ""
    assert screens.printer.tail(1, 1) == "last lines of standard error:\nValueError: no"


def test_the_place_is_found_by_looking() -> None:
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
    screens = Screens(3, OutputOptions(fold=fold, terminal_info=TerminalInfo(same_file=shared)))
    said: dict[tuple[int, str], bytes] = {}
    for rank, stream, data, pause_s in chunks:
        screens.say(rank, data, stream=stream)
        said[rank, stream] = said.get((rank, stream), b"") + data
        if pause_s:
            screens.wait(pause_s)
    screens.close()
    for rank in range(3):
        for stream, file in (("out", screens.out), ("err", screens.err)):
            if not shared:
                assert said_by(rank, file.getvalue()) == said.get((rank, stream), b"").replace(b"\n", b"")
    if shared:
        for rank in range(3):
            everything = b"".join(said.get((rank, stream), b"") for stream in ("out", "err")).replace(b"\n", b"")
            assert sorted(said_by(rank, screens.out.getvalue())) == sorted(everything)


def said_by(rank: int, printed: bytes) -> bytes:
    """What a rank said, without its ends of lines: an open line may have been ended for another rank."""
    parts = []
    for line in printed.split(b"\n"):
        name, _, text = line.partition(b"] ")
        spans = [span.split("-") for span in name.removeprefix(b"[").decode().split(",") if span]
        if any(int(span[0]) <= rank <= int(span[-1]) for span in spans):
            parts.append(text)
    return b"".join(parts)
