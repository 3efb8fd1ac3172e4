"""Links between two ranks with real sockets, and channels that only note what they are given."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from ronde.comm.backends.base import ChannelSpec, CurrentCall
from ronde.comm.backends.native_library import EventKind, LinkKind, NativeStatus
from ronde.comm.backends.native_links import EVENT, NativeLinks
from ronde.net.addresses import format_address
from ronde.net.connect import connect_authenticated
from ronde.net.event_loop import LoopThread
from ronde.net.keys import JobKey, new_job_key
from ronde.net.listener import ConnectionRequest, Listener
from ronde.net.messages import AbortChannel, ChannelAborted, WorkerMessage
from ronde.net.open_files import make_open_files_error
from ronde.settings import Settings
from ronde.types import Deadline, Member, OperationKind, Topology
from tests.limits import PATIENCE_S

HOST = "127.0.0.1"
NUM_SOCKETS = 3


def until(condition: Callable[[], bool]) -> None:
    deadline = Deadline(PATIENCE_S)
    while not condition():
        assert not deadline.expired
        time.sleep(0.001)


class NotingChannel:
    def __init__(self, rank: int, id: str = "0.ordered") -> None:
        self.spec = ChannelSpec(id=id, members=(0, 1), member_index=rank)
        self.links: list[tuple[int, int, bool, list[socket.socket]]] = []
        self.aborts: list[tuple[int, str]] = []
        self.failures: list[str] = []
        self.told: list[tuple[int, int, int, str]] = []
        self.busy = True

    def add_link(self, member: int, kind: int, opened_here: bool, sockets: list[int]) -> None:
        self.links.append((member, kind, opened_here, [socket.socket(fileno=fd) for fd in sockets]))

    def abort(self, *, lost_rank: int = -1, why: str) -> None:
        self.aborts.append((lost_rank, why))

    def fail(self, why: str) -> None:
        self.failures.append(why)

    def abort_with(self, status: int, rank: int, error: int, why: str) -> None:
        self.told.append((status, rank, error, why))

    def current_call(self) -> CurrentCall | None:
        return CurrentCall(OperationKind.ALLREDUCE, "allreduce", 1, ()) if self.busy else None

    def close(self) -> None:
        for *_, sockets in self.links:
            for sock in sockets:
                sock.close()


class LinkedRank:
    """One of two ranks, each on a host of its own."""

    def __init__(self, rank: int, key: JobKey, opened: ExitStack) -> None:
        self.rank = rank
        self.key = key
        self.thread = LoopThread(f"rank-{rank}")
        opened.callback(self.thread.stop)
        self.listener = Listener(key, unix=False, tcp_host=HOST, loop=self.thread.loop)
        opened.callback(self.listener.close)
        self.address = format_address(HOST, self.listener.tcp_port)
        self.sent: list[WorkerMessage] = []

    def use_links(self, addresses: list[str], opened: ExitStack) -> None:
        members = tuple(Member(rank, f"host-{rank}", 1, "", (address,)) for rank, address in enumerate(addresses))
        settings = Settings(num_sockets=NUM_SOCKETS)
        topology = Topology(members, self.rank)
        self.links = NativeLinks(topology, self.listener, self.key, settings, self.thread.loop, self.sent.append)
        self.thread.start()
        opened.callback(lambda: self.thread.call(self.links.close))

    def open(self, channel: NotingChannel, opened: ExitStack) -> int:
        number = self.links.new_number()
        self.links.add_channel(number, channel)
        opened.callback(channel.close)
        return number

    def want(self, number: int, member: int, kind: int, deadline_ns: int = 2**63 - 1) -> None:
        """What the library does when a call first sends to a member."""
        record = EVENT.pack(number, EventKind.LINK_WANTED, member, kind, 0, deadline_ns)
        with socket.socket(fileno=os.dup(self.links.events_fd)) as events:
            events.send(record)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def ranks(opened: ExitStack) -> list[LinkedRank]:
    key = JobKey(new_job_key())
    made = [LinkedRank(rank, key, opened) for rank in range(2)]
    for each in made:
        each.use_links([rank.address for rank in made], opened)
    return made


@pytest.mark.parametrize(("kind", "num_sockets"), [(LinkKind.SINGLE, 1), (LinkKind.RING, NUM_SOCKETS)])
def test_both_ends_of_a_link_have_the_same_sockets_in_the_same_order(
    ranks: list[LinkedRank], opened: ExitStack, kind: LinkKind, num_sockets: int
) -> None:
    channels = [NotingChannel(rank) for rank in range(2)]
    numbers = [each.open(channel, opened) for each, channel in zip(ranks, channels, strict=True)]
    ranks[0].want(numbers[0], 1, kind)
    until(lambda: all(channel.links for channel in channels))
    (to, kind_0, opened_0, ours), (source, kind_1, opened_1, theirs) = channels[0].links[0], channels[1].links[0]
    assert (to, kind_0, opened_0) == (1, kind, True) and (source, kind_1, opened_1) == (0, kind, False)
    assert len(ours) == len(theirs) == num_sockets
    for index, sock in enumerate(ours):
        sock.sendall(bytes([index]))
    for index, sock in enumerate(theirs):
        sock.settimeout(PATIENCE_S)
        assert sock.recv(1) == bytes([index])


def test_two_ranks_that_open_links_to_each_other_at_once_get_both(ranks: list[LinkedRank], opened: ExitStack) -> None:
    channels = [NotingChannel(rank) for rank in range(2)]
    numbers = [each.open(channel, opened) for each, channel in zip(ranks, channels, strict=True)]
    for rank in range(2):
        ranks[rank].want(numbers[rank], 1 - rank, LinkKind.SINGLE)
    until(lambda: all(len(channel.links) == 2 for channel in channels))
    for channel in channels:
        assert sorted(opened_here for _, _, opened_here, _ in channel.links) == [False, True]


def test_a_link_that_comes_before_its_channel_is_kept_for_it(ranks: list[LinkedRank], opened: ExitStack) -> None:
    early, late = NotingChannel(0), NotingChannel(1)
    ranks[0].want(ranks[0].open(early, opened), 1, LinkKind.RING)
    until(lambda: bool(early.links))
    ranks[1].open(late, opened)
    until(lambda: bool(late.links))
    assert len(late.links[0][3]) == NUM_SOCKETS


def test_a_link_to_a_closed_channel_ends_at_once(ranks: list[LinkedRank], opened: ExitStack) -> None:
    ranks[1].links.remove_channel(ranks[1].open(NotingChannel(1), opened))
    channel = NotingChannel(0)
    ranks[0].want(ranks[0].open(channel, opened), 1, LinkKind.SINGLE)
    until(lambda: bool(channel.links))
    sock = channel.links[0][3][0]
    sock.settimeout(PATIENCE_S)
    assert sock.recv(1) == b""


def test_a_rank_that_cannot_be_reached_is_named_to_this_rank_and_to_all_others(opened: ExitStack) -> None:
    rank = LinkedRank(0, JobKey(new_job_key()), opened)
    rank.use_links([rank.address, "255.255.255.255:9"], opened)
    channel = NotingChannel(0)
    rank.want(rank.open(channel, opened), 1, LinkKind.RING)
    until(lambda: bool(rank.sent))
    ((lost, why),) = channel.aborts
    assert lost == 1 and "rank 0 on host host-0 cannot reach it on host host-1: " in why
    assert "could not connect to 255.255.255.255:9 for 'link': " in why
    assert rank.sent == [AbortChannel("0.ordered", NativeStatus.PEER_LOST, 1, 0, why)]


def test_a_rank_that_does_not_answer_until_the_deadline_is_no_abort_but_a_reason(opened: ExitStack) -> None:
    """The call that wants the link ends by itself, and asks for the reason."""
    with socket.create_server((HOST, 0)) as silent:
        rank = LinkedRank(0, JobKey(new_job_key()), opened)
        rank.use_links([rank.address, format_address(HOST, silent.getsockname()[1])], opened)
        channel = NotingChannel(0)
        rank.want(rank.open(channel, opened), 1, LinkKind.SINGLE, deadline_ns=1)
        until(lambda: "cannot reach it on host host-1: " in rank.links.find_problem(channel, 1))
        assert not channel.aborts and not rank.sent
        assert rank.links.find_problem(channel, 0) == ""


@pytest.mark.parametrize("end", ["rank lost", "channel closed", "backend closed"])
def test_a_half_opened_link_leaves_no_socket_behind(opened: ExitStack, end: str) -> None:
    with socket.create_server((HOST, 0)) as silent:
        rank = LinkedRank(0, JobKey(new_job_key()), opened)
        rank.use_links([rank.address, format_address(HOST, silent.getsockname()[1])], opened)
        channel = NotingChannel(0)
        number = rank.open(channel, opened)
        rank.want(number, 1, LinkKind.RING)
        silent.settimeout(PATIENCE_S)
        there = [opened.enter_context(silent.accept()[0]) for _ in range(NUM_SOCKETS)]
        if end == "rank lost":
            rank.links.rank_lost(1)
        elif end == "channel closed":
            rank.links.remove_channel(number)
        else:
            rank.thread.call(rank.links.close)
        for sock in there:
            sock.settimeout(PATIENCE_S)
            while sock.recv(1000):  # until its end
                pass
    assert not channel.links and not channel.aborts


def test_an_abort_is_told_to_the_coordinator_even_if_the_channel_is_closed_right_after(
    ranks: list[LinkedRank], opened: ExitStack
) -> None:
    number = ranks[0].open(NotingChannel(0), opened)
    record = EVENT.pack(number, EventKind.CHANNEL_ABORTED, 1, NativeStatus.TIMEOUT, 0, 0)
    with socket.socket(fileno=os.dup(ranks[0].links.events_fd)) as events:
        events.send(record)
    ranks[0].links.remove_channel(number)
    until(lambda: ranks[0].sent == [AbortChannel("0.ordered", NativeStatus.TIMEOUT, 1)])


def test_an_abort_reaches_a_channel_that_is_open_and_one_that_is_opened_later(
    ranks: list[LinkedRank], opened: ExitStack
) -> None:
    now, later, other = NotingChannel(0), NotingChannel(0, "1.ordered"), NotingChannel(0, "2.ordered")
    ranks[0].open(now, opened)
    ranks[0].open(other, opened)
    for id in ("0.ordered", "1.ordered"):
        ranks[0].links.channel_aborted(ChannelAborted(id, NativeStatus.TIMEOUT, 1, 0, ""))
    ranks[0].open(later, opened)
    assert now.told == later.told == [(NativeStatus.TIMEOUT, 1, 0, "")]
    assert other.told == []


def test_a_link_that_broke_on_the_other_side_first_is_the_loss_of_the_other_rank(
    ranks: list[LinkedRank], opened: ExitStack
) -> None:
    """In an elastic job both can be in the next round; an error of its own would end this rank."""
    broken, own = NotingChannel(0), NotingChannel(0, "1.ordered")
    for channel in (broken, own):
        ranks[0].open(channel, opened)
    aborted = ChannelAborted("0.ordered", NativeStatus.PEER_LOST, 0, errno.ETIMEDOUT, reporter=1)
    ranks[0].links.channel_aborted(aborted)
    ranks[0].links.channel_aborted(ChannelAborted("1.ordered", NativeStatus.PEER_LOST, 0, 0, "cut", reporter=1))
    assert broken.told == [(NativeStatus.PEER_LOST, 1, errno.ETIMEDOUT, "")]
    assert own.told == [(NativeStatus.PEER_LOST, 0, 0, "cut")]


def test_too_many_open_files_fail_channels_on_which_a_call_waits_for_links(
    ranks: list[LinkedRank], opened: ExitStack
) -> None:
    busy, idle = NotingChannel(0), NotingChannel(0, "1.ordered")
    idle.busy = False
    for channel in (busy, idle):
        ranks[0].open(channel, opened)
    problem = make_open_files_error("no connection can be accepted")
    ranks[0].thread.call(lambda: ranks[0].listener.on_shortage(problem))
    assert busy.failures == [str(problem)] and not idle.failures
    assert ranks[0].sent == [AbortChannel("0.ordered", NativeStatus.PEER_LOST, 0, 0, str(problem))]


def test_a_request_that_makes_no_sense_is_refused(ranks: list[LinkedRank], opened: ExitStack) -> None:
    for detail in ("", "{", '["0.ordered",0,1,1]', '["0.ordered",7,0,1]', '["0.ordered",0,0,100000]'):
        request = ConnectionRequest("link", 1, detail)
        sock, _ = connect_authenticated(ranks[0].address, ranks[0].key, request, Deadline(PATIENCE_S))
        with opened.enter_context(sock):
            sock.settimeout(PATIENCE_S)
            assert sock.recv(1) == b""
