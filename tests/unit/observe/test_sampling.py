"""Which operations are noted: on all members the same, at most so many, and without a beat."""

from __future__ import annotations

import pytest

from ronde.observe.stragglers import ArrivalSampler, long_wait_ns, max_samples_per_s, next_sampled


def chosen(level: int, limit: int) -> list[int]:
    found, number = [], -1
    while (number := next_sampled(number, level)) < limit:
        found.append(number)
    return found


def test_at_level_0_every_operation_is_noted() -> None:
    assert chosen(0, 50) == list(range(50))


@pytest.mark.parametrize("level", range(1, 9))
def test_one_of_each_block_is_noted(level: int) -> None:
    blocks = [number >> level for number in chosen(level, 1 << (level + 6))]
    assert blocks == list(range(64))


@pytest.mark.parametrize("level", range(8))
def test_what_is_noted_at_a_higher_level_is_noted_at_a_lower_one(level: int) -> None:
    assert set(chosen(level + 1, 5000)) < set(chosen(level, 5000))


@pytest.mark.parametrize("period", [2, 8, 64, 100, 1024])
def test_the_choice_does_not_beat_with_a_step_of_the_training(period: int) -> None:
    firsts = [number for number in chosen(3, 8 * 20_000) if number % period == 0]
    expected = 20_000 / period
    assert abs(len(firsts) - expected) < 5 * expected**0.5 + 1


def fill(book: ArrivalSampler, numbers: range, waited_ns: int = 0) -> None:
    for number in numbers:
        if number >= book.next_sequence or waited_ns >= book.long_wait_ns:
            book.add(number, number, waited_ns, waited_ns)


def test_a_busy_channel_notes_a_part_and_a_calm_one_all() -> None:
    book = ArrivalSampler(2)
    fill(book, range(100_000))
    first = book.take_samples()
    assert max_samples_per_s(2) <= len(first) < 8 * max_samples_per_s(2)
    assert [note.sequence for note in first[: max_samples_per_s(2)]] == list(range(max_samples_per_s(2)))
    number = 100_000
    for _ in range(20):
        fill(book, range(number, number + 100))
        number += 100
        book.take_samples()
    fill(book, range(number, number + 100))
    assert len(book.take_samples()) == 100


def test_a_long_wait_is_noted_at_every_level() -> None:
    book = ArrivalSampler(2)
    fill(book, range(100_000))
    book.take_samples()
    fill(book, range(100_000, 100_100), waited_ns=long_wait_ns(2))
    assert [note.sequence for note in book.take_samples()] == list(range(100_000, 100_100))


def test_the_clock_of_the_coordinator_is_used() -> None:
    book = ArrivalSampler(2)
    book.add(0, arrived_ns=500, waited_ns=20, blocked_ns=10)
    (note,) = book.take_samples(offset_ns=-100)
    assert (note.arrived_ns, note.waited_ns, note.blocked_ns) == (400, 20, 10)


@pytest.mark.parametrize("num_members", [0, 1])
def test_nothing_is_noted_where_nobody_waits(num_members: int) -> None:
    book = ArrivalSampler(num_members)
    fill(book, range(1000), waited_ns=10**12)
    assert book.take_samples() == ()


def test_numbers_that_begin_anew_are_noted() -> None:
    book = ArrivalSampler(2)
    fill(book, range(10))
    book.skip_to(1 << 32)
    fill(book, range(1 << 32, (1 << 32) + 5))
    assert [note.sequence for note in book.take_samples()][10:] == [(1 << 32) + index for index in range(5)]


def test_many_members_note_less_each() -> None:
    assert max_samples_per_s(2) == max_samples_per_s(64) > max_samples_per_s(256) > max_samples_per_s(2000)
    assert long_wait_ns(64) == pytest.approx(1e6, rel=0.05) and long_wait_ns(256) > long_wait_ns(64)
