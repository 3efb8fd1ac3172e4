"""What the commit log and the servers are made of: parts and configurations, clocks, leases."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.errors import Mismatch
from ronde.ps.commit_log.leases import LeaseTable
from ronde.ps.commit_log.log_state import (
    AddWorker,
    CommitPush,
    Effect,
    LogRecord,
    LogState,
    RemoveWorker,
    ReplyCommitted,
    ReplyLease,
    ReplyRejected,
    TakeLease,
    WorkerAdded,
)
from ronde.ps.commit_log.staleness import Clocks, Mode, StalenessSettings
from ronde.ps.partition import (
    MAX_PART_BYTES,
    NO_BACKUP,
    PartsLost,
    TensorSpec,
    change_servers,
    cut_into_parts,
    make_configuration,
)

TENSORS = st.lists(
    st.builds(
        TensorSpec,
        name=st.just("w"),
        shape=st.tuples(st.integers(0, 3000), st.integers(0, 2000)),
        dtype=st.sampled_from(["float32", "float64"]),
        group=st.integers(0, 1),
    ),
    max_size=8,
)


@given(TENSORS, st.integers(1, 6), st.booleans())
def test_every_element_is_in_one_part_and_no_part_is_too_large(
    tensors: list[TensorSpec], num_servers: int, keep_whole: bool
) -> None:
    parts = cut_into_parts(tensors, num_servers, keep_whole=keep_whole)
    ends = [0] * len(tensors)
    for part in parts:
        assert part.size and (part.num_bytes <= MAX_PART_BYTES or (keep_whole and len(part.slices) == 1))
        for piece in part.slices:
            tensor = tensors[piece.tensor]
            assert (part.dtype, part.group) == (tensor.dtype, tensor.group)
            assert piece.start == ends[piece.tensor] < piece.stop
            ends[piece.tensor] = piece.stop
            assert not keep_whole or piece.stop == tensor.size
    assert ends == [tensor.size for tensor in tensors]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_what_is_gathered_can_be_scattered(sizes: list[int]) -> None:
    tensors = [TensorSpec(str(size), (size,), "float64") for size in sizes]
    source = [np.random.default_rng(size).random(size) for size in sizes]
    target = [np.zeros(size) for size in sizes]
    for part in cut_into_parts(tensors, 3, max_bytes=100):
        part.scatter(part.gather(source), target)
    assert all((a == b).all() for a, b in zip(source, target, strict=True))


@given(st.integers(1, 5), st.lists(st.integers(0, 4), unique=True, max_size=4), st.booleans())
def test_servers_are_loaded_evenly_and_their_loss_leaves_each_part_on_two_others(
    num_servers: int, lost: list[int], replicate: bool
) -> None:
    parts = cut_into_parts([TensorSpec("w", (1000, 10_000), "float32")], num_servers)
    configuration = make_configuration(parts, range(num_servers), replicate=replicate)
    loads = [configuration.primaries.count(rank) for rank in range(num_servers)]
    assert max(loads) - min(loads) <= 1
    for rank in lost:
        if rank not in configuration.servers:
            continue
        before = configuration
        try:
            configuration = change_servers(configuration, parts, lost={rank})
        except PartsLost as error:
            assert not replicate or len(before.servers) == 1
            assert error.parts and all(before.replicas_of(part) == (rank,) for part in error.parts)
            return
        assert configuration.epoch == before.epoch + 1 and rank not in configuration.servers
        for part in range(len(parts)):
            replicas = configuration.replicas_of(part)
            assert len({*replicas}) == (2 if replicate and len(configuration.servers) > 1 else 1)
            assert configuration.primaries[part] in before.replicas_of(part)  # who has the values
            assert {*replicas} <= {*configuration.servers}
    if not replicate:
        assert {*configuration.backups} == {NO_BACKUP}


EVENTS = st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 10.0)), max_size=120)


@given(st.sampled_from(list(Mode)), st.integers(0, 4), EVENTS, st.integers(0, 120))
def test_no_worker_begins_a_step_farther_ahead_of_the_slowest_than_the_bound(
    mode: Mode, staleness: int, events: list[tuple[int, float]], removed_at: int
) -> None:
    clocks = Clocks(StalenessSettings(mode, staleness), range(4))
    computing: set[int] = set()
    limit = {Mode.SYNC: 0, Mode.ASYNC: math.inf}.get(mode, staleness)
    now_s = 0.0
    for index, (worker, duration_s) in enumerate(events):
        now_s += duration_s
        if index == removed_at:
            clocks.remove(3)
            computing.discard(3)
        if worker not in clocks.clocks:
            assert not clocks.may_begin(worker)
            continue
        if worker in computing:
            computing.discard(worker)
            clocks.push(worker, now_s)
            clocks.begin_wait(worker, now_s)
        elif clocks.may_begin(worker):
            clocks.end_wait(worker, now_s)
            computing.add(worker)
        assert 0 <= clocks.bound <= limit
        for each in computing:
            assert clocks.clocks[each] - clocks.slowest <= limit
        slowest = [each for each, clock in clocks.clocks.items() if clock == clocks.slowest]
        assert all(clocks.may_begin(each) for each in slowest)  # somebody can always go on


def test_the_dynamic_bound_follows_the_speeds_and_does_not_count_waiting() -> None:
    clocks = Clocks(StalenessSettings(Mode.DYNAMIC, 8), (0, 1))
    now_s = 0.0
    for _ in range(30):  # worker 1 takes a third of the time, and then waits for worker 0
        clocks.push(1, now_s + 1.0)
        clocks.begin_wait(1, now_s + 1.0)
        clocks.push(0, now_s + 3.0)
        clocks.end_wait(1, now_s + 3.0)
        now_s += 3.0
    assert clocks.bound == 2


@given(st.integers(0, 40), st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.sampled_from("aaal"))))
def test_no_sample_is_leased_to_two_and_all_are_acknowledged_once(
    num_samples: int, events: list[tuple[int, int, str]]
) -> None:
    table, held, used = LeaseTable(), {0: [], 1: [], 2: []}, []  # type: ignore[var-annotated]
    table.open_epoch(0, num_samples)
    for worker, count, what in [*events, *([(0, 9, "a")] * 2 * (num_samples + 1))]:
        if what == "l":
            table.release(worker)
            held[worker].clear()
            continue
        for lease in held[worker]:
            used += [index for each in lease.ranges for index in range(each.start, each.stop)]
        table.acknowledge(worker, [lease.number for lease in held[worker]])
        table.acknowledge(worker, [lease.number for lease in held[worker]])  # a second time changes nothing
        held[worker] = []
        lease = table.grant(worker, 0, count)
        if lease is not None and lease.ranges:
            held[worker].append(lease)
            assert sum(each.stop - each.start for each in lease.ranges) <= count
        leased = [
            index for each in held.values() for one in each for r in one.ranges for index in range(r.start, r.stop)
        ]
        assert len({*leased}) == len(leased) and not {*leased} & {*used}
    for worker in held:
        for lease in held[worker]:
            used += [index for each in lease.ranges for index in range(each.start, each.stop)]
        table.acknowledge(worker, [lease.number for lease in held[worker]])
    while (lease := table.grant(0, 0, 100)) is not None and lease.ranges:
        used += [index for each in lease.ranges for index in range(each.start, each.stop)]
        table.acknowledge(0, [lease.number])
    assert sorted(used) == list(range(num_samples)) and table.is_over


def test_epochs_follow_each_other() -> None:
    table = LeaseTable()
    table.open_epoch(0, 3)
    with pytest.raises(Mismatch, match="epoch 0 has 3 samples"):
        table.open_epoch(0, 4)
    with pytest.raises(ValueError, match="epoch 1 cannot begin"):
        table.open_epoch(1, 3)
    lease = table.grant(5, 0, 3)
    assert lease is not None and table.grant(6, 0, 1) is None and table.leases_of(5) == (lease,)
    assert table.grant(5, 0, 1) == lease.__class__(0, 0, ())  # it does not wait for itself
    table.acknowledge(6, [lease.number])  # not its own
    assert not table.is_over
    table.acknowledge(5, [lease.number])
    table.open_epoch(1, 4)
    assert table.grant(6, 0, 1) == lease.__class__(0, 0, ())  # who is late learns that the epoch is over


@pytest.mark.parametrize("workers_may_join", [False, True])
def test_training_is_over_when_all_workers_are_lost_only_if_no_others_can_come(workers_may_join: bool) -> None:
    state = LogState(StalenessSettings(), (0,), workers_may_join=workers_may_join)
    state.apply(LogRecord(1, 0.0, RemoveWorker(0, 0)))
    assert state.is_finished != workers_may_join
    effects = state.apply(LogRecord(2, 0.0, AddWorker(1, 1)))
    assert [type(each) for each in effects] == ([WorkerAdded, ReplyCommitted] if workers_may_join else [ReplyRejected])
    if workers_may_join:
        state.apply(LogRecord(3, 0.0, RemoveWorker(1, 2)))  # it has come to its end
        assert state.is_finished


def test_who_has_used_its_samples_waits_for_the_next_epoch_and_who_leaves_some_to_nobody_is_told() -> None:
    state = LogState(StalenessSettings(Mode.BOUNDED, 9), (0, 1))
    positions, requests = itertools.count(1), itertools.count(1)

    def take(worker: int, epoch: int, count: int) -> list[Effect]:
        return state.apply(LogRecord(next(positions), 0.0, TakeLease(worker, next(requests), epoch, 10, count)))

    def push(worker: int, *leases: int) -> list[ReplyLease]:
        step = state.steps[worker] + 1
        entry = CommitPush(worker, next(requests), step, leases=leases)
        return [each for each in state.apply(LogRecord(next(positions), 0.0, entry)) if isinstance(each, ReplyLease)]

    numbers = [effect.lease.number for worker in (0, 1) for effect in take(worker, 0, 5)]  # type: ignore[union-attr]
    (ended,) = take(0, 0, 5)  # it has accumulated gradients, and has to push them
    assert isinstance(ended, ReplyLease) and not ended.lease.ranges
    assert push(0, numbers[0]) == [] and take(0, 1, 2) == []  # the other one still has some
    (granted,) = push(1, numbers[1])
    assert granted.worker == 0 and granted.lease.epoch == 1
    (rejected,) = take(1, 2, 1)
    assert isinstance(rejected, ReplyRejected) and "epoch 2 cannot begin: 10 of the 10 samples" in rejected.reason
