from __future__ import annotations

import fcntl
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ronde.errors import PeerLost, StartFailed
from ronde.net import connect as sockets
from ronde.net.connect import connect_authenticated
from ronde.net.keys import JobKey
from ronde.net.listener import ConnectionRequest, Listener
from ronde.types import Deadline
from tests.services import needs
from tests.unit.net.callers import LOCAL, address, ends, meet, raw


def test_both_ends_get_a_plain_socket_that_is_ready_for_use(door: Listener, link: str, key: JobKey) -> None:
    here, greeting = connect_authenticated(address(door, link), key, ConnectionRequest("data", 5), Deadline(20))
    with here, door.accept("data", 5, Deadline(20)) as there:
        assert greeting == b""
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
    with Listener(key, unix=False, tcp_host="::1") as door:
        here, _ = connect_authenticated(f"[::1]:{door.tcp_port}", key, ConnectionRequest("data", 0), Deadline(20))
        with here, door.accept("data", 0, Deadline(20)):
            pass


@pytest.mark.parametrize(("heartbeat_s", "limit_s"), [(10, 10), (30, 30), (0.5, 4)])
def test_a_cut_link_is_noticed_within_a_heartbeat(key: JobKey, heartbeat_s: float, limit_s: float) -> None:
    with Listener(key, unix=False, tcp_host=LOCAL, heartbeat_s=heartbeat_s) as door:
        here, _ = connect_authenticated(
            address(door, "tcp"), key, ConnectionRequest("life", 0), Deadline(20), heartbeat_s=heartbeat_s
        )
        with here, door.accept("life", 0, Deadline(20)) as there:
            for sock in (here, there):
                idle, pause, num = (
                    sock.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                )
                assert idle + num * pause <= limit_s


def test_the_door_speaks_to_whom_it_knows(link: str, key: JobKey) -> None:
    def greet(caller: ConnectionRequest) -> bytes:
        return f"{caller.purpose} {caller.rank} {caller.detail}".encode() + bytes(60_000)

    with Listener(key, unix=True, tcp_host=LOCAL, make_reply=greet) as door:
        sock, greeting = connect_authenticated(
            address(door, link), key, ConnectionRequest("life", 3, "round 2"), Deadline(20)
        )
        sock.close()
        assert greeting == b"life 3 round 2" + bytes(60_000)


def test_what_is_said_right_after_the_welcome_is_not_lost(link: str, key: JobKey) -> None:
    def arrived(caller: ConnectionRequest, sock: socket.socket) -> bool:
        sock.sendall(b"first words")
        sock.close()
        return True

    with Listener(key, unix=True, tcp_host=LOCAL, on_connection=arrived) as door:
        sock, _ = connect_authenticated(address(door, link), key, ConnectionRequest("life", 0), Deadline(20))
        with sock:
            assert sock.recv(100) == b"first words"


def test_callers_are_told_apart_by_purpose_and_rank_and_come_in_order(door: Listener, link: str, key: JobKey) -> None:
    callers = [("data", 1, b"a"), ("life", 1, b"b"), ("data", 0, b"c"), ("data", 1, b"d")]
    for purpose, rank, word in callers:
        sock, _ = connect_authenticated(address(door, link), key, ConnectionRequest(purpose, rank), Deadline(20))
        sock.sendall(word)
        sock.close()
    for purpose, rank, word in [callers[1], callers[0], callers[3], callers[2]]:
        with door.accept(purpose, rank, Deadline(20)) as sock:
            assert sock.recv(9) == word


def test_many_come_at_once(door: Listener, link: str, key: JobKey) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda rank: meet(door, link, key, rank), range(200)))
    assert door.num_refused == 0


def test_a_caller_that_does_not_come_is_named(door: Listener) -> None:
    with pytest.raises(StartFailed, match=r"rank 7 did not connect for 'data' within 0\.01 s"):
        door.accept("data", 7, Deadline(0.01))


def test_a_failed_rank_ends_the_waits_for_it_and_no_others(door: Listener, link: str, key: JobKey) -> None:
    sock, _ = connect_authenticated(address(door, link), key, ConnectionRequest("other", 1), Deadline(20))
    lost = PeerLost(rank=0, peer=1, why="killed")
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(door.accept, "data", rank, Deadline(20)) for rank in (1, 2)]
        door.fail_rank(1, lost)
        door.fail_rank(1, StartFailed("a later reason"))
        with pytest.raises(PeerLost, match="killed"):
            waits[0].result(20)
        with pytest.raises(PeerLost, match="killed"):
            door.accept("other", 1, Deadline(0))
        with (
            connect_authenticated(address(door, link), key, ConnectionRequest("data", 2), Deadline(20))[0],
            waits[1].result(20),
        ):
            pass
    with sock:
        assert sock.recv(1) == b""


def test_closing_ends_all_waits_and_hangs_up_on_untaken_callers(key: JobKey, link: str) -> None:
    door = Listener(key, unix=True, tcp_host=LOCAL)
    sock, _ = connect_authenticated(address(door, link), key, ConnectionRequest("data", 0), Deadline(20))
    silent = raw(door, link)
    with ThreadPoolExecutor(1) as pool, sock, silent:
        wait = pool.submit(door.accept, "data", 1, Deadline(20))
        door.close()
        door.close()
        with pytest.raises(StartFailed, match="rank 1 can no longer connect for 'data': the door was closed"):
            wait.result(20)
        assert sock.recv(1) == b""
        assert ends(silent)


