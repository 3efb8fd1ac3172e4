"""Memory of other devices: operations are ordered on streams, the host does not wait, and errors come later."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from ronde.comm.buffers import Array, as_memory
from ronde.comm.call import Memory
from ronde.comm.world import World
from ronde.errors import Mismatch, OperationTimeout, PeerLost
from tests.conformance.fake_device import FakeDevice, FakeDeviceBackend, device_of, filled
from tests.conformance.ranks import run_threads
from tests.limits import OPERATION_S


def run_on_devices(body: Callable[[World, FakeDevice, int], None], size: int = 2) -> None:
    """Run the body with a device and one of its streams on each rank."""

    def with_device(world: World) -> None:
        with device_of(world.joined_round.backend) as device:
            try:
                body(world, device, device.new_stream())
            finally:
                world.close()

    run_threads(size, with_device, make_backend=FakeDeviceBackend)


@contextmanager
def blocked(device: FakeDevice, stream: int) -> Iterator[threading.Event]:
    """The stream goes on when the event is set, at the end at the latest."""
    gate = threading.Event()
    device.put(stream, gate.wait)
    try:
        yield gate
    finally:
        gate.set()


def test_a_blocking_call_waits_for_its_stream_and_its_stream_for_it_but_the_host_for_nothing() -> None:
    def body(world: World, device: FakeDevice, stream: int) -> None:
        x, seen = filled(3, -1), []
        memory = device.memory(x, stream)
        with blocked(device, stream) as gate:
            device.put(stream, lambda: x.fill(world.rank + 1))  # the gradient, which is not there yet
            assert world.group.allreduce(memory, out=memory) is memory
            device.put(stream, lambda: seen.append(x.tolist()))
            assert seen == [] and x.tolist() == [-1] * 3
            gate.set()
            device.synchronize(stream)
            assert seen == [[3] * 3]

    run_on_devices(body)


def test_any_stream_can_wait_for_a_work_and_so_can_the_host() -> None:
    def body(world: World, device: FakeDevice, stream: int) -> None:
        x, out, seen = filled(3, world.rank), filled(3, -1), []
        other = device.new_stream()
        with blocked(device, stream) as gate:
            result = device.memory(out, stream)
            work = world.group.allreduce(device.memory(x, stream), out=result, wait=False)
            assert work.wait(stream=other) is result
            device.put(other, lambda: seen.append(out.tolist()))
            with pytest.raises(OperationTimeout):
                work.wait(0.01)
            assert not work.done() and seen == []
            gate.set()
            assert work.wait() is result and out.tolist() == [1] * 3
            device.synchronize(other)
            assert seen == [[1] * 3] and x.tolist() == [world.rank] * 3
            assert work.wait(stream=stream) is result, "of a work that is over, too"

    run_on_devices(body)


@pytest.mark.parametrize("name", [None, "w"])
def test_reduce_broadcast_and_lists_use_memory_of_a_device(name: str | None) -> None:
    def body(world: World, device: FakeDevice, stream: int) -> None:
        xs = [filled(3, world.rank), filled(4, 10 * world.rank)]
        memories = [device.memory(x, stream) for x in xs]
        world.group.allreduce(memories, out=memories, op="max", name=name)
        device.synchronize(stream)
        assert [x.tolist() for x in xs] == [[1] * 3, [10] * 4]
        x = filled(2, world.rank + 5)
        memory = device.memory(x, stream)
        world.group.broadcast(memory, out=memory, root=1, name=name)
        device.synchronize(stream)
        assert x.tolist() == [6, 6]
        out = device.memory(filled(2, 0), stream)
        result = world.group.reduce(memory, out=out if world.rank == 0 else None, root=0, name=name)
        device.synchronize(stream)
        assert result is (out if world.rank == 0 else None)
        assert world.rank == 1 or out.owner.tolist() == [12, 12]  # type: ignore[attr-defined]  # it is an array
        assert world.group.allreduce(np.ones(2), name=name).tolist() == [2, 2], "arrays go on as ever"

    run_on_devices(body)


def test_without_a_stream_the_host_waits() -> None:
    def body(world: World, device: FakeDevice, stream: int) -> None:
        x = filled(3, 2)
        world.group.allreduce(device.memory(x, None), out=device.memory(x, None))
        assert x.tolist() == [4] * 3

    run_on_devices(body)


def test_named_operations_come_in_any_order_and_are_fused_by_device() -> None:
    def body(world: World, device: FakeDevice, stream: int) -> None:
        other = device.new_stream()
        for _ in range(4):  # from the third time on, those of arrays could be announced in shared memory
            arrays: dict[str, Array] = {name: filled(3, index) for index, name in enumerate("abcd")}
            works = []
            for name in "abcd" if world.rank else "dcba":
                memory = device.memory(arrays[name], stream if name in "ab" else other)
                works.append(world.group.allreduce(memory, out=memory, name=name, wait=False))
            on_cpu = world.group.allreduce(np.ones(3, np.float32), name="e", wait=False)
            for work in works:
                work.wait(stream=stream)
            device.synchronize(stream)
            assert [arrays[name].tolist() for name in "abcd"] == [[2 * index] * 3 for index in range(4)]
            assert on_cpu.wait().tolist() == [2] * 3

    run_on_devices(body)


def test_an_error_that_comes_later_is_raised_by_the_next_wait_and_the_stream_goes_on() -> None:
    def body(world: World, device: FakeDevice, stream: int) -> None:
        memory = device.memory(filled(3 + world.rank, 1), stream)
        with blocked(device, stream) as gate:
            work = world.group.allreduce(memory, out=memory, wait=False)
            assert work.wait(stream=stream) is memory, "nobody knows of the mistake yet"
            gate.set()
            device.synchronize(stream)
        with pytest.raises(Mismatch, match=r"rank 0: allreduce sum float32\[3\] on fake; rank 1: .*\[4\] on fake"):
            work.wait()
        assert isinstance(work.exception(), Mismatch)
        with pytest.raises(Mismatch):
            work.wait(stream=stream)
        x = filled(3, 1)
        world.group.allreduce(device.memory(x, stream), out=device.memory(x, stream))
        device.synchronize(stream)
        assert x.tolist() == [2] * 3, "after a mismatch the group can still be used"

    run_on_devices(body)


def test_the_loss_of_a_rank_ends_what_the_device_waits_for_and_what_comes_after() -> None:
    def body(world: World, device: FakeDevice, stream: int) -> None:
        if world.rank == 1:
            return  # it leaves
        x = filled(3, 1)
        memory = device.memory(x, stream)
        work = world.group.allreduce(memory, out=memory, wait=False)
        assert work.wait(stream=stream) is memory
        device.synchronize(stream)  # a failed operation does not stop the stream
        with pytest.raises(PeerLost) as lost:
            work.wait()
        assert lost.value.peer == 1
        with pytest.raises(PeerLost):
            world.group.allreduce(memory, out=memory, wait=False).wait()

    run_on_devices(body)


def test_memory_lives_until_the_device_has_done_with_it_though_nobody_keeps_the_work() -> None:
    def body(world: World, device: FakeDevice, stream: int) -> None:
        with blocked(device, stream) as gate:
            x = filled(3, 1)
            owner = weakref.ref(x)
            memory = device.memory(x, stream)
            world.group.allreduce(memory, out=memory)
            del x, memory
            gc.collect()
            assert owner() is not None
            gate.set()
            device.synchronize(stream)
        world.group.barrier()
        world.group.allreduce(np.ones(1))  # it looks at what has ended before
        gc.collect()
        assert owner() is None, "and no longer"

    run_on_devices(body)


def test_members_that_use_different_devices_are_told_so() -> None:
    def body(world: World, device: FakeDevice, stream: int) -> None:
        x = filled(3, 1)
        given = device.memory(x, stream) if world.rank else x
        with pytest.raises(Mismatch, match="ranks disagree on the device: rank 0 gave cpu; rank 1 gave fake"):
            world.group.allreduce(given, out=given, name="w", wait=False).wait()

    run_on_devices(body)


def test_memory_that_no_backend_takes_is_refused_with_what_to_do() -> None:
    def body(world: World) -> None:
        memory = Memory(4096, (3,), "float32", "cuda:0", 7)
        words = "the memory is on cuda:0, and the backend 'threads' takes only that of cpu; copy it .*RONDE_BACKEND"
        for operation in (world.group.allreduce, world.group.broadcast, world.group.reduce):
            with pytest.raises(TypeError, match=words):
                operation(memory, out=memory)
        for other in (world.group.allgather, world.group.alltoall, world.group.reduce_scatter):
            with pytest.raises(TypeError, match=r"is on cuda:0, and only allreduce, broadcast and reduce .*copy"):
                other(memory)
        assert world.group.allreduce(np.ones(1)).tolist() == [2]

    run_threads(2, body)


def test_what_does_not_fit_together_is_refused() -> None:
    def body(world: World, device: FakeDevice, stream: int) -> None:
        memory, group = device.memory(filled(3, 1), stream), world.group
        with pytest.raises(TypeError, match=r"allocates none: give out=, which may be x"):
            group.allreduce(memory)
        with pytest.raises(TypeError, match="x and out must be ronde"):
            group.allreduce([memory, np.ones(3)], out=[memory, memory])
        with pytest.raises(TypeError, match="one device and have one dtype, got float32 on fake:0, int32 on fake:0"):
            group.allreduce(memory, out=device.memory(np.zeros(3, np.int32), stream))
        with pytest.raises(ValueError, match="shapes of x"):
            group.allreduce(memory, out=device.memory(filled(4, 1), stream))
        with pytest.raises(TypeError, match="dtype 'complex64' is not supported"):
            strange = Memory(memory.address, (1,), "complex64", "fake:0")
            group.allreduce(strange, out=strange)
        group.allreduce(memory, out=memory)
        second = Memory(memory.address, (3,), "float32", "fake:1")
        with pytest.raises(TypeError, match="on fake:1, and this rank has used fake:0 before; use one device"):
            group.allreduce(second, out=second)

    run_on_devices(body)


def test_memory_of_the_cpu_is_as_good_as_an_array() -> None:
    def body(world: World) -> None:
        x = filled(6, world.rank + 1)
        memory = Memory(x.ctypes.data, (2, 3), "float32", owner=x)
        assert world.group.allreduce(memory).tolist() == [[3] * 3] * 2
        assert world.group.allgather(memory, name="w").shape == (4, 3)
        assert world.group.allreduce(memory, out=memory) is memory and x.tolist() == [3] * 6
        assert world.group.broadcast(as_memory(x), root=1).dtype == np.uint8

    run_threads(2, body)


def test_a_stream_that_waits_for_a_work_of_the_cpu_is_the_host() -> None:
    def body(world: World) -> None:
        work = world.group.allreduce(np.ones(2), wait=False)
        assert work.wait(stream=7).tolist() == [2, 2] and work.done()

    run_threads(2, body)


def test_who_waits_for_a_stream_waits_no_longer_than_he_may() -> None:
    def body(world: World, device: FakeDevice, stream: int) -> None:
        memory = device.memory(filled(3, 1), stream)
        if world.rank == 0:
            work = world.group.allreduce(memory, out=memory, name="late", wait=False)
            with pytest.raises(OperationTimeout, match="waits for rank 1"):
                work.wait(0.2, stream=stream)
            world.group.barrier()
            work.wait(OPERATION_S, stream=stream)
        else:
            world.group.barrier()
            world.group.allreduce(memory, out=memory, name="late")
        device.synchronize(stream)

    run_on_devices(body)
