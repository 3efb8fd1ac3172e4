"""Mailboxes: messages that handlers take as they come."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from ronde.comm.buffers import Bfloat16View
from ronde.comm.mailbox import WINDOW_BYTES, Mailbox, MailboxMessage
from ronde.comm.world import World
from ronde.errors import OperationTimeout, PeerLost, RondeError, RoundEnded
from ronde.net.messages import LeaveReason
from tests.conformance.cases import on_ranks, raises
from tests.limits import OPERATION_S


@on_ranks(1, 2, 3)
def posts_are_handled_in_the_order_of_each_sender(world: World) -> None:
    handled: list[list[int]] = [[] for _ in range(world.size)]
    done = threading.Semaphore(0)

    def handle(message: MailboxMessage) -> None:
        assert message.payload.shape == (2, int(message.header))
        assert (message.payload == message.source).all() and not message.wants_reply
        handled[message.source].append(int(message.header))
        done.release()

    num_each = 20
    if world.rank:  # the first messages come before this rank is ready for them
        world.group.barrier()
    with world.group.open_mailbox(handle) as mailbox:
        if not world.rank:
            for to in range(1, world.size):
                mailbox.post(to, b"0", np.zeros((2, 0)))
            world.group.barrier()
        works = []
        for index in range(1, num_each):
            for to in range(world.size):  # to itself as well
                x = np.full((2, index), world.rank)
                if index % 2:
                    mailbox.post(to, str(index).encode(), x)
                    x[:] = -1  # it may be changed at once
                else:
                    works.append(mailbox.post(to, str(index).encode(), x, wait=False))
        for work in works:
            assert work.wait() is None
        for _ in range((num_each - 1) * world.size + (world.rank > 0)):
            assert done.acquire(timeout=OPERATION_S)
        for source, indices in enumerate(handled):
            assert indices == [0] * (world.rank > 0 and source == 0) + list(range(1, num_each))
        world.group.barrier()


@on_ranks(1, 2, 3)
def a_request_gets_its_reply(world: World) -> None:
    def handle(message: MailboxMessage) -> None:
        payload = message.payload
        if isinstance(payload, Bfloat16View):
            message.reply(b"bits", Bfloat16View(payload.bits + 1))
        else:
            message.reply(message.header[::-1], None if payload is None else payload * 2)

    payloads = [np.arange(6.0).reshape(2, 3), np.float32(1.5), np.ones((0, 3)), np.arange(2_000_000), None]
    with world.group.open_mailbox(handle) as mailbox:
        for to in range(world.size):
            for payload in payloads:
                header, got = mailbox.request(to, b"abc", payload)
                assert header == b"cba"
                if payload is None:
                    assert got is None
                else:
                    assert got.dtype == payload.dtype and got.shape == payload.shape and (got == payload * 2).all()
            bits = mailbox.request(to, payload=Bfloat16View(np.arange(3, dtype=np.uint16))).payload
            assert isinstance(bits, Bfloat16View) and bits.bits.tolist() == [1, 2, 3]
            works = [mailbox.request(to, str(index).encode(), wait=False) for index in range(1, 60)]
            for index, work in reversed([*enumerate(works, 1)]):
                assert work.wait().header == str(index).encode()[::-1]
        world.group.barrier()


@on_ranks(2, 3)
def a_reply_may_come_later_and_from_any_thread(world: World) -> None:
    """As a server does that waits until every worker has pushed."""
    waiting: list[MailboxMessage] = []

    def handle(message: MailboxMessage) -> None:
        waiting.append(message)
        if len(waiting) == world.size:
            total = np.sum([each.payload for each in waiting], axis=0)
            for each in waiting:
                each.reply(payload=total)
                with raises(ValueError, match="replied to already"):
                    each.reply()
            waiting.clear()

    with world.group.open_mailbox(handle if world.rank == 0 else None) as mailbox:
        for step in range(5):
            got = mailbox.request(0, payload=np.full(1000, world.rank + step)).payload
            assert (got == sum(range(world.size)) + world.size * step).all()
        world.group.barrier()


@on_ranks(2)
def a_payload_is_the_handlers_own(world: World) -> None:
    kept = []
    with world.group.open_mailbox(lambda message: kept.append(message.payload)) as mailbox:
        x = np.zeros(10_000)
        for step in range(10):
            x[:] = step
            mailbox.post(1 - world.rank, payload=x)
        mailbox.post(1 - world.rank)
        deadline = time.monotonic() + OPERATION_S
        while len(kept) < 11 and time.monotonic() < deadline:
            time.sleep(0.001)
        world.group.barrier()
    for step, array in enumerate(kept[:10]):
        assert (array == step).all()
        array += 1
    assert kept[10] is None and (kept[0] == 1).all() and (kept[9] == 10).all()


@on_ranks(2)
def what_a_handler_raises_is_told_to_who_waits_for_it(world: World) -> None:
    def handle(message: MailboxMessage) -> None:
        raise ArithmeticError(f"no {message.header.decode()}")

    mailbox = world.group.open_mailbox(handle)
    with raises(RondeError, match="the handler of rank . failed on a request of no array.*ArithmeticError: no luck"):
        mailbox.request(1 - world.rank, b"luck")
    mailbox.post(1 - world.rank, b"post")
    with raises(RondeError, match="no more"):  # it goes on
        mailbox.request(1 - world.rank, b"more")
    world.group.barrier()
    with raises(ArithmeticError, match="no post"):
        mailbox.close()
    mailbox.close()


@on_ranks(2)
def a_reply_that_cannot_be_sent_leaves_the_request_open(world: World) -> None:
    def handle(message: MailboxMessage) -> None:
        if message.header == b"again":
            with raises(ValueError, match="use the payload"):
                message.reply(bytes(1_000_000))
            assert message.wants_reply
            message.reply(b"shorter")
        else:
            message.reply(payload=np.ones(3, np.complex64))

    with world.group.open_mailbox(handle) as mailbox:
        with raises(RondeError, match="the handler of rank . failed on a request of no array.*TypeError"):
            mailbox.request(1 - world.rank)
        assert mailbox.request(1 - world.rank, b"again").header == b"shorter"
        world.group.barrier()


@on_ranks(2)
def a_handler_that_uses_what_is_closed_has_failed(world: World) -> None:
    closed = world.group.open_mailbox()
    closed.close()
    mailbox = world.group.open_mailbox(lambda message: closed.post(0))
    for _ in range(2):
        with raises(RondeError, match="the handler of rank . failed.*RoundEnded: post .*the mailbox is closed"):
            mailbox.request(1 - world.rank)
        mailbox.post(1 - world.rank)
    with raises(RondeError, match="the mailbox is closed"):  # by now the posts have been handled
        mailbox.request(1 - world.rank)
    world.group.barrier()
    with raises(RoundEnded, match="post .*the mailbox is closed"):
        mailbox.close()


@on_ranks(2)
def a_handler_that_exits_has_failed_and_goes_on(world: World) -> None:
    def handle(message: MailboxMessage) -> None:
        if message.header == b"exit":
            sys.exit(3)
        message.reply(b"here")

    with world.group.open_mailbox(handle) as mailbox:
        with raises(RondeError, match="the handler of rank . failed.*SystemExit: 3"):
            mailbox.request(1 - world.rank, b"exit")
        assert mailbox.request(1 - world.rank).header == b"here"
        world.group.barrier()


@on_ranks(2, 3)
def a_slow_handler_holds_up_its_senders_and_nobody_else(world: World) -> None:
    may_go_on, num_handled = threading.Event(), [0]

    def handle(message: MailboxMessage) -> None:
        assert may_go_on.wait(OPERATION_S)
        num_handled[0] += 1
        if message.wants_reply:
            message.reply(payload=np.array(num_handled))

    with world.group.open_mailbox(handle) as mailbox:
        if world.rank == 1:
            payload, num_posted = np.ones(1_000_000), 0
            mailbox._channel._operation_timeout_s = 0.2
            with raises(OperationTimeout, match="rank 0"):
                while num_posted < 100:
                    mailbox.post(0, payload=payload)
                    num_posted += 1
            assert 4 <= num_posted < 20, num_posted  # bounded
            mailbox._channel._operation_timeout_s = world.group.operation_timeout_s
            world.group.send(np.array([num_posted]), 0)  # other messages pass
            late = mailbox.post(0, payload=payload, wait=False)
            world.group.receive(np.ones(1), 0)
            late.wait()
            assert mailbox.request(0).payload.tolist() == [num_posted + 2]
        elif world.rank == 0:
            num_posted = int(world.group.receive(np.empty(1, np.int64), 1)[0])
            may_go_on.set()
            world.group.send(np.ones(1), 1)
        world.group.barrier()


@on_ranks(2, 3)
def all_may_ask_all_at_once(world: World) -> None:
    with world.group.open_mailbox(lambda message: message.reply(payload=message.payload)) as mailbox:
        for count in (1, 100_000):
            x = np.full(count, world.rank)
            for _ in range(10):
                works = [mailbox.request(to, payload=x, wait=False) for to in range(world.size)]
                assert all((work.wait().payload == x).all() for work in works)
        world.group.barrier()


@on_ranks(2)
def mailboxes_do_not_get_each_others_messages(world: World) -> None:
    first = world.group.open_mailbox(lambda message: message.reply(b"first " + message.header))
    second = world.group.open_mailbox(lambda message: message.reply(b"second " + message.header))
    assert second.request(1 - world.rank, b"b").header == b"second b"
    assert first.request(1 - world.rank, b"a").header == b"first a"
    world.group.barrier()
    first.close()
    second.close()


@on_ranks(1, 2)
def mistakes_with_mailboxes_are_named(world: World) -> None:
    with raises(ValueError, match="on_lost needs a handler"):
        world.group.open_mailbox(on_lost=lambda rank, why: None)
    with world.group.open_mailbox() as mailbox:
        with raises(ValueError, match="post: to must be a member"):
            mailbox.post(7)
        with raises(TypeError, match="header must be bytes, got str"):
            mailbox.request(0, "text")  # type: ignore[arg-type]
        with raises(ValueError, match="use the payload"):
            mailbox.post(0, bytes(1_000_000))
        with raises(TypeError, match="cannot read dict"):
            mailbox.post(0, payload={})
    with raises(RondeError):
        mailbox.post(0)


@on_ranks(3, spoils=True)
def a_lost_worker_does_not_break_the_others(world: World) -> None:
    total = np.zeros(1000)
    lost: list[tuple[int, str]] = []
    is_lost = threading.Event()

    def handle(message: MailboxMessage) -> None:
        assert not lost or message.source != 2
        if message.payload is not None:
            total[:] += message.payload
        if message.wants_reply:
            message.reply(payload=total)

    def on_lost(rank: int, why: str) -> None:
        lost.append((rank, why))
        is_lost.set()

    mailbox = world.group.open_mailbox(handle, on_lost=on_lost)
    if world.rank == 2:
        for _ in range(20):
            mailbox.post(0, payload=np.ones(1000))
        world.close(LeaveReason.FAILED, "out of coffee")
        return
    assert is_lost.wait(OPERATION_S) and lost == [(2, "out of coffee")]
    with raises(PeerLost, match="lost rank 2.*out of coffee"):
        mailbox.request(2)
    with raises(PeerLost, match="lost rank 2"):
        mailbox.post(2)
    if world.rank == 1:
        for _ in range(20):
            mailbox.post(0, payload=np.ones(1000))
        got = mailbox.request(0).payload
        assert (got == got[0]).all() and 20 <= got[0] <= 40  # the last messages of the lost one may be lost with it
        world.group.send(np.ones(1), 0)
    else:
        world.group.receive(np.ones(1), 1)
    mailbox.close()


@on_ranks(2, spoils=True)
def a_request_to_a_rank_that_leaves_ends(world: World) -> None:
    asked = threading.Event()
    mailbox = world.group.open_mailbox(lambda message: asked.set())  # which never replies
    if world.rank == 0:
        assert asked.wait(OPERATION_S)
        world.close()
        return
    with raises(PeerLost, match="rank 1 lost rank 0 during the reply to a request of no array to rank 0"):
        mailbox.request(0)


@on_ranks(2, 3)
def a_closed_mailbox_refuses_requests_at_once(world: World) -> None:
    mailbox = world.group.open_mailbox(lambda message: message.reply(b"here"))
    if world.rank == 0:
        mailbox.close()
        with raises(RoundEnded, match="post to rank 1 on rank 0: the mailbox is closed"):
            mailbox.post(1)
        with raises(RoundEnded, match="the mailbox is closed"):
            mailbox.request(1)
    world.group.barrier()
    if world.rank:
        mailbox.post(0)
        for _ in range(2):
            with raises(RondeError, match="rank 0 has closed its mailbox, so nobody will reply to a request of no arr"):
                mailbox.request(0)
        assert mailbox.request(1).header == b"here"  # whose mailbox is open
    world.group.barrier()
    mailbox.close()


@on_ranks(2, 3)
def closing_a_mailbox_refuses_the_requests_that_have_no_reply(world: World) -> None:
    kept: list[MailboxMessage] = []
    asked = threading.Semaphore(0)

    def handle(message: MailboxMessage) -> None:
        if message.header == b"now":
            message.reply(b"here")
        else:
            kept.append(message)
        asked.release()

    mailbox = world.group.open_mailbox(handle)
    if world.rank == 0:
        for _ in range(2 * (world.size - 1)):
            assert asked.acquire(timeout=OPERATION_S)
        mailbox.close()
        assert len(kept) == world.size - 1
        for message in kept:
            with raises(RoundEnded, match="reply to rank . on rank 0: the mailbox is closed"):
                message.reply()
    else:
        works = [mailbox.request(0, header, wait=False) for header in (b"now", b"later")]
        assert works[0].wait().header == b"here"
        with raises(RondeError, match="rank 0 has closed its mailbox"):
            works[1].wait()
    world.group.barrier()
    mailbox.close()


@on_ranks(2, 3)
def a_handler_may_close_its_own_mailbox(world: World) -> None:
    mailbox: Mailbox = world.group.open_mailbox(lambda message: mailbox.close())
    world.group.barrier()
    if world.rank:
        works = [mailbox.request(0, wait=False) for _ in range(3)]  # the second and third are not handled
        for work in works:
            with raises(RondeError, match="rank 0 has closed its mailbox"):
                work.wait()
    world.group.barrier()
    mailbox.close()


@on_ranks(2, spoils=True)
def a_handler_may_leave_the_round(world: World) -> None:
    threads: list[threading.Thread] = []
    has_left = threading.Event()

    def handle(message: MailboxMessage) -> None:
        threads.append(threading.current_thread())
        world.close()
        has_left.set()

    mailbox = world.group.open_mailbox(handle)
    if world.rank == 0:
        assert has_left.wait(OPERATION_S)
        threads[0].join(OPERATION_S)  # nobody else could
    else:
        with raises(PeerLost, match="lost rank 0"):
            mailbox.request(0)


@on_ranks(2)
def posts_arrive_though_the_mailbox_is_closed(world: World) -> None:
    check_posts_arrive(world, lambda mailbox: mailbox.close())
    world.group.barrier()


@on_ranks(2, spoils=True)
def posts_arrive_though_the_sender_leaves(world: World) -> None:
    world.settings = world.settings.replace(shutdown_s=OPERATION_S)
    check_posts_arrive(world, lambda mailbox: world.close())


def check_posts_arrive(world: World, end: Callable[[Mailbox], None]) -> None:
    """Rank 1 posts more than the window allows, and ends its side before rank 0 has handled anything."""
    handled = threading.Semaphore(0)
    may_go_on = threading.Event()

    def handle(message: MailboxMessage) -> None:
        assert may_go_on.wait(OPERATION_S)
        assert (message.payload == 1).all()
        handled.release()

    mailbox = world.group.open_mailbox(handle if world.rank == 0 else None)
    num_posts, payload = 12, np.ones(1_000_000)
    assert (num_posts - 1) * payload.nbytes > WINDOW_BYTES
    if world.rank == 1:
        for _ in range(num_posts):
            mailbox.post(0, payload=payload, wait=False)
        world.group.send(np.ones(1), 0)
        end(mailbox)
    else:
        world.group.receive(np.empty(1), 1)
        may_go_on.set()
        for _ in range(num_posts):
            assert handled.acquire(timeout=OPERATION_S)
        mailbox.close()
