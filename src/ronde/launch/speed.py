"""How fast ranks talk to each other, pair by pair, on the data plane that jobs use. `ronde doctor` calls measure() on
all ranks of a job.

One of a pair leads. It sends an order (a number) and the other one does it: answer with the time (0), take so many
bytes and say when they are there (above 0), or end (below 0).
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
PAIR_S = 2.0
"""About as long as a pair takes at most, in a network that is of any use."""

ANSWER, END = 0.0, -1.0


class Speed(msgspec.Struct, frozen=True):
    """Between two ranks."""

    round_trip_s: float
    """Of a message of 8 bytes."""
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
    trips = _throw(peer)
    forth = _fill(peer)
    send(np.array([END]), peer)
    _follow_back = receive(np.empty(1), peer)
    best = min(trips, key=lambda trip: trip[0])
    return Speed(
        round_trip_s=statistics.median(trip[0] for trip in trips),
        bytes_per_s=forth,
        back_bytes_per_s=float(_follow_back[0]),
        clock_ahead_s=best[1],
    )
