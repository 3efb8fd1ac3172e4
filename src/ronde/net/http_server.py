"""An HTTP server for predictions, metrics and pages: token, Host check, limits and TLS, in one place for all of them.

HttpServer runs an ASGI application on uvicorn, in the asyncio loop of its caller. Before the application sees a
request, its Host and its token were checked (GuardedApp); the application reads bodies with RequestBody, and all of
them together stay within one BodyBudget. What an attacker could make grow or last has a limit: connections, headers,
bodies (also compressed ones), the time that a client takes for its headers, its body, and for reading the reply.

uvicorn is optional (`ronde[serve]`), so it is imported where it is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import math
import os
import secrets
import socket
import stat
import zlib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec

from ronde.errors import StartFailed
from ronde.net.addresses import format_address, listen_error, resolve_host
from ronde.net.connect import close_in_children
from ronde.text import format_bytes, shorten

if TYPE_CHECKING:
    import uvicorn

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers: TypeAlias = "list[tuple[bytes, bytes]]"

MIN_TOKEN_CHARS = 16
TOKEN_BYTES = 32
MAX_HEADER_BYTES = 64 * 1024
MIN_BODY_BYTES_PER_S = 1_000_000
"""A body gets so much more time, by its length, than body_timeout_s."""
MAX_DISCARDED_BYTES, DISCARD_S = 64_000_000, 2.0
"""So much of a request that is refused is read, and for so long."""
WRITE_STALL_S = 30.0
"""A client that reads nothing of its reply for so long is cut off."""
BACKLOG = 2048
CLIENT_EXTENSION, BODY_EXTENSION = "ronde.client", "ronde.has_body"
"""Of the scope of a request: its ClientConnection, and whether all of its body has come."""
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")
ENCODINGS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}
"""What a body may be compressed with, and zlib's number for it."""

logger = logging.getLogger("ronde.http")


class RequestError(Exception):
    """A request cannot be answered as asked: the status and the message of the reply."""

    def __init__(self, status: int, message: str, *, retry_after_s: float | None = None, close: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        """When the client may try again, if it may."""
        self.close = close
        """Whether the connection has to end: the rest of the request was not read."""

    @property
    def headers(self) -> Headers:
        headers: Headers = [(b"connection", b"close")] if self.close else []
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpOptions:
    """Where the server listens, whom it answers, and what it takes."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free one."""
    token: str = field(default="", repr=False)
    """What clients have to send as `Authorization: Bearer TOKEN`; empty: none is needed."""
    public_paths: frozenset[str] = frozenset()
    """Paths that need no token."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in the header Host, without port, that are answered. By default, a server that listens on a loopback
    address answers only loopback names, so that no web page can reach it under a name of its own; others answer all."""
    certificate: str = ""
    """File with the certificate chain for TLS, in PEM."""
    private_key: str = ""
    max_connections: int = 4096
    max_body_bytes: int = 64 * 1024 * 1024
    """Of one request, also when it was decompressed."""
    max_buffered_bytes: int = 1024 * 1024 * 1024
    """Of the bodies of all requests that are being answered."""
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    keep_alive_s: float = 75.0

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.private_key):
            raise ValueError("TLS needs both a certificate and its private key")
        for name in (self.certificate, self.private_key):
            if name and not os.access(name, os.R_OK):
                raise ValueError(f"{name} cannot be read; TLS needs it")
        if self.token and len(self.token) < MIN_TOKEN_CHARS:
            raise ValueError(f"a token must have at least {MIN_TOKEN_CHARS} characters")

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False


# --- tokens ----------------------------------------------------------------------------------------------------------


def new_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


def read_token(path: Path) -> str:
    """Return the token in a file. ValueError if there is none that can be used."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(4097).strip()
    except OSError as error:
        raise ValueError(f"the token cannot be read from {path}: {error.strerror}") from None
    if mode & 0o007:
        logger.warning("%s can be read by every user of this machine (mode %04o); chmod 600 it", path, mode)
    if len(text) > 4096 or not text.isascii() or not text.decode("ascii").isprintable() or b" " in text:
        raise ValueError(f"{path} must hold one token: printable characters without spaces")
    if len(text) < MIN_TOKEN_CHARS:
        raise ValueError(f"the token in {path} must have at least {MIN_TOKEN_CHARS} characters")
    return text.decode("ascii")


def write_token(path: Path, token: str) -> None:
    """Write a token to a file that only its user can read."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:  # noqa: PTH123  # a descriptor, not a path
        file.write(token + "\n")


# --- requests --------------------------------------------------------------------------------------------------------


