"""The compute service: dispatchers and workers of a tf.data service register here, and whoever needs them waits here.

One process owns the ComputeService; the others have its addresses and its key, and a ComputeClient. A call of the
client is one connection: both sides prove the key (ronde's handshake, which carries the request), and the answer
follows, with a proof of its own. Nothing is parsed before it is proved, and nothing is unpickled.

    client                                                     service
    handshake with the request (JSON, with a fresh nonce)   →
                                                            ←  length, answer (JSON), mac(label, nonce, answer)
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hmac
import logging
import secrets
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from horovod.runner.common.util.timeout import TimeoutException
from ronde.errors import StartFailed
from ronde.net.addresses import HOST_LOCAL_INTERFACES, format_address
from ronde.net.connect import ConnectFailed, connect_authenticated
from ronde.net.event_loop import LoopThread, Timer
from ronde.net.handshake import MAC_BYTES, ConnectionRequest
from ronde.net.keys import JobKey, derive_job_key
from ronde.net.listener import Listener
from ronde.types import Deadline

__all__ = ["ComputeClient", "ComputeService"]

PURPOSE = "compute service"
CONNECT_S = 10.0
"""How long a client tries one address of the service."""
ANSWER_S = 30.0
"""An answer may come this much later than the service promises: it may be busy."""
MAX_WAIT_S = 7 * 24 * 3600.0
LOOPBACK = "127.0.0.1"

_LENGTH = struct.Struct("!H")
_ANSWER_LABEL = b"compute answer"

logger = logging.getLogger("horovod")


class ComputeRequest(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What a client asks for. The proof of the answer covers the nonce."""

    nonce: str


class RegisterDispatcher(ComputeRequest, frozen=True):
    dispatcher_id: int
    address: str


class AwaitDispatcher(ComputeRequest, frozen=True):
    dispatcher_id: int
    timeout_s: float


class RegisterWorker(ComputeRequest, frozen=True):
    dispatcher_id: int
    worker_id: int


class AwaitWorkers(ComputeRequest, frozen=True):
    dispatcher_id: int
    timeout_s: float


class ShutDown(ComputeRequest, frozen=True):
    """The owner of the service is to end it."""


class AwaitShutdown(ComputeRequest, frozen=True):
    pass


AnyRequest = RegisterDispatcher | AwaitDispatcher | RegisterWorker | AwaitWorkers | ShutDown | AwaitShutdown


class Outcome(enum.Enum):
    DONE = "done"
    NO_SUCH_DISPATCHER = "no such dispatcher"
    OTHER_ADDRESS = "other address"
    TIMED_OUT = "timed out"
    SHUT_DOWN = "shut down"


class ComputeAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    outcome: Outcome
    num_dispatchers: int
    address: str = ""
    """Of the dispatcher, as it was registered."""


class Registrations:
    """Who has registered. Without I/O."""

    def __init__(self, num_dispatchers: int, workers_per_dispatcher: int) -> None:
        self.is_shut_down = False
        self._addresses = [""] * num_dispatchers
        self._workers: list[set[int]] = [set() for _ in range(num_dispatchers)]
        self._workers_per_dispatcher = workers_per_dispatcher

    def answer(self, request: AnyRequest) -> ComputeAnswer | None:
        """Carry the request out and return its answer; None while it has to wait."""
        match request:
            case ShutDown():
                self.is_shut_down = True
                return self.make_answer(Outcome.DONE)
            case AwaitShutdown():
                return self.make_answer(Outcome.DONE) if self.is_shut_down else None
        if self.is_shut_down:
            return self.make_answer(Outcome.SHUT_DOWN)
        index = request.dispatcher_id
        if not 0 <= index < len(self._addresses):
            return self.make_answer(Outcome.NO_SUCH_DISPATCHER)
        match request:
            case RegisterDispatcher(address=address):
                if self._addresses[index] not in ("", address):
                    return self.make_answer(Outcome.OTHER_ADDRESS, self._addresses[index])
                self._addresses[index] = address
            case RegisterWorker(worker_id=worker_id):
                self._workers[index].add(worker_id)
            case AwaitDispatcher():
                if not self._addresses[index]:
                    return None
            case AwaitWorkers():
                if len(self._workers[index]) < self._workers_per_dispatcher:
                    return None
        return self.make_answer(Outcome.DONE, self._addresses[index])

    def make_answer(self, outcome: Outcome, address: str = "") -> ComputeAnswer:
        return ComputeAnswer(outcome, len(self._addresses), address)


