"""While a job runs, somebody without its key tries everything at every socket where its processes listen. He is turned
away, that is logged, and the job goes on as if nothing had happened.
"""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from ronde.errors import StartFailed
from ronde.net.connect import connect_authenticated
from ronde.net.handshake import VERSION
from ronde.net.keys import JobKey, new_job_key
from ronde.net.listener import ConnectionRequest
from ronde.net.messages import LeaveReason, LeaveRound, encode
from ronde.types import Deadline
from tests.jobs.kit import LocalRanks, start_ranks
from tests.limits import SECONDS_S

LISTENING = 0x10000
"""The flag of a listening socket in /proc/net/unix."""
ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"%s" + bytes(32)
FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

NOISE = {
    "nothing": b"",
    "garbage": random.Random(1).randbytes(4096),
    "a web request": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 8,
    "half a hello": b"RONDc" + bytes([VERSION, 0]),
    "a hello that announces too much": struct.pack("!5sBH32s", b"RONDc", VERSION, 0xFFFF, bytes(32)) + bytes(1 << 20),
    "a hello of another version": struct.pack("!5sBH32s", b"RONDc", 99, 64, bytes(32)),
    "a hello, then garbage as proof": struct.pack("!5sBH32s", b"RONDc", VERSION, 64, bytes(32)) + bytes(96),
    "a control message in the clear": encode(LeaveRound(LeaveReason.SHUTDOWN)),
    "a greeting of ZeroMQ without a key": ZMTP_GREETING % b"NULL".ljust(20, b"\0"),
    "a greeting of ZeroMQ, then a frame of 2^62 bytes": ZMTP_GREETING % b"CURVE".ljust(20, b"\0")
    + b"\x02"
    + struct.pack("!Q", 1 << 62),
}


Address = tuple[str, int] | str
"""A TCP port, or the path or abstract name of a Unix socket."""


def listening_tcp(pid: int) -> set[tuple[str, int]]:
    found = psutil.Process(pid).net_connections(kind="tcp")
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}


def listening_unix(pid: int) -> set[str]:
    """Abstract names of the listening stream sockets of a process."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(str(link.readlink()))
        except OSError:  # closed while we looked
            continue
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {
        row[7].removeprefix("@")
        for row in rows
        if len(row) > 7 and f"socket:[{row[6]}]" in inodes and int(row[3], 16) & LISTENING and int(row[4], 16) == 1
    }


def connect(address: Address) -> socket.socket:
    client = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    client.settimeout(SECONDS_S)
    try:
        client.connect(f"\0{address}" if isinstance(address, str) and address[0] != "/" else address)
    except OSError:
        client.close()
        raise
    return client


def send(client: socket.socket, noise: bytes) -> None:
    try:
        client.sendall(noise)
    except (ConnectionError, TimeoutError):  # refused before all was sent
        pass


def connect_zeromq(port: int, server_public: bytes | None, opened: ExitStack) -> None:
    """Connect as a rank with keys of our own, which has to be refused."""
    context = zmq.Context()
    opened.callback(context.term)
    client = context.socket(zmq.DEALER)
    opened.callback(client.close, linger=0)
    client.set(zmq.ROUTING_ID, b"rank-0")
    if server_public is not None:
        client.set(zmq.CURVE_SERVERKEY, server_public)
        client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
    monitor = client.get_monitor_socket(FAILED | zmq.EVENT_DISCONNECTED)
    opened.callback(monitor.close)
    opened.callback(client.disable_monitor)
    client.connect(f"tcp://127.0.0.1:{port}")
    client.send(encode(LeaveRound(LeaveReason.SHUTDOWN)), zmq.NOBLOCK)
    assert monitor.poll(int(1000 * SECONDS_S)), "nobody refused it"
    assert recv_monitor_message(monitor)["event"] & (FAILED | zmq.EVENT_DISCONNECTED)


@pytest.fixture
def others() -> set[tuple[str, int]]:
    """What listens in this process already: other tests keep jobs of their own for the whole session."""
    return listening_tcp(os.getpid())


@pytest.fixture
def job(others: set[tuple[str, int]]) -> Iterator[LocalRanks]:
    with start_ranks("until_stopped", 2, env={"TEST_STEPS": "connections"}) as job:
        yield job


@pytest.fixture
def key(job: LocalRanks) -> str:
    return psutil.Process(job.pids[0]).environ()["RONDE_KEY"]


def finish(job: LocalRanks) -> None:
    """Let the job end; everything was right, or a rank would have failed."""
    job.send((0, 1), stop=True)
    over = job.receive_all((0, 1), "over")
    assert over[0]["num_steps"] == over[1]["num_steps"] > 0
    assert job.wait() == [0, 0], job.printed()


def test_strangers_are_turned_away_and_the_job_goes_on(
    others: set[tuple[str, int]], job: LocalRanks, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    job.receive_all((0, 1), "running")
    coordinator = listening_tcp(os.getpid()) - others
    addresses: list[Address] = [address for pid in job.pids.values() for address in listening_tcp(pid)]
    addresses += [address for pid in job.pids.values() for address in listening_unix(pid)]
    assert len(coordinator) == 2 and len(addresses) == 4
    listener = ("127.0.0.1", int(job.coordinator.address.rpartition(":")[2]))
    ((_, control_port),) = coordinator - {listener}
    with ExitStack() as opened:
        for address in (*coordinator, *addresses):
            for noise in NOISE.values():
                send(opened.enter_context(connect(address)), noise)
        for server_public in (None, JobKey(new_job_key()).server_public, JobKey(key).server_public):
            connect_zeromq(control_port, server_public, opened)
        for address in (listener, *addresses):
            target = f"unix:{address}" if isinstance(address, str) else f"{address[0]}:{address[1]}"
            with pytest.raises(StartFailed, match="key"):
                connect_authenticated(target, JobKey(new_job_key()), ConnectionRequest("life", 0), Deadline(SECONDS_S))
        finish(job)
    for text in (caplog.text, job.output(0), job.output(1)):
        assert "refused a connection" in text
    assert "control client at 127.0.0.1: does not have the job's key" in caplog.text
    assert "a connection to the control port: failed in the handshake" in caplog.text
    assert "Traceback" not in caplog.text + job.printed()


def test_only_what_is_needed_listens_and_only_on_this_host(others: set[tuple[str, int]], job: LocalRanks) -> None:
    listeners = job.receive_all((0, 1), "running")
    for rank, pid in job.pids.items():
        tcp = {f"{host}:{port}" for host, port in listening_tcp(pid)}
        assert tcp == set(listeners[rank]["tcp"]) and len(tcp) == 1
        assert listening_unix(pid) == set(listeners[rank]["unix"]) and len(listeners[rank]["unix"]) == 1
    mine = listening_tcp(os.getpid()) - others
    assert len(mine) == 2, "the coordinator's listener and its control port"
    assert job.coordinator.address in {f"{host}:{port}" for host, port in mine}
    everywhere = mine.union(*(listening_tcp(pid) for pid in job.pids.values()))
    assert {host for host, _ in everywhere} == {"127.0.0.1"}
    finish(job)


def test_the_key_is_on_no_command_line_and_in_no_log(
    job: LocalRanks, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    job.receive_all((0, 1), "running")
    secrets = [key, JobKey(key).server_secret.decode(), JobKey(key).client_secret.decode()]
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands.append(path.read_text(errors="replace"))
        except OSError:  # it ended while we looked
            continue
    finish(job)
    for text in (*commands, caplog.text, job.printed()):
        assert not any(secret in text for secret in secrets)