class GuardedApp:
    """Checks Host and token of each request, and hands it to the application. Errors of both become replies."""

    def __init__(self, app: AsgiApp, options: HttpOptions) -> None:
        self._app = app
        self._public_paths = options.public_paths
        self._token = b"bearer " + options.token.encode() if options.token else b""
        hosts = options.allowed_hosts or (LOCAL_NAMES if options.is_loopback else ())
        self._hosts = frozenset(host.lower().encode() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no WebSockets; lifespan is off
            return
        has_begun = False

        async def send_reply(message: MutableMapping[str, Any]) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, send_reply)
        except RequestError as error:
            if not has_begun:
                if error.close and error.status != 408 and header(scope, b"expect") is None:
                    await _discard_body(receive)
                await send_json(send, error.status, {"error": str(error)}, error.headers)
        except ConnectionError:  # the client has left
            pass
        except Exception:
            logger.exception("a request to %s could not be answered", shorten(scope["path"]))
            if not has_begun:
                await send_json(send, 500, {"error": "an internal error; the log of the server says more"})

    def _check(self, scope: Scope) -> None:
        host = authorization = b""
        num_hosts = 0
        for name, value in scope["headers"]:
            if name == b"host":
                host, num_hosts = value, num_hosts + 1
            elif name == b"authorization":
                authorization = value
        if self._hosts and (num_hosts != 1 or _without_port(host) not in self._hosts):
            shown = shorten(host.decode("latin-1"))
            raise RequestError(421, f"this server does not answer for the host {shown!r}", close=True)
        if self._token and scope["path"] not in self._public_paths:
            kind, _, given = authorization.partition(b" ")
            if not hmac.compare_digest(kind.lower() + b" " + given.strip(), self._token):
                problem = "the token is wrong" if authorization else "a token is needed"
                raise RequestError(401, f"{problem}; send the header `Authorization: Bearer TOKEN`", close=True)


