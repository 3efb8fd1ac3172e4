"""Questions and answers over a Unix socket: for the same user only, and nobody can hold up the others."""

from __future__ import annotations

import os
import queue
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ronde.net import unix_server as module
from ronde.net.unix_server import MAX_CLIENTS, UnixLineServer, listening_pid, query_monitor
from ronde.types import Deadline
from tests.limits import PATIENCE_S


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ronde") as folder:  # short, as a socket's path must be
        yield Path(folder) / "server"


@pytest.fixture
def server(path: Path) -> Iterator[UnixLineServer]:
    made = UnixLineServer(path, lambda request, reply: reply(request.upper()))
    yield made
    made.close()


def connect(path: Path, stack: ExitStack) -> socket.socket:
    sock = stack.enter_context(socket.socket(socket.AF_UNIX))
    sock.settimeout(PATIENCE_S)
    sock.connect(str(path))
    return sock


def test_questions_are_answered_though_others_say_nothing(path: Path) -> None:
    server = UnixLineServer(path, lambda request, reply: reply(request * 1000))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "only its user may connect"
    with ExitStack() as stack:
        connect(path, stack)
        connect(path, stack).sendall(b"half a question")
        for question in (b"a", b"", b"b" * 4000):
            assert query_monitor(path, question, Deadline(PATIENCE_S)) == question * 1000
    server.close()


def test_a_process_out_of_descriptors_answers_later_and_does_not_spin(
    server: UnixLineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[socket.socket] = []

    def accept(self: socket.socket) -> tuple[socket.socket, object]:
        calls.append(self)
        if len(calls) == 1:
            raise OSError(24, "Too many open files")
        return real(self)

    real = socket.socket.accept
    monkeypatch.setattr(socket.socket, "accept", accept)
    began_s = time.monotonic()
    assert query_monitor(server.path, b"a", Deadline(PATIENCE_S)) == b"A"
    assert time.monotonic() - began_s >= module.OUT_OF_DESCRIPTORS_PAUSE_S


def test_several_questions_on_one_connection_are_answered_in_turn(server: UnixLineServer) -> None:
    with ExitStack() as stack:
        sock = connect(server.path, stack)
        sock.sendall(b"one\ntwo\nthr")
        sock.sendall(b"ee\n")
        answers = b""
        while answers.count(b"\n") < 3:
            answers += sock.recv(100)
    assert answers == b"ONE\nTWO\nTHREE\n"


def test_a_peer_that_says_nothing_is_sent_away_in_time(server: UnixLineServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_TIMEOUT_S", 0.05)
    with ExitStack() as stack:
        assert connect(server.path, stack).recv(1) == b""


def test_a_question_without_end_is_cut(server: UnixLineServer) -> None:
    with ExitStack() as stack:
        sock = connect(server.path, stack)
        with pytest.raises(OSError):
            while True:
                sock.sendall(b"x" * 65536)


def test_more_peers_than_there_is_room_for_are_sent_away(server: UnixLineServer) -> None:
    with ExitStack() as stack:
        peers = [connect(server.path, stack) for _ in range(MAX_CLIENTS)]
        for sock in peers:  # each is accepted now
            sock.sendall(b"x\n")
            assert sock.recv(10) == b"X\n"
        assert connect(server.path, stack).recv(1) == b""
    assert server.num_refused == 1


def test_another_user_is_refused_by_both_sides(server: UnixLineServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "peer_uid", lambda sock: os.getuid() + 1)
    with pytest.raises(PermissionError, match="another user"):
        query_monitor(server.path, b"a", Deadline(PATIENCE_S))
    with ExitStack() as stack:
        assert connect(server.path, stack).recv(1) == b""
    assert server.num_refused >= 1


def test_a_mistake_in_an_answer_costs_this_peer_only(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = UnixLineServer(path, lambda request, reply: reply(bytes(10 // len(request))))
    with pytest.raises(ConnectionError, match="without an answer"):
        query_monitor(path, b"", Deadline(PATIENCE_S))
    assert query_monitor(path, b"12345", Deadline(PATIENCE_S)) == bytes(2)
    assert "ZeroDivisionError" in caplog.text
    server.close()


def test_it_says_who_listens(server: UnixLineServer, path: Path) -> None:
    assert listening_pid(path, Deadline(PATIENCE_S)) == os.getpid()
    server.close()
    assert listening_pid(path, Deadline(PATIENCE_S)) is None
    with socket.socket(socket.AF_UNIX) as dead:  # as a killed process leaves it
        dead.bind(str(path))
    assert listening_pid(path, Deadline(PATIENCE_S)) is None


def test_a_reply_may_come_later_from_any_thread_and_others_are_answered_meanwhile(path: Path) -> None:
    replies: queue.SimpleQueue[Callable[[bytes], None]] = queue.SimpleQueue()

    def answer(request: bytes, reply: Callable[[bytes], None]) -> None:
        replies.put(reply) if request == b"late" else reply(b"soon")

    server = UnixLineServer(path, answer)
    with ExitStack() as stack:
        waiting = connect(path, stack)
        waiting.sendall(b"late\n")
        reply = replies.get(timeout=PATIENCE_S)
        assert query_monitor(path, b"now", Deadline(PATIENCE_S)) == b"soon"
        reply(b"here")
        assert waiting.recv(10) == b"here\n"
    server.close()


def test_closing_ends_connections_and_removes_the_path(path: Path) -> None:
    replies: queue.SimpleQueue[Callable[[bytes], None]] = queue.SimpleQueue()
    server = UnixLineServer(path, lambda request, reply: replies.put(reply))
    with ExitStack() as stack:
        silent, waiting = connect(path, stack), connect(path, stack)
        waiting.sendall(b"x\n")
        reply = replies.get(timeout=PATIENCE_S)
        with pytest.raises(TimeoutError):
            query_monitor(path, b"a", Deadline(0.05))
        server.close()
        server.close()
        reply(b"too late")
        assert silent.recv(1) == waiting.recv(1) == b""
        assert not path.exists()
