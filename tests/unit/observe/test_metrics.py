"""Sums of operations: kept per group and kind, and no addition of any thread is lost."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from ronde.observe.metrics import Metrics, MetricsRow, OperationCounters


@pytest.fixture
def frantic_switching() -> Iterator[None]:
    """Threads take turns after nearly every instruction, so that an addition that can be lost is lost."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_all(work: Callable[[], None], num_threads: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_sums_are_kept_per_group_and_kind() -> None:
    counters = OperationCounters()
    counters.add(1, "broadcast", 7, 0, 500_000_000)
    counters.add(0, "allreduce", 100, 1_000_000_000, 2_000_000_000)
    counters.add(0, "allreduce", 50, 500_000_000, 0)
    metrics = counters.snapshot(rank=3)
    assert metrics.rank == 3
    assert metrics.rows == (
        MetricsRow(group=0, kind="allreduce", operations=2, bytes=150, wait_s=1.5, move_s=2.0),
        MetricsRow(group=1, kind="broadcast", operations=1, bytes=7, wait_s=0.0, move_s=0.5),
    )
    assert metrics.total == MetricsRow(operations=3, bytes=157, wait_s=1.5, move_s=2.5)
    assert metrics.of(1, "broadcast").bytes == 7
    assert metrics.of(1, "barrier") == MetricsRow(group=1, kind="barrier")
    assert pickle.loads(pickle.dumps(metrics)) == metrics
    assert OperationCounters().snapshot(0) == Metrics(rank=0)


@pytest.mark.usefixtures("frantic_switching")
def test_no_addition_of_many_threads_is_lost_and_no_snapshot_is_torn() -> None:
    counters = OperationCounters()
    torn: list[MetricsRow] = []

    def work() -> None:
        for index in range(2000):
            counters.add(index % 3, "allreduce", 10, 3, 4)
            if index % 100 == 0:
                torn.extend(row for row in counters.snapshot(0).rows if row.bytes != 10 * row.operations)

    run_all(work, num_threads=8)
    total = counters.snapshot(0).total
    assert torn == []
    assert total.operations == 16_000
    assert total.bytes == 160_000
    assert total.wait_s == pytest.approx(48_000e-9)
    assert total.move_s == pytest.approx(64_000e-9)


def test_threads_that_ended_are_added_up_and_forgotten() -> None:
    counters = OperationCounters()
    for _ in range(50):
        run_all(lambda: counters.add(0, "barrier", 0, 1, 1), num_threads=1)
    assert counters.snapshot(0).total.operations == 50
    assert len(counters._threads) <= 2  # ours, and the last one if it is just ending


def test_a_source_that_counts_nothing_any_more_is_forgotten_and_its_sums_stay() -> None:
    counters = OperationCounters()
    counters.add(0, "allreduce", 10, 1, 1)
    sources = [lambda: (2, 8, 10, 20), lambda: (0, 0, 0, 0)]
    for source in sources:
        counters.add_source(0, "allreduce", source)
    before = counters.snapshot(0)
    for source in sources:
        counters.remove_source(0, "allreduce", source)
    assert counters.snapshot(0) == before and before.total.operations == 3
    assert counters._sources == []
