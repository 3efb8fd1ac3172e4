"""The listener: who is let in, who is refused, and that nothing a peer does stops it."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ronde.errors import PeerLost, StartFailed
from ronde.net import connect as sockets
from ronde.net import listener as listener_module
from ronde.net.connect import connect_authenticated, describe_disconnect, socket_error
from ronde.net.handshake import VERSION
from ronde.net.keys import JobKey
from ronde.net.listener import ConnectionRequest, Listener
from ronde.types import Deadline, Member, Topology
from tests.services import needs

LOCAL = "127.0.0.1"


@pytest.fixture
def listener(key: JobKey) -> Iterator[Listener]:
    with closing(Listener(key, unix=True, tcp_host=LOCAL)) as made:
        yield made


@pytest.fixture(params=["unix", "tcp"])
def link(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def address(listener: Listener, link: str) -> str:
    return f"unix:{listener.unix_name}" if link == "unix" else f"{LOCAL}:{listener.tcp_port}"


def raw(listener: Listener, link: str) -> socket.socket:
    """A connection that has not said anything yet."""
    if link == "tcp":
        return socket.create_connection((LOCAL, listener.tcp_port), timeout=20)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    sock.connect("\0" + listener.unix_name)
    return sock


def connect(listener: Listener, link: str, key: JobKey, rank: int = 0, purpose: str = "data") -> socket.socket:
    return connect_authenticated(address(listener, link), key, ConnectionRequest(purpose, rank), Deadline(20))[0]


def meet(listener: Listener, link: str, key: JobKey, rank: int = 0) -> None:
    """An honest caller comes, and both ends talk."""
    with connect(listener, link, key, rank) as here, listener.accept("data", rank, Deadline(20)) as there:
        here.sendall(b"ping")
        assert there.recv(4) == b"ping"


def ends(sock: socket.socket) -> bool:
    """Wait until the other side has hung up; False if it says anything."""
    try:
        return sock.recv(100) == b""
    except ConnectionResetError:
        return True


def test_both_ends_get_a_plain_socket_that_is_ready_for_use(listener: Listener, link: str, key: JobKey) -> None:
    with connect(listener, link, key, 5) as here, listener.accept("data", 5, Deadline(20)) as there:
        for sock in (here, there):
            assert sock.gettimeout() is None
            assert fcntl.fcntl(sock, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            if link == "tcp":
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        here.sendall(b"a")
        there.sendall(b"b")
        assert (here.recv(9), there.recv(9)) == (b"b", b"a")


@needs("IPv6")
def test_ipv6_works_too(key: JobKey) -> None:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    with closing(Listener(key, unix=False, tcp_host="::1")) as listener:
        where = f"[::1]:{listener.tcp_port}"
        connect_authenticated(where, key, ConnectionRequest("data", 0), Deadline(20))[0].close()


@pytest.mark.parametrize(("heartbeat_s", "limit_s"), [(10, 10), (30, 30), (4, 4), (2.5, 3), (0.5, 3)])
def test_a_cut_link_is_noticed_within_a_heartbeat(key: JobKey, heartbeat_s: float, limit_s: float) -> None:
    with closing(Listener(key, unix=False, tcp_host=LOCAL, heartbeat_s=heartbeat_s)) as listener:
        here, _ = connect_authenticated(
            address(listener, "tcp"), key, ConnectionRequest("life", 0), Deadline(20), heartbeat_s=heartbeat_s
        )
        with here, listener.accept("life", 0, Deadline(20)) as there:
            for sock in (here, there):
                idle, pause, num = (
                    sock.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                )
                assert idle + num * pause <= limit_s


def test_the_reply_and_what_is_said_right_after_it_reach_a_peer_with_the_key(link: str, key: JobKey) -> None:
    def make_reply(peer: ConnectionRequest) -> bytes:
        return f"{peer.purpose} {peer.rank} {peer.detail}".encode() + bytes(60_000)

    def on_connection(peer: ConnectionRequest, sock: socket.socket) -> bool:
        sock.sendall(b"first words")
        sock.close()
        return True

    with closing(
        Listener(key, unix=True, tcp_host=LOCAL, make_reply=make_reply, on_connection=on_connection)
    ) as listener:
        request = ConnectionRequest("life", 3, "round 2")
        sock, reply = connect_authenticated(address(listener, link), key, request, Deadline(20))
        with sock:
            assert reply == b"life 3 round 2" + bytes(60_000)
            assert sock.recv(100) == b"first words"


def test_peers_are_told_apart_by_purpose_and_rank_and_come_in_order(listener: Listener, link: str, key: JobKey) -> None:
    peers = [("data", 1, b"a"), ("life", 1, b"b"), ("data", 0, b"c"), ("data", 1, b"d")]
    for purpose, rank, word in peers:
        with connect(listener, link, key, rank, purpose) as sock:
            sock.sendall(word)
    for purpose, rank, word in [peers[1], peers[0], peers[3], peers[2]]:
        with listener.accept(purpose, rank, Deadline(20)) as sock:
            assert sock.recv(9) == word


def test_many_come_at_once(listener: Listener, link: str, key: JobKey) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda rank: meet(listener, link, key, rank), range(200)))
    assert listener.num_refused == 0


def test_a_peer_that_does_not_come_is_named(listener: Listener) -> None:
    with pytest.raises(StartFailed, match=r"rank 7 did not connect for 'data' within 0\.01 s"):
        listener.accept("data", 7, Deadline(0.01))


def test_a_failed_rank_ends_the_waits_for_it_and_no_others(listener: Listener, link: str, key: JobKey) -> None:
    sock = connect(listener, link, key, 1, "other")
    lost = PeerLost(rank=0, peer=1, why="killed")
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(listener.accept, "data", rank, Deadline(20)) for rank in (1, 2)]
        listener.fail_rank(1, lost)
        listener.fail_rank(1, StartFailed("a later reason"))
        with pytest.raises(PeerLost, match="killed"):
            waits[0].result(20)
        with pytest.raises(PeerLost, match="killed"):
            listener.accept("other", 1, Deadline(0))
        with connect(listener, link, key, 2), waits[1].result(20):
            pass
    with sock:
        assert sock.recv(1) == b""


def test_closing_ends_all_waits_and_closes_sockets_that_nobody_took(key: JobKey, link: str) -> None:
    listener = Listener(key, unix=True, tcp_host=LOCAL)
    sock = connect(listener, link, key)
    silent = raw(listener, link)
    with ThreadPoolExecutor(1) as pool, sock, silent:
        wait = pool.submit(listener.accept, "data", 1, Deadline(20))
        listener.close()
        listener.close()
        with pytest.raises(StartFailed, match="rank 1 can no longer connect for 'data': the listener was closed"):
            wait.result(20)
        assert sock.recv(1) == b""
        assert ends(silent)


@pytest.mark.parametrize("callback", ["make_reply", "on_connection"])
def test_a_callback_that_fails_costs_its_peer_and_not_the_listener(
    key: JobKey, link: str, callback: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_at_zero(peer: ConnectionRequest, *_: object) -> bytes:
        if peer.rank == 0:
            raise KeyError("a mistake")
        return b""

    with closing(Listener(key, unix=True, tcp_host=LOCAL, **{callback: fail_at_zero})) as listener:  # type: ignore[arg-type]
        if callback == "make_reply":
            with pytest.raises(StartFailed, match="the log of the other side says why"):
                connect(listener, link, key)
        else:
            with connect(listener, link, key) as sock:
                assert sock.recv(1) == b""
        meet(listener, link, key, rank=1)
    assert "a mistake" in caplog.text


# --- how a connection ended ------------------------------------------------------------------------------------------


def test_only_a_host_that_the_kernel_gave_up_is_called_unreachable() -> None:
    for error in (0, errno.ECONNRESET, errno.EPIPE):
        assert describe_disconnect(error) == ""
    assert describe_disconnect(errno.ETIMEDOUT) == f"its host cannot be reached: {os.strerror(errno.ETIMEDOUT)}"


def test_the_error_of_a_connection_is_found_and_its_descriptor_stays_open() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = free.getsockname()
    with socket.socket() as line:
        line.setblocking(False)
        line.connect_ex(nobody)
        select.select([], [line], [], 10.0)
        assert socket_error(line.fileno()) == errno.ECONNREFUSED
        assert line.fileno() >= 0 and os.fstat(line.fileno())
    one, other = socket.socketpair()
    other.close()
    with one:
        assert socket_error(one.fileno()) == 0
    with open(os.devnull) as file:  # noqa: PTH123  # not a socket
        assert socket_error(file.fileno()) == 0


# --- connecting to what is not the right listener ---------------------------------------------------------------------


def test_a_wrong_key_fails_at_once_and_in_words_without_a_secret(
    listener: Listener, link: str, other_key: JobKey, caplog: pytest.LogCaptureFixture
) -> None:
    deadline = Deadline(60)
    words = r"rank 3 could not connect to .* for 'data': it refused the job's key"
    with pytest.raises(StartFailed, match=words) as refused:
        connect_authenticated(address(listener, link), other_key, ConnectionRequest("data", 3), deadline)
    assert deadline.remaining_s > 30
    for text in (caplog.text, str(refused.value), listener.unix_name):
        assert "5a5a" not in text and "a5a5" not in text


@pytest.mark.parametrize("former", [True, False], ids=["hangs up on its queue", "is not there yet"])
def test_a_listener_that_opens_late_is_found(key: JobKey, former: bool) -> None:
    """A coordinator that closes hangs up while the peers of the next round are already in its queue."""
    place_holder = socket.create_server((LOCAL, 0))
    port = place_holder.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        if not former:
            place_holder.close()
        call = pool.submit(connect_authenticated, f"{LOCAL}:{port}", key, ConnectionRequest("data", 0), Deadline(20))
        if former:
            place_holder.accept()[0].close()
            place_holder.close()
        with (
            closing(Listener(key, unix=False, tcp_host=LOCAL, port=port)) as listener,
            listener.accept("data", 0, Deadline(20)),
        ):
            call.result(20)[0].close()


@pytest.mark.parametrize("where", ["unix:ronde-nobody", f"{LOCAL}:1"])
def test_no_listener_is_reported_after_the_deadline(key: JobKey, where: str) -> None:
    with pytest.raises(StartFailed, match=r"nobody listens there .*, for 0\.05 s; is the other side running"):
        connect_authenticated(where, key, ConnectionRequest("data", 0), Deadline(0.05))


def test_an_unknown_name_is_reported_at_once(key: JobKey) -> None:
    deadline = Deadline(60)
    with pytest.raises(StartFailed, match=r"'no-such-host\.invalid' is unknown"):
        connect_authenticated("no-such-host.invalid:80", key, ConnectionRequest("data", 0), deadline)
    assert deadline.remaining_s > 30


def test_somebody_who_does_not_answer_is_not_waited_for_forever(key: JobKey) -> None:
    with socket.create_server((LOCAL, 0)) as silent:
        where = f"{LOCAL}:{silent.getsockname()[1]}"
        with pytest.raises(StartFailed, match=r"something listens there but did not answer within 0\.05 s"):
            connect_authenticated(where, key, ConnectionRequest("data", 0), Deadline(0.05))


def test_something_that_is_not_ronde_is_reported(key: JobKey) -> None:
    with socket.create_server((LOCAL, 0)) as listener, ThreadPoolExecutor(1) as pool:
        where = f"{LOCAL}:{listener.getsockname()[1]}"
        call = pool.submit(connect_authenticated, where, key, ConnectionRequest("data", 0), Deadline(20))
        with listener.accept()[0] as sock:
            sock.sendall(b"SSH-2.0-OpenSSH_9.6 and some more words of reply\r\n")
            with pytest.raises(StartFailed, match="what answers there is not ronde"):
                call.result(20)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ConnectionRefusedError(111, "Connection refused"), sockets.NotListening, "nobody listens"),
        (BlockingIOError(11, "Resource temporarily unavailable"), sockets.NotListening, "too busy"),
        (ConnectionResetError(104, "Connection reset by peer"), sockets.NotListening, "too busy"),
        (TimeoutError("timed out"), StartFailed, "firewall"),
        (TimeoutError(110, "Connection timed out"), StartFailed, "firewall"),
        (OSError(113, "No route to host"), StartFailed, "unreachable"),
        (OSError(101, "Network is unreachable"), StartFailed, "unreachable"),
        (PermissionError(13, "Permission denied"), StartFailed, "Permission denied"),
    ],
)
def test_each_way_not_to_connect_has_its_words(error: OSError, kind: type[Exception], words: str) -> None:
    translated = sockets._connect_error(error, Deadline(1))
    assert type(translated) is kind
    assert words in str(translated)


def test_one_of_several_addresses_is_enough(listener: Listener, key: JobKey, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[sockets.SocketAddress] = [(LOCAL, 1), (LOCAL, listener.tcp_port)]
    monkeypatch.setattr(sockets, "resolve_address", lambda address: places)
    meet(listener, "tcp", key)


def test_a_peer_does_not_talk_to_itself() -> None:
    """Calling a port where nobody listens, from that very port, connects in TCP."""
    with socket.create_server((LOCAL, 0)) as place_holder:
        here = place_holder.getsockname()

    class FromThere(socket.socket):
        def connect(self, address: object) -> None:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(here)
            super().connect(here)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ronde.net.connect.socket.socket", FromThere)
        with pytest.raises(sockets.NotListening, match="nobody listens"):
            sockets.connect_socket([here], Deadline(20))


def test_an_address_that_cannot_be_listened_on_is_named(key: JobKey) -> None:
    with socket.create_server((LOCAL, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartFailed, match=rf"cannot listen on {LOCAL}:{port} .*another port"):
            Listener(key, unix=True, tcp_host=LOCAL, port=port)
    with pytest.raises(StartFailed, match=r"cannot listen on 192\.0\.2\.1:0"):
        Listener(key, unix=True, tcp_host="192.0.2.1")


@pytest.mark.parametrize(
    "noise",
    [
        b"\0",
        b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n" * 3,
        b"RONDc" + bytes([VERSION]) + b"\xff\xff" + bytes(32),
        bytes(1 << 20),
        b"",
    ],
    ids=["a byte", "http", "too much announced", "a flood", "nothing"],
)
def test_a_peer_is_refused_and_delays_nobody(
    listener: Listener,
    link: str,
    key: JobKey,
    noise: bytes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(listener_module, "HANDSHAKE_S", 1.0)
    with raw(listener, link) as peer:
        try:
            peer.sendall(noise)
        except ConnectionError:
            pass  # refused before all was sent
        meet(listener, link, key)
        assert ends(peer)
    meet(listener, link, key)
    assert listener.num_refused == 1
    assert [record.name for record in caplog.records if "refused a connection" in record.getMessage()] == ["ronde.net"]


def test_many_peers_make_few_lines(
    listener: Listener, key: JobKey, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "REFUSAL_LOG_INTERVAL_S", 600.0)
    for _ in range(50):
        with raw(listener, "tcp") as peer:
            peer.sendall(bytes(40))
            assert ends(peer)
    meet(listener, "tcp", key)
    assert listener.num_refused == 50
    assert len(caplog.records) == 1


def test_a_number_of_silent_peers_keeps_nobody_out(
    listener: Listener, link: str, key: JobKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "MAX_PENDING_HANDSHAKES", 4)
    monkeypatch.setattr(listener_module, "EVICT_AFTER_S", 0.05)
    monkeypatch.setattr(listener_module, "HANDSHAKE_S", 600.0)
    peers = [raw(listener, link) for _ in range(12)]
    meet(listener, link, key)
    for peer in peers:
        peer.close()


def test_another_user_is_refused_even_with_the_key(
    listener: Listener, key: JobKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "peer_uid", lambda sock: os.getuid() + 1)
    with raw(listener, "unix") as peer:
        assert ends(peer)
    monkeypatch.undo()
    monkeypatch.setattr(sockets, "peer_uid", lambda sock: os.getuid() + 1)
    with pytest.raises(StartFailed, match="its owner is another user"):
        connect_authenticated(address(listener, "unix"), key, ConnectionRequest("data", 0), Deadline(20))


def test_a_process_out_of_descriptors_lets_peers_in_later(
    listener: Listener, key: JobKey, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (listening,) = (sock for sock in listener._listening_sockets if sock.family == socket.AF_INET)
    failures: list[OSError] = []

    def accept(self: socket.socket) -> tuple[socket.socket, object]:
        if self is listening and not failures:
            failures.append(OSError(24, "Too many open files"))
            raise failures[0]
        return real(self)

    real = socket.socket.accept
    monkeypatch.setattr(socket.socket, "accept", accept)
    meet(listener, "tcp", key)
    assert "cannot accept a connection (Too many open files)" in caplog.text


def test_a_listener_that_breaks_tells_whoever_waits(
    key: JobKey, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Listener(key, unix=True, tcp_host=None)) as listener:
        monkeypatch.setattr(listener, "_check_timeouts", lambda: 1 / 0)
        with raw(listener, "unix"), pytest.raises(StartFailed, match="the listener failed: ZeroDivisionError"):
            listener.accept("data", 0, Deadline(20))
    assert "the listener failed" in caplog.text


HELLO = b"RONDc" + bytes([VERSION]) + b"\x00\x10" + bytes(32)


@pytest.mark.parametrize("start", [b"", HELLO], ids=["from the start", "after a hello"])
def test_noise_does_not_stop_the_listener(start: bytes) -> None:
    key = JobKey("77" * 32)
    with closing(Listener(key, unix=True, tcp_host=None)) as listener:

        @settings(deadline=None, max_examples=50)
        @given(st.binary(max_size=200))
        def make(noise: bytes) -> None:
            with raw(listener, "unix") as peer:
                try:
                    peer.sendall(start + noise)
                    peer.shutdown(socket.SHUT_WR)
                    while peer.recv(100):
                        pass
                except ConnectionError:
                    pass  # refused before all was sent
            meet(listener, "unix", key)

        make()
        assert listener.num_refused > 0


# --- rounds ----------------------------------------------------------------------------------------------------------

ROUND = 77
TOPOLOGY = Topology(tuple(Member(rank, "here", 1, "", worker=f"worker{rank}") for rank in range(2)), 0, round=ROUND)
STALE = {
    "an earlier round": ConnectionRequest("data", 1, worker="worker1", round=ROUND - 1),
    "no round": ConnectionRequest("data", 1, worker="worker1"),
    "an earlier process of the rank": ConnectionRequest("data", 1, worker="former", round=ROUND),
    "another rank of the process": ConnectionRequest("data", 0, worker="worker1", round=ROUND),
    "a rank that does not exist": ConnectionRequest("data", 2, worker="worker1", round=ROUND),
}
PRESENT = ConnectionRequest("data", 1, worker="worker1", round=ROUND)


@pytest.mark.parametrize("stale", STALE)
@pytest.mark.parametrize("link", ["unix", "tcp"])
def test_who_is_not_a_member_of_the_round_is_told_so(listener: Listener, key: JobKey, link: str, stale: str) -> None:
    listener.start_round(TOPOLOGY)
    with pytest.raises(StartFailed, match="in another round of the job; the round of this rank is over"):
        connect_authenticated(address(listener, link), key, STALE[stale], Deadline(20))
    connect_authenticated(address(listener, link), key, PRESENT, Deadline(20))[0].close()
    listener.accept("data", 1, Deadline(20)).close()


def test_a_connection_of_an_earlier_round_that_came_before_this_one_began_is_not_taken(
    listener: Listener, key: JobKey
) -> None:
    where = address(listener, "tcp")
    with ExitStack() as opened:
        early = {
            name: opened.enter_context(connect_authenticated(where, key, request, Deadline(20))[0])
            for name, request in {**STALE, "present": PRESENT}.items()
            if request.round
        }
        deadline = Deadline(20)
        while len(listener._early) < len(early):
            assert not deadline.expired
        listener.start_round(TOPOLOGY)
        taken = opened.enter_context(listener.accept("data", 1, Deadline(20)))
        taken.sendall(b"x")
        assert early.pop("present").recv(1) == b"x"
        for sock in early.values():
            assert sock.recv(1) == b"", "it is closed"
