"""The backend for one rank, and the loading of the native library. What channels do: tests/conformance."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ronde.comm.backends.base import ChannelSpec
from ronde.comm.backends.native import NativeBackend, NativeChannel
from ronde.comm.backends.native_library import ABI, MAX_DESCRIPTIONS, RD_CALL, CallStructs, NativeLibrary
from ronde.comm.backends.native_messages import NativeEndpoint
from ronde.comm.backends.single_rank import SingleRankChannel
from ronde.comm.buffers import Array, address_of, as_array
from ronde.comm.call import Call, Span
from ronde.errors import PeerLost, RondeError, RoundEnded
from ronde.net.event_loop import EventLoop
from ronde.net.handshake import ConnectionRequest
from ronde.net.keys import JobKey, new_job_key
from ronde.settings import Settings
from ronde.types import Deadline, DType, Member, Op, OperationKind, Topology
from tests.limits import OPERATION_S, PATIENCE_S
from tests.unit.net.polled import run_for
from tests.unit.thread_limit import no_new_threads

DEADLINE = Deadline(10.0)
"""For what does not wait: it is made once, and may be over."""


@pytest.fixture
def channel() -> SingleRankChannel:
    return SingleRankChannel(ChannelSpec(id="0.ordered", members=(3,), member_index=0, bucket_bytes=1000))


def allreduce(x: Array, out: Array, **more: object) -> Call:
    span = Span(address_of(x), address_of(out), x.size)
    dtype = DType[x.dtype.name.upper()]
    return Call(OperationKind.ALLREDUCE, dtype, spans=(span,), description="allreduce", **more)  # type: ignore[arg-type]


class ListenerOfDyingRank:
    """Rank 1 connects and dies; then the coordinator reports it."""

    def __init__(self) -> None:
        self._left = iter([True])

    def accept(self, purpose: str, rank: int, deadline: Deadline) -> socket.socket:
        if not next(self._left, False):
            raise PeerLost(rank=0, peer=rank, op="opening a channel", why="its process is gone")
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours


def test_a_rank_that_dies_before_it_gets_the_shared_memory_is_named() -> None:
    topology = Topology(tuple(Member(rank, "host", rank + 1, "") for rank in range(2)), 0)
    backend = NativeBackend(topology, ListenerOfDyingRank(), JobKey(new_job_key()), Settings())  # type: ignore[arg-type]
    with pytest.raises(PeerLost, match="rank 0 lost rank 1 during opening a channel"):
        backend.open_channel(ChannelSpec(id="0.ordered", members=(0, 1), member_index=0, bucket_bytes=1000), DEADLINE)


def test_a_link_for_messages_whose_memory_finds_no_descriptor_is_closed_and_the_reason_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def find_none(sock: socket.socket, deadline: Deadline) -> int:
        sock.recv(1)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("ronde.comm.backends.native_messages.receive_descriptor", find_none)
    accept: list[Callable[[ConnectionRequest, socket.socket], None]] = []
    listener = SimpleNamespace(serve=lambda purpose, callback: accept.append(callback))
    topology = Topology(tuple(Member(rank, "host", rank + 1, "") for rank in range(2)), 0)
    endpoint = NativeEndpoint(0, 2, 2)
    ours, theirs = socket.socketpair()
    with closing(EventLoop()) as loop, theirs:
        endpoint.use_links(topology, listener, loop, connect=None)  # type: ignore[arg-type]
        accept[0](ConnectionRequest("messages", 1), ours)
        theirs.send(b"f")
        run_for(loop, PATIENCE_S, lambda: ours.fileno() < 0)
        theirs.settimeout(PATIENCE_S)
        assert theirs.recv(1) == b""
    endpoint.close()
    assert "rank 0 cannot take the link for messages from rank 1: too many open files" in caplog.text


@pytest.mark.parametrize(
    ("num_members", "bucket_bytes", "words"),
    [
        (600, 0, "0.ordered: chunk_bytes must be at least 4800 for 600 members on one host, got 4096"),
        (1025, 0, "0.ordered: it has 1025 members on one host, at most 1024 are possible"),
        (2, 1 << 62, "0.ordered: 2 members on one host with slot_bytes = 8192, .* more shared memory than possible"),
    ],
)
def test_sizes_that_the_library_refuses_are_named_with_what_is_allowed(
    num_members: int, bucket_bytes: int, words: str
) -> None:
    topology = Topology(tuple(Member(rank, "host", rank + 1, "") for rank in range(num_members)), 0)
    settings = Settings(slot_bytes=8192, chunk_bytes=4096)
    backend = NativeBackend(topology, None, JobKey(new_job_key()), settings)  # type: ignore[arg-type]
    spec = ChannelSpec(id="0.ordered", members=tuple(range(num_members)), member_index=0, bucket_bytes=bucket_bytes)
    with pytest.raises(ValueError, match=words):
        backend.open_channel(spec, DEADLINE)


def deadline() -> Deadline:
    return Deadline(OPERATION_S)


@pytest.fixture
def native_channel() -> Iterator[NativeChannel]:
    """A channel of the native backend with one member."""
    topology = Topology((Member(0, "host", 1, ""),), 0)
    backend = NativeBackend(topology, ListenerOfDyingRank(), JobKey(new_job_key()), Settings())  # type: ignore[arg-type]
    opened = backend.open_channel(ChannelSpec(id="0.ordered", members=(0,), member_index=0, bucket_bytes=8), deadline())
    assert isinstance(opened, NativeChannel)
    yield opened
    opened.close()


def test_a_call_in_the_background_that_gets_no_thread_is_refused_and_not_lost(native_channel: NativeChannel) -> None:
    x = np.ones(3, np.float32)
    with no_new_threads():
        assert native_channel.run(allreduce(x, x), deadline()).algorithm == "direct"  # needs none
        with pytest.raises(RondeError, match=r"allreduce failed on rank 0: no thread could be started .*ulimit -u"):
            native_channel.submit(allreduce(x, x), deadline())
    native_channel.submit(allreduce(x, x), deadline()).wait(deadline())


def test_a_closed_native_channel_refuses_everything(native_channel: NativeChannel) -> None:
    x = np.ones(3, np.float32)
    ended = native_channel.submit(allreduce(x, x), deadline())
    ended.wait(deadline())
    native_channel.close("the round is over")
    native_channel.close()
    for refused in (native_channel.run, native_channel.submit):
        with pytest.raises(RoundEnded, match="allreduce on rank 0: the round is over"):
            refused(allreduce(x, x), deadline())
    with pytest.raises(RoundEnded):
        native_channel.bucket()
    assert native_channel.current_call() is None and ended.done()
    native_channel.abort(why="too late")


@pytest.mark.parametrize("op", list(Op))
def test_the_reduction_of_one_input_is_the_input_scaled(op: Op, channel: SingleRankChannel) -> None:
    x, out = np.arange(5.0), np.zeros(5)
    channel.run(allreduce(x, out, op=op), DEADLINE)
    assert np.array_equal(out, x)
    channel.run(allreduce(x, out, op=op, prescale=0.5, postscale=3.0), DEADLINE)
    assert np.array_equal(out, 1.5 * x)


def test_scaled_integers_are_truncated_and_kept_within_their_type(channel: SingleRankChannel) -> None:
    x = np.array([7, -7, 100], np.int8)
    channel.run(allreduce(x, x, prescale=1.5), DEADLINE)
    assert x.tolist() == [10, -10, 127]


def test_a_submitted_call_has_ended(channel: SingleRankChannel) -> None:
    running_call = channel.submit(Call(OperationKind.BARRIER, description="barrier"), DEADLINE)
    assert running_call.done()
    timing = running_call.wait(Deadline(0))
    assert timing.start_ns <= timing.ready_ns <= timing.end_ns
    assert channel.current_call() is None


def test_after_an_abort_or_close_nothing_runs(channel: SingleRankChannel) -> None:
    channel.abort(why="the round is over")
    channel.close()
    for refused in (channel.run, channel.submit):
        with pytest.raises(RoundEnded, match="barrier cannot finish: the round is over"):
            refused(Call(OperationKind.BARRIER, description="barrier"), DEADLINE)


def test_buckets_are_aligned_and_zero(channel: SingleRankChannel) -> None:
    bucket = channel.bucket()
    assert bucket.num_bytes == 2 * 1000 and not as_array(bucket).any()
    assert bucket.address % 64 == 0
    assert channel.bucket().address == bucket.address


def test_a_call_that_repeats_keeps_its_description_while_many_others_are_described() -> None:
    structs, description = CallStructs(), "allreduce sum float32[7], again and again"
    call = Call(OperationKind.ALLREDUCE, DType.FLOAT32, spans=(Span(64, 64, 7),), description=description)

    def fill() -> str:
        structs.fill(call, 0)
        return ctypes.string_at(RD_CALL.unpack_from(structs.call)[9], len(description)).decode()

    assert fill() == description
    for number in range(MAX_DESCRIPTIONS + 1):
        structs.fill_message(Call(OperationKind.SEND, description=f"send float32[{number}]"), 0, 1)
    others = [bytes([number % 256]) * len(description) for number in range(10_000)]  # in memory that is free
    assert fill() == description
    assert others


def test_a_stale_library_says_what_to_do(tmp_path: Path) -> None:
    source, library = tmp_path / "stale.c", tmp_path / "libstale.so"
    source.write_text(f"unsigned rd_abi(void) {{ return {ABI - 1}; }}")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    with pytest.raises(RondeError, match=f"has ABI {ABI - 1}, this ronde needs {ABI}.*run `make build`"):
        NativeLibrary(library)