@dataclass(eq=False)
class _WaitingClient:
    sock: socket.socket
    request: AnyRequest
    timer: Timer | None = None


class ComputeService:
    """Listens at the loopback interface and at those that other hosts may reach, or at the named interfaces `nics`. All
    state belongs to the service's one thread."""

    def __init__(
        self, dispatchers: int, workers_per_dispatcher: int, key: bytes, nics: Iterable[str] | None = None
    ) -> None:
        if dispatchers <= 0:
            raise ValueError(f"dispatchers must be at least 1, got {dispatchers}")
        if workers_per_dispatcher <= 0:
            raise ValueError(f"workers_per_dispatcher must be at least 1, got {workers_per_dispatcher}")
        self._key = make_service_key(key)
        self._registrations = Registrations(dispatchers, workers_per_dispatcher)
        self._waiting: dict[socket.socket, _WaitingClient] = {}
        self._listeners: dict[str, list[tuple[str, Listener]]] = {}
        self._thread = LoopThread("ronde-compute-service")
        try:
            for interface, hosts in find_interfaces(None if nics is None else set(nics)).items():
                self._listeners[interface] = [(host, self._listen(host)) for host in hosts]
            self._thread.start()
        except BaseException:
            self.shutdown()
            raise

    def addresses(self) -> dict[str, list[tuple[str, int]]]:
        """Return where the service listens: host and port, by interface."""
        return {
            name: [(host, listener.tcp_port) for host, listener in found] for name, found in self._listeners.items()
        }

    def get_port(self) -> int:
        """Return the port of the first address."""
        return next(port for found in self.addresses().values() for _, port in found)

    def shutdown(self) -> None:
        """Answer those that wait, and stop listening. Idempotent."""
        self._thread.call(self._close)
        self._thread.stop()

    # --- in the service's thread -----------------------------------------------------------------------------------

    def _listen(self, host: str) -> Listener:
        return Listener(
            self._key, unix=False, tcp_host=host, loop=self._thread.loop, on_connection=self._take_connection
        )

    def _take_connection(self, connection: ConnectionRequest, sock: socket.socket) -> bool:
        try:
            if connection.purpose != PURPOSE:
                raise msgspec.DecodeError(f"it connects for {connection.purpose!r}")
            request: AnyRequest = msgspec.json.decode(connection.detail, type=AnyRequest)
        except msgspec.DecodeError as error:
            logger.warning("the compute service refused a request: %s", error)
            sock.close()
            return True
        answer = self._registrations.answer(request)
        if answer is None:
            self._keep_waiting(sock, request)
        else:
            self._send_answer(sock, request, answer)
            self._answer_waiting()
        return True

    def _keep_waiting(self, sock: socket.socket, request: AnyRequest) -> None:
        loop = self._thread.loop
        client = _WaitingClient(sock, request)
        if isinstance(request, AwaitDispatcher | AwaitWorkers):
            client.timer = loop.call_later(request.timeout_s, functools.partial(self._time_out, client))
        self._waiting[sock] = client
        loop.add_reader(sock.fileno(), functools.partial(self._forget, client, close=True))  # it has given up

    def _forget(self, client: _WaitingClient, *, close: bool = False) -> None:
        self._thread.loop.remove_reader(client.sock.fileno())
        del self._waiting[client.sock]
        if client.timer is not None:
            client.timer.cancel()
        if close:
            client.sock.close()

    def _answer_waiting(self) -> None:
        for client in list(self._waiting.values()):
            answer = self._registrations.answer(client.request)
            if answer is not None:
                self._forget(client)
                self._send_answer(client.sock, client.request, answer)

    def _time_out(self, client: _WaitingClient) -> None:
        self._forget(client)
        self._send_answer(client.sock, client.request, self._registrations.make_answer(Outcome.TIMED_OUT))

    def _send_answer(self, sock: socket.socket, request: AnyRequest, answer: ComputeAnswer) -> None:
        body = msgspec.json.encode(answer)
        proof = self._key.mac(_ANSWER_LABEL, request.nonce.encode(), body)
        with sock, contextlib.suppress(OSError):  # the client may have gone
            sock.settimeout(0)  # a few bytes into an empty buffer
            sock.sendall(_LENGTH.pack(len(body)) + body + proof)

    def _close(self) -> None:
        self._registrations.is_shut_down = True
        self._answer_waiting()
        for found in self._listeners.values():
            for _, listener in found:
                listener.close()


