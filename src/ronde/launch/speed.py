"""How fast ranks talk to each other, pair by pair, on the data plane that jobs use. `ronde doctor` calls measure() on
all ranks of a job.

The first of a pair leads: it sends orders (a kind and a number of bytes), and the other one follows them. So only the
leader has to decide, and it has all the numbers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from ronde.comm.collectives import barrier, rank, receive, send
from ronde.comm.current import init, shutdown

__all__ = ["PAIR_S", "Speed", "measure"]

ROUND_TRIPS_S = 0.1
"""So long is the small message thrown to and fro."""
MIN_ROUND_TRIPS = 5
FIRST_BYTES = 64 * 1024
MOST_BYTES = 64 * 1024 * 1024
LONG_S = 0.05
"""A message that takes so long is large enough to tell the bandwidth."""
NUM_LARGE = 3
"""How often that one is sent; the best counts: somebody else may use the network."""
PAIR_S = 10.0
"""A pair that takes longer is of no use."""

TELL, TAKE, GIVE, END = range(4)
"""Orders: tell what time it is, take so many bytes and say when they are there, give so many, end."""


class Speed(msgspec.Struct, frozen=True):
    """Between two ranks."""

    round_trip_s: float
    """Of a message of 16 bytes."""
    bytes_per_s: float
    """From the first to the second."""
    back_bytes_per_s: float
    clock_ahead_s: float
    """How much the second's clock is ahead of the first's, to about half a round trip."""


def measure(pairs: Sequence[tuple[int, int]]) -> list[Speed | None]:
    """Measure each pair of ranks in turn, while the others wait. The first of each pair has its result."""
    init()
    found: list[Speed | None] = []
    for first, second in pairs:
        barrier()
        found.append(_lead(second) if rank() == first else None)
        if rank() == second:
            _follow(first)
    shutdown()
    return found


def _lead(peer: int) -> Speed:
    _ask_time(peer)  # the first time, both sides have something to prepare
    trips = [_ask_time(peer) for _ in range(MIN_ROUND_TRIPS)]
    until_s = time.monotonic() + ROUND_TRIPS_S
    while time.monotonic() < until_s:
        trips.append(_ask_time(peer))
    forth, back = _move(peer, TAKE), _move(peer, GIVE)
    _order(peer, END)
    _, ahead_s = min(trips)
    return Speed(statistics.median(trip_s for trip_s, _ in trips), forth, back, ahead_s)


def _ask_time(peer: int) -> tuple[float, float]:
    """How long the answer took, and how much the other clock is ahead, should the way back be as long as the one
    there."""
    wall_s, start_s = time.time(), time.monotonic()
    _order(peer, TELL)
    theirs_s = receive(np.empty(2), peer)[0]
    took_s = time.monotonic() - start_s
    return took_s, float(theirs_s) - (wall_s + took_s / 2)


def _move(peer: int, kind: int) -> float:
    """Bytes per second of a message that is large enough for this network."""
    data = np.zeros(MOST_BYTES, np.uint8)
    num_bytes, took_s = FIRST_BYTES, 0.0
    while took_s < LONG_S and num_bytes < MOST_BYTES:
        num_bytes *= 2
        took_s = _move_once(peer, kind, data[:num_bytes])
    return num_bytes / min(took_s, *(_move_once(peer, kind, data[:num_bytes]) for _ in range(NUM_LARGE - 1)))


def _move_once(peer: int, kind: int, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> float:
    start_s = time.monotonic()
    _order(peer, kind, data.size)
    if kind == TAKE:
        send(data, peer)
        receive(np.empty(2), peer)
    else:
        receive(data, peer)
    return time.monotonic() - start_s


def _follow(peer: int) -> None:
    data = np.zeros(MOST_BYTES, np.uint8)  # touched before it is timed
    while True:
        kind, num_bytes = map(int, receive(np.empty(2), peer))
        if kind == END:
            return
        if kind == TAKE:
            receive(data[:num_bytes], peer)
        if kind == GIVE:
            send(data[:num_bytes], peer)
        else:
            send(np.array([time.time(), 0.0]), peer)


def _order(peer: int, kind: int, num_bytes: int = 0) -> None:
    send(np.array([kind, num_bytes], np.float64), peer)
