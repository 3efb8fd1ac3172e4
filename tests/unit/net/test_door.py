from __future__ import annotations

import fcntl
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ronde.errors import PeerLost, StartFailed
from ronde.net import door as door_module
from ronde.net import sockets
from ronde.net.door import Caller, Door, knock
from ronde.net.keys import JobKey
from ronde.types import Deadline
from tests.services import needs
from tests.unit.net.callers import LOCAL, address, ends, meet, raw


def test_both_ends_get_a_plain_socket_that_is_ready_for_use(door: Door, link: str, key: JobKey) -> None:
    here, greeting = knock(address(door, link), key, Caller("data", 5), Deadline(20))
    with here, door.take("data", 5, Deadline(20)) as there:
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
    with Door(key, unix=False, tcp="::1") as door:
        here, _ = knock(f"[::1]:{door.tcp_port}", key, Caller("data", 0), Deadline(20))
        with here, door.take("data", 0, Deadline(20)):
            pass


@pytest.mark.parametrize(("heartbeat_s", "limit_s"), [(10, 10), (30, 30), (0.5, 4)])
def test_a_cut_link_is_noticed_within_a_heartbeat(key: JobKey, heartbeat_s: float, limit_s: float) -> None:
    with Door(key, unix=False, tcp=LOCAL, heartbeat_s=heartbeat_s) as door:
        here, _ = knock(address(door, "tcp"), key, Caller("life", 0), Deadline(20), heartbeat_s=heartbeat_s)
        with here, door.take("life", 0, Deadline(20)) as there:
            for sock in (here, there):
                idle, pause, num = (
                    sock.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                )
                assert idle + num * pause <= limit_s


def test_the_door_speaks_to_whom_it_knows(link: str, key: JobKey) -> None:
    def greet(caller: Caller) -> bytes:
        return f"{caller.purpose} {caller.rank} {caller.note}".encode() + bytes(60_000)

    with Door(key, unix=True, tcp=LOCAL, greet=greet) as door:
        sock, greeting = knock(address(door, link), key, Caller("life", 3, "round 2"), Deadline(20))
        sock.close()
        assert greeting == b"life 3 round 2" + bytes(60_000)


def test_what_is_said_right_after_the_welcome_is_not_lost(link: str, key: JobKey) -> None:
    def arrived(caller: Caller, sock: socket.socket) -> bool:
        sock.sendall(b"first words")
        sock.close()
        return True

    with Door(key, unix=True, tcp=LOCAL, arrived=arrived) as door:
        sock, _ = knock(address(door, link), key, Caller("life", 0), Deadline(20))
        with sock:
            assert sock.recv(100) == b"first words"


def test_callers_are_told_apart_by_purpose_and_rank_and_come_in_order(door: Door, link: str, key: JobKey) -> None:
    callers = [("data", 1, b"a"), ("life", 1, b"b"), ("data", 0, b"c"), ("data", 1, b"d")]
    for purpose, rank, word in callers:
        sock, _ = knock(address(door, link), key, Caller(purpose, rank), Deadline(20))
        sock.sendall(word)
        sock.close()
    for purpose, rank, word in [callers[1], callers[0], callers[3], callers[2]]:
        with door.take(purpose, rank, Deadline(20)) as sock:
            assert sock.recv(9) == word


def test_many_come_at_once(door: Door, link: str, key: JobKey) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda rank: meet(door, link, key, rank), range(200)))
    assert door.refused == 0


def test_a_caller_that_does_not_come_is_named(door: Door) -> None:
    with pytest.raises(StartFailed, match=r"rank 7 did not connect for 'data' within 0\.01 s"):
        door.take("data", 7, Deadline(0.01))


