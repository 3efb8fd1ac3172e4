"""Which cores a rank gets."""

from __future__ import annotations

import os

import pytest

from ronde.launch.agent.resource_usage import available_cpus, sort_by_topology
from ronde.launch.environment import omp_num_threads
from ronde.launch.placement import bind_cpus


@pytest.mark.parametrize(
    ("num_cores", "shares"),
    [
        (4, [(0, 1), (2, 3)]),
        (5, [(0, 1, 2), (3, 4)]),
        (7, [(0, 1, 2), (3, 4), (5, 6)]),
        (2, [(0,), (1,)]),
        (2, [(0,), (1,), (0,)]),
        (0, [(), ()]),
    ],
)
def test_cores_are_divided_evenly_and_nobody_goes_without(num_cores: int, shares: list[tuple[int, ...]]) -> None:
    cpus = range(num_cores)
    assert [bind_cpus(cpus, rank, len(shares)) for rank in range(len(shares))] == shares


def test_threads_of_one_core_stay_with_one_rank() -> None:
    def place(cpu: int) -> tuple[int, int]:
        return (cpu % 4 // 2, cpu % 4)  # four cores of two threads, on two sockets: 0 and 4 are one core

    cpus = sort_by_topology(range(8), place)
    assert cpus == (0, 4, 1, 5, 2, 6, 3, 7)
    assert bind_cpus(cpus, 0, 4) == (0, 4)
    assert bind_cpus(cpus, 1, 2) == (2, 6, 3, 7)


def test_only_cores_that_this_process_may_use_are_listed() -> None:
    assert set(available_cpus()) == os.sched_getaffinity(0)


@pytest.mark.parametrize(("num_cores", "local_size", "threads"), [(8, 2, 4), (8, 3, 2), (2, 4, 1), (1, 1, 1)])
def test_a_rank_computes_with_its_part_of_the_cores(num_cores: int, local_size: int, threads: int) -> None:
    assert omp_num_threads(num_cores, local_size) == threads
