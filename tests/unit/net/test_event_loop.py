"""The event loop, and reading and writing descriptors with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from ronde.net.event_loop import MAX_REMAINING_BYTES, EventLoop, PipeReader, PipeWriter


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop()
    yield made
    made.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def test_what_can_be_read_is_called_until_it_is_unwatched(loop: EventLoop, pipe: tuple[int, int]) -> None:
    got = []
    loop.add_reader(pipe[0], lambda: got.append(os.read(pipe[0], 1)))
    os.write(pipe[1], b"abc")
    loop.run_until(lambda: len(got) == 2)
    loop.remove_reader(pipe[0])
    loop.call_soon_threadsafe(lambda: got.append(b"end"))
    loop.run_until(lambda: got[-1] == b"end")
    assert got == [b"a", b"b", b"end"]


def test_a_file_may_stand_where_a_pipe_is_expected(loop: EventLoop, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with (tmp_path / "file").open("rb") as file:
        ready = []
        loop.add_reader(file.fileno(), lambda: ready.append(True))
        loop.run_until(lambda: bool(ready))
        loop.remove_reader(file.fileno())


def test_one_call_may_end_the_watch_of_another_and_reuse_its_number(loop: EventLoop, pipe: tuple[int, int]) -> None:
    called = []
    other, writing = os.pipe()
    os.write(writing, b"x")
    os.write(pipe[1], b"x")

    def first() -> None:
        called.append("first")
        loop.remove_reader(pipe[0])
        loop.remove_reader(other)
        loop.add_reader(other, lambda: called.append("new"))
        os.read(other, 1)  # the new watch has nothing to read, and must not inherit the old one's call

    loop.add_reader(pipe[0], first)  # first in a turn, too
    loop.add_reader(other, lambda: called.append("old"))
    loop.run_until(lambda: bool(called))
    loop.remove_reader(other)
    os.close(other)
    os.close(writing)
    assert called == ["first"]


def test_timers_come_in_the_order_of_their_times_and_a_cancelled_one_not_at_all(loop: EventLoop) -> None:
    called: list[str] = []
    for delay_s, name in [(0.02, "late"), (0.0, "early"), (0.01, "middle")]:
        loop.call_later(delay_s, partial(called.append, name))
        loop.call_later(delay_s, partial(called.append, "cancelled")).cancel()
    loop.run_until(lambda: len(called) == 3)
    assert called == ["early", "middle", "late"]


def test_a_signal_handler_wakes_the_loop(loop: EventLoop) -> None:
    called: list[bool] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: loop.call_soon_threadsafe(lambda: called.append(True)))
    try:
        loop.call_later(0.0, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        loop.run_until(lambda: bool(called))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_who_asks_again_and_again_leaves_others_their_turn(loop: EventLoop, pipe: tuple[int, int]) -> None:
    read = []

    def again() -> None:
        loop.call_soon_threadsafe(again)

    again()
    loop.add_reader(pipe[0], lambda: read.append(os.read(pipe[0], 1)))
    os.write(pipe[1], b"x")
    loop.run_until(lambda: bool(read))


def test_an_error_in_a_call_ends_the_run(loop: EventLoop) -> None:
    loop.call_soon_threadsafe(lambda: [].pop())
    with pytest.raises(IndexError):
        loop.run_until(lambda: False)


def test_a_late_call_of_a_closed_loop_writes_into_no_other_file() -> None:
    loop = EventLoop()
    number = loop._wakeup_fd
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(loop.call_soon_threadsafe, lambda: None) for _ in range(400)]
        loop.close()
        loop.close()
        victims = [os.memfd_create("victim") for _ in range(2)]
        for call in calls:
            call.result(20)
    assert number in victims, "the test needs the old number"
    for victim in victims:
        assert os.pread(victim, 8, 0) == b""
        os.close(victim)


BIG = os.urandom(1000) * 3000


def test_everything_that_is_written_is_read_in_order(loop: EventLoop) -> None:
    reading, writing = os.pipe()
    got: list[bytes] = []
    left: list[int] = []
    ended: list[bool] = []
    writer = PipeWriter(loop, writing, on_written=lambda: left.append(writer.pending_bytes))
    PipeReader(loop, reading, got.append, lambda: ended.append(True))
    pieces = [BIG, b"", *(b"%d," % n for n in range(1000)), BIG]
    for piece in pieces:
        writer.write(piece)
    assert writer.pending_bytes == sum(map(len, pieces))
    writer.write_eof()
    loop.run_until(lambda: bool(ended))
    assert b"".join(got) == b"".join(pieces)
    assert left == sorted(left, reverse=True) and left[-1] == writer.pending_bytes == 0


def test_a_writer_whose_reader_is_gone_says_so_once_and_takes_nothing_more(loop: EventLoop) -> None:
    reading, writing = os.pipe()
    broken: list[bool] = []
    writer = PipeWriter(loop, writing, on_broken_pipe=lambda: broken.append(True))
    os.close(reading)
    writer.write(BIG)
    loop.run_until(lambda: bool(broken))
    writer.write(BIG)
    writer.write_eof()
    writer.close()
    assert writer.pending_bytes == 0 and broken == [True]


def test_a_paused_reader_leaves_everything_where_it_is(loop: EventLoop) -> None:
    reading, writing = os.pipe()
    got: list[bytes] = []
    reader = PipeReader(loop, reading, got.append, lambda: None)
    reader.pause_reading()
    reader.pause_reading()
    os.write(writing, b"x")
    ticks: list[bool] = []
    loop.call_later(0.02, lambda: ticks.append(True))
    loop.run_until(lambda: bool(ticks))
    assert not got
    reader.resume_reading()
    loop.run_until(lambda: bool(got))
    reader.close()
    reader.pause_reading()
    os.close(writing)


def test_draining_takes_what_is_there_and_ends_though_the_pipe_is_held_open(loop: EventLoop) -> None:
    reading, writing = os.pipe()
    got: list[bytes] = []
    ended: list[bool] = []
    reader = PipeReader(loop, reading, got.append, lambda: ended.append(True))
    os.write(writing, b"x" * 65536)
    reader.read_remaining()
    reader.read_remaining()
    os.close(writing)
    assert b"".join(got) == b"x" * 65536 and ended == [True]


def test_draining_ends_though_somebody_goes_on_writing(loop: EventLoop) -> None:
    reading, writing = os.pipe()
    got: list[bytes] = []
    ended: list[bool] = []

    def more(data: bytes) -> None:
        got.append(data)
        os.write(writing, b"y" * 65536)

    reader = PipeReader(loop, reading, more, lambda: ended.append(True))
    os.write(writing, b"x")
    reader.read_remaining()
    os.close(writing)
    assert ended == [True] and sum(map(len, got)) <= MAX_REMAINING_BYTES + 65536