class ComputeClient:
    """Registers with a ComputeService and waits for others to do so. Each call has a connection of its own, so threads
    may share a client. ConnectionError if the service cannot be reached; RuntimeError if it was shut down."""

    def __init__(
        self, compute_addresses: Mapping[str, Sequence[tuple[str, int]]], key: bytes, verbose: int = 1
    ) -> None:
        """`verbose` has no effect; see the logger "horovod"."""
        found = dict.fromkeys((host, port) for each in compute_addresses.values() for host, port in each)
        if not found:
            raise ValueError("compute_addresses has no address of the compute service")
        # The loopback interface comes last: from another host it leads elsewhere.
        self._addresses = [format_address(*each) for each in sorted(found, key=lambda each: each[0] == LOOPBACK)]
        self._key = make_service_key(key)
        self._local_host = ""

    @property
    def local_host(self) -> str:
        """The address from which this process reaches the service, where others may reach this host."""
        if not self._local_host:
            self._connect(AwaitShutdown(make_nonce())).close()
        return self._local_host

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """IndexError if there is no such dispatcher; ValueError if it has another address."""
        request = RegisterDispatcher(make_nonce(), dispatcher_id, dispatcher_address)
        answer = self._call(request, ANSWER_S)
        self._check_dispatcher(answer, dispatcher_id)
        if answer.outcome is Outcome.OTHER_ADDRESS:
            raise ValueError(
                f"Dispatcher with id {dispatcher_id} has already been registered under "
                f"different address {answer.address}: {dispatcher_address}"  # Horovod's own words
            )

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        """Return the address of the dispatcher when it is known. TimeoutException after so many seconds."""
        wait_s = check_timeout(timeout)
        answer = self._call(AwaitDispatcher(make_nonce(), dispatcher_id, wait_s), wait_s + ANSWER_S)
        self._check_dispatcher(answer, dispatcher_id)
        if answer.outcome is Outcome.TIMED_OUT:
            raise make_timeout(f"dispatcher {dispatcher_id}", "dispatcher", timeout)
        return answer.address

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """IndexError if there is no such dispatcher."""
        answer = self._call(RegisterWorker(make_nonce(), dispatcher_id, worker_id), ANSWER_S)
        self._check_dispatcher(answer, dispatcher_id)

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        """Wait until all workers of the dispatcher have registered. TimeoutException after so many seconds."""
        wait_s = check_timeout(timeout)
        answer = self._call(AwaitWorkers(make_nonce(), dispatcher_id, wait_s), wait_s + ANSWER_S)
        self._check_dispatcher(answer, dispatcher_id)
        if answer.outcome is Outcome.TIMED_OUT:
            raise make_timeout(f"workers for dispatcher {dispatcher_id}", "workers", timeout)

    def shutdown(self) -> None:
        """Tell the owner of the service, and all that wait for it, to end."""
        self._call(ShutDown(make_nonce()), ANSWER_S)

    def wait_for_shutdown(self) -> None:
        """Wait until someone calls shutdown(), or the service has ended: its process, or its host."""
        try:
            self._call(AwaitShutdown(make_nonce()), None)
        except ConnectionError as error:
            logger.warning("%s; taken for its shutdown", error)

    def _check_dispatcher(self, answer: ComputeAnswer, dispatcher_id: int) -> None:
        if answer.outcome is Outcome.SHUT_DOWN:
            raise RuntimeError("the compute service was shut down; is the training, or another rank of it, over?")
        if answer.outcome is Outcome.NO_SUCH_DISPATCHER:
            raise IndexError(f"dispatchers have ids from 0 to {answer.num_dispatchers - 1}, got {dispatcher_id}")

    def _call(self, request: AnyRequest, answer_s: float | None) -> ComputeAnswer:
        """Return the service's answer. Without answer_s, the wait ends with the connection; TCP's keepalive notices a
        host that is gone."""
        with self._connect(request) as sock:
            deadline = None if answer_s is None else Deadline(answer_s)
            try:
                (length,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size, deadline))
                body = receive_exactly(sock, length, deadline)
                proof = receive_exactly(sock, MAC_BYTES, deadline)
            except TimeoutError:
                raise ConnectionError(f"the compute service did not answer within {answer_s:g} s") from None
            except OSError as error:
                raise ConnectionError(f"the compute service has closed the connection ({error})") from None
        if not hmac.compare_digest(proof, self._key.mac(_ANSWER_LABEL, request.nonce.encode(), body)):
            raise ConnectionError("the compute service's answer was changed on its way")
        return msgspec.json.decode(body, type=ComputeAnswer)

    def _connect(self, request: AnyRequest) -> socket.socket:
        connection = ConnectionRequest(PURPOSE, 0, msgspec.json.encode(request).decode())
        problems = []
        for address in list(self._addresses):
            try:
                sock, _ = connect_authenticated(
                    address, self._key, connection, Deadline(CONNECT_S), before_retry=refuse_retry
                )
            except ConnectFailed as error:
                problems.append(f"{address}: {error.reason}")
                continue
            self._addresses.sort(key=lambda each, found=address: each != found)  # type: ignore[misc]  # try it first
            self._local_host = str(sock.getsockname()[0])
            return sock
        hint = "is the job of its compute workers running, and is this its key?"
        if all(address.startswith(f"{LOOPBACK}:") for address in self._addresses):
            hint = f"{hint} It listens for its own host only; compute_worker --network-interfaces changes that"
        raise ConnectionError(f"the compute service cannot be reached; {hint} ({'; '.join(problems)})")


