"""What the coordinator's door answers to a rank that comes, and how a rank calls until it is let in. Written by the
coordinator, read by the worker.

    4711           the port of the control server: come in
    later: <why>   the round that is on is not yours; the next may be: call again
    never: <why>   it will not work, however often you call
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from ronde.errors import StartFailed
from ronde.net.addresses import format_address, peer_host
from ronde.net.door import Caller, knock
from ronde.types import Deadline

if TYPE_CHECKING:
    from ronde.comm.coordination.lifelines import Line
    from ronde.net.keys import JobKey

__all__ = ["LIFE", "call_coordinator", "later", "liveness_caller", "never", "read_greeting", "welcome"]

LIFE = "life"
"""Purpose of a lifeline: the socket that stays open as long as the rank's process lives."""
AGAIN_S = 0.02


def welcome(control_port: int) -> bytes:
    """Come in."""
    return str(control_port).encode()


def later(why: str) -> bytes:
    """Call again."""
    return f"later: {why}".encode()


def never(why: str) -> bytes:
    """Do not call again."""
    return f"never: {why}".encode()


def read_greeting(greeting: bytes) -> int | str:
    """The control port, or why to call again. Raises StartFailed when that would not help."""
    text = greeting.decode(errors="replace")
    word, _, why = text.partition(": ")
    if word == "later":
        return why
    if word == "never":
        raise StartFailed(why)
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 65535):
        raise StartFailed("what answers at the coordinator's address is no coordinator")
    return int(text)


def liveness_caller(rank: int, round: int) -> Caller:
    """How a rank introduces itself. The note is unique to this attempt to join: a retry with the same note comes from
    the same process, whose former connection then no longer counts."""
    return Caller(LIFE, rank, note=f"{round} {secrets.token_hex(8)}")


def call_coordinator(
    address: str, key: JobKey, rank: int, *, round: int, deadline: Deadline, heartbeat_s: float
) -> tuple[Line, str]:
    """The lifeline to the coordinator, and `host:port` of its control server."""
    caller = liveness_caller(rank, round)
    while True:
        line, greeting = knock(address, key, caller, deadline, heartbeat_s=heartbeat_s)
        try:
            answer = read_greeting(greeting)
            if isinstance(answer, int):
                return line, format_address(peer_host(line), answer)
        except BaseException:
            line.close()
            raise
        line.close()
        if deadline.passed:
            raise StartFailed(f"rank {rank} was not let in within {deadline.seconds:g} s: {answer}")
        time.sleep(min(AGAIN_S, deadline.left_s))
