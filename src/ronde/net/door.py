"""Authenticated plain sockets between the processes of a job: lifelines, data sockets, Unix sockets for descriptors.

One side has a Door and takes callers from it; the other side knocks. Used by comm (coordinator, native backend) and
launch. What happens between the two before a socket is handed out is in handshake.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ronde.errors import StartFailed
from ronde.net.descriptors import Bell
from ronde.net.handshake import FAULT, NONCE_BYTES, Caller, CallerSide, DoorSide, Stranger
from ronde.net.keys import JobKey
from ronde.net.sockets import NotYet, Place, connect, describe_peer, listen_tcp, listen_unix, locate, peer_uid, tune
from ronde.types import Deadline

__all__ = ["Caller", "Connection", "Door", "knock"]

Connection: TypeAlias = socket.socket
"""What a door gives out and knock() returns; its own name, for those who only pass it on."""

HANDSHAKE_S = 5.0
"""A caller that has not proved itself by then is refused."""
CROWD = 64
"""Most unfinished handshakes at a time. Further callers wait in the kernel's queue."""
CROWD_S = 1.0
"""In a crowd, a caller that took longer than this makes room for others. Honest ones take milliseconds."""
HEARTBEAT_S = 10.0
BACKLOG = 1024

logger = logging.getLogger("ronde.net")


