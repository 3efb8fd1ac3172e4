"""Which requests are predicted together, where and when; the clock is a number."""

from __future__ import annotations

import math

import pytest

from ronde.serve.batcher import ALONE, MAX_OUTSTANDING, Batch, Batcher, BatchLimits, QueueFull, WaitingRequest

SHORT_S = 0.002


def make(num_replicas: int = 2, *, max_rows: int = 4, max_waiting: int = 100) -> Batcher[str]:
    limits = BatchLimits(max_rows=max_rows, max_delay_s=SHORT_S, max_waiting=max_waiting, num_replicas=num_replicas)
    batcher: Batcher[str] = Batcher(limits)
    for number in range(num_replicas):
        batcher.set_ready(number)
    return batcher


def add(
    batcher: Batcher[str], *names: str, now_s: float = 0.0, rows: int = 1, group: object = "g"
) -> list[WaitingRequest[str]]:
    requests = [WaitingRequest(name, group, rows, now_s, now_s + 60.0) for name in names]
    for request in requests:
        batcher.add(request)
    return requests


def shown(batches: list[Batch[str]]) -> list[tuple[int, str]]:
    return [(batch.replica, "".join(each.payload for each in batch.requests)) for batch in batches]


def test_a_lone_request_is_sent_at_once() -> None:
    batcher = make()
    add(batcher, "a")
    assert shown(batcher.take_batches(0.0)) == [(0, "a")]
    assert batcher.num_waiting == 0 and batcher.num_sent == 1


def test_what_comes_together_goes_together_and_the_next_goes_to_the_idle_replica() -> None:
    batcher = make()
    add(batcher, "a", "b")
    assert shown(batcher.take_batches(0.0)) == [(0, "ab")]
    add(batcher, "c")
    assert shown(batcher.take_batches(0.0)) == [(1, "c")]


def test_while_all_are_busy_requests_collect_until_they_fill_a_batch() -> None:
    batcher = make()
    for name in "ab":
        add(batcher, name)
        batcher.take_batches(0.0)
    add(batcher, *"cde")
    assert batcher.take_batches(0.0) == []
    assert batcher.due_s() == SHORT_S
    add(batcher, "f")
    assert shown(batcher.take_batches(0.0)) == [(1, "cdef")]  # the last that was used


def test_while_all_are_busy_nobody_waits_longer_for_company_than_the_bound() -> None:
    batcher = make(1)
    add(batcher, "a")
    batcher.take_batches(0.0)
    add(batcher, "b", now_s=1.0)
    assert batcher.take_batches(1.0 + SHORT_S / 2) == []
    assert shown(batcher.take_batches(1.0 + SHORT_S)) == [(0, "b")]
    assert batcher.due_s() == math.inf


def test_a_replica_has_at_most_so_many_batches_and_an_answer_makes_room() -> None:
    batcher = make(1)
    for number in range(MAX_OUTSTANDING + 1):
        add(batcher, "x", now_s=float(number))
        batcher.take_batches(100.0)
    assert batcher.num_waiting == 1 and len(batcher.outstanding(0)) == MAX_OUTSTANDING
    assert batcher.due_s() == math.inf
    first = batcher.outstanding(0)[0]
    assert batcher.batch_done(0, first.number) is first
    assert batcher.batch_done(0, first.number) is None
    assert len(batcher.take_batches(100.0)) == 1


def test_work_goes_where_least_is_outstanding() -> None:
    batcher = make(max_rows=8)
    add(batcher, "a", rows=8)
    add(batcher, "b", rows=1)
    batcher.take_batches(0.0)
    add(batcher, "c", rows=8)
    assert shown(batcher.take_batches(0.0)) == [(1, "c")]


def test_requests_of_other_shapes_or_that_do_not_fit_are_in_other_batches() -> None:
    batcher = make(4)
    add(batcher, "a", group=(3,))
    add(batcher, "b", group=(4,))
    add(batcher, "c", rows=9, group=(3,))
    add(batcher, "d", "e", group=ALONE)
    batches = shown(batcher.take_batches(0.0))
    assert sorted(names for _, names in batches) == ["a", "b", "c", "d", "e"]  # e is a full batch, behind another
    assert {replica for replica, _ in batches} == {0, 1, 2, 3}


def test_the_queue_is_bounded() -> None:
    batcher = make(1, max_waiting=2)
    batcher.set_ready(0, False)
    add(batcher, "a", "b")
    with pytest.raises(QueueFull):
        add(batcher, "c")


def test_what_nobody_waits_for_any_more_is_not_sent() -> None:
    batcher = make(1, max_waiting=4)
    batcher.set_ready(0, False)
    requests = add(batcher, "a", "b", "c", "d")
    for left in (requests[0], requests[2], requests[2]):
        batcher.withdraw(left)
    assert batcher.num_waiting == 2
    add(batcher, "e", "f")  # there is room again
    batcher.set_ready(0)
    assert shown(batcher.take_batches(0.0)) == [(0, "bdef")]
    batcher.withdraw(requests[1])
    assert (batcher.num_waiting, batcher.num_sent) == (0, 4)
    add(batcher, "g")
    assert [each.payload for each in batcher.replica_lost(0, by_request=False).retried] == ["d", "e", "f"]
    assert batcher.num_waiting == 4
    assert [each.payload for each in batcher.take_expired(1e9)] == ["d", "e", "f", "g"]
    assert batcher.num_waiting == 0


