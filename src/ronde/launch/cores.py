"""Which cores a rank gets. The division is pure; used by the driver for RankOrder.cpus, and by the agent, which lists
the cores of its host so that they can be divided."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

__all__ = ["num_threads", "order_cores", "own_cores", "share_of_cores"]


def share_of_cores(cpus: Sequence[int], local_rank: int, local_size: int) -> tuple[int, ...]:
    """The cores of one rank, for `--bind core`: neighbours in `cpus` stay together, and nobody shares as long as there
    is one for each. With fewer cores than ranks, ranks take turns on single cores."""
    if not cpus:
        return ()
    if len(cpus) < local_size:
        return (cpus[local_rank % len(cpus)],)
    each, more = divmod(len(cpus), local_size)
    # The first `more` ranks get one core more.
    first = local_rank * each + min(local_rank, more)
    return tuple(cpus[first : first + each + (local_rank < more)])


def num_threads(num_cores: int, local_size: int) -> int:
    """How many threads a rank should compute with: its part of the host's cores."""
    return max(1, num_cores // local_size)


def own_cores() -> tuple[int, ...]:
    """The cores this process may use, in the order in which they should be divided."""
    return order_cores(os.sched_getaffinity(0), _place_of_core)


def order_cores(cpus: Iterable[int], place: Callable[[int], tuple[int, int]]) -> tuple[int, ...]:
    """Threads of one physical core beside each other, and cores of one socket too: Linux numbers the second thread of
    every core after the first threads of all, so that dividing by number would put two ranks on the same cores."""
    return tuple(sorted(cpus, key=lambda cpu: (*place(cpu), cpu)))


def _place_of_core(cpu: int) -> tuple[int, int]:
    """Socket and physical core of a CPU as Linux numbers it; where it does not tell, each is a core of its own."""
    folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text())
    except (OSError, ValueError):
        return 0, cpu
