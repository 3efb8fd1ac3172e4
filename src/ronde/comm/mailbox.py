"""Mailboxes: messages that a handler takes as they come, without a receive for each. Made by Group.open_mailbox().

Meant for parameter servers and other one-sided traffic: a rank that owns something opens a mailbox with a handler, and
the others push to it (post) or ask it (request) whenever they like. A message is a header, which is bytes that mean
nothing here, and at most one array. Nothing is unpickled.

A mailbox is a channel of messages of its own: tag 0 is for what handlers take, the other tags are for replies. The
channel stays open when the mailbox is closed, until its group is: what was posted is still sent, and the thread of the
handler refuses requests, which nobody would answer otherwise.
"""

from __future__ import annotations

import enum
import itertools
import logging
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from ronde.comm.backends.base import CallTiming, Received
from ronde.comm.buffers import Bfloat16View, SendBuffer, address_of, as_array, as_send_buffer
from ronde.comm.call import Call, MessageFlag, Signature, Span
from ronde.comm.channel import Channel
from ronde.comm.open_channels import OpenChannels
from ronde.comm.work import Work
from ronde.errors import PeerLost, ProtocolError, RondeError, RoundEnded
from ronde.net.event_loop import start_thread
from ronde.text import shorten
from ronde.types import Deadline, DType, Op, OperationKind

THREAD_NAME = "ronde-mailbox"
WINDOW_BYTES = 64 * 1024 * 1024
"""So much of one sender's messages may wait for the handler of a rank; then the sender waits."""
MAX_HEADER_BYTES = 256 * 1024
MIN_SHARED_BYTES = 32 * 1024
"""Payloads from here on may lie in memory that is shared with the sender (kMinPlacedBytes of native/src/endpoint.h). It
stays as it is until the array is gone, but not for a forked child that still has one."""
NUM_REQUEST_TAGS = 1 << 30
CLOSE_TIMEOUT_S = 5.0
"""How long close() waits for a handler to return and for what was posted."""
CLOSE_POLL_S = 0.001
"""How often close() looks. It takes no lock, so a signal handler can call it in the middle of anything."""
FOREVER_S = 10 * 365 * 86400.0

PREFIX = struct.Struct("<BbBQ")
"""Ahead of the caller's header: kind, dtype or -1, number of dimensions, number of the request; then the shape."""

logger = logging.getLogger("ronde.comm")


class _Kind(enum.IntEnum):
    POST = 0
    REQUEST = 1
    REPLY = 2
    FAILURE = 3
    """The handler of a request has raised; the header is the text of the error."""
    REFUSAL = 4
    """The mailbox is closed, so nobody will reply to the request."""


class _Phase(enum.Enum):
    OPEN = enum.auto()
    CLOSING = enum.auto()
    """No more messages are handled. The handler may still be running, and may reply and post."""
    CLOSED = enum.auto()
    """Nothing can be sent but refusals."""


class MailboxReply(NamedTuple):
    """What the handler of another rank has answered to a request."""

    header: bytes
    """As it was given to reply()."""
    payload: Any
    """An array, or None."""


class MailboxMessage:
    """A message for the handler of a mailbox. Its payload is the handler's own memory."""

    __slots__ = ("_is_replied", "_mailbox", "_request", "header", "payload", "source")

    def __init__(self, mailbox: Mailbox, source: int, header: bytes, payload: Any, request: int) -> None:
        self.source = source
        """The rank that sent it."""
        self.header = header
        """As the sender gave it."""
        self.payload: Any = payload
        """An array, or None."""
        self._mailbox = mailbox
        self._request = request
        """The tag for the reply; 0 when none is wanted."""
        self._is_replied = False

    @property
    def wants_reply(self) -> bool:
        """Whether it is a request that has not been replied to."""
        return bool(self._request) and not self._is_replied

    def reply(self, header: bytes = b"", payload: Any = None, *, wait: bool = True) -> Any:
        """Answer a request, once. The handler may also keep the message and let any thread reply later.

        It returns, or its Work is done, as soon as the payload may be changed again.
        """
        if not self._request:
            raise ValueError("only a request can be replied to, and this message is a post")
        if self._is_replied:
            raise ValueError("the request has been replied to already")
        self._is_replied = True
        try:
            return self._mailbox.send_reply(self.source, self._request, header, payload, wait=wait)
        except BaseException:
            self._is_replied = False  # so that another reply, or the error, can go to the rank that waits
            raise

    def __repr__(self) -> str:
        kind = "request" if self._request else "post"
        return f"<MailboxMessage: {kind} of rank {self.source}, {len(self.header)} bytes of header>"


Handler: TypeAlias = Callable[[MailboxMessage], object]


