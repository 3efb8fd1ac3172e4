"""Stragglers: the arrivals tell for whom the others wait, not the waiting time that everybody sees."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from ronde.observe.stragglers import (
    MAX_BLOCKED_INTERVALS,
    MAX_OPEN_OPERATIONS,
    REPORT_GRACE_NS,
    REPORT_TIMEOUT_NS,
    ArrivalSample,
    ArrivalSampler,
    BlockedIntervals,
    StragglerDetector,
    attribute_waits,
    long_wait_ns,
    max_samples_per_s,
    next_sampled,
)

MS = 1_000_000
ALL = (0, 1, 2, 3)


def samples_of(arrivals: dict[int, int], *, sequence: int = 0, level: int = 0) -> dict[int, ArrivalSample]:
    """What the members report of an operation to which they came at these times, and waited in from then on."""
    ready = max(arrivals.values())
    return {rank: ArrivalSample(sequence, level, at, ready - at, ready - at) for rank, at in arrivals.items()}


def report(
    detector: StragglerDetector, samples: dict[int, ArrivalSample], *, members: tuple[int, ...] = ALL, now: int = 0
) -> None:
    for rank, sample in samples.items():
        detector.add(rank, "0.ordered", members, [sample], now)


def held_up_ms(detector: StragglerDetector) -> dict[int, float]:
    return {rank: round(held_ns / MS, 6) for rank, held_ns in sorted(detector.held_up_ns.items())}


# --- one operation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrivals", "blocked", "expected"),
    [
        ({0: 0, 1: 0, 2: 30, 3: 0}, [(0, 30), (0, 30), (0, 30)], {0: 0, 1: 0, 2: 90, 3: 0}),
        # Until 10 both are missing, and two wait; from then on three wait for rank 3 alone.
        ({0: 0, 1: 0, 2: 10, 3: 30}, [(0, 30), (0, 30), (10, 30)], {0: 0, 1: 0, 2: 10, 3: 10 + 60}),
        ({0: 0, 1: 100}, [(90, 100)], {0: 0, 1: 10}),
        ({0: 0, 1: 100}, [], {0: 0, 1: 0}),
        ({0: 0, 1: 10}, [(0, 50), (10, 50)], {0: 0, 1: 10}),
        ({}, [(0, 50)], {}),
    ],
    ids=["one late", "two late", "the caller computes", "never blocked", "after the last arrival", "no arrivals"],
)
def test_the_late_are_charged_for_the_time_that_others_wait(
    arrivals: dict[int, int], blocked: list[tuple[int, int]], expected: dict[int, float]
) -> None:
    assert attribute_waits(arrivals, blocked) == expected


def test_the_time_of_all_is_the_time_that_all_have_lost() -> None:
    draw = random.Random(7)
    for _ in range(200):
        arrivals = {rank: draw.randrange(1000) for rank in range(draw.randrange(2, 9))}
        ready = max(arrivals.values())
        blocked = [(draw.randrange(at, ready + 1), ready) for at in arrivals.values()]
        waited_for_ns = attribute_waits(arrivals, blocked)
        assert sum(waited_for_ns.values()) == pytest.approx(sum(end - begin for begin, end in blocked))
        assert waited_for_ns[min(arrivals, key=lambda rank: arrivals[rank])] == 0


# --- many operations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("late_ns", "held_up"), [(MS // 2, {1: 8 * 0.5}), (50 * MS, {1: 50.0})], ids=["for its block", "for itself"]
)
def test_a_short_operation_that_was_sampled_stands_for_its_block_and_a_long_one_for_itself(
    late_ns: int, held_up: dict[int, float]
) -> None:
    detector = StragglerDetector()
    report(detector, samples_of({0: 0, 1: late_ns}, level=3), members=(0, 1))
    detector.add(1, "1.ordered", (0, 1), [samples_of({0: 0, 1: 9 * MS})[1]], 0)  # channels do not mix
    assert held_up_ms(detector) == held_up


def test_who_has_not_sampled_a_long_operation_came_at_its_end() -> None:
    detector = StragglerDetector()
    samples = samples_of({0: 0, 1: 2 * MS, 2: 50 * MS, 3: 0}, level=5)
    del samples[2]  # it has not waited, and the operation was not sampled
    report(detector, samples, now=100)
    for rank in ALL[:-1]:
        detector.rank_reported(rank, 100 + REPORT_GRACE_NS)
        assert held_up_ms(detector) == {}, "the last one may still report it"
    detector.rank_reported(3, 100 + REPORT_GRACE_NS)
    assert held_up_ms(detector) == {1: 2.0, 2: 2.0 + 48 * 3}


@pytest.mark.parametrize(("late_ms", "held_up"), [(1, {}), (50, {1: 50.0})], ids=["short", "long"])
def test_of_the_last_operations_only_long_ones_count_without_the_samples_of_all(
    late_ms: int, held_up: dict[int, float]
) -> None:
    detector = StragglerDetector()
    report(detector, {0: samples_of({0: 0, 1: late_ms * MS})[0]}, members=(0, 1))
    detector.finish()
    assert held_up_ms(detector) == held_up


def test_a_member_that_stays_silent_is_not_waited_for_without_end() -> None:
    detector = StragglerDetector()
    report(detector, {0: samples_of({0: 0, 1: 50 * MS})[0]}, members=(0, 1))
    detector.rank_reported(0, REPORT_TIMEOUT_NS - 1)
    assert held_up_ms(detector) == {}
    detector.rank_reported(0, REPORT_TIMEOUT_NS)
    assert held_up_ms(detector) == {1: 50.0}


def test_what_is_kept_is_bounded() -> None:
    detector = StragglerDetector()
    detector.add(
        0,
        "0.ordered",
        (0, 1),
        [ArrivalSample(sequence, 0, 0, 0, 0) for sequence in range(MAX_OPEN_OPERATIONS + 100)],
        0,
    )
    detector.rank_reported(0, 1)
    assert len(detector._open) == MAX_OPEN_OPERATIONS


# --- which operations are sampled: the same on all members, not too many, without a period ----------------------------


def sampled(level: int, limit: int) -> list[int]:
    found, sequence = [], -1
    while (sequence := next_sampled(sequence, level)) < limit:
        found.append(sequence)
    return found


@pytest.mark.parametrize("level", [1, 3, 8])
def test_one_of_each_block_is_sampled(level: int) -> None:
    blocks = [sequence >> level for sequence in sampled(level, 1 << (level + 6))]
    assert blocks == list(range(64))


@pytest.mark.parametrize("level", [0, 3, 7])
def test_what_is_sampled_at_a_higher_level_is_sampled_at_a_lower_one(level: int) -> None:
    assert set(sampled(level + 1, 5000)) < set(sampled(level, 5000))


@pytest.mark.parametrize("period", [2, 8, 64, 100, 1024])
def test_the_choice_has_no_period_in_common_with_a_step_of_the_training(period: int) -> None:
    firsts = [sequence for sequence in sampled(3, 8 * 20_000) if sequence % period == 0]
    expected = 20_000 / period
    assert abs(len(firsts) - expected) < 5 * expected**0.5 + 1


def fill(sampler: ArrivalSampler, sequences: range, waited_ns: int = 0) -> None:
    for sequence in sequences:
        if sequence >= sampler.next_sequence or waited_ns >= sampler.long_wait_ns:
            sampler.add(sequence, sequence, waited_ns, waited_ns)


def test_a_busy_channel_samples_a_part_and_a_calm_one_all() -> None:
    sampler = ArrivalSampler(2)
    fill(sampler, range(100_000))
    first = sampler.take_samples()
    assert max_samples_per_s(2) <= len(first) < 8 * max_samples_per_s(2)
    assert [sample.sequence for sample in first[: max_samples_per_s(2)]] == list(range(max_samples_per_s(2)))
    sequence = 100_000
    for _ in range(20):
        fill(sampler, range(sequence, sequence + 100))
        sequence += 100
        sampler.take_samples()
    fill(sampler, range(sequence, sequence + 100))
    assert len(sampler.take_samples()) == 100


def test_a_long_wait_is_sampled_at_every_level() -> None:
    sampler = ArrivalSampler(2)
    fill(sampler, range(100_000))
    sampler.take_samples()
    fill(sampler, range(100_000, 100_100), waited_ns=long_wait_ns(2))
    assert [sample.sequence for sample in sampler.take_samples()] == list(range(100_000, 100_100))


@pytest.mark.parametrize("num_members", [0, 1])
def test_nothing_is_sampled_where_nobody_waits(num_members: int) -> None:
    sampler = ArrivalSampler(num_members)
    fill(sampler, range(1000), waited_ns=10**12)
    assert sampler.take_samples() == ()


def test_sequences_that_begin_anew_are_sampled() -> None:
    sampler = ArrivalSampler(2)
    fill(sampler, range(10))
    sampler.skip_to(1 << 32)
    fill(sampler, range(1 << 32, (1 << 32) + 5))
    assert [sample.sequence for sample in sampler.take_samples()][10:] == [(1 << 32) + index for index in range(5)]


# --- with the samples of ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("offset_ms", [0, 5_000_000, -77])
@pytest.mark.parametrize("per_step", [1, 64, 1000])
def test_the_time_is_right_however_many_operations_a_step_has_and_whatever_the_clocks_say(
    per_step: int, offset_ms: int
) -> None:
    """Rank 2 computes 20 ms longer; the first operation of each step takes all of the waiting."""
    members = (0, 1, 2)
    samplers = {rank: ArrivalSampler(len(members)) for rank in members}
    clocks = {0: 0, 1: offset_ms * MS, 2: 3 * offset_ms * MS}
    detector = StragglerDetector()
    now, sequence, num_steps = 1000 * MS, 0, 40
    for step in range(num_steps):
        for index in range(per_step):
            late = 20 * MS if index == 0 else 0
            for rank in members:
                arrived = now + (late if rank == 2 else 0)
                waited = now + late - arrived
                sampler = samplers[rank]
                if sequence >= sampler.next_sequence or waited >= sampler.long_wait_ns:
                    sampler.add(sequence, arrived + clocks[rank], waited, waited)
            now += late + MS // 100
            sequence += 1
        if step % 10 == 9:
            for rank in members:
                detector.add(rank, "0.ordered", members, samplers[rank].take_samples(-clocks[rank]), now)
                detector.rank_reported(rank, now)
    detector.finish()
    assert held_up_ms(detector) == {2: pytest.approx(num_steps * 20 * 2)}


def test_short_waits_are_estimated_from_those_that_were_sampled() -> None:
    """Too many to sample them all, and each too short to be sampled in any case."""
    members = (0, 1)
    samplers = {rank: ArrivalSampler(len(members)) for rank in members}
    detector = StragglerDetector()
    num, waited = 100_000, long_wait_ns(2) // 4
    for sequence in range(num):
        for rank in members:
            if sequence >= samplers[rank].next_sequence:
                late = waited if rank == 0 else 0
                samplers[rank].add(sequence, sequence * MS - late, late, late)
        if sequence % 20_000 == 19_999:
            for rank in members:
                detector.add(rank, "0.ordered", members, samplers[rank].take_samples(), 0)
    assert detector.held_up_ns[1] == pytest.approx(num * waited, rel=0.1)


@pytest.mark.parametrize(
    ("added", "between", "blocked"),
    [
        ([(10, 30)], (0, 5), 0),
        ([(10, 30)], (0, 20), 10),
        ([(10, 30)], (20, 25), 5),
        ([(10, 30)], (20, 90), 10),
        ([(20, 40), (0, 30), (5, 10)], (0, 100), 40),  # two callers at once count as one
        ([(0, 0.009), (5, 4)], (0, 10), 0),  # a very short interval is no wait
        (
            [(2 * index, 2 * index + 1) for index in range(MAX_BLOCKED_INTERVALS + 1)],
            (0, 1),
            0,
        ),  # old ones are forgotten
    ],
)
def test_the_blocked_time_between_two_moments(
    added: list[tuple[float, float]], between: tuple[int, int], blocked: int
) -> None:
    intervals = BlockedIntervals()
    for begin, end in added:
        intervals.add(int(begin * MS), int(end * MS))
    assert intervals.blocked_ns_between(between[0] * MS, between[1] * MS) == blocked * MS


def test_the_work_of_reports_grows_as_the_members_do_not_as_their_square() -> None:
    num = 2000
    members = CountedRanks(range(num))
    detector = StragglerDetector()
    for rank in range(num):
        sample = ArrivalSample(0, 0, rank, num - rank, num - rank)
        if rank:  # rank 0 reports late: the operation stays open meanwhile
            detector.add(rank, "0.ordered", members, [sample], now_ns=rank)
        detector.rank_reported(rank, rank)
    assert members.num_iterations < 10
    detector.rank_reported(0, 2 * REPORT_GRACE_NS)
    assert not detector.held_up_ns, "the others may still report it"
    for rank in range(num):
        detector.rank_reported(rank, 2 * REPORT_GRACE_NS)
    assert members.num_iterations < 20


class CountedRanks(tuple[int, ...]):
    """Counts how often somebody has looked at all of them."""

    num_iterations = 0

    def __iter__(self) -> Iterator[int]:
        self.num_iterations += 1
        return super().__iter__()
