"""Bytes on their way to a reader who takes his time."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from ronde.launch.output.terminal import HIGH_WATER_BYTES, OutputBuffer, OutputClosed


@contextmanager
def opened_pipe() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader, os.fdopen(write, "wb") as writer:
        yield reader, writer


def numbered(num_lines: int) -> bytes:
    return b"".join(b"line %d\n" % index for index in range(num_lines))


def test_a_reader_that_has_stopped_holds_up_nobody_until_much_waits() -> None:
    with opened_pipe() as (_, pipe):
        outlet = OutputBuffer({"out": pipe})
        outlet.add("out", b"x" * HIGH_WATER_BYTES)
        outlet.flush()
        assert 0 < outlet.pending_bytes < HIGH_WATER_BYTES
        assert outlet.closed is None


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("wait", [True, False])
def test_a_reader_that_goes_on_gets_everything_in_order(blocking: bool, wait: bool) -> None:
    data = numbered(200_000)
    got: list[bytes] = []
    with opened_pipe() as (reader, pipe):
        os.set_blocking(pipe.fileno(), blocking)
        thread = threading.Thread(target=lambda: got.append(reader.read()))
        outlet = OutputBuffer({"out": pipe, "err": pipe})
        for begin in range(0, len(data), 1000):
            outlet.add("out" if begin % 3000 else "err", data[begin : begin + 1000])
            outlet.flush()
        thread.start()
        while outlet.pending_bytes:
            outlet.flush(wait=wait)
        pipe.close()
        thread.join()
    assert got == [data]


def test_when_somebody_goes_on_all_the_same_he_waits_for_the_reader() -> None:
    with opened_pipe() as (reader, pipe):
        thread = threading.Thread(target=lambda: reader.read(5 * HIGH_WATER_BYTES))
        outlet = OutputBuffer({"out": pipe})
        outlet.add("out", b"x" * 5 * HIGH_WATER_BYTES)
        thread.start()
        outlet.flush()
        assert outlet.pending_bytes < 4 * HIGH_WATER_BYTES
        outlet.flush(wait=True)
        thread.join()


def test_a_file_takes_everything(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        outlet = OutputBuffer({"out": file})
        outlet.add("out", b"x" * 10_000_000)
        outlet.flush()
        assert outlet.pending_bytes == 0
        assert (tmp_path / "log").stat().st_size == 10_000_000


def test_what_was_printed_before_stays_before() -> None:
    with opened_pipe() as (reader, pipe):
        pipe.write(b"before ")
        outlet = OutputBuffer({"out": pipe})
        outlet.add("out", b"after")
        outlet.flush()
        assert os.read(reader.fileno(), 100) == b"before after"


def test_a_file_that_was_closed_is_told() -> None:
    file = io.BytesIO()
    outlet = OutputBuffer({"err": file})
    file.close()
    outlet.add("err", b"x")
    outlet.flush()
    assert outlet.closed == OutputClosed("cannot write to standard error: I/O operation on closed file.")
    outlet.add("err", b"y")
    assert outlet.pending_bytes == 0
