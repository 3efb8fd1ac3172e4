"""Who is waited for: the arrivals tell, not the waiting time that everybody sees."""

from __future__ import annotations

import random

import pytest

from ronde.observe.stragglers import (
    MAX_OPEN_OPERATIONS,
    REPORT_GRACE_NS,
    REPORT_TIMEOUT_NS,
    ArrivalSample,
    ArrivalSampler,
    StragglerDetector,
    attribute_waits,
    long_wait_ns,
)

MS = 1_000_000
ALL = (0, 1, 2, 3)


def notes_of(arrivals: dict[int, int], *, number: int = 0, level: int = 0) -> dict[int, ArrivalSample]:
    """What the members tell of an operation to which they came at these times, and waited in from then on."""
    ready = max(arrivals.values())
    return {rank: ArrivalSample(number, level, at, ready - at, ready - at) for rank, at in arrivals.items()}


def tell(
    stragglers: StragglerDetector, notes: dict[int, ArrivalSample], *, members: tuple[int, ...] = ALL, now: int = 0
) -> None:
    for rank, note in notes.items():
        stragglers.add(rank, "0.ordered", members, [note], now)


def held_up_ms(stragglers: StragglerDetector) -> dict[int, float]:
    return {rank: round(held_ns / MS, 6) for rank, held_ns in sorted(stragglers.held_up_ns.items())}


# --- one operation ---------------------------------------------------------------------------------------------------


def test_one_slow_of_four_is_blamed_for_the_time_of_the_three() -> None:
    assert attribute_waits({0: 0, 1: 0, 2: 30, 3: 0}, [(0, 30), (0, 30), (0, 30)]) == {0: 0, 1: 0, 2: 90, 3: 0}


def test_two_slow_ones_share_the_time_in_which_both_are_missing() -> None:
    # Until 10 both miss, and two wait; from then on three wait for rank 3 alone.
    blamed = attribute_waits({0: 0, 1: 0, 2: 10, 3: 30}, [(0, 30), (0, 30), (10, 30)])
    assert blamed == {0: 0, 1: 0, 2: 10, 3: 10 + 60}


def test_time_in_which_a_caller_computes_is_nobodys_fault() -> None:
    assert attribute_waits({0: 0, 1: 100}, [(90, 100)]) == {0: 0, 1: 10}
    assert attribute_waits({0: 0, 1: 100}, []) == {0: 0, 1: 0}


def test_time_after_the_last_arrival_is_nobodys_fault() -> None:
    assert attribute_waits({0: 0, 1: 10}, [(0, 50), (10, 50)]) == {0: 0, 1: 10}


def test_without_arrivals_nobody_is_to_blame() -> None:
    assert attribute_waits({}, [(0, 50)]) == {}


def test_the_blame_of_all_is_the_time_that_all_have_lost() -> None:
    draw = random.Random(7)
    for _ in range(200):
        arrivals = {rank: draw.randrange(1000) for rank in range(draw.randrange(2, 9))}
        ready = max(arrivals.values())
        blocked = [(draw.randrange(at, ready + 1), ready) for at in arrivals.values()]
        blamed = attribute_waits(arrivals, blocked)
        assert sum(blamed.values()) == pytest.approx(sum(end - begin for begin, end in blocked))
        assert blamed[min(arrivals, key=lambda rank: arrivals[rank])] == 0


# --- many operations -------------------------------------------------------------------------------------------------


def test_the_one_that_is_always_late_is_found() -> None:
    stragglers = StragglerDetector()
    for number in range(10):
        tell(stragglers, notes_of({0: 0, 1: 1 * MS, 2: 20 * MS, 3: 0}, number=number))
    # In the first millisecond of each, two wait for ranks 1 and 2.
    assert held_up_ms(stragglers) == {1: 10.0, 2: 10 * (1 + 19 * 3.0)}


def test_those_that_are_late_in_turn_are_blamed_alike() -> None:
    stragglers = StragglerDetector()
    for number in range(10):
        late = 1 + number % 2
        tell(stragglers, notes_of({rank: 20 * MS * (rank == late) for rank in ALL}, number=number))
    assert held_up_ms(stragglers) == {1: 5 * 60.0, 2: 5 * 60.0}


def test_channels_do_not_mix() -> None:
    stragglers = StragglerDetector()
    notes = notes_of({0: 0, 1: 9 * MS})
    stragglers.add(0, "1.ordered", (0, 1), [notes[0]], 0)
    stragglers.add(1, "2.ordered", (0, 1), [notes[1]], 0)
    assert held_up_ms(stragglers) == {}
    stragglers.add(1, "1.ordered", (0, 1), [notes[1]], 0)
    assert held_up_ms(stragglers) == {1: 9.0}


