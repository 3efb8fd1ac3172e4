"""Hosts find out where they reach each other, and addresses are chosen from that."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from ronde.errors import StartFailed
from ronde.launch.network import LateHostProbe, NetworkProber, choose_addresses
from ronde.launch.protocol import AgentError, PortCounts, ProbeReply, ProbeRequest
from ronde.net.addresses import PortReservation, candidate_addresses, parse_address
from ronde.net.keys import new_job_key
from ronde.types import Deadline
from tests.limits import promised_s
from tests.unit.launch.agent.watched_agent import PATIENCE_S

A = ("10.0.0.1:4001", "192.168.7.1:4002")
B = ("10.0.0.2:4001", "192.168.7.2:4002")
C = ("10.0.0.3:4001", "192.168.7.3:4002")
V6 = ("[fd00::1]:4001",)


Reached = tuple[tuple[str, ...], ...]


def choose(listeners: Reached, *reached: Reached, num_hosts: int | None = None) -> tuple[str, ...]:
    """`reached` has a row for each machine, with what it reaches of each."""
    replies = [ProbeReply(row, tuple("" if found else "connection refused" for found in row)) for row in reached]
    return choose_addresses("abc"[: len(listeners)], listeners, replies, num_hosts=num_hosts or len(listeners))


def test_the_best_address_that_all_others_reach_is_chosen() -> None:
    assert choose((A, B), (A, B[1:]), (A, B)) == ("10.0.0.1", "192.168.7.2")
    assert choose((V6, B), (V6, B), (V6, B)) == ("fd00::1", "10.0.0.2")
    assert choose((A, B), ((), B), (A, ())) == ("10.0.0.1", "10.0.0.2"), "whether it reaches itself does not matter"
    one_for_all = choose((A, B, C), (A, B, C), (A[1:], B, C), (A, B[:1], C))
    assert one_for_all == ("192.168.7.1", "10.0.0.2", "10.0.0.3")


def test_a_driver_without_ranks_is_reached_and_connects_to_nobody() -> None:
    assert choose((A, C), (A, C), ((), C), num_hosts=1) == ("", "10.0.0.3")


def test_every_pair_that_cannot_talk_is_named_with_what_was_tried() -> None:
    with pytest.raises(StartFailed) as failed:
        choose((A, B), (A, ()), ((), B))
    assert str(failed.value).splitlines() == [
        "the hosts of this job cannot all reach each other:",
        "  b cannot reach a (tried 10.0.0.1:4001, 192.168.7.1:4002): connection refused",
        "  a cannot reach b (tried 10.0.0.2:4001, 192.168.7.2:4002): connection refused",
    ]


def test_a_host_without_a_common_address_is_named() -> None:
    with pytest.raises(StartFailed, match=r"a has no address that all others reach: b reaches .*; c reaches 192"):
        choose((A, B, C), (A, B, C), (A[:1], B, C), (A[1:], B, C))
    with pytest.raises(StartFailed, match="b has no address where others could connect"):
        choose((A, ()), (A, ()), (A, ()))


KEY = new_job_key()


class WaitingProber:
    """A prober, and a way to wait for its reply."""

    def __init__(self) -> None:
        self._replies: queue.Queue[ProbeReply | AgentError] = queue.Queue()
        self.reservation = PortReservation()
        self.prober = NetworkProber(self._replies.put, self.reservation)

    def probe(self, request: ProbeRequest) -> ProbeReply | AgentError:
        self.prober.probe(request)
        return self._replies.get(timeout=PATIENCE_S)

    def listen(self, *num_ports: int) -> ProbeReply:
        found = self.probe(ProbeRequest(KEY, num_ports=PortCounts(*num_ports)))
        assert isinstance(found, ProbeReply)
        return found


@contextmanager
def two_hosts() -> Iterator[tuple[WaitingProber, WaitingProber]]:
    both = (WaitingProber(), WaitingProber())
    try:
        yield both
    finally:
        for waiting in both:
            waiting.prober.close()
            waiting.prober.close()
            waiting.reservation.close()


@contextmanager
def silent_port() -> Iterator[str]:
    """Where connections are taken and nobody speaks."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_host_listens_at_each_of_its_addresses_and_finds_free_ports() -> None:
    with two_hosts() as (host, _):
        found = host.listen(20, 3)
        assert [parse_address(address)[0] for address in found.reachable[0]] == list(candidate_addresses())
        assert len(set(found.free_ports)) == 23
        host.prober.close()  # as an agent does when it was idle
        for is_reserved, port in ((False, found.free_ports[0]), (True, found.free_ports[-1])):
            with socket.socket() as plain:
                address = (candidate_addresses()[0], port)
                if is_reserved:
                    with pytest.raises(OSError, match="in use"):
                        plain.bind(address)
                    plain.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                plain.bind(address)
                plain.listen()


