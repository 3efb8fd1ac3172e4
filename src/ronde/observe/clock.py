"""The offset of the coordinator's clock to the local one, so that times of all ranks stand on one axis.

Each rank estimates it from the replies to its heartbeats. Monotonic clocks of two hosts start at different moments, so
the offset can be anything; on one host both are the same clock.
"""

from __future__ import annotations

import math

MAX_DRIFT = 20e-6
"""How fast two clocks drift apart at most."""


class ClockOffset:
    """The estimate from the sample with the smallest round trip.

    The request is sent at `sent_ns` and the reply arrives at `received_ns` (local clock); the coordinator replied at
    `coordinator_ns` (its clock). That was between the two; taking the middle is wrong by at most half the round trip,
    however unequal the two ways are. So the quickest sample is the best one. It grows old as the clocks drift apart,
    which is added to its error: a fresh sample that is a little slower replaces it in time.
    """

    def __init__(self) -> None:
        self.offset_ns = 0
        """What to add to the local clock to get the coordinator's; 0 before the first sample."""
        self._error_ns = math.inf
        self._at_ns = 0

    def error_ns(self, now_ns: int) -> float:
        """Return how wrong the offset can be at this time of the local clock; infinite before the first sample."""
        return self._error_ns + MAX_DRIFT * max(0, now_ns - self._at_ns)

    def add(self, sent_ns: int, coordinator_ns: int, received_ns: int) -> bool:
        """Add a sample. Return whether it is the best one now. A reply from before its request is no sample."""
        round_trip_ns = received_ns - sent_ns
        if round_trip_ns < 0 or round_trip_ns / 2 > self.error_ns(received_ns):
            return False
        self.offset_ns = coordinator_ns - (sent_ns + received_ns) // 2
        self._error_ns = round_trip_ns / 2
        self._at_ns = received_ns
        return True