class Mailbox:
    """One rank's end of a mailbox. Messages of one rank are handled in the order in which it sent them.

    `handler` runs in a thread of the mailbox, one message at a time. It may post and request, but must not wait for a
    rank whose own handler may be waiting for it. `on_lost` is called in the same thread for each member that is gone,
    with its rank and the reason, after its last message.

    The end of a `with` block closes it, and so does the end of the round. Let the ranks meet in a barrier before: what
    was not handled by then is dropped.
    """

    def __init__(
        self,
        channel: Channel,
        rank: int,
        handler: Handler | None,
        on_lost: Callable[[int, str], object] | None,
        *,
        open_channels: OpenChannels,
        in_place: bool,
    ) -> None:
        self._channel = channel
        self._in_place = in_place
        self._open_channels = open_channels
        self._ranks = channel.members
        self._rank = rank
        self._handler = handler
        self._on_lost = on_lost
        self._operation_timeout_s = open_channels.operation_timeout_s
        self._request_tags = itertools.count(1)
        self._phase = _Phase.OPEN
        self._refuses = False
        """Whether ranks that ask are told that the mailbox is closed. Not when this rank leaves, which they learn."""
        self._unanswered: set[tuple[int, int]] = set()
        """Requests that the handler has got and nobody has replied to: the rank that asked, and the tag."""
        self._is_running = False
        """Whether the handler or on_lost is running."""
        self._error: BaseException | None = None
        # Owned by the mailbox. It waits for messages, runs the handler and on_lost, and refuses requests when the
        # mailbox is closed. It ends with the channel.
        self._thread: threading.Thread | None = None
        if handler is not None:
            self._thread = threading.Thread(target=self._serve, name=THREAD_NAME, daemon=True)
            start_thread(self._thread)

    def post(self, to: int, header: bytes = b"", payload: Any = None, *, wait: bool = True) -> Any:
        """Send a message to the handler of a rank of the world, which may be this one.

        It returns, or its Work is done, as soon as the payload may be changed again; the message may be handled later.
        It waits when too much that this rank has sent is still to be handled there.
        """
        return self._send(*self._make_send(to, 0, _Kind.POST, header, payload), wait)

    def request(self, to: int, header: bytes = b"", payload: Any = None, *, wait: bool = True) -> Any:
        """Send a message to the handler of a rank and return its MailboxReply, or a Work whose result that is.

        RondeError is raised if the handler has raised or the rank has closed its mailbox, PeerLost if the rank is gone.
        """
        tag = next(self._request_tags) % NUM_REQUEST_TAGS + 1
        call, signature = self._make_send(to, tag, _Kind.REQUEST, header, payload)
        wanted = Call(
            OperationKind.RECEIVE,
            peer=call.peer,
            description=f"the reply to a {signature.description}",
            tag=tag,
            flags=MessageFlag.ANY_SIZE,
        )
        waiting = self._channel.submit(wanted)  # first: a reply for which nothing waits is dropped
        sent = self._channel.submit(call, ((signature, ""),))
        work = _RequestWork(signature, to, self._operation_timeout_s, in_place=self._in_place)
        work.started_on((sent, waiting))
        return work.wait() if wait else work

    def close(self) -> None:
        """Take no more messages. Wait for 5 s at most until the handler has returned and what this rank has posted is
        on its way; then raise the first exception that a handler raised for a post. Idempotent.

        Messages that were not handled are dropped. Ranks that wait for a reply, or ask later, get a RondeError at once.
        What is still to be sent after 5 s goes on being sent.
        """
        self._stop(Deadline(CLOSE_TIMEOUT_S), refuses=True)
        if self._unanswered:
            # Not here: a signal handler may have interrupted an operation of this thread.
            thread = threading.Thread(target=self._refuse_unanswered, name=f"{THREAD_NAME}-close", daemon=True)
            start_thread(thread)
            thread.join(CLOSE_TIMEOUT_S)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Mailbox {self._channel.backend_channel.spec.id}>"

    # --- for the group, for messages, and for parameter servers ------------------------------------------------------

    @property
    def name(self) -> str:
        # Equal on all members, and no other mailbox of the round has it.
        return self._channel.backend_channel.spec.id

    @property
    def closed_error(self) -> RondeError | None:
        # Why the round is over for this rank, if it is: then no handler is called any more.
        return self._open_channels.closed_error

    def leave(self, deadline: Deadline) -> None:
        # This rank leaves: as close(), but whoever waits for a reply learns that the rank is gone.
        self._stop(deadline, refuses=False)

    def end(self, why: str) -> None:
        # The group is closed, for this reason: end everything that is under way.
        if self._channel.has_sends_under_way():
            name = self._channel.backend_channel.spec.id
            logger.warning("rank %d has not sent all that it posted to mailbox %s in time", self._rank, name)
        self._phase, self._refuses = _Phase.CLOSED, False
        self._unanswered.clear()
        self._open_channels.close(self._channel, why)

    def join(self, deadline: Deadline) -> None:
        # Wait for the thread, after end().
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(deadline.remaining_s)

    def send_reply(self, to: int, request: int, header: bytes, payload: Any, *, wait: bool) -> Any:
        result = self._send(*self._make_send(to, request, _Kind.REPLY, header, payload), wait)
        self._unanswered.discard((to, request))
        return result

    # --- closing -----------------------------------------------------------------------------------------------------

    def _stop(self, deadline: Deadline, *, refuses: bool) -> None:
        self._refuses = refuses
        if self._phase is _Phase.OPEN:
            self._phase = _Phase.CLOSING
        if self._thread is not threading.current_thread():  # the handler cannot wait for itself
            while not deadline.expired and (self._is_handling() or self._channel.has_sends_under_way()):
                time.sleep(CLOSE_POLL_S)
        self._phase = _Phase.CLOSED

    def _is_handling(self) -> bool:
        return self._is_running and self._thread is not None and self._thread.is_alive()  # not in a forked child

    def _refuse_unanswered(self) -> None:
        for to, request in list(self._unanswered):
            self._give_up(to, request, _Kind.REFUSAL)

    def _give_up(self, to: int, request: int, kind: _Kind, text: str = "") -> None:
        """Tell a rank that its request will get no reply."""
        self._unanswered.discard((to, request))
        try:
            call, signature = self._make_send(to, request, kind, shorten(text).encode(), None)
            self._channel.submit(call, ((signature, ""),))
        except RondeError:
            logger.debug("rank %d could not be told that its request gets no reply", to, exc_info=True)

    # --- sending -----------------------------------------------------------------------------------------------------

    def _send(self, call: Call, signature: Signature, wait: bool) -> Any:  # None, or the work
        if wait:
            self._channel.send_or_receive(call, signature)
            return None
        work = Work(signature, timeout_s=self._operation_timeout_s)
        work.started_on((self._channel.submit(call, ((signature, ""),)),))
        return work

    def _make_send(self, to: int, request: int, kind: _Kind, header: bytes, payload: Any) -> tuple[Call, Signature]:
        what = kind.name.lower()
        if to not in self._ranks:
            raise ValueError(f"{what}: to must be a member of the mailbox's group, got {to!r}")
        if not isinstance(header, bytes | bytearray | memoryview):
            raise TypeError(f"{what}: header must be bytes, got {type(header).__name__}")
        if len(header) > MAX_HEADER_BYTES:
            raise ValueError(f"{what}: header has {len(header)} bytes, at most {MAX_HEADER_BYTES}; use the payload")
        source = None if payload is None else as_send_buffer(payload, what)
        if self._phase is _Phase.CLOSED and kind is not _Kind.REFUSAL:
            raise RoundEnded(f"{what} to rank {to} on rank {self._rank}: the mailbox is closed")
        is_answer = kind not in (_Kind.POST, _Kind.REQUEST)
        amount, prefix = "no array", PREFIX.pack(kind, -1, 0, request)
        spans: tuple[Span, ...] = ()
        if source is not None:
            shape = source.array.shape
            amount = f"{source.dtype.name.lower()}{list(shape)}"
            prefix = PREFIX.pack(kind, source.dtype, len(shape), request) + struct.pack(f"<{len(shape)}Q", *shape)
            spans = (Span(address_of(source.array), 0, source.array.size),)
        description = f"{what} of {amount} to rank {to}"
        dtype, shapes, num_bytes = _facts_of(source)
        signature = Signature(
            OperationKind.SEND, dtype, shapes, Op.SUM, 1.0, 1.0, -1, what, description, 0, num_bytes + len(header)
        )
        call = Call(
            OperationKind.SEND,
            dtype,
            spans=spans,
            peer=self._ranks.index(to),
            description=description,
            owners=source,
            tag=request if is_answer else 0,
            header=prefix + bytes(header),
            window_bytes=WINDOW_BYTES,
            flags=MessageFlag.EXPECTED if is_answer else 0,
        )
        return call, signature

    # --- handling ----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        wanted = Call(
            OperationKind.RECEIVE,
            description="waiting for messages",
            flags=MessageFlag.ANY_SIZE | MessageFlag.BACKGROUND | MessageFlag.REPORT_LOSSES,
        )
        lost: set[int] = set()
        while True:
            try:
                timing = self._channel.backend_channel.submit(wanted, Deadline(FOREVER_S)).wait(Deadline(FOREVER_S))
            except PeerLost as error:
                if error.peer in lost:  # the round is over because of it
                    return
                lost.add(error.peer)
                if self._on_lost is not None and error.peer in self._ranks:
                    self._run(None, self._on_lost, error.peer, error.why)
                continue
            except RoundEnded:  # the group is closed, or the round is over
                return
            except RondeError as error:
                logger.exception("a mailbox of rank %d cannot take messages any more", self._rank)
                self._error = self._error or error
                return
            self._handle(timing)
            del timing  # its memory is the handler's now, and this thread may wait for long

    def _handle(self, timing: CallTiming) -> None:
        assert timing.received is not None and self._handler is not None
        source = self._ranks[timing.received.source]
        try:
            kind, request, header, payload = _decode(timing.received, in_place=self._in_place)
        except ProtocolError:
            logger.exception("a message of rank %d cannot be handled", source)
            return
        message = MailboxMessage(self, source, header, payload, request if kind is _Kind.REQUEST else 0)
        self._run(message, self._handler, message)

    def _run(self, message: MailboxMessage | None, function: Callable[..., object], *arguments: object) -> None:
        """Call a function of the user's, or refuse a request if the mailbox is closed. What the function raises goes to
        the rank that waits for a reply, or else is kept for close()."""
        request = message if message is not None and message.wants_reply else None
        self._is_running = True  # first: _stop() changes the phase, and then looks at this
        try:
            if self._phase is _Phase.OPEN:
                if request is not None:
                    self._unanswered.add((request.source, request._request))
                function(*arguments)
            elif request is not None and self._refuses:
                self._give_up(request.source, request._request, _Kind.REFUSAL)
        except BaseException as error:  # also SystemExit, which would end nothing but this thread
            if isinstance(error, RoundEnded) and not isinstance(error, PeerLost) and self._is_over():
                return  # because of that
            logger.exception("the handler of a mailbox failed on rank %d", self._rank)
            if request is not None and request.wants_reply:
                text = f"{type(error).__name__}: {error}"
                self._give_up(request.source, request._request, _Kind.FAILURE, text)
            else:
                self._error = self._error or error
        finally:
            self._is_running = False

    def _is_over(self) -> bool:
        """Whether nothing can be done here any more. Whoever waits for a reply has been told so, or that this rank is
        gone."""
        return self._phase is _Phase.CLOSED or self._open_channels.closed_error is not None


