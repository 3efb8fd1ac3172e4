"""Readers and writers move bytes as the other side can, and know its end."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ronde.launch.loop import Loop
from ronde.launch.pipes import DRAIN_BYTES, Reader, Writer

BIG = os.urandom(1000) * 3000


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def test_everything_that_is_written_is_read_in_order(loop: Loop) -> None:
    reading, writing = os.pipe()
    got: list[bytes] = []
    ended: list[bool] = []
    writer = Writer(loop, writing)
    Reader(loop, reading, got.append, lambda: ended.append(True))
    pieces = [BIG, b"", *(b"%d," % n for n in range(1000)), BIG]
    for piece in pieces:
        writer.write(piece)
    assert writer.num_waiting_bytes == sum(map(len, pieces))
    writer.finish()
    loop.run(until=lambda: bool(ended))
    assert b"".join(got) == b"".join(pieces)
    assert writer.num_waiting_bytes == 0


def test_a_writer_says_when_something_has_gone(loop: Loop) -> None:
    reading, writing = os.pipe()
    waiting: list[int] = []
    writer = Writer(loop, writing, moved=lambda: waiting.append(writer.num_waiting_bytes))
    writer.write(b"abc")
    loop.run(until=lambda: bool(waiting))
    writer.close()
    os.close(reading)
    assert waiting == [0]


def test_a_writer_whose_reader_is_gone_says_so_once_and_takes_nothing_more(loop: Loop) -> None:
    reading, writing = os.pipe()
    broken: list[bool] = []
    writer = Writer(loop, writing, broken=lambda: broken.append(True))
    os.close(reading)
    writer.write(BIG)
    loop.run(until=lambda: bool(broken))
    writer.write(BIG)
    writer.finish()
    writer.close()
    assert writer.num_waiting_bytes == 0 and broken == [True]


def test_a_paused_reader_leaves_everything_where_it_is(loop: Loop) -> None:
    reading, writing = os.pipe()
    got: list[bytes] = []
    reader = Reader(loop, reading, got.append, lambda: None)
    reader.pause(True)
    reader.pause(True)
    os.write(writing, b"x")
    ticks: list[bool] = []
    loop.at(0.02, lambda: ticks.append(True))
    loop.run(until=lambda: bool(ticks))
    assert not got
    reader.pause(False)
    loop.run(until=lambda: bool(got))
    reader.close()
    reader.pause(True)
    os.close(writing)


def test_draining_takes_what_is_there_and_ends_though_the_pipe_is_held_open(loop: Loop) -> None:
    reading, writing = os.pipe()
    got: list[bytes] = []
    ended: list[bool] = []
    reader = Reader(loop, reading, got.append, lambda: ended.append(True))
    os.write(writing, b"x" * 65536)
    reader.drain()
    reader.drain()
    os.close(writing)
    assert b"".join(got) == b"x" * 65536 and ended == [True]


def test_draining_ends_though_somebody_goes_on_writing(loop: Loop) -> None:
    reading, writing = os.pipe()
    got: list[bytes] = []
    ended: list[bool] = []

    def more(data: bytes) -> None:
        got.append(data)
        os.write(writing, b"y" * 65536)

    reader = Reader(loop, reading, more, lambda: ended.append(True))
    os.write(writing, b"x")
    reader.drain()
    os.close(writing)
    assert ended == [True] and sum(map(len, got)) <= DRAIN_BYTES + 65536
