"""Output is written as fast as its reader takes it."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import pytest

from ronde.launch.output.terminal import OutputBuffer, OutputClosed


@contextmanager
def opened_pipe() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader, os.fdopen(write, "wb") as writer:
        yield reader, writer


def numbered(num_lines: int) -> bytes:
    return b"".join(b"line %d\n" % index for index in range(num_lines))


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("wait", [True, False])
def test_a_reader_that_goes_on_gets_everything_in_order(blocking: bool, wait: bool) -> None:
    data = numbered(200_000)
    got: list[bytes] = []
    with opened_pipe() as (reader, pipe):
        os.set_blocking(pipe.fileno(), blocking)
        thread = threading.Thread(target=lambda: got.append(reader.read()))
        buffer = OutputBuffer({"out": pipe, "err": pipe})
        for begin in range(0, len(data), 1000):
            buffer.add("out" if begin % 3000 else "err", data[begin : begin + 1000])
            buffer.flush()
        thread.start()
        while buffer.pending_bytes:
            buffer.flush(wait=wait)
        pipe.close()
        thread.join()
    assert got == [data]


def test_what_was_printed_before_stays_before() -> None:
    with opened_pipe() as (reader, pipe):
        pipe.write(b"before ")
        buffer = OutputBuffer({"out": pipe})
        buffer.add("out", b"after")
        buffer.flush()
        assert os.read(reader.fileno(), 100) == b"before after"


def test_a_file_that_was_closed_is_reported() -> None:
    file = io.BytesIO()
    buffer = OutputBuffer({"err": file})
    file.close()
    buffer.add("err", b"x")
    buffer.flush()
    assert buffer.closed == OutputClosed("cannot write to standard error: I/O operation on closed file.")
    buffer.add("err", b"y")
    assert buffer.pending_bytes == 0