def test_a_short_operation_that_was_drawn_stands_for_its_block() -> None:
    stragglers = StragglerDetector()
    tell(stragglers, notes_of({0: 0, 1: MS // 2}, level=3), members=(0, 1))
    assert held_up_ms(stragglers) == {1: 8 * 0.5}


def test_a_long_operation_stands_for_itself_at_every_level() -> None:
    stragglers = StragglerDetector()
    tell(stragglers, notes_of({0: 0, 1: 50 * MS}, level=3), members=(0, 1))
    assert held_up_ms(stragglers) == {1: 50.0}


def test_who_has_not_noted_a_long_operation_came_at_its_end() -> None:
    stragglers = StragglerDetector()
    notes = notes_of({0: 0, 1: 2 * MS, 2: 50 * MS, 3: 0}, level=5)
    del notes[2]  # it has not waited, and the operation was not drawn
    tell(stragglers, notes, now=100)
    for rank in ALL[:-1]:
        stragglers.rank_reported(rank, 100 + REPORT_GRACE_NS)
        assert held_up_ms(stragglers) == {}, "the last one may still tell of it"
    stragglers.rank_reported(3, 100 + REPORT_GRACE_NS)
    assert held_up_ms(stragglers) == {1: 2.0, 2: 2.0 + 48 * 3}


def test_a_short_operation_that_not_all_have_noted_counts_for_nothing() -> None:
    stragglers = StragglerDetector()
    tell(stragglers, {0: notes_of({0: 0, 1: MS})[0]}, members=(0, 1))
    stragglers.finish()
    assert held_up_ms(stragglers) == {}


def test_the_last_operations_count_when_nobody_tells_any_more() -> None:
    stragglers = StragglerDetector()
    tell(stragglers, {0: notes_of({0: 0, 1: 50 * MS})[0]}, members=(0, 1))
    stragglers.finish()
    assert held_up_ms(stragglers) == {1: 50.0}


def test_a_member_that_stays_silent_is_not_waited_for_without_end() -> None:
    stragglers = StragglerDetector()
    tell(stragglers, {0: notes_of({0: 0, 1: 50 * MS})[0]}, members=(0, 1))
    stragglers.rank_reported(0, REPORT_TIMEOUT_NS - 1)
    assert held_up_ms(stragglers) == {}
    stragglers.rank_reported(0, REPORT_TIMEOUT_NS)
    assert held_up_ms(stragglers) == {1: 50.0}


def test_what_is_kept_is_bounded() -> None:
    stragglers = StragglerDetector()
    stragglers.add(
        0, "0.ordered", (0, 1), [ArrivalSample(number, 0, 0, 0, 0) for number in range(MAX_OPEN_OPERATIONS + 100)], 0
    )
    stragglers.rank_reported(0, 1)
    assert len(stragglers._open) == MAX_OPEN_OPERATIONS


# --- with what ranks note --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset_ms", [0, 5_000_000, -77])
@pytest.mark.parametrize("per_step", [1, 64, 1000])
def test_the_time_is_right_however_many_operations_a_step_has_and_whatever_the_clocks_say(
    per_step: int, offset_ms: int
) -> None:
    """Rank 2 computes 20 ms longer; the first operation of each step takes all of the waiting."""
    members = (0, 1, 2)
    books = {rank: ArrivalSampler(len(members)) for rank in members}
    clocks = {0: 0, 1: offset_ms * MS, 2: 3 * offset_ms * MS}
    stragglers = StragglerDetector()
    now, number, num_steps = 1000 * MS, 0, 40
    for step in range(num_steps):
        for index in range(per_step):
            late = 20 * MS if index == 0 else 0
            for rank in members:
                arrived = now + (late if rank == 2 else 0)
                waited = now + late - arrived
                book = books[rank]
                if number >= book.next_sequence or waited >= book.long_wait_ns:
                    book.add(number, arrived + clocks[rank], waited, waited)
            now += late + MS // 100
            number += 1
        if step % 10 == 9:
            for rank in members:
                stragglers.add(rank, "0.ordered", members, books[rank].take_samples(-clocks[rank]), now)
                stragglers.rank_reported(rank, now)
    stragglers.finish()
    assert held_up_ms(stragglers) == {2: pytest.approx(num_steps * 20 * 2)}


def test_short_waits_are_estimated_from_those_that_were_drawn() -> None:
    """Too many to note them all, and each too short to be noted in any case."""
    members = (0, 1)
    books = {rank: ArrivalSampler(len(members)) for rank in members}
    stragglers = StragglerDetector()
    num, waited = 100_000, long_wait_ns(2) // 4
    for number in range(num):
        for rank in members:
            if number >= books[rank].next_sequence:
                late = waited if rank == 0 else 0
                books[rank].add(number, number * MS - late, late, late)
        if number % 20_000 == 19_999:
            for rank in members:
                stragglers.add(rank, "0.ordered", members, books[rank].take_samples(), 0)
    assert stragglers.held_up_ns[1] == pytest.approx(num * waited, rel=0.1)
