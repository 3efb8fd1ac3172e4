"""The leak check of conftest.py sees what it should: each kind of thing, by its name."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from tests.conftest import held, left_since

Undo = Callable[[], object]


def a_thread() -> Undo:
    told = threading.Event()
    thread = threading.Thread(target=told.wait, args=(30,), name="forgotten")
    thread.start()

    def end() -> None:
        told.set()
        thread.join()

    return end


def a_process() -> Undo:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    return lambda: child.communicate(b"\n", timeout=30)


def a_file() -> Undo:
    descriptor = os.memfd_create("forgotten")
    return lambda: os.close(descriptor)


def a_mapping() -> Undo:
    descriptor = os.memfd_create("ronde-forgotten")
    os.ftruncate(descriptor, mmap.PAGESIZE)
    memory = mmap.mmap(descriptor, mmap.PAGESIZE)
    os.close(descriptor)
    return memory.close


def a_zmq_context() -> Undo:
    import zmq

    context = zmq.Context()
    context.socket(zmq.PAIR).close()
    return context.term


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (a_thread, "thread 'forgotten'"),
        (a_process, "input()"),
        (a_file, "memfd:forgotten"),
        (a_mapping, "mapped shared memory /memfd:ronde-forgotten"),
        (a_zmq_context, "native thread 'ZMQbg"),
    ],
)
def test_what_is_left_behind_is_named(make: Callable[[], Undo], words: str) -> None:
    before = held()
    undo = make()
    deadline = time.monotonic() + 10
    try:
        left = ""
        while words not in left and time.monotonic() < deadline:  # a native thread names itself after its start
            left = "\n".join(left_since(before))
        assert words in left
    finally:
        undo()


def test_a_quiet_test_leaves_nothing() -> None:
    before = held()
    assert left_since(before) == []
