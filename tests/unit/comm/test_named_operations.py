"""Named operations that repeat: what is announced in shared memory, and what is recorded of it. What callers see of it:
tests/conformance/repeats_bodies.py."""

from __future__ import annotations

import ctypes
import json
import threading
from typing import Any, NoReturn

import numpy as np
import pytest

from ronde.comm.backends.native import NativeChannel
from ronde.comm.backends.native_library import RD_CALL, RD_CALLBACK, SPAN, NativeStatus, load_library
from ronde.comm.buffers import address_of
from ronde.comm.call import Call
from ronde.comm.named_operations import NamedOperations
from ronde.comm.world import World
from ronde.errors import PeerLost, RondeError
from ronde.net.messages import AnnounceOperations, WorkerMessage
from ronde.types import Deadline, DType, Op, OperationKind
from tests.limits import PATIENCE_S
from tests.unit.comm.thread_ranks import run_ranks

SIZE = 2
X = np.ones(4, np.float32)


def check(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def named_of(world: World) -> NamedOperations:
    named = world.group._named_operations
    assert named is not None
    return named


def repeat(world: World, *names: str) -> None:
    """From now on these are announced in shared memory."""
    for _ in range(2):
        for name in names:
            world.group.allreduce(X, name=name)
    world.group.barrier()


def test_a_root_and_a_name_of_numpy_are_like_any_others() -> None:
    def body(world: World) -> None:
        group, x = world.group, np.full(2, 1.0 + world.rank)
        # The first one without a name makes the signature that the others find.
        for name in (None, "w", np.str_("w"), "\N{GREEK SMALL LETTER ALPHA}"):
            roots: list[Any] = [np.int64(1), np.argmax([0, 1]), True, 1]
            for root in roots:
                assert group.broadcast(x, root=root, name=name).tolist() == [2, 2]
                for result in (group.reduce(x, root=root, name=name), group.gather(x, root=root, name=name)):
                    assert (result is None) == (world.rank == 0)
                assert group.scatter(x, root=root, name=name).tolist() == [2]

    check(run_ranks(SIZE, body))


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_an_operation_that_one_rank_cannot_execute_is_not_taken_for_its_next_one(num_hosts: int) -> None:
    """Between hosts nothing compares calls on which the coordinator has agreed."""
    has_failed = threading.Event()

    def body(world: World) -> list[Any]:
        channel = named_of(world).channel
        submit = channel._submit

        def fail_once(call: Call, deadline: Deadline) -> NoReturn:
            channel._submit = submit
            raise RondeError("no thread could be started for it")

        if world.rank == 0:
            channel._submit = fail_once
        outcomes: list[Any] = []
        first = world.group.allreduce(X, name="a", wait=False)
        if world.rank == 0:
            with pytest.raises(RondeError):
                first.wait(PATIENCE_S)
            has_failed.set()
        assert has_failed.wait(PATIENCE_S)
        second = world.group.allreduce(100 * X, name="b", wait=False)
        for work in (first, second):
            try:
                outcomes.append(work.wait(PATIENCE_S).tolist())
            except RondeError as error:
                outcomes.append((type(error), str(error)))
        return outcomes

    own, other = check(run_ranks(SIZE, body, lambda rank: {"host": f"host-{rank % num_hosts}"}))
    assert [kind for kind, _ in own] == [RondeError] * 2, own
    assert [kind for kind, _ in other] == [PeerLost] * 2, other
    for _, text in (*own, *other):
        assert "no thread could be started for it" in text


def test_the_coordinator_learns_nothing_of_what_repeats() -> None:
    def body(world: World) -> int:
        repeat(world, "a", "b")
        sent: list[WorkerMessage] = []
        control = world.joined_round.control
        send = control.send

        def record(message: WorkerMessage) -> None:
            sent.append(message)
            send(message)

        control.send = record  # type: ignore[method-assign]
        for step in range(20):
            assert (world.group.allreduce(X * step, name="a") == SIZE * step).all()
            works = [world.group.allreduce(X, name=name, wait=False) for name in ("a", "b")]
            assert all((work.wait() == SIZE).all() for work in works)
        return sum(isinstance(message, AnnounceOperations) for message in sent)

    assert check(run_ranks(SIZE, body)) == [0] * SIZE


def test_every_operation_is_counted_once_and_has_a_slice_from_its_announcement_to_its_start() -> None:
    def body(world: World) -> tuple[int, list[dict[str, Any]]]:
        repeat(world, "a", "b", "c")
        before = world.recorder.metrics().total.operations
        world.recorder.set_tracing(True)
        world.group.allreduce(X, name="a")
        for work in [world.group.allreduce(X, name=name, wait=False) for name in ("a", "b", "c")]:
            work.wait()
        events, dropped = world.recorder.drain_trace(1000)
        world.recorder.set_tracing(False)
        assert not dropped
        return world.recorder.metrics().total.operations - before, [json.loads(event) for event in events]

    for operations, trace in check(run_ranks(SIZE, body)):
        assert operations == 4
        begins = {event["id"]: event for event in trace if event["ph"] == "b"}
        ends = {event["id"]: event for event in trace if event["ph"] == "e"}
        assert len(begins) == 4 and begins.keys() == ends.keys()
        assert sorted(event["args"]["name"] for event in begins.values()) == ["a", "a", "b", "c"]
        assert all(begins[id]["ts"] <= ends[id]["ts"] for id in begins)
        slices = [event for event in trace if event["ph"] == "X" and event["name"].startswith("allreduce")]
        assert len(slices) == 4
        assert min(event["ts"] for event in slices) >= min(event["ts"] for event in ends.values())


def test_what_nobody_waits_for_is_counted_when_others_follow() -> None:
    def body(world: World) -> int:
        repeat(world, "a", "b")
        before = world.recorder.metrics().total.operations
        world.group.allreduce(X, name="a", wait=False)
        for _ in range(3):  # by then it has ended
            world.group.allreduce(X, name="b", wait=False).wait()
            world.group.barrier()
        world.group.allreduce(X, name="b", wait=False).wait()
        return world.recorder.metrics().total.operations - before

    assert check(run_ranks(SIZE, body)) == [8] * SIZE


def test_calls_that_were_taken_back_are_not_kept() -> None:
    """In each step rank 1 gives another number of rows than before, so what rank 0 has announced in shared memory is
    taken back."""
    num_steps = 8
    announced = [threading.Event() for _ in range(num_steps)]
    names = ["a", "b", "c"]

    def gather(world: World, num_rows: int) -> list[Any]:
        x = np.ones((num_rows, 2), np.float32)
        return [world.group.allgather(x, name=name, wait=False) for name in names]

    def body(world: World) -> int:
        channel = named_of(world).announced_channel
        assert channel is not None
        for step in range(num_steps):
            for _ in range(3):
                for work in gather(world, 2):
                    work.wait()
                world.group.barrier()
            if world.rank == 0:
                works = gather(world, 2)
                named_of(world).announce_queued()
                announced[step].set()
            else:
                assert announced[step].wait(PATIENCE_S)
                works = gather(world, 3)
            assert [len(work.wait()) for work in works] == [5, 5, 5]
        for _ in range(2 * num_steps):  # each looks at two of those that were announced before
            for work in gather(world, 2):
                work.wait()
            world.group.barrier()
        return len(channel._unreported)

    assert max(check(run_ranks(SIZE, body))) < num_steps // 2


def test_who_is_missing_is_shown_while_a_caller_waits() -> None:
    may_come = threading.Event()

    def body(world: World) -> Any:
        repeat(world, "late")
        if world.rank == 1:
            may_come.wait(PATIENCE_S)
            return world.group.allreduce(X, name="late")
        seen: list[Any] = []

        def watch() -> None:
            named = named_of(world)
            while not seen or not seen[0].missing:
                current = named.blocked_operation()
                seen[:] = [current] if current is not None else []
            seen.append(named.late_operations(seen[0].since_ns + int(PATIENCE_S * 1e9)))
            may_come.set()

        watcher = threading.Thread(target=watch)
        watcher.start()
        world.group.allreduce(X, name="late")
        watcher.join()
        assert named_of(world).blocked_operation() is None
        return seen

    current, late = check(run_ranks(SIZE, body))[0]
    assert (current.op, current.missing, current.is_waiting) == ("allreduce 'late' of group 0", (1,), True)
    assert late == [("allreduce 'late' sum float32[4]", late[0][1], (1,))]


def announce_from_native_code(world: World, x: np.ndarray[Any, np.dtype[Any]], name: bytes) -> tuple[int, list[int]]:
    """As the kernel of a framework would: the status of the announcement, and that of the call when it has ended."""
    channel = named_of(world).announced_channel
    assert channel is not None
    backend_channel = channel.backend_channel
    assert isinstance(backend_channel, NativeChannel)
    library, ended, statuses = load_library(), threading.Event(), []

    def on_end(context: int, result: int) -> None:
        statuses.append(ctypes.c_int32.from_address(result).value)
        ended.set()

    callback = RD_CALLBACK(on_end)
    span = ctypes.create_string_buffer(SPAN.pack(address_of(x), address_of(x), x.size))
    fields = (OperationKind.ALLREDUCE, DType.FLOAT32, Op.SUM, 0, 0, -1, 1.0, 1.0, 0, 0, ctypes.addressof(span), 1, 0, 0)
    call = ctypes.create_string_buffer(RD_CALL.pack(*fields))
    announce = library.rd_announce_named
    announce.argtypes = (
        *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_double),
        *(RD_CALLBACK, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
    )
    status = announce(backend_channel.handle, name, call, 60.0, callback, 1, None, None)
    if status == NativeStatus.OK:
        assert ended.wait(PATIENCE_S)
    return status, statuses


def test_native_code_announces_what_repeats_by_its_name() -> None:
    def body(world: World) -> Any:
        repeat(world, "kernel")
        x = np.full(4, 1.0 + world.rank, np.float32)
        if world.rank == 0:
            return world.group.allreduce(x, name="kernel").tolist()
        return announce_from_native_code(world, x, b"kernel"), x.tolist()

    python, (native, x) = check(run_ranks(SIZE, body))
    assert python == x == [3.0] * 4
    assert native == (NativeStatus.OK, [NativeStatus.OK])


def test_native_code_is_told_when_it_has_to_ask_python() -> None:
    changed = threading.Event()

    def body(world: World) -> Any:
        repeat(world, "kernel")
        if world.rank == 0:
            changed.wait(PATIENCE_S)
            return world.group.allreduce(np.ones(9, np.float32), name="kernel").tolist()
        unknown = [
            announce_from_native_code(world, np.ones(4, np.float32), b"other")[0],
            announce_from_native_code(world, np.ones(5, np.float32), b"kernel")[0],
        ]
        changed.set()  # rank 0 asks for something else than this one, which is withdrawn
        withdrawn = announce_from_native_code(world, np.ones(4, np.float32), b"kernel")
        again = world.group.allreduce(np.ones(9, np.float32), name="kernel").tolist()
        return unknown, withdrawn, again

    result, (unknown, withdrawn, again) = check(run_ranks(SIZE, body))
    assert unknown == [NativeStatus.NOT_AGREED] * 2
    assert withdrawn in ((NativeStatus.OK, [NativeStatus.WITHDRAWN]), (NativeStatus.NOT_AGREED, []))
    assert result == again == [2.0] * 9
