"""Works that tell when they are over: callbacks, futures, errors."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from typing import Any

import numpy as np

from ronde.comm.plan import Bucket, Plan
from ronde.comm.work import Work
from ronde.comm.world import World
from ronde.errors import Mismatch, RoundEnded
from tests.conformance.cases import on_ranks, raises
from tests.limits import RANK_S


def start_all_kinds(world: World, plan: Plan) -> dict[str, Work]:
    """One work of each kind, in an order that fits the other ranks."""
    x, group = np.ones(3), world.group
    plan.arrays[0][:] = 1
    following, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    return {
        "ordered": group.allreduce(x, wait=False),
        "named": group.allreduce(x, name="named", wait=False),
        "named rows": group.allgather(x, name="rows", wait=False),
        "several calls": group.allreduce([x, 2 * x], op="adasum", wait=False),
        "bucket": plan.start(0),
        "send": group.send(x, following, wait=False),
        "receive": group.receive(np.zeros(3), before, wait=False),
        "barrier": group.barrier(wait=False),
    }


@on_ranks(2, 3)
def what_follows_a_work_is_called_once_with_the_finished_work(world: World) -> None:
    called: list[tuple[Work, int]] = []

    def follow(work: Work) -> Any:
        assert work.done() and work.exception() is None
        called.append((work, threading.get_ident()))
        return work.result()

    with Plan([Bucket(3, op="sum")], world.group) as plan:
        for _ in range(3):
            works = start_all_kinds(world, plan)
            futures = {name: [work.then(follow), work.then(follow), work.future()] for name, work in works.items()}
            for name, work in works.items():
                result = work.wait()
                for future in (*futures[name], work.future()):
                    assert np.array_equal(future.result(RANK_S), result), name
            assert all([each for each, _ in called].count(work) == 2 for work in works.values())
    assert threading.get_ident() not in {thread for _, thread in called}


@on_ranks(2)
def a_future_is_not_over_before_its_work_and_cannot_be_cancelled(world: World) -> None:
    if world.rank == 0:
        works = [world.group.allreduce(np.ones(2), wait=False), world.group.allreduce(np.ones(2), name="w", wait=False)]
        for future, work in [(work.future(), work) for work in works]:
            assert not future.cancel() and not future.done()
            with raises(ValueError, "still under way"):
                work.exception()
    world.group.barrier(name="go on")
    if world.rank == 1:
        works = [world.group.allreduce(np.ones(2), wait=False), world.group.allreduce(np.ones(2), name="w", wait=False)]
    done, not_done = wait([work.future() for work in works], RANK_S)
    assert not not_done and all(each.result().tolist() == [2, 2] for each in done)


@on_ranks(2)
def a_failure_reaches_callbacks_and_futures(world: World) -> None:
    x = np.ones(2 + world.rank)
    for name in (None, "other shapes"):
        work = world.group.allreduce(x, name=name, wait=False)
        assert isinstance(work.then(lambda ended: ended.exception()).result(RANK_S), Mismatch)
        future = work.future()
        assert isinstance(future.exception(RANK_S), Mismatch) and work.exception() is future.exception()
    ended = world.group.barrier(wait=False).then(lambda _: 1 / 0)
    assert isinstance(ended.exception(RANK_S), ZeroDivisionError)  # of the function: the work is fine


@on_ranks(2)
def a_callback_may_start_other_operations(world: World) -> None:
    first = world.group.allreduce(np.ones(2), wait=False)
    second = first.then(lambda over: world.group.allreduce(over.result(), name="second", wait=False))
    assert second.result(RANK_S).wait().tolist() == [4, 4]


@on_ranks(2, spoils=True)
def what_the_end_of_the_round_ends_is_told_as_well(world: World) -> None:
    if world.rank == 0:
        works = [world.group.allreduce(np.ones(2), wait=False), world.group.allreduce(np.ones(2), name="w", wait=False)]
        futures = [work.future() for work in works]
        world.close()
        for future in futures:
            assert isinstance(future.exception(RANK_S), RoundEnded)  # or PeerLost, if the other one is quicker
