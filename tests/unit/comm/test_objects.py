"""Objects that were changed, replaced or repeated on their way are refused before they are unpickled."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ronde.comm import objects
from ronde.comm.buffers import Array
from ronde.comm.world import World
from ronde.errors import Mismatch, ProtocolError
from ronde.net.listener import Listener
from tests.forwarder import Forwarder
from tests.unit.comm.thread_ranks import run_ranks

Change = Callable[[int, Array], Array]
"""Gets the sender of an object and its bytes, and returns other bytes."""


def refusal(kind: str, rank: int) -> str:
    return f"{kind} of an object on rank {rank}: what came from rank {1 - rank} is not what that rank sent, and was not"


class Harm:
    """Whoever unpickles this makes a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def call_every_function(world: World) -> list[object]:
    """What rank 1 gets from rank 0, or why it gets nothing."""
    calls: dict[str, Callable[[], object]] = {
        "broadcast": lambda: objects.broadcast("b", group=world.group),
        "allgather": lambda: objects.allgather("a", group=world.group)[0],
        "gather": lambda: (objects.gather("g", 1, group=world.group) or [""])[0],
        "alltoall": lambda: objects.alltoall(["x", "y"], group=world.group)[0],
        "message": lambda: objects.receive(0, group=world.group),
    }
    if world.rank == 0:
        calls["message"] = lambda: objects.send("s", 1, group=world.group)
    found: list[object] = []
    for kind, call in calls.items():
        try:
            found.append(call())
        except ProtocolError as error:
            assert str(error).startswith(refusal(kind, world.rank)), error
            found.append("refused")
    return found


@pytest.fixture
def on_the_way(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    """Changes what rank 1 receives."""
    unpack = objects._Exchange.unpack

    def use(change: Change) -> None:
        def unpack_changed(self: Any, pieces: Iterable[tuple[int, Array]], to: int = -1) -> list[Any]:
            if self.own_rank == 1:
                pieces = [(source, change(source, data)) for source, data in pieces]
            return unpack(self, pieces, to)

        monkeypatch.setattr(objects._Exchange, "unpack", unpack_changed)

    return use


def flip(source: int, data: Array, where: int) -> Array:
    changed = data.copy()
    if source == 0:
        changed[where] ^= 1
    return changed


SENT = ["b", "a", "g", "y", "s"]


@pytest.mark.parametrize(
    "change",
    [
        lambda source, data: flip(source, data, 0),
        lambda source, data: flip(source, data, -1),
        lambda source, data: flip(source, data, -objects.TAG_BYTES - 1),
        lambda source, data: data[:-1] if source == 0 else data,
        lambda source, data: data[:3] if source == 0 else data,
        lambda source, data: data[:0] if source == 0 else data,
    ],
    ids=["first byte", "last byte", "end of the pickle", "shortened", "without a tag", "nothing"],
)
def test_an_object_that_was_changed_is_refused_and_its_sender_named(
    change: Change, on_the_way: Callable[[Change], None]
) -> None:
    assert run_ranks(2, call_every_function)[1] == SENT
    on_the_way(change)
    assert run_ranks(2, call_every_function)[1] == ["refused"] * 5


def test_an_object_that_was_sent_before_or_by_another_rank_is_refused(on_the_way: Callable[[Change], None]) -> None:
    seen: list[Array] = []

    def replay(source: int, data: Array) -> Array:
        seen.append(data.copy())
        return seen[0] if len(seen) > 1 else data

    def twice(world: World) -> list[object]:
        if world.rank == 0:
            for _ in range(2):
                objects.send("same", 1, group=world.group)
            return []
        found: list[object] = [objects.receive(0, group=world.group)]
        with pytest.raises(ProtocolError, match=refusal("message", 1)):
            objects.receive(0, group=world.group)
        return found

    on_the_way(replay)
    assert run_ranks(2, twice)[1] == ["same"]

    of_rank_0: list[Array] = []

    def put_in_place_of_another(source: int, data: Array) -> Array:
        of_rank_0.append(data)
        return of_rank_0[0]

    def gather(world: World) -> object:
        if world.rank == 0:
            return objects.allgather("a", group=world.group)
        with pytest.raises(ProtocolError, match="what came from rank 1 is not what that rank sent"):
            objects.allgather("b", group=world.group)
        return None

    on_the_way(put_in_place_of_another)
    assert run_ranks(2, gather) == [["a", "b"], None]


def test_objects_arrive_again_after_one_was_refused_and_after_a_mismatch(on_the_way: Callable[[Change], None]) -> None:
    num_changed: list[int] = []

    def change_first(source: int, data: Array) -> Array:
        if source == 0 and not num_changed:
            num_changed.append(1)
            return flip(source, data, 0)
        return data

    def use(world: World) -> object:
        if world.rank == 0:
            objects.send(1, 1, group=world.group)
            objects.send(2, 1, group=world.group)
            received = None
        else:
            with pytest.raises(ProtocolError):
                objects.receive(0, group=world.group)
            received = objects.receive(0, group=world.group)
        with pytest.raises(Mismatch):
            _ = objects.allgather(3, group=world.group) if world.rank else world.group.allreduce(np.ones(3))
        return received, objects.allgather(world.rank, group=world.group)

    on_the_way(change_first)
    assert run_ranks(2, use) == [(None, [0, 1]), (2, [0, 1])]


def test_every_round_has_a_key_of_its_own_for_objects() -> None:
    first, second = (run_ranks(2, lambda world: world.group.object_key) for _ in range(2))
    assert first[0] == first[1] != second[0] == second[1]
    assert len(first[0]) == 32


def test_bytes_changed_between_two_hosts_are_never_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can change packets takes the place of the network between the hosts."""
    good, bad = tmp_path / "good", tmp_path / "evil"
    forwarders: list[Forwarder] = []
    listen = Listener._listen

    def listen_behind_forwarder(self: Listener, *arguments: Any) -> None:
        listen(self, *arguments)
        if self.unix_name:  # a rank's, and not the coordinator's
            forwarders.append(Forwarder(self.tcp_port).__enter__())
            self.tcp_port = forwarders[-1].port

    monkeypatch.setattr(Listener, "_listen", listen_behind_forwarder)

    def use(world: World) -> object:
        assert objects.broadcast(world.rank, group=world.group) == 0
        if world.rank == 0:
            for forwarder in forwarders:
                forwarder.change = lambda data: data.replace(b"good", b"evil")
        world.group.barrier()
        if world.rank:
            with pytest.raises(ProtocolError, match=refusal("broadcast", 1)):
                objects.broadcast(None, group=world.group)
            return "refused"
        objects.broadcast(Harm(good), group=world.group)
        return "sent"

    try:
        assert run_ranks(2, use, lambda rank: {"host": f"host-{rank}"}) == ["sent", "refused"]
    finally:
        for forwarder in forwarders:
            forwarder.__exit__()
    assert not good.exists() and not bad.exists()