class _RequestWork(Work):
    """A request until its reply has come."""

    __slots__ = ("_in_place", "_to")

    def __init__(self, signature: Signature, to: int, timeout_s: float, *, in_place: bool) -> None:
        super().__init__(signature, timeout_s=timeout_s)
        self._to = to
        self._in_place = in_place

    def finish(self) -> Any:
        assert self._running_calls is not None
        timing = self._running_calls[-1].timing
        assert timing is not None and timing.received is not None
        kind, _, header, payload = _decode(timing.received, in_place=self._in_place)
        if kind is _Kind.FAILURE:
            error = header.decode(errors="replace")
            self.fail(RondeError(f"the handler of rank {self._to} failed on a {self.signature.description}: {error}"))
        elif kind is _Kind.REFUSAL:
            what = self.signature.description
            self.fail(RondeError(f"rank {self._to} has closed its mailbox, so nobody will reply to a {what}"))
        else:
            self._result = MailboxReply(header, payload)
        return self._result


def _facts_of(source: SendBuffer | None) -> tuple[DType, tuple[tuple[int, ...], ...], int]:
    if source is None:
        return DType.UINT8, (), 0
    return source.dtype, (source.array.shape,), source.array.nbytes


def _decode(received: Received, *, in_place: bool) -> tuple[_Kind, int, bytes, Any]:
    """Kind, number of the request, the sender's header, and its array or None."""
    text = received.header
    try:
        kind, dtype_number, num_dimensions, request = PREFIX.unpack_from(text)
        shape = struct.unpack_from(f"<{num_dimensions}Q", text, PREFIX.size)
        kind, header = _Kind(kind), text[PREFIX.size + 8 * num_dimensions :]
        if dtype_number < 0:
            return kind, request, header, None
        dtype = DType(dtype_number)
        assert received.data is not None
        data = as_array(received.data)
        if not in_place and data.nbytes >= MIN_SHARED_BYTES:
            data = data.copy()
        array = data.view(dtype.numpy).reshape(shape)
    except (struct.error, ValueError) as error:
        raise ProtocolError(
            f"member {received.source} has sent a message that no mailbox of this version does"
        ) from error
    return kind, request, header, Bfloat16View(array) if dtype is DType.BFLOAT16 else array