def test_a_failed_rank_ends_the_waits_for_it_and_no_others(door: Door, link: str, key: JobKey) -> None:
    sock, _ = knock(address(door, link), key, Caller("other", 1), Deadline(20))
    lost = PeerLost(rank=0, peer=1, why="killed")
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(door.take, "data", rank, Deadline(20)) for rank in (1, 2)]
        door.fail(1, lost)
        door.fail(1, StartFailed("a later reason"))
        with pytest.raises(PeerLost, match="killed"):
            waits[0].result(20)
        with pytest.raises(PeerLost, match="killed"):
            door.take("other", 1, Deadline(0))
        with knock(address(door, link), key, Caller("data", 2), Deadline(20))[0], waits[1].result(20):
            pass
    with sock:
        assert sock.recv(1) == b""


def test_closing_ends_all_waits_and_hangs_up_on_untaken_callers(key: JobKey, link: str) -> None:
    door = Door(key, unix=True, tcp=LOCAL)
    sock, _ = knock(address(door, link), key, Caller("data", 0), Deadline(20))
    silent = raw(door, link)
    with ThreadPoolExecutor(1) as pool, sock, silent:
        wait = pool.submit(door.take, "data", 1, Deadline(20))
        door.close()
        door.close()
        with pytest.raises(StartFailed, match="rank 1 can no longer connect for 'data': the door was closed"):
            wait.result(20)
        assert sock.recv(1) == b""
        assert ends(silent)


def test_a_door_may_be_closed_by_its_own_callback(key: JobKey, link: str) -> None:
    doors: list[Door] = []

    def arrived(caller: Caller, sock: socket.socket) -> bool:
        doors[0].close()
        return False

    doors.append(Door(key, unix=True, tcp=LOCAL, arrived=arrived))
    sock, _ = knock(address(doors[0], link), key, Caller("data", 0), Deadline(20))
    with sock:
        assert sock.recv(1) == b""
    doors[0].close()


