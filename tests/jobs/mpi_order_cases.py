"""Order, disagreement, and what the world does to a channel. Run by tests/jobs/mpi_ranks.py."""

from __future__ import annotations

import itertools
import re
import time

import numpy as np
from mpi4py import MPI

from ronde.comm.backends.base import ChannelSpec
from ronde.comm.backends.mpi.backend import MpiBackend, settings_from_mpi
from ronde.errors import Mismatch, OperationTimeout, PeerLost, RoundEnded, StartFailed
from ronde.settings import Settings
from ronde.types import Deadline, DType, Op, OperationKind
from tests.conformance.reference_arithmetic import reduce
from tests.jobs.mpi_kit import (
    EVERYBODY,
    LONG_S,
    RANK,
    SIZE,
    call,
    case,
    channel,
    close_enough,
    everybody_says,
    expect_equal,
    raises,
    run,
    topology,
)

# --- order -----------------------------------------------------------------------------------------------------------


@case
def submitted_calls_run_in_order(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        arrays = [np.full(5, index + RANK, np.int32) for index in range(10)]
        tickets = [opened.submit(call(OperationKind.ALLREDUCE, x), Deadline(LONG_S)) for x in arrays]
        last = np.ones(1, np.int32)
        run(opened, call(OperationKind.ALLREDUCE, last))
        assert all(ticket.done() for ticket in tickets), "run() waits for those before it"
        outcomes = [ticket.wait(Deadline(LONG_S)) for ticket in tickets]
        for index, x in enumerate(arrays):
            expect_equal(x, np.full(5, SIZE * index + sum(EVERYBODY), np.int32), index)
        for before, after in itertools.pairwise(outcomes):
            assert before.start_ns <= before.ready_ns <= before.end_ns <= after.start_ns


@case
def channels_do_not_wait_for_each_other(backend: MpiBackend) -> None:
    with channel(backend, "0.a") as a, channel(backend, "0.b") as b:
        x, y = np.ones(1), np.ones(1)
        first, second = (a, b) if RANK % 2 else (b, a)
        tickets = [
            each.submit(call(OperationKind.ALLREDUCE, z), Deadline(LONG_S)) for each, z in ((first, x), (second, y))
        ]
        for ticket in tickets:
            ticket.wait(Deadline(LONG_S))
        assert x[0] == y[0] == SIZE


@case
def groups_have_channels_of_their_own(backend: MpiBackend) -> None:
    mine = EVERYBODY[RANK % 2 :: 2]
    with channel(backend, f"{1 + RANK % 2}.ordered", mine) as opened:
        x = np.array([RANK])
        run(opened, call(OperationKind.ALLREDUCE, x))
        assert x[0] == sum(mine)


@case
def messages_wait_for_nothing_but_their_other_side(backend: MpiBackend) -> None:
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    with channel(backend) as opened:
        for count in (1, 100_000):  # beyond what MPI sends without being asked for
            x, y = np.full(count, RANK, np.float16), np.empty(count, np.float16)
            sent = opened.submit(call(OperationKind.SEND, x, peer=after, description="message"), Deadline(LONG_S))
            got = opened.submit(call(OperationKind.RECEIVE, y, peer=before, description="message"), Deadline(LONG_S))
            run(opened, call(OperationKind.BARRIER))  # in another order than the messages on some ranks
            got.wait(Deadline(LONG_S))
            sent.wait(Deadline(LONG_S))
            expect_equal(y, np.full(count, before, np.float16), "message")


# --- disagreement and join -------------------------------------------------------------------------------------------


@case
def members_that_disagree_all_get_the_same_error(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        x = np.ones(3 if RANK == 1 else 4, np.float32)
        with raises(Mismatch, says="rank 1: allreduce float32[3]") as words:
            run(opened, call(OperationKind.ALLREDUCE, x))
        expect_equal(x, np.ones_like(x), "no data moved")
        with raises(Mismatch) as more:
            run(opened, call(OperationKind.BARRIER) if RANK else call(OperationKind.BROADCAST, np.ones(2), peer=0))
        with raises(Mismatch) as signatures:
            run(opened, call(OperationKind.BARRIER, signature_hash=RANK, description=f"barrier of rank {RANK}"))
        y = np.ones(2)
        run(opened, call(OperationKind.ALLREDUCE, y))
        assert y[0] == SIZE, "the channel goes on"
    assert len(set(everybody_says(words[0] + more[0] + signatures[0]))) == 1


@case
def a_sender_and_a_receiver_that_disagree_both_know(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        if RANK < 2:
            kind = OperationKind.SEND if RANK == 0 else OperationKind.RECEIVE
            with raises(Mismatch, says="rank 0: send float32[1]; rank 1: receive float32[2]"):
                run(opened, call(kind, np.ones(1 + RANK, np.float32), peer=1 - RANK))
            x = np.full(1, RANK)
            run(opened, call(kind, x, peer=1 - RANK, description="message"))
            assert x[0] == 0
        run(opened, call(OperationKind.BARRIER))


@case
def a_mistake_is_refused_before_anything_is_sent(backend: MpiBackend) -> None:
    x = np.ones(4, np.bool_)
    wrong = (
        call(OperationKind.ALLREDUCE, x, op=Op.MEAN),
        call(OperationKind.ALLREDUCE, np.ones(1, np.int32), op=Op.ADASUM),
        call(OperationKind.ALLREDUCE, x, prescale=2.0),
        call(OperationKind.BROADCAST, x, peer=SIZE),
        call(OperationKind.ALLGATHER, x, counts=(1,)),
        call(OperationKind.ALLGATHER, x, counts=(3,) * SIZE),
        call(OperationKind.ALLTOALL, x, counts=(1,) * SIZE),
        call(OperationKind.REDUCE_SCATTER, x, counts=(9,) * SIZE),
    )
    with channel(backend) as opened:
        for each in wrong:
            with raises(ValueError):
                run(opened, each)
        run(opened, call(OperationKind.BARRIER))


@case
def who_has_joined_takes_part_with_zeros(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        for step in range(RANK):  # rank 0 joins at once, the last one last
            for dtype, op in ((DType.FLOAT32, Op.SUM), (DType.BFLOAT16, Op.SUM), (DType.FLOAT64, Op.ADASUM)):
                ones = (
                    np.full(step + 1, 0x3F80, np.uint16) if dtype is DType.BFLOAT16 else np.ones(step + 1, dtype.numpy)
                )
                here = [rank for rank in EVERYBODY if rank > step]
                everybody = [ones if rank in here else np.zeros_like(ones) for rank in EVERYBODY]
                out = np.empty_like(ones)
                run(opened, call(OperationKind.ALLREDUCE, ones, out, dtype, op=op))
                close_enough(out, reduce(everybody, dtype, op, 1.0, 1.0), dtype)
        run(opened, call(OperationKind.JOIN))
        run(opened, call(OperationKind.BARRIER))


@case
def who_has_joined_cannot_take_part_in_anything_else(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        with raises(Mismatch, says="rank 0: join"):
            run(opened, call(OperationKind.BARRIER if RANK else OperationKind.JOIN))
        run(opened, call(OperationKind.BARRIER))


# --- the world's faults ----------------------------------------------------------------------------------------------


LATE_S = 3.0
"""A time limit that only who does not come at all misses, also when ranks share few cores."""


@case
def a_deadline_ends_the_call_for_all_and_names_who_is_missing(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        run(opened, call(OperationKind.BARRIER))
        if RANK:
            with raises(OperationTimeout, RoundEnded, says="waiting for rank 0"):
                run(opened, call(OperationKind.ALLREDUCE, np.ones(4)), LATE_S)
            with raises(RoundEnded):
                run(opened, call(OperationKind.BARRIER))
        MPI.COMM_WORLD.barrier()
        if not RANK:
            with raises(RoundEnded, says="gave up"):
                run(opened, call(OperationKind.ALLREDUCE, np.ones(4)))


@case
def a_call_whose_time_was_over_before_its_turn_names_who_is_missing(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        if RANK:
            first = opened.submit(call(OperationKind.BARRIER, description="first"), Deadline(LONG_S))
            second = opened.submit(call(OperationKind.BARRIER, description="second"), Deadline(0.0))
            MPI.COMM_WORLD.barrier()
            first.wait(Deadline(LONG_S))
            with raises(OperationTimeout, RoundEnded) as words:
                second.wait(Deadline(LONG_S))
            assert re.search("waiting for ranks? 0", words[0]), words
        else:
            MPI.COMM_WORLD.barrier()
            run(opened, call(OperationKind.BARRIER, description="first"))
        MPI.COMM_WORLD.barrier()


@case
def a_call_behind_one_that_waits_names_for_whom(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        run(opened, call(OperationKind.BARRIER))
        if RANK:
            first = opened.submit(call(OperationKind.BARRIER, description="first"), Deadline(LONG_S))
            with raises(OperationTimeout, RoundEnded) as words:
                run(opened, call(OperationKind.BARRIER, description="second"), 0.1)
            assert re.search("waiting for ranks? 0", words[0]), words
            with raises(OperationTimeout, RoundEnded):
                first.wait(Deadline(LONG_S))
        MPI.COMM_WORLD.barrier()


@case
def a_submitted_call_ends_at_its_deadline_too(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        run(opened, call(OperationKind.BARRIER))
        if RANK:
            first = opened.submit(call(OperationKind.BARRIER), Deadline(0.5))
            second = opened.submit(call(OperationKind.BARRIER), Deadline(LONG_S))
            with raises(OperationTimeout, says="still under way"):
                first.wait(Deadline(0.01))
            with raises(OperationTimeout, RoundEnded):
                first.wait(Deadline(LONG_S))
            with raises(RoundEnded):
                second.wait(Deadline(LONG_S))
        MPI.COMM_WORLD.barrier()


@case
def an_abort_ends_the_waits_of_all_members(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        ticket = None
        if RANK:
            ticket = opened.submit(
                call(OperationKind.ALLREDUCE, np.ones(100_000), description="allreduce 'w'"), Deadline(LONG_S)
            )
        MPI.COMM_WORLD.barrier()
        if not RANK:
            opened.abort(lost_rank=SIZE - 1, why="it was killed")
            opened.abort(why="the first one wins")
            with raises(PeerLost, says=f"rank 0 lost rank {SIZE - 1} during barrier (it was killed)"):
                run(opened, call(OperationKind.BARRIER))
        else:
            assert ticket is not None
            with raises(PeerLost, says=f"rank {RANK} lost rank {SIZE - 1} during allreduce 'w' (it was killed)"):
                ticket.wait(Deadline(LONG_S))
        MPI.COMM_WORLD.barrier()


@case
def my_own_abort_ends_my_waits_at_once(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        if RANK:
            ticket = opened.submit(call(OperationKind.BARRIER), Deadline(LONG_S))
            opened.abort(why="the test says so")
            with raises(RoundEnded, says="barrier cannot finish: the test says so"):
                ticket.wait(Deadline(LONG_S))
            with raises(RoundEnded):
                run(opened, call(OperationKind.SEND, np.ones(1), peer=0))
        MPI.COMM_WORLD.barrier()


@case
def who_waits_for_a_member_that_closed_is_told(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        run(opened, call(OperationKind.BARRIER))
        if not RANK:
            opened.close()
            opened.close()
            with raises(RoundEnded, says="closed"):
                run(opened, call(OperationKind.BARRIER))
        else:
            with raises(RoundEnded, says="rank 0 has closed channel 0.ordered"):
                run(opened, call(OperationKind.BARRIER))
        MPI.COMM_WORLD.barrier()


@case
def closing_right_after_a_call_harms_nobody(backend: MpiBackend) -> None:
    for repeat in range(10):
        with channel(backend, f"{repeat}.ordered") as opened:
            x = np.full(50_000, RANK, np.float32)
            run(opened, call(OperationKind.BROADCAST, x, peer=repeat % SIZE))
        expect_equal(x, np.full(50_000, repeat % SIZE, np.float32), "broadcast")


@case
def a_look_names_who_is_missing(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        assert opened.current_call() is None
        ticket = opened.submit(call(OperationKind.BARRIER, description="barrier 7"), Deadline(LONG_S)) if RANK else None
        deadline = Deadline(LONG_S)
        while ticket is not None:
            look = opened.current_call()
            if look is not None and look.missing == (0,):
                assert look.description == "barrier 7"
                assert look.since_ns <= time.monotonic_ns()
                break
            assert not deadline.expired, f"{look}"
            time.sleep(0.01)
        MPI.COMM_WORLD.barrier()
        if ticket is None:
            run(opened, call(OperationKind.BARRIER))
        else:
            ticket.wait(Deadline(LONG_S))
        assert opened.current_call() is None


@case
def opening_names_who_did_not_come(backend: MpiBackend) -> None:
    spec = ChannelSpec(id="0.late", members=EVERYBODY, member_index=RANK)
    if RANK:
        with raises(StartFailed, says=f"opening channel 0.late: rank 0 did not come within {LATE_S:g} s"):
            backend.open_channel(spec, Deadline(LATE_S))
        backend.rank_lost(0, "it was killed")
        with raises(PeerLost, says=f"rank {RANK} lost rank 0 during opening channel 0.later"):
            backend.open_channel(ChannelSpec(id="0.later", members=EVERYBODY, member_index=RANK), Deadline(LONG_S))
    MPI.COMM_WORLD.barrier()


@case
def settings_come_from_mpi(backend: MpiBackend) -> None:
    settings = settings_from_mpi(Settings(backend="mpi", start_s=LONG_S))
    assert (settings.rank, settings.size) == (RANK, SIZE)
    assert len(set(everybody_says(f"{settings.coordinator} {settings.key}"))) == 1
    assert settings.coordinator.startswith("127.0.0.1:") and len(settings.key) == 64
    with raises(StartFailed, says="MPI says that there are"):
        settings_from_mpi(Settings(backend="mpi", size=SIZE + 1))


@case
def ranks_that_do_not_fit_mpi_are_refused(backend: MpiBackend) -> None:
    with raises(StartFailed, says=f"MPI says rank {RANK} of {SIZE}"):
        MpiBackend(topology(SIZE + 1), Settings(backend="mpi"))
