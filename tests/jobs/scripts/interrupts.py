"""A rank of tests/jobs/test_interrupts.py: rank 0 waits for one that does not come, until a signal ends the wait."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

import numpy as np

import ronde
from tests.jobs.scripts.control import ControlSocket, until


class Alarm(Exception):
    """Raised by a handler of the program's own."""


def raise_alarm(_number: int, _frame: FrameType | None) -> None:
    raise Alarm


def wait_for_nobody(how: str) -> None:
    """An operation to which the other rank does not come."""
    if how == "blocking":
        ronde.allreduce(np.ones(3))
    elif how == "work":
        ronde.allreduce(np.ones(3), wait=False).wait()
    else:
        ronde.allreduce(np.ones(3), name="lonely")


def say_when_waiting(test: ControlSocket, how: str) -> None:
    """Tell the test when the data plane waits; a named operation waits for the coordinator instead."""
    channel = ronde.world().ordered_channel
    if how != "named":
        until(lambda: channel.current_call() is not None, "the operation to wait")
    test.send("waiting")


def main(how: str) -> None:
    signal.signal(signal.SIGUSR1, raise_alarm)
    with ControlSocket() as test:
        ronde.init()
        ronde.barrier()
        if test.rank == 0:
            watcher = threading.Thread(target=say_when_waiting, args=(test, how))
            try:
                watcher.start()
                wait_for_nobody(how)
            except (KeyboardInterrupt, Alarm) as error:
                watcher.join()
                test.send("raised", error=type(error).__name__)
        else:
            test.send("past the barrier")  # or rank 0 could end its round while we are still in it
            test.receive()
        ronde.shutdown()
        test.send("over")


if __name__ == "__main__":
    main(os.environ["TEST_HOW"])
