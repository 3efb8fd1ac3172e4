"""The HTTP server: token, Host, limits and time limits, by raw connections."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import socket
import ssl
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ronde.errors import StartFailed
from ronde.net.http_server import BodyBudget, HttpOptions, HttpServer, RequestBody, read_token, send_reply, write_token
from tests.limits import PATIENCE_S
from tests.services import needs

TOKEN = "a-token-of-some-length"


@contextmanager
def serving(**given: Any) -> Iterator[HttpServer]:
    """A server that answers with the body of the request."""
    options = HttpOptions(**{"token": TOKEN, "public_paths": frozenset({"/open"}), **given})
    budget = BodyBudget(options.max_buffered_bytes)
    loop = asyncio.new_event_loop()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/fail":
            raise RuntimeError("on purpose")
        with RequestBody(scope, receive, options, budget) as body:
            await send_reply(send, 200, await body.read(), b"application/octet-stream")

    server = HttpServer(app, options)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(PATIENCE_S)

    try:
        run(server.start())
        yield server
        assert budget.num_bytes == 0
    finally:
        run(server.stop(PATIENCE_S))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def ask(server: HttpServer, request: bytes, *, more: bytes = b"") -> bytes:
    """Send bytes, and return all that comes back until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
        sock.sendall(request + more)
        return read_all(sock)


def read_all(sock: socket.socket) -> bytes:
    parts = []
    try:
        while part := sock.recv(65536):
            parts.append(part)
    except ConnectionResetError:  # it was closed with bytes of ours unread
        pass
    return b"".join(parts)


def make_request(
    path: str = "/", body: bytes = b"", *, token: str = TOKEN, host: str = "localhost", **headers: Any
) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
    lines += [f"Authorization: Bearer {token}"] if token else []
    given = {"Content-Length": len(body), **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines += [f"{name}: {value}" for name, value in given.items() if value is not None]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def status(reply: bytes) -> int:
    return int(reply.split()[1]) if reply else 0


def test_token_and_host_decide_who_is_answered() -> None:
    with serving() as server:
        assert ask(server, make_request(body=b"hello")).endswith(b"\r\n\r\nhello")
        for token in ("", "wrong-token-of-length", TOKEN + "x", TOKEN[:-1]):
            reply = ask(server, make_request(body=b"hello", token=token))
            assert status(reply) == 401 and b"www-authenticate: Bearer" in reply and TOKEN.encode() not in reply
        assert status(ask(server, make_request("/open", token=""))) == 200
        for host in ("evil.example", "localhost.evil.example", "", "evil:80"):
            assert status(ask(server, make_request(host=host))) == 421
        for host in ("LOCALHOST:99", "127.0.0.1:8000", "[::1]:7", "[::1]"):
            assert status(ask(server, make_request(host=host))) == 200
        assert status(ask(server, make_request("/fail"))) == 500


def test_bodies_have_a_limit_however_they_are_sent() -> None:
    with serving(max_body_bytes=1000) as server:
        assert status(ask(server, make_request(body=bytes(1000)))) == 200
        assert status(ask(server, make_request(body=bytes(1001)))) == 413
        assert status(ask(server, make_request(Content_Length=10**15))) == 413
        chunked = make_request(Content_Length=None, Transfer_Encoding="chunked")
        chunk = b"1f4\r\n" + bytes(500) + b"\r\n"
        assert status(ask(server, chunked, more=2 * chunk + b"0\r\n\r\n")) == 200
        assert status(ask(server, chunked, more=3 * chunk + b"0\r\n\r\n")) == 413
        bomb = gzip.compress(bytes(10_000_000))
        assert status(ask(server, make_request(body=bomb[:900], Content_Encoding="gzip"))) == 413
        small = gzip.compress(bytes(900))
        assert status(ask(server, make_request(body=small, Content_Encoding="gzip"))) == 200
        assert status(ask(server, make_request(body=zlib.compress(bytes(900)), Content_Encoding="deflate"))) == 200
        for body, kind in ((small[:-5], "gzip"), (b"no gzip", "gzip"), (small + b"x", "gzip")):
            assert status(ask(server, make_request(body=body, Content_Encoding=kind))) == 400
        assert status(ask(server, make_request(body=b"x", Content_Encoding="br"))) == 415


def test_all_bodies_together_have_a_limit() -> None:
    with serving(max_buffered_bytes=1000) as server:
        first = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
        with first:
            first.sendall(make_request(body=bytes(900))[:-1])  # one byte is missing
            deadline_s = time.monotonic() + PATIENCE_S
            while status(reply := ask(server, make_request(body=bytes(200)))) == 200:
                assert time.monotonic() < deadline_s
            assert status(reply) == 503 and b"retry-after: " in reply
            first.sendall(b"x")
            assert status(read_all(first)) == 200
        assert status(ask(server, make_request(body=bytes(200)))) == 200


def test_slow_clients_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(header_timeout_s=0.2, body_timeout_s=0.2, max_body_bytes=100_000) as server:
        assert status(ask(server, b"")) == 408
        assert status(ask(server, b"POST / HTTP/1.1\r\nHost: localhost\r\nA: ")) == 408
        assert status(ask(server, make_request(body=bytes(100))[:-1])) == 408


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\nContent-Length: 0\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: " + b"x" * 200_000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_no_request_gets_an_error_and_hurts_nobody(request_bytes: bytes) -> None:
    with serving(header_timeout_s=1.0) as server:
        assert 400 <= status(ask(server, request_bytes)) < 500
        assert status(ask(server, make_request())) == 200


def test_connections_are_counted() -> None:
    with serving(max_connections=2) as server:
        address = ("127.0.0.1", server.port)
        with socket.create_connection(address) as first, socket.create_connection(address) as second:
            for sock in (first, second):
                sock.settimeout(PATIENCE_S)
                sock.sendall(make_request("/open", token="").replace(b"Connection: close", b"Connection: keep-alive"))
                assert sock.recv(12).endswith(b"200")
            assert status(ask(server, make_request())) == 503


def test_a_port_that_is_taken_is_named() -> None:
    with serving() as server, pytest.raises(StartFailed, match=str(server.port)), serving(port=server.port):
        pass


@needs("openssl", missing="" if shutil.which("openssl") else "no openssl to make a certificate with")
def test_tls(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    more = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *more], check=True, capture_output=True)
    with serving(certificate=str(certificate), private_key=str(key)) as server:
        assert server.url == f"https://127.0.0.1:{server.port}"
        context = ssl.create_default_context(cafile=str(certificate))
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as plain:
            with context.wrap_socket(plain, server_hostname="localhost") as sock:
                sock.sendall(make_request(body=b"secret"))
                assert read_all(sock).endswith(b"secret")
    key.write_text("no key")
    with pytest.raises(ValueError, match="TLS"), serving(certificate=str(certificate), private_key=str(key)):
        pass
    with pytest.raises(ValueError, match="both"):
        HttpOptions(certificate=str(certificate))


def test_tokens_are_kept_in_files_that_only_their_user_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "token"
    write_token(path, TOKEN)
    assert path.stat().st_mode & 0o777 == 0o600 and read_token(path) == TOKEN and not caplog.records
    path.chmod(0o644)
    assert read_token(path) == TOKEN and "0644" in caplog.text
    for text in ("short", "", "two words in a row", "x" * 5000, "täglich-ein-anderer"):
        path.write_text(text)
        with pytest.raises(ValueError, match=str(path)):
            read_token(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_token(tmp_path / "none")
    assert TOKEN not in repr(HttpOptions(token=TOKEN))