class Door:
    """Lets callers in that prove the job's key, at an abstract Unix socket, at a TCP port, or both.

    `greet` makes the greeting for a caller, `arrived` may take its socket at once by returning True; both run in the
    door's thread and must not wait. Everybody else is fetched with take().
    """

    def __init__(
        self,
        key: JobKey,
        *,
        unix: bool,
        tcp: str | None,
        port: int = 0,
        greet: Callable[[Caller], bytes] | None = None,
        arrived: Callable[[Caller, socket.socket], bool] | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.unix_name = ""
        """Name of the abstract socket, for `unix:NAME`; empty without."""
        self.tcp_port = 0
        """The port it listens on; 0 without."""
        self.refused = 0
        """Callers that did not prove themselves."""
        self._key = key
        self._greet = greet or (lambda caller: b"")
        self._arrived = arrived or (lambda caller, sock: False)
        self._heartbeat_s = heartbeat_s
        self._changed = threading.Condition()
        self._here: dict[tuple[str, int], deque[socket.socket]] = {}
        self._failed: dict[int, Exception] = {}
        self._closed = ""
        self._complain = _Complaints()
        self._visits: dict[socket.socket, _Visit] = {}
        self._pause: Deadline | None = None
        self._listeners: list[socket.socket] = []
        self._listen(unix, tcp, port)
        self._selector = selectors.DefaultSelector()
        self._bell = Bell()
        self._selector.register(self._bell, selectors.EVENT_READ, self._bell.clear)
        self._open_listeners()
        # Owned by the door. Touches the listeners, the unfinished handshakes, and under the lock what take() waits for.
        self._thread = threading.Thread(target=self._serve, name="ronde-door", daemon=True)
        self._thread.start()

    def take(self, purpose: str, rank: int, deadline: Deadline) -> socket.socket:
        """The socket of that caller, as soon as it has come; several of one kind come in the order they arrived."""
        with self._changed:
            while True:
                if rank in self._failed:
                    raise self._failed[rank].with_traceback(None)
                waiting = self._here.get((purpose, rank))
                if waiting:
                    return waiting.popleft()
                if self._closed:
                    raise StartFailed(f"rank {rank} can no longer connect for {purpose!r}: {self._closed}")
                if deadline.passed:
                    raise StartFailed(
                        f"rank {rank} did not connect for {purpose!r} within {deadline.seconds:g} s; "
                        f"look at the output of rank {rank}, and whether its host can reach this one"
                    )
                self._changed.wait(deadline.left_s)

    def fail(self, rank: int, error: Exception) -> None:
        """Nobody comes from this rank any more: every take() for it raises the error. The first error stays."""
        with self._changed:
            self._failed.setdefault(rank, error)
            for purpose, who in [place for place in self._here if place[1] == rank]:
                _close_all(self._here.pop((purpose, who)))
            self._changed.notify_all()

    def close(self) -> None:
        """End all waits and close what nobody took. Idempotent."""
        self._shut("the door was closed")
        self._bell.ring()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Door:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _listen(self, unix: bool, tcp: str | None, port: int) -> None:
        try:
            if unix:
                self._listeners.append(listen_unix(BACKLOG))
                self.unix_name = self._listeners[-1].getsockname()[1:].decode()
            if tcp is not None:
                self._listeners.append(listen_tcp(tcp, port, BACKLOG))
                self.tcp_port = int(self._listeners[-1].getsockname()[1])
        except BaseException:
            self._close_listeners()
            raise

    def _shut(self, why: str) -> None:
        with self._changed:
            self._closed = self._closed or why
            for waiting in self._here.values():
                _close_all(waiting)
            self._here.clear()
            self._changed.notify_all()

    # --- the door's thread -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closed:
                for ready, _ in self._selector.select(self._patience_s()):
                    ready.data()
                self._look_at_the_clock()
        except Exception as error:  # the thread's edge: whoever waits must learn of it
            logger.exception("the door broke")
            self._shut(f"the door broke: {error!r}")
        finally:
            self._close_listeners()
            _close_all(self._visits)
            self._visits.clear()
            self._selector.close()
            self._bell.close()

    def _patience_s(self) -> float | None:
        waits = [visit.deadline.left_s for visit in self._oldest()]
        if self._pause is not None:
            waits.append(self._pause.left_s)
        return min(waits, default=None)

    def _oldest(self) -> list[_Visit]:
        # Visits are kept in the order they began, and all may take equally long.
        return [next(iter(self._visits.values()))] if self._visits else []

    def _look_at_the_clock(self) -> None:
        for visit in self._oldest():
            if visit.deadline.passed:
                self._refuse(visit, f"did not prove itself within {HANDSHAKE_S:g} s")
        if self._pause is not None and self._pause.passed:
            self._pause = None
            self._open_listeners()

    def _accept(self, listener: socket.socket) -> None:
        for visit in self._oldest():
            if len(self._visits) < CROWD:
                break
            if visit.deadline.seconds - visit.deadline.left_s < CROWD_S:
                return self._stop_accepting(0.01)
            self._refuse(visit, "was silent while others waited")
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionError):  # it has gone again
            return
        except OSError as error:  # out of descriptors or memory: trying at once would only burn the processor
            logger.warning("cannot accept a connection (%s); raise the limit of open files (ulimit -n)", error.strerror)
            return self._stop_accepting(0.5)
        visit = self._visits[sock] = _Visit(
            sock=sock,
            peer=describe_peer(sock),
            side=DoorSide(self._key, secrets.token_bytes(NONCE_BYTES), self._make_greeting),
            deadline=Deadline(HANDSHAKE_S),
        )
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, functools.partial(self._advance, visit))
        if sock.family == socket.AF_UNIX and peer_uid(sock) != os.getuid():
            return self._refuse(visit, "belongs to another user")
        self._advance(visit)  # most callers have spoken by now

    def _advance(self, visit: _Visit) -> None:
        """Go on with one handshake as far as it goes without waiting."""
        if visit.sock not in self._visits:  # refused since the selector spoke
            return
        try:
            if not visit.unsent:
                data = visit.sock.recv(visit.side.num_wanted)
                if not data:
                    return self._refuse(visit, "hung up in the middle of the handshake")
                visit.unsent = visit.side.feed(data)
            if visit.unsent:
                visit.unsent = visit.unsent[visit.sock.send(visit.unsent) :]
        except BlockingIOError:
            pass
        except Stranger as stranger:
            return self._refuse(visit, str(stranger), answer=stranger.answer)
        except OSError as error:
            return self._refuse(visit, f"lost its connection ({error.strerror})")
        if visit.side.caller is not None and not visit.unsent:
            return self._admit(visit, visit.side.caller)
        events = selectors.EVENT_WRITE if visit.unsent else selectors.EVENT_READ
        if self._selector.get_key(visit.sock).events != events:
            self._selector.modify(visit.sock, events, functools.partial(self._advance, visit))

    def _make_greeting(self, caller: Caller) -> bytes:
        try:
            return self._greet(caller)
        except Exception:  # the edge to the owner's greet(): its mistake costs this caller, not the door
            logger.exception("no greeting for %s of rank %d", caller.purpose, caller.rank)
            raise Stranger("could not be greeted", answer=FAULT) from None

    def _admit(self, visit: _Visit, caller: Caller) -> None:
        self._forget(visit)
        sock = visit.sock
        try:
            tune(sock, self._heartbeat_s)
            if self._arrived(caller, sock):
                return
        except Exception:  # the edge to the owner's arrived(): its mistake costs this caller, not the door
            logger.exception("%s of rank %d could not be received", caller.purpose, caller.rank)
            sock.close()
            return
        with self._changed:
            if self._closed or caller.rank in self._failed:
                sock.close()
                return
            self._here.setdefault((caller.purpose, caller.rank), deque()).append(sock)
            self._changed.notify_all()

    def _refuse(self, visit: _Visit, why: str, *, answer: bytes = b"") -> None:
        self.refused += 1
        self._complain(f"refused {visit.peer}: it {why}")
        self._forget(visit)
        try:
            if answer:
                visit.sock.send(answer)  # a few bytes into an empty buffer: no wait, and no harm if it fails
        except OSError:
            pass
        visit.sock.close()

    def _forget(self, visit: _Visit) -> None:
        self._selector.unregister(visit.sock)
        del self._visits[visit.sock]

    def _open_listeners(self) -> None:
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, functools.partial(self._accept, listener))

    def _stop_accepting(self, pause_s: float) -> None:
        if self._pause is None:
            for listener in self._listeners:
                self._selector.unregister(listener)
        self._pause = Deadline(pause_s)

    def _close_listeners(self) -> None:
        _close_all(self._listeners)
        self._listeners.clear()