@pytest.mark.parametrize("callback", ["greet", "arrived"])
def test_a_callback_that_fails_costs_its_caller_and_not_the_door(
    key: JobKey, link: str, callback: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_at_zero(caller: Caller, *_: object) -> bool:
        if caller.rank == 0:
            raise KeyError("a mistake")
        return False

    def greet(caller: Caller) -> bytes:
        fail_at_zero(caller)
        return b"hello"

    with Door(
        key,
        unix=True,
        tcp=LOCAL,
        greet=greet if callback == "greet" else None,
        arrived=fail_at_zero if callback == "arrived" else None,
    ) as door:
        if callback == "greet":
            with pytest.raises(StartFailed, match="the log of the other side says why"):
                knock(address(door, link), key, Caller("data", 0), Deadline(20))
        else:
            sock, _ = knock(address(door, link), key, Caller("data", 0), Deadline(20))
            with sock:
                assert sock.recv(1) == b""
        meet(door, link, key, rank=1)
    assert "a mistake" in caplog.text


# --- knocking at what is not the right door ------------------------------------------------------------------------


def test_a_wrong_key_fails_at_once_and_in_words(door: Door, link: str, other_key: JobKey) -> None:
    deadline = Deadline(60)
    with pytest.raises(StartFailed, match=r"rank 3 could not connect to .* for 'data': it refused the job's key"):
        knock(address(door, link), other_key, Caller("data", 3), deadline)
    assert deadline.left_s > 30


def test_a_door_that_opens_late_is_found(key: JobKey) -> None:
    with socket.create_server((LOCAL, 0)) as place_holder:
        port = place_holder.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(knock, f"{LOCAL}:{port}", key, Caller("data", 0), Deadline(20))
        with Door(key, unix=False, tcp=LOCAL, port=port) as door, door.take("data", 0, Deadline(20)):
            call.result(20)[0].close()


def test_a_door_that_hangs_up_on_its_queue_is_tried_again(key: JobKey) -> None:
    """As a coordinator does that closes while the next round's callers are already in its queue."""
    former = socket.create_server((LOCAL, 0))
    port = former.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(knock, f"{LOCAL}:{port}", key, Caller("data", 0), Deadline(20))
        former.accept()[0].close()
        former.close()
        with Door(key, unix=False, tcp=LOCAL, port=port) as door, door.take("data", 0, Deadline(20)):
            call.result(20)[0].close()


@pytest.mark.parametrize("where", ["unix:ronde-nobody", f"{LOCAL}:1"])
def test_nobody_at_home_is_said_after_the_deadline(key: JobKey, where: str) -> None:
    with pytest.raises(StartFailed, match=r"nobody listens there .*, for 0\.05 s; is the other side running"):
        knock(where, key, Caller("data", 0), Deadline(0.05))


def test_an_unknown_name_is_said_at_once(key: JobKey) -> None:
    deadline = Deadline(60)
    with pytest.raises(StartFailed, match=r"'no-such-host\.invalid' is unknown"):
        knock("no-such-host.invalid:80", key, Caller("data", 0), deadline)
    assert deadline.left_s > 30


def test_somebody_who_does_not_answer_is_not_waited_for_forever(key: JobKey) -> None:
    with socket.create_server((LOCAL, 0)) as silent:
        where = f"{LOCAL}:{silent.getsockname()[1]}"
        with pytest.raises(StartFailed, match=r"somebody listens there but did not answer within 0\.05 s"):
            knock(where, key, Caller("data", 0), Deadline(0.05))


def test_something_that_is_not_ronde_is_said_to_be_so(key: JobKey) -> None:
    with socket.create_server((LOCAL, 0)) as listener, ThreadPoolExecutor(1) as pool:
        call = pool.submit(knock, f"{LOCAL}:{listener.getsockname()[1]}", key, Caller("data", 0), Deadline(20))
        with listener.accept()[0] as sock:
            sock.sendall(b"SSH-2.0-OpenSSH_9.6 and some more words of greeting\r\n")
            with pytest.raises(StartFailed, match="what answers there is not ronde"):
                call.result(20)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ConnectionRefusedError(111, "Connection refused"), sockets.NotYet, "nobody listens"),
        (BlockingIOError(11, "Resource temporarily unavailable"), sockets.NotYet, "too busy"),
        (ConnectionResetError(104, "Connection reset by peer"), sockets.NotYet, "too busy"),
        (TimeoutError("timed out"), StartFailed, "firewall"),
        (TimeoutError(110, "Connection timed out"), StartFailed, "firewall"),
        (OSError(113, "No route to host"), StartFailed, "unreachable"),
        (OSError(101, "Network is unreachable"), StartFailed, "unreachable"),
        (PermissionError(13, "Permission denied"), StartFailed, "Permission denied"),
    ],
)
def test_each_way_not_to_connect_has_its_words(error: OSError, kind: type[Exception], words: str) -> None:
    translated = sockets._translate(error, Deadline(1))
    assert type(translated) is kind
    assert words in str(translated)


def test_one_of_several_addresses_is_enough(door: Door, key: JobKey, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[sockets.Place] = [(LOCAL, 1), (LOCAL, door.tcp_port)]
    monkeypatch.setattr(door_module, "locate", lambda address: places)
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
        patch.setattr("ronde.net.sockets.socket.socket", FromThere)
        with pytest.raises(sockets.NotYet, match="nobody listens"):
            sockets.connect([here], Deadline(20))


def test_an_address_that_cannot_be_listened_on_is_named(key: JobKey) -> None:
    with socket.create_server((LOCAL, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartFailed, match=rf"cannot listen on {LOCAL}:{port} .*another port"):
            Door(key, unix=True, tcp=LOCAL, port=port)
    with pytest.raises(StartFailed, match=r"cannot listen on 192\.0\.2\.1:0"):
        Door(key, unix=True, tcp="192.0.2.1")


def test_a_door_listens_on_nothing_but_its_address(door: Door) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", door.tcp_port), timeout=20)