def test_what_waits_too_long_is_taken_out() -> None:
    batcher = make(1)
    batcher.set_ready(0, False)
    add(batcher, "a", now_s=0.0)
    add(batcher, "b", now_s=10.0)
    assert [each.payload for each in batcher.take_expired(60.0)] == ["a"]
    assert batcher.num_waiting == 1


def test_a_replica_that_is_not_ready_gets_nothing_and_waits_for_nobody() -> None:
    batcher = make()
    batcher.set_ready(0, False)
    add(batcher, "a")
    assert shown(batcher.take_batches(0.0)) == [(1, "a")]
    batcher.set_ready(0)
    add(batcher, "b")
    assert shown(batcher.take_batches(0.0)) == [(0, "b")]


def test_what_a_lost_host_had_is_sent_again_at_once_before_all_others() -> None:
    batcher = make()
    add(batcher, "a", "b")
    batcher.take_batches(0.0)
    batcher.set_ready(1, False)
    add(batcher, "c", now_s=1.0)
    lost = batcher.replica_lost(0, by_request=False)
    assert [each.payload for each in lost.retried] == ["a", "b"]
    batcher.set_ready(1)
    assert shown(batcher.take_batches(1.0)) == [(1, "abc")]


def test_a_request_that_always_meets_a_lost_host_is_given_up() -> None:
    batcher = make(1)
    add(batcher, "a")
    given_up: list[str] = []
    for number in range(10):
        if batcher.take_batches(0.0):
            given_up += [each.payload for each in batcher.replica_lost(number, by_request=False).given_up]
        batcher.set_ready(number + 1)
    assert given_up == ["a"]


def test_suspects_are_tried_alone_one_at_a_time_while_others_are_served() -> None:
    batcher = make(3)
    add(batcher, "a", "b", "c")
    assert shown(batcher.take_batches(0.0)) == [(0, "abc")]
    assert len(batcher.replica_lost(0, by_request=True).retried) == 3
    first = batcher.take_batches(1.0)
    assert shown(first) == [(1, "a")]
    add(batcher, "d", now_s=1.0)
    assert shown(batcher.take_batches(2.0)) == [(2, "d")]
    add(batcher, "e", now_s=2.0)  # waits behind d, not beside the suspect
    assert shown(batcher.take_batches(3.0)) == [(2, "e")]
    batcher.batch_done(1, first[0].number)
    assert shown(batcher.take_batches(3.0)) == [(1, "b")]


def test_a_request_that_kills_twice_is_set_aside_and_others_are_not() -> None:
    batcher = make(3)
    add(batcher, "p", "q")
    batcher.take_batches(0.0)
    batcher.replica_lost(0, by_request=True)
    batcher.set_ready(3)
    assert shown(batcher.take_batches(0.0)) == [(1, "p")]
    lost = batcher.replica_lost(1, by_request=True)
    assert [each.payload for each in lost.set_aside] == ["p"] and lost.retried == []
    (batch,) = batcher.take_batches(0.0)
    assert shown([batch])[0][1] == "q"
    assert batcher.batch_done(batch.replica, batch.number) is batch
    assert batcher.num_waiting == batcher.num_sent == 0


def test_a_suspect_is_not_tried_on_the_last_replica() -> None:
    batcher = make(2)
    add(batcher, "p")
    batcher.take_batches(0.0)
    batcher.replica_lost(0, by_request=True)
    assert batcher.take_batches(0.0) == []
    add(batcher, "a")
    assert shown(batcher.take_batches(0.0)) == [(1, "a")]  # which serves others meanwhile
    batcher.set_ready(2)
    assert shown(batcher.take_batches(0.0)) == [(2, "p")]


def test_a_suspect_is_tried_on_the_only_replica_of_a_service_with_one() -> None:
    batcher = make(1)
    add(batcher, "p")
    batcher.take_batches(0.0)
    batcher.replica_lost(0, by_request=True)
    batcher.set_ready(1)
    assert shown(batcher.take_batches(0.0)) == [(1, "p")]


def test_suspects_get_their_turn_under_full_load() -> None:
    batcher = make(3, max_rows=1)
    add(batcher, "p")
    batcher.take_batches(0.0)
    batcher.replica_lost(0, by_request=True)
    for _ in range(50):
        add(batcher, "x", now_s=0.0)
    sent: list[tuple[int, str]] = []
    for _ in range(20):
        sent += shown(batcher.take_batches(1.0))
        for number in (1, 2):
            for batch in batcher.outstanding(number)[:1]:
                batcher.batch_done(number, batch.number)
    assert "p" in [names for _, names in sent]


def test_nobody_is_set_aside_whose_client_has_left() -> None:
    batcher = make(2)
    add(batcher, "a")
    (batch,) = batcher.take_batches(0.0)
    batch.requests[0].is_over = True
    lost = batcher.replica_lost(0, by_request=True)
    assert lost.retried == lost.set_aside == lost.given_up == []
    assert batcher.num_waiting == 0


@pytest.mark.parametrize("name", ["max_rows", "max_waiting", "num_replicas"])
def test_limits_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        BatchLimits(**{name: 0})