def _without_port(host: bytes) -> bytes:
    name, colon, port = host.lower().rpartition(b":")
    return name if colon and port.isdigit() and (not name.count(b":") or name.endswith(b"]")) else host.lower()


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return the value of a header; None if there is none. RequestError if it is there twice."""
    found = [value for key, value in scope["headers"] if key == name]
    if len(found) > 1:
        raise RequestError(400, f"the header {name.decode()} is there twice", close=True)
    return found[0] if found else None


class ClientConnection:
    """The connection of a client, for those who answer its requests, one after the other."""

    def __init__(self) -> None:
        self.on_leave: Callable[[], None] | None = None
        """Called when the client closes the connection before it has its reply. (To wait for the message
        `http.disconnect` would take a task for each request.)"""


def client_of(scope: Scope) -> ClientConnection:
    """The connection of a request."""
    client: ClientConnection = scope["extensions"][CLIENT_EXTENSION]
    return client


class BodyBudget:
    """How many bytes of bodies are held at a time, in all requests together."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """RequestError if there is no room. give_back() returns the same number later."""
        if self.num_bytes + num_bytes > self.limit_bytes:
            held = format_bytes(self.num_bytes)
            raise RequestError(
                503, f"the server holds {held} of requests already; try again", retry_after_s=1, close=True
            )
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


@contextlib.contextmanager
def _cancelled_after(timeout_s: float) -> Iterator[Callable[[], bool]]:
    """Cancel the current task after a time; the function says whether that has happened. (asyncio.timeout is not in
    Python 3.10, and wait_for makes a task of its own.)"""
    task, has_expired = asyncio.current_task(), False
    assert task is not None

    def expire() -> None:
        nonlocal has_expired
        has_expired = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(timeout_s, expire)
    try:
        yield lambda: has_expired
    finally:
        timer.cancel()


async def _discard_body(receive: Receive) -> None:
    """Read what a client that is refused still sends, up to a limit: it reads the reply only when it has sent all, and
    would find the connection broken."""
    num_bytes = 0
    with _cancelled_after(DISCARD_S) as has_expired:
        try:
            while num_bytes < MAX_DISCARDED_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
        except asyncio.CancelledError:
            if not has_expired():
                raise


class RequestBody:
    """Reads the body of one request. A context: its bytes count against the budget until the end of it."""

    def __init__(self, scope: Scope, receive: Receive, options: HttpOptions, budget: BodyBudget) -> None:
        self._scope = scope
        self._receive = receive
        self._options = options
        self._budget = budget
        self._num_taken = 0

    def __enter__(self) -> RequestBody:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.give_back(self._num_taken)

    async def read(self) -> bytes:
        """Return the body, decompressed. RequestError if it is too large, too slow, or cannot be decompressed."""
        given = header(self._scope, b"content-length")
        length = int(given) if given is not None else None  # the parser has checked that it is a number
        if length is not None:
            self._take(length)
        data = await self._receive_all(length)
        encoding = header(self._scope, b"content-encoding")
        if encoding is None or encoding.lower() == b"identity":
            return data
        return self._decompress(data, encoding.strip().lower())

    def _take(self, num_bytes: int) -> None:
        """Count further bytes."""
        limit_bytes = self._options.max_body_bytes
        if self._num_taken + num_bytes > limit_bytes:
            message = f"the body is larger than the {format_bytes(limit_bytes)} that this server takes"
            raise RequestError(413, message, close=True)
        self._budget.take(num_bytes)
        self._num_taken += num_bytes

    async def _receive_all(self, length: int | None) -> bytes:
        if self._scope["extensions"].get(BODY_EXTENSION):  # most are here before anybody asks, and need no timer
            return await self._receive_parts(length)
        timeout_s = self._options.body_timeout_s
        timeout_s += (self._options.max_body_bytes if length is None else length) / MIN_BODY_BYTES_PER_S
        with _cancelled_after(timeout_s) as has_expired:
            try:
                return await self._receive_parts(length)
            except asyncio.CancelledError:
                if not has_expired():
                    raise
                raise RequestError(408, f"the body did not come within {timeout_s:.0f} s", close=True) from None

    async def _receive_parts(self, length: int | None) -> bytes:
        parts: list[bytes] = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError("the client has left")
            part: bytes = message.get("body", b"")
            if length is None and part:
                self._take(len(part))
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def _decompress(self, data: bytes, encoding: bytes) -> bytes:
        if encoding not in ENCODINGS:
            shown = shorten(encoding.decode("latin-1"))
            raise RequestError(415, f"the content encoding {shown!r} is unknown; there are gzip and deflate")
        limit_bytes = self._options.max_body_bytes
        decompressor = zlib.decompressobj(ENCODINGS[encoding])
        try:
            # One byte more than is allowed is enough to know.
            plain = decompressor.decompress(data, limit_bytes + 1)
        except zlib.error as error:
            raise RequestError(400, f"the body is no {encoding.decode()}: {error}") from None
        if len(plain) > limit_bytes:
            message = f"the decompressed body is larger than the {format_bytes(limit_bytes)} that this server takes"
            raise RequestError(413, message)
        if not decompressor.eof or decompressor.unused_data:
            problem = "is truncated" if not decompressor.eof else "has something behind its end"
            raise RequestError(400, f"the compressed body {problem}")
        more_bytes = max(0, len(plain) - self._num_taken)
        self._budget.take(more_bytes)
        self._num_taken += more_bytes
        return plain


async def send_json(send: Send, status: int, value: Any, headers: Headers | None = None) -> None:
    await send_reply(send, status, msgspec.json.encode(value), b"application/json", headers)


async def send_reply(send: Send, status: int, body: bytes, kind: bytes, headers: Headers | None = None) -> None:
    """Send a whole reply."""
    more = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*more, *(headers or ())]})
    await send({"type": "http.response.body", "body": body})


# --- the server ------------------------------------------------------------------------------------------------------


class HttpServer:
    """Serves an application in the running asyncio loop, from start() to stop()."""

    def __init__(self, app: AsgiApp, options: HttpOptions) -> None:
        self._options = options
        self._app = GuardedApp(app, options)
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0
        """The one at which it listens, after start()."""

    @property
    def url(self) -> str:
        scheme = "https" if self._options.certificate else "http"
        host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(self._options.host, self._options.host)
        return f"{scheme}://{format_address(host, self.port)}"

    async def start(self) -> None:
        """Listen, and answer from now on. StartFailed if the address cannot be had, ValueError if TLS cannot begin."""
        try:
            import uvicorn
        except ModuleNotFoundError:
            raise ModuleNotFoundError("serving needs uvicorn and httptools: pip install ronde[serve]") from None
        options = self._options
        config = uvicorn.Config(
            self._app,
            http=_make_protocol_class(options),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(options.keep_alive_s),
            ssl_certfile=options.certificate or None,
            ssl_keyfile=options.private_key or None,
            backlog=BACKLOG,
        )
        try:
            config.load()
        except OSError as error:  # ssl.SSLError is one
            raise ValueError(f"TLS cannot use {options.certificate} and {options.private_key}: {error}") from None
        listening = self._listen()
        self.port = int(listening.getsockname()[1])

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:  # the caller handles signals
                yield

        self._server = Server(config)
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listening]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise StartFailed("the HTTP server has ended before it began")
            await asyncio.sleep(0.01)

    def _listen(self) -> socket.socket:
        host, port = self._options.host, self._options.port
        address = resolve_host(host, port)[0]
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        close_in_children(listening)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except OSError as error:
            listening.close()
            raise listen_error(host, port, error.strerror) from None
        listening.setblocking(False)
        return listening

    async def stop(self, timeout_s: float) -> bool:
        """Accept no more connections, answer what was asked, and end. What takes longer is cut off: return whether
        nothing was."""
        if self._server is None or self._task is None:
            return True
        self._server.should_exit = True
        done, _ = await asyncio.wait([self._task], timeout=timeout_s)
        if not done:
            self._server.force_exit = True
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            for task in list(self._server.server_state.tasks):
                task.cancel()
            await asyncio.wait([self._task], timeout=timeout_s)
        return bool(done)


class _ReplyTransport:
    """The transport of one connection, as uvicorn writes replies to it: first the head, then the body. Both are sent
    with one call, so that the kernel is asked once and the client woken once."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""
        """Of a reply whose body has not been written yet."""
        self.is_closing = transport.is_closing
        self.get_extra_info = transport.get_extra_info

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 2") and data.endswith(b"\r\n\r\n"):
            self._head = data  # until flush() at the latest
            return
        self._transport.write(data)

    def flush(self) -> None:
        """Write the head of a reply without a body. Called at the end of each reply."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


def _make_protocol_class(options: HttpOptions) -> type[asyncio.Protocol]:
    """uvicorn's protocol with limits for clients that are slow on purpose: for the number of connections, for the size
    and the time of headers, and for the time in which nothing of a reply is read. A reply is one write."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ModuleNotFoundError:
        raise ModuleNotFoundError("serving needs uvicorn and httptools: pip install ronde[serve]") from None

    class LimitedProtocol(HttpToolsProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._in_headers = True
            self._num_header_bytes = 0
            self._header_timer: asyncio.TimerHandle | None = None
            self._stall_timer: asyncio.TimerHandle | None = None
            self._reply_transport: _ReplyTransport
            self._client = ClientConnection()

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
            super().connection_made(transport)
            self._reply_transport = _ReplyTransport(transport)
            self.transport = cast("asyncio.Transport", self._reply_transport)
            if len(self.connections) > options.max_connections:
                self._refuse(503, b"too many connections", b"retry-after: 1\r\n")
            else:
                self._start_header_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._client.on_leave is not None:
                self._client.on_leave()
            for timer in (self._header_timer, self._stall_timer, self.timeout_keep_alive_task):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._in_headers:
                self._num_header_bytes += len(data)
            super().data_received(data)
            if self._in_headers and not self.transport.is_closing():
                if self._num_header_bytes > MAX_HEADER_BYTES:
                    self._refuse(431, b"the headers are too long")
                elif self._header_timer is None:
                    self._start_header_timer()

        def on_message_begin(self) -> None:
            self._in_headers = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_headers = False
            self._num_header_bytes = 0
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None
            extensions: dict[str, Any] = {CLIENT_EXTENSION: self._client}
            self.scope["extensions"] = extensions
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            extensions: dict[str, Any] = self.scope["extensions"]
            extensions[BODY_EXTENSION] = True
            if not self.pipeline:  # uvicorn stops reading in large bodies, and would not see that the client leaves
                self.flow.resume_reading()

        def on_response_complete(self) -> None:
            self._reply_transport.flush()
            super().on_response_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stall_timer = self.loop.call_later(WRITE_STALL_S, self.transport.abort)

        def resume_writing(self) -> None:
            if self._stall_timer is not None:
                self._stall_timer.cancel()
                self._stall_timer = None
            super().resume_writing()

        def _start_header_timer(self) -> None:
            def expire() -> None:
                self._header_timer = None
                self._refuse(408, b"the headers did not come in time")

            self._header_timer = self.loop.call_later(options.header_timeout_s, expire)

        def _refuse(self, status: int, message: bytes, headers: bytes = b"") -> None:
            body = b'{"error":"' + message + b'"}'
            length = str(len(body)).encode()
            first = b"HTTP/1.1 " + str(status).encode() + b" \r\ncontent-type: application/json\r\n"
            self.transport.write(
                first + headers + b"content-length: " + length + b"\r\nconnection: close\r\n\r\n" + body
            )
            self.transport.close()

    return LimitedProtocol
