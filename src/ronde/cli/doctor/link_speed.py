"""How fast pairs of ranks communicate over the data plane that jobs use. `ronde doctor` calls measure_links() on all
ranks of a job.

The first rank of a pair is the client: it sends requests (a kind and a number of bytes) to the second one, the server.
So only the client decides, and it has all the numbers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from ronde.comm.collectives import barrier, rank, receive, send
from ronde.comm.world import init, shutdown

ROUND_TRIP_DURATION_S = 0.1
MIN_ROUND_TRIPS = 5
START_BYTES = 64 * 1024
MAX_BYTES = 64 * 1024 * 1024
MIN_TRANSFER_S = 0.05
"""A message that takes this long is large enough to measure the bandwidth."""
NUM_TRANSFERS = 3
"""How often that message is sent; the fastest counts, as others may use the network too."""
PAIR_TIMEOUT_S = 10.0

SEND_TIME, RECEIVE_BYTES, SEND_BYTES, STOP = range(4)
"""Requests: send the time; receive so many bytes, then send the time; send so many bytes; stop."""


class LinkSpeed(msgspec.Struct, frozen=True):
    round_trip_s: float
    """Of a message of 16 bytes."""
    bytes_per_s: float
    """From the first to the second."""
    back_bytes_per_s: float
    clock_ahead_s: float
    """How much the second's clock is ahead of the first's, to about half a round trip."""

    @property
    def slowest_bytes_per_s(self) -> float:
        return min(self.bytes_per_s, self.back_bytes_per_s)


def measure_links(pairs: Sequence[tuple[int, int]]) -> list[LinkSpeed | None]:
    """Measure one pair of ranks after the other, while the other ranks wait. The result of a pair is returned on its
    first rank, None on the others. Collective."""
    init()
    found: list[LinkSpeed | None] = []
    for first, second in pairs:
        barrier()
        found.append(_run_client(second) if rank() == first else None)
        if rank() == second:
            _run_server(first)
    shutdown()
    return found


def _run_client(peer: int) -> LinkSpeed:
    _query_time(peer)  # the first time, both sides set up their connection
    trips = [_query_time(peer) for _ in range(MIN_ROUND_TRIPS)]
    until_s = time.monotonic() + ROUND_TRIP_DURATION_S
    while time.monotonic() < until_s:
        trips.append(_query_time(peer))
    bytes_per_s, back_bytes_per_s = _measure_bandwidth(peer, RECEIVE_BYTES), _measure_bandwidth(peer, SEND_BYTES)
    _send_request(peer, STOP)
    _, ahead_s = min(trips)
    return LinkSpeed(statistics.median(trip_s for trip_s, _ in trips), bytes_per_s, back_bytes_per_s, ahead_s)


def _query_time(peer: int) -> tuple[float, float]:
    """How long the reply took, and how much the other clock is ahead if both ways took equally long."""
    wall_s, start_s = time.time(), time.monotonic()
    _send_request(peer, SEND_TIME)
    server_s = receive(np.empty(2), peer)[0]
    took_s = time.monotonic() - start_s
    return took_s, float(server_s) - (wall_s + took_s / 2)


def _measure_bandwidth(peer: int, request: int) -> float:
    """Bytes per second, of a message that is large enough for this network."""
    data = np.zeros(MAX_BYTES, np.uint8)

    def time_transfer() -> float:
        start_s = time.monotonic()
        _send_request(peer, request, num_bytes)
        if request == RECEIVE_BYTES:
            send(data[:num_bytes], peer)
            receive(np.empty(2), peer)
        else:
            receive(data[:num_bytes], peer)
        return time.monotonic() - start_s

    num_bytes, took_s = START_BYTES, 0.0
    while took_s < MIN_TRANSFER_S and num_bytes < MAX_BYTES:
        num_bytes *= 2
        took_s = time_transfer()
    return num_bytes / min(took_s, *(time_transfer() for _ in range(NUM_TRANSFERS - 1)))


def _run_server(peer: int) -> None:
    data = np.zeros(MAX_BYTES, np.uint8)  # written to, so that its pages exist before it is timed
    while True:
        kind, num_bytes = map(int, receive(np.empty(2), peer))
        if kind == STOP:
            return
        if kind == RECEIVE_BYTES:
            receive(data[:num_bytes], peer)
        if kind == SEND_BYTES:
            send(data[:num_bytes], peer)
        else:
            send(np.array([time.time(), 0.0]), peer)


def _send_request(peer: int, request: int, num_bytes: int = 0) -> None:
    send(np.array([request, num_bytes], np.float64), peer)