def make_service_key(key: bytes) -> JobKey:
    """The key that the handshake uses, derived from the service's."""
    if not isinstance(key, bytes) or len(key) < 16:
        raise ValueError("the key of a compute service must be at least 16 bytes; use secret.make_secret_key()")
    return JobKey(derive_job_key(key, "horovod compute service"))


def make_nonce() -> str:
    return secrets.token_hex(16)


def check_timeout(timeout: float) -> float:
    if not timeout >= 0:  # also NaN
        raise ValueError(f"timeout must be a number of seconds, got {timeout!r}")
    return min(float(timeout), MAX_WAIT_S)


def make_timeout(awaited: str, short: str, timeout: float) -> TimeoutException:
    return TimeoutException(
        f"Timed out waiting for {awaited} to register. Try to find out what takes the {short} so long to register "
        f"or increase timeout. Timeout after {timeout} seconds."  # Horovod's own words
    )


def refuse_retry() -> NoReturn:
    """The addresses are known only when the service listens, so a retry does not help."""
    raise StartFailed("nobody listens there")


def receive_exactly(sock: socket.socket, num_bytes: int, deadline: Deadline | None) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        sock.settimeout(None if deadline is None else max(deadline.remaining_s, 1e-6))
        more = sock.recv(num_bytes - len(data))
        if not more:
            raise ConnectionResetError("it has ended")
        data += more
    return bytes(data)


def find_interfaces(nics: set[str] | None) -> dict[str, list[str]]:
    """Return the IPv4 addresses of interfaces that are up: of these, or of loopback and all that lead to others."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = {
        name: [each.address for each in addresses if each.family == socket.AF_INET]
        for name, addresses in sorted(psutil.net_if_addrs().items())
        if name in up
    }
    is_wanted: Callable[[str], bool] = (
        (lambda name: not name.startswith(HOST_LOCAL_INTERFACES)) if nics is None else nics.__contains__
    )
    wanted = {name: addresses for name, addresses in found.items() if addresses and is_wanted(name)}
    if not wanted:
        raise ValueError(
            f"none of the interfaces {sorted(nics or ())} is up with an IPv4 address; there are: {[*found]}"
        )
    return wanted