@dataclass(eq=False, slots=True)
class _Visit:
    """One unfinished handshake."""

    sock: socket.socket
    peer: str
    side: DoorSide
    deadline: Deadline
    unsent: bytes = b""


class _Complaints:
    """Logs the first refusal at once and then at most one line in a while, with the number of those between."""

    EVERY_S = 10.0

    def __init__(self) -> None:
        self._quiet: Deadline | None = None
        self._num_unsaid = 0

    def __call__(self, text: str) -> None:
        """Say it, or count it."""
        if self._quiet is not None and not self._quiet.passed:
            self._num_unsaid += 1
            return
        more = f" ({self._num_unsaid} more since the last such line)" if self._num_unsaid else ""
        logger.warning("%s%s", text, more)
        self._quiet, self._num_unsaid = Deadline(self.EVERY_S), 0


def _close_all(sockets: Iterable[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def knock(
    address: str,
    key: JobKey,
    caller: Caller,
    deadline: Deadline,
    *,
    heartbeat_s: float = HEARTBEAT_S,
    before_retry: Callable[[], None] = lambda: None,
) -> tuple[socket.socket, bytes]:
    """Connect to the door at `host:port` or `unix:NAME`: the socket, and the door's greeting.

    A door that is not open yet is tried again until the deadline, or until before_retry() raises because it will never
    be. Everything else that goes wrong raises StartFailed at once: a retry would not help an unknown name, a cut
    network or a wrong key.
    """
    what = f"rank {caller.rank} could not connect to {address} for {caller.purpose!r}"
    pause_s = 0.005
    try:
        places = locate(address)
        while True:
            try:
                return _knock_once(places, key, caller, deadline, heartbeat_s)
            except NotYet as error:
                problem = error
            before_retry()
            time.sleep(min(pause_s, deadline.left_s))
            pause_s = min(2 * pause_s, 0.2)
            if deadline.passed:
                raise StartFailed(
                    f"{problem}, for {deadline.seconds:g} s; is the other side running, and is this its address?"
                )
    except (StartFailed, Stranger) as error:
        raise StartFailed(f"{what}: {error}") from None


def _knock_once(
    places: Sequence[Place], key: JobKey, caller: Caller, deadline: Deadline, heartbeat_s: float
) -> tuple[socket.socket, bytes]:
    side = CallerSide(key, secrets.token_bytes(NONCE_BYTES), caller)
    sock = connect(places, deadline)
    try:
        _send(sock, side.hello, deadline)
        while side.greeting is None:
            sock.settimeout(max(deadline.left_s, 1e-6))
            data = sock.recv(side.num_wanted)
            if not data:
                raise NotYet("it hung up in the middle of the handshake")
            answer = side.feed(data)
            if answer:  # sending even nothing fails when the door's owner has hung up right after the welcome
                _send(sock, answer, deadline)
        tune(sock, heartbeat_s)
        return sock, side.greeting
    except BaseException as error:
        sock.close()
        if isinstance(error, TimeoutError):
            raise StartFailed(
                f"somebody listens there but did not answer within {deadline.seconds:g} s; "
                "check that it is ronde, and whether that process is stopped"
            ) from None
        if isinstance(error, ConnectionError):
            raise NotYet(f"it hung up in the middle of the handshake ({error.strerror})") from None
        raise


def _send(sock: socket.socket, data: bytes, deadline: Deadline) -> None:
    sock.settimeout(max(deadline.left_s, 1e-6))
    sock.sendall(data)
