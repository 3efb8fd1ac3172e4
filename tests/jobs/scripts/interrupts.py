"""A rank of tests/jobs/test_interrupts.py: rank 0 waits for one that does not come, until a signal arrives. What its
handler does, and in what rank 0 waits, is the test's choice."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

import ronde
from tests.jobs.scripts.control import ControlSocket, until


class Alarm(Exception):
    """Raised by a handler of the program's own."""


works: list[ronde.Work] = []


def wait_in(how: str) -> list[float]:
    """Do something in which this rank waits for the other one; the sum."""
    x = np.ones(3)
    if how == "work":
        works.append(ronde.allreduce(x, wait=False))
        x = works[0].wait()
    elif how in ("named", "repeated named"):
        x = ronde.allreduce(x, name="lonely")
    elif how == "behind":  # another operation in the background
        before = ronde.allreduce(x, wait=False)
        x = ronde.allreduce(x)
        before.wait()
    elif how == "message":
        if ronde.rank() == 0:
            ronde.receive(x, 1)
        else:
            ronde.send(2 * x, 0)
    elif how == "request":
        asked = threading.Event()

        def handle(message: ronde.MailboxMessage) -> None:
            message.reply(payload=2 * message.payload)
            asked.set()

        with ronde.world().open_mailbox(handle) as mailbox:
            if ronde.rank() == 0:
                x = mailbox.request(1, payload=x).payload
            else:
                asked.wait()
    elif how == "bucket":
        plan = ronde.plan([ronde.Bucket(3, op="sum")])
        plan.arrays[0][:] = 1
        x = plan.start(0).wait()
    elif how == "group":
        x = ronde.allreduce(x, group=ronde.add_group([0, 1]))
    else:
        x = ronde.allreduce(x)
    return x.tolist()


def is_waiting(how: str) -> bool:
    """Whether the main thread waits for the other rank."""
    if how == "message":
        return ronde.world().message_channel.current_call() is not None
    if how not in ("named", "repeated named", "group", "init", "request"):
        return ronde.world().ordered_channel.current_call() is not None
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    frame: FrameType | None = sys._current_frames()[main_thread]
    waits = ("wait_for_start", "run_announced", "_wait_for_reply", "_request_join", "wait_for_end")
    while frame is not None and frame.f_code.co_name not in waits:
        frame = frame.f_back
    return frame is not None


class Handler:
    """Does what the test has chosen, and keeps what it got."""

    def __init__(self, test: ControlSocket, action: str) -> None:
        self.test = test
        self.action = action
        self.errors: list[str] = []
        self.took_s = -1.0

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        began = time.monotonic()
        x = np.ones(3)
        operations: list[Callable[[], Any]] = []
        if self.action == "raise":
            raise Alarm
        if self.action == "operate":
            operations = [
                lambda: ronde.allreduce(x),
                lambda: ronde.allreduce(x, wait=False),
                lambda: ronde.allreduce(x, name="in a handler"),
                lambda: ronde.barrier(),
                lambda: ronde.add_group([0, 1]),
                lambda: ronde.send(x, 1),
                lambda: ronde.receive(x),
            ]
        if self.action.startswith("shut down"):
            ronde.shutdown()
        for operate in operations:
            try:
                operate()
            except ronde.RondeError as error:
                self.errors.append(str(error))
        self.took_s = time.monotonic() - began
        if self.action == "operate":
            self.test.send("operated")
        if self.action == "shut down and exit":
            raise SystemExit


def say_when_waiting(test: ControlSocket, how: str) -> None:
    until(lambda: is_waiting(how), "the operation to wait")
    test.send("waiting")


def interrupted_rank(test: ControlSocket, how: str, handler: Handler) -> None:
    watcher = threading.Thread(target=say_when_waiting, args=(test, how))
    result, error = None, ""
    try:
        watcher.start()
        result = wait_in(how)
    except (Exception, KeyboardInterrupt, SystemExit) as raised:
        error = f"{type(raised).__name__}: {raised}"
    watcher.join()
    handled = {"inside": handler.errors, "took_s": handler.took_s}
    test.send("ended", error=error, result=result, initialized=ronde.is_initialized(), **handled)
    if how == "work" and handler.action == "raise":
        test.send("went on", result=works[0].wait().tolist())


def other_rank(test: ControlSocket, how: str) -> None:
    test.send("past the barrier")  # or rank 0 could end its round while we are still in it
    if test.receive()["come"]:
        test.send("came", result=wait_in(how))
    else:
        error = ""
        try:
            wait_in("blocking")
        except ronde.RondeError as raised:
            error = f"{type(raised).__name__}: {raised}"
        test.send("stayed", error=error)


def main() -> None:
    with ControlSocket() as test:
        wanted = test.receive()
        how, handler = wanted["how"], Handler(test, wanted["action"])
        signal.signal(signal.SIGUSR1, handler)
        if how == "init":
            if test.rank == 0:
                watcher = threading.Thread(target=say_when_waiting, args=(test, how))
                watcher.start()
                try:
                    ronde.init()
                except ronde.RoundEnded as error:
                    test.send("ended", error=str(error), initialized=ronde.is_initialized())
                watcher.join()
            test.receive()
        ronde.init()
        ronde.barrier()
        for _ in range(3 if how.startswith("repeated") else 0):  # a repeated allreduce takes a shorter way
            ronde.allreduce(np.ones(3), name="lonely" if how == "repeated named" else None)
        if how == "init":
            test.send("joined", result=wait_in("blocking"))
        elif test.rank == 0:
            interrupted_rank(test, how, handler)
        else:
            other_rank(test, how)
        ronde.shutdown()
        test.send("over")


if __name__ == "__main__":
    main()