def test_a_door_may_be_closed_by_its_own_callback(key: JobKey, link: str) -> None:
    doors: list[Listener] = []

    def arrived(caller: ConnectionRequest, sock: socket.socket) -> bool:
        doors[0].close()
        return False

    doors.append(Listener(key, unix=True, tcp_host=LOCAL, on_connection=arrived))
    sock, _ = connect_authenticated(address(doors[0], link), key, ConnectionRequest("data", 0), Deadline(20))
    with sock:
        assert sock.recv(1) == b""
    doors[0].close()


@pytest.mark.parametrize("callback", ["greet", "arrived"])
def test_a_callback_that_fails_costs_its_caller_and_not_the_door(
    key: JobKey, link: str, callback: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_at_zero(caller: ConnectionRequest, *_: object) -> bool:
        if caller.rank == 0:
            raise KeyError("a mistake")
        return False

    def greet(caller: ConnectionRequest) -> bytes:
        fail_at_zero(caller)
        return b"hello"

    with Listener(
        key,
        unix=True,
        tcp_host=LOCAL,
        make_reply=greet if callback == "greet" else None,
        on_connection=fail_at_zero if callback == "arrived" else None,
    ) as door:
        if callback == "greet":
            with pytest.raises(StartFailed, match="the log of the other side says why"):
                connect_authenticated(address(door, link), key, ConnectionRequest("data", 0), Deadline(20))
        else:
            sock, _ = connect_authenticated(address(door, link), key, ConnectionRequest("data", 0), Deadline(20))
            with sock:
                assert sock.recv(1) == b""
        meet(door, link, key, rank=1)
    assert "a mistake" in caplog.text


# --- knocking at what is not the right door ------------------------------------------------------------------------


def test_a_wrong_key_fails_at_once_and_in_words(door: Listener, link: str, other_key: JobKey) -> None:
    deadline = Deadline(60)
    with pytest.raises(StartFailed, match=r"rank 3 could not connect to .* for 'data': it refused the job's key"):
        connect_authenticated(address(door, link), other_key, ConnectionRequest("data", 3), deadline)
    assert deadline.remaining_s > 30


def test_a_door_that_opens_late_is_found(key: JobKey) -> None:
    with socket.create_server((LOCAL, 0)) as place_holder:
        port = place_holder.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(connect_authenticated, f"{LOCAL}:{port}", key, ConnectionRequest("data", 0), Deadline(20))
        with Listener(key, unix=False, tcp_host=LOCAL, port=port) as door, door.accept("data", 0, Deadline(20)):
            call.result(20)[0].close()


def test_a_door_that_hangs_up_on_its_queue_is_tried_again(key: JobKey) -> None:
    """As a coordinator does that closes while the next round's callers are already in its queue."""
    former = socket.create_server((LOCAL, 0))
    port = former.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(connect_authenticated, f"{LOCAL}:{port}", key, ConnectionRequest("data", 0), Deadline(20))
        former.accept()[0].close()
        former.close()
        with Listener(key, unix=False, tcp_host=LOCAL, port=port) as door, door.accept("data", 0, Deadline(20)):
            call.result(20)[0].close()


@pytest.mark.parametrize("where", ["unix:ronde-nobody", f"{LOCAL}:1"])
def test_nobody_at_home_is_said_after_the_deadline(key: JobKey, where: str) -> None:
    with pytest.raises(StartFailed, match=r"nobody listens there .*, for 0\.05 s; is the other side running"):
        connect_authenticated(where, key, ConnectionRequest("data", 0), Deadline(0.05))


def test_an_unknown_name_is_said_at_once(key: JobKey) -> None:
    deadline = Deadline(60)
    with pytest.raises(StartFailed, match=r"'no-such-host\.invalid' is unknown"):
        connect_authenticated("no-such-host.invalid:80", key, ConnectionRequest("data", 0), deadline)
    assert deadline.remaining_s > 30


def test_somebody_who_does_not_answer_is_not_waited_for_forever(key: JobKey) -> None:
    with socket.create_server((LOCAL, 0)) as silent:
        where = f"{LOCAL}:{silent.getsockname()[1]}"
        with pytest.raises(StartFailed, match=r"somebody listens there but did not answer within 0\.05 s"):
            connect_authenticated(where, key, ConnectionRequest("data", 0), Deadline(0.05))


def test_something_that_is_not_ronde_is_said_to_be_so(key: JobKey) -> None:
    with socket.create_server((LOCAL, 0)) as listener, ThreadPoolExecutor(1) as pool:
        call = pool.submit(
            connect_authenticated,
            f"{LOCAL}:{listener.getsockname()[1]}",
            key,
            ConnectionRequest("data", 0),
            Deadline(20),
        )
        with listener.accept()[0] as sock:
            sock.sendall(b"SSH-2.0-OpenSSH_9.6 and some more words of greeting\r\n")
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


def test_one_of_several_addresses_is_enough(door: Listener, key: JobKey, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[sockets.SocketAddress] = [(LOCAL, 1), (LOCAL, door.tcp_port)]
    monkeypatch.setattr(sockets, "resolve_address", lambda address: places)
    meet(door, "tcp", key)


def test_a_caller_does_not_talk_to_itself() -> None:
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


def test_a_door_listens_on_nothing_but_its_address(door: Listener) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", door.tcp_port), timeout=20)