def test_hosts_reach_each_others_listeners_and_say_why_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_hosts() as (here, there), silent_port() as silent:
        addresses = there.listen().reachable[0]
        gone = here.listen().reachable[0]
        here.listen()  # closes the ones before
        found = here.probe(ProbeRequest(KEY, (addresses, (gone[0],), ("nonsense",), ()), timeout_s=PATIENCE_S))
        assert isinstance(found, ProbeReply)
        assert found.reachable == (addresses, (), (), ())
        assert found.errors[0] == found.errors[3] == ""
        assert f"{gone[0]}: the connection was refused or cut; does a firewall" in found.errors[1]
        assert "address must be host:port" in found.errors[2]
        monkeypatch.setattr("ronde.launch.network.PROBE_ATTEMPT_TIMEOUT_S", 0.5)
        found = here.probe(ProbeRequest(KEY, ((silent,),), timeout_s=1.25))
        assert isinstance(found, ProbeReply)
        assert found.reachable == ((),)
        assert f"{silent}: no answer within 1.25 s; is the host up" in found.errors[0]


def test_the_listener_of_another_job_is_not_reached() -> None:
    with two_hosts() as (here, there):
        found = here.probe(ProbeRequest(new_job_key(), (there.listen().reachable[0],)))
        assert isinstance(found, ProbeReply)
        assert found.reachable == ((),) and "refused the job's key" in found.errors[0]


def test_a_key_that_is_none_is_told_without_showing_it() -> None:
    with two_hosts() as (here, _):
        found = here.probe(ProbeRequest("swordfish"))
        assert isinstance(found, AgentError)
        assert "64 hexadecimal digits" in found.reason and "swordfish" not in found.reason


def test_closing_does_not_wait_for_the_silent() -> None:
    waiting = WaitingProber()
    with silent_port() as silent:
        waiting.prober.probe(ProbeRequest(KEY, ((silent,),), timeout_s=60.0))
        deadline = Deadline(promised_s(10.0))
        waiting.prober.close()
        assert not deadline.expired


# --- a host that comes later ----------------------------------------------------------------------------------------

NAMES = {0: "a", 1: "b", 2: "c"}


def probe(
    reached_by_newcomer: Sequence[Sequence[str]], newcomer_reached: Sequence[Sequence[str]]
) -> tuple[LateHostProbe, dict[int, ProbeRequest]]:
    """Host c comes to a at 10.0.0.1 and b at 10.0.0.2, and all have answered. Return the second requests, too."""
    late = LateHostProbe(KEY, 2, {0: "10.0.0.1", 1: "10.0.0.2"}, NAMES)
    assert late.start().keys() == {0, 1, 2}
    requests: dict[int, ProbeRequest] = {}
    for agent in (0, 1, 2):
        requests = late.handle_reply(agent, ProbeReply(((f"10.0.0.{agent + 1}:5", f"10.1.0.{agent + 1}:6"),)))
    late.handle_reply(2, ProbeReply(tuple(map(tuple, reached_by_newcomer)), ("", "no answer")))
    for agent in (0, 1):
        assert not late.is_complete
        late.handle_reply(agent, ProbeReply((tuple(newcomer_reached[agent]),), ("",)))
    assert late.is_complete
    return late, requests


def test_a_host_that_comes_later_gets_an_address_that_all_others_reach() -> None:
    own = ("10.0.0.3:5", "10.1.0.3:6")
    late, requests = probe([["10.0.0.1:5"], ["10.1.0.2:6", "10.0.0.2:5"]], [own, ["10.1.0.3:6"]])
    assert late.choose_address() == "10.1.0.3"
    assert requests[0].targets == requests[1].targets == (own,)
    assert requests[2].targets == (("10.0.0.1:5", "10.1.0.1:6"), ("10.0.0.2:5", "10.1.0.2:6"))


@pytest.mark.parametrize(
    ("reached", "reached_by", "reason"),
    [
        ([["10.0.0.1:5"], ["10.1.0.2:6"]], [["10.0.0.3:5"]] * 2, "it cannot reach b at 10.0.0.2 (no answer)"),
        (
            [["10.0.0.1:5"], ["10.0.0.2:5"]],
            [["10.0.0.3:5"], ["10.1.0.3:6"]],
            "none of its addresses (10.0.0.3:5, 10.1.0.3:6) is reached by all other hosts",
        ),
    ],
)
def test_a_host_that_comes_later_and_is_cut_off_is_told_from_whom(
    reached: list[list[str]], reached_by: list[list[str]], reason: str
) -> None:
    late, _ = probe(reached, reached_by)
    with pytest.raises(StartFailed) as failed:
        late.choose_address()
    assert str(failed.value) == reason


def test_a_host_that_is_lost_meanwhile_does_not_keep_the_newcomer_waiting() -> None:
    late = LateHostProbe(KEY, 2, {0: "10.0.0.1", 1: "10.0.0.2"}, NAMES)
    for agent in (0, 2):
        assert not late.handle_reply(agent, ProbeReply(((f"10.0.0.{agent + 1}:5",),)))
    requests = late.drop(1)
    assert requests.keys() == {0, 2}
    late.handle_reply(0, ProbeReply((("10.0.0.3:5",),), ("",)))
    late.handle_reply(2, ProbeReply((("10.0.0.1:5",),), ("",)))
    assert late.is_complete and late.choose_address() == "10.0.0.3"
