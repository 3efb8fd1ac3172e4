"""Readers and writers move bytes as the other side can, and know its end."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ronde.net.event_loop import MAX_REMAINING_BYTES, EventLoop, PipeReader, PipeWriter

BIG = os.urandom(1000) * 3000


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop()
    yield made
    made.close()


def test_everything_that_is_written_is_read_in_order(loop: EventLoop) -> None:
    reading, writing = os.pipe()
    got: list[bytes] = []
    ended: list[bool] = []
    writer = PipeWriter(loop, writing)
    PipeReader(loop, reading, got.append, lambda: ended.append(True))
    pieces = [BIG, b"", *(b"%d," % n for n in range(1000)), BIG]
    for piece in pieces:
        writer.write(piece)
    assert writer.pending_bytes == sum(map(len, pieces))
    writer.write_eof()
    loop.run_until(condition=lambda: bool(ended))
    assert b"".join(got) == b"".join(pieces)
    assert writer.pending_bytes == 0


def test_a_writer_says_when_something_has_gone(loop: EventLoop) -> None:
    reading, writing = os.pipe()
    waiting: list[int] = []
    writer = PipeWriter(loop, writing, on_written=lambda: waiting.append(writer.pending_bytes))
    writer.write(b"abc")
    loop.run_until(condition=lambda: bool(waiting))
    writer.close()
    os.close(reading)
    assert waiting == [0]


def test_a_writer_whose_reader_is_gone_says_so_once_and_takes_nothing_more(loop: EventLoop) -> None:
    reading, writing = os.pipe()
    broken: list[bool] = []
    writer = PipeWriter(loop, writing, on_broken_pipe=lambda: broken.append(True))
    os.close(reading)
    writer.write(BIG)
    loop.run_until(condition=lambda: bool(broken))
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
    loop.run_until(condition=lambda: bool(ticks))
    assert not got
    reader.resume_reading()
    loop.run_until(condition=lambda: bool(got))
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
