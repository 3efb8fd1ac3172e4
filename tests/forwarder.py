"""A TCP forwarder between a client and a server, which loses what passes through it when the test wants it to."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from typing import Self

from tests.limits import PATIENCE_S

CHUNK_BYTES = 1 << 16


class Forwarder:
    """Forwards connections to `port` of this host; a context. One thread does all the work."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.swallow_to_server = self.swallow_to_client = False
        """Whether what is sent in this direction gets lost."""
        self.num_swallowed = 0
        """Bytes."""
        self.change: Callable[[bytes], bytes] = lambda data: data
        """Changes what passes through, in both directions."""
        self._accepting = True
        self._pairs: dict[socket.socket, tuple[socket.socket, bool]] = {}
        """By socket: the other one, and whether it is the server's."""
        self._wakeup, self._waker = socket.socketpair()
        self._requests: list[threading.Event] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="forwarder")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._waker.send(b"x")
        self._thread.join()
        self._close_pairs()
        for sock in (self._listener, self._wakeup, self._waker):
            sock.close()

    def cut(self, *, for_good: bool = False) -> None:
        """Break all connections. What comes after is forwarded again, unless they are cut for good."""
        self._accepting = not for_good
        done = threading.Event()
        self._requests.append(done)
        self._waker.send(b"x")
        assert done.wait(PATIENCE_S)

    def _run(self) -> None:
        while not self._stopping:
            ready, _, _ = select.select([self._listener, self._wakeup, *self._pairs], [], [])
            for sock in ready:
                if sock is self._listener:
                    self._accept()
                elif sock is self._wakeup:
                    self._wakeup.recv(1)
                    if self._requests:
                        self._close_pairs()
                        self.swallow_to_server = self.swallow_to_client = False
                        self._requests.pop().set()
                elif sock in self._pairs:
                    self._forward(sock)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if not self._accepting:
            return client.close()
        server = socket.create_connection(self._target)
        self._pairs[client], self._pairs[server] = (server, True), (client, False)

    def _forward(self, sock: socket.socket) -> None:
        other, to_server = self._pairs[sock]
        try:
            data = sock.recv(CHUNK_BYTES)
            if data and (self.swallow_to_server if to_server else self.swallow_to_client):
                self.num_swallowed += len(data)
            elif data:
                other.sendall(self.change(data))
        except OSError:
            data = b""
        if not data:
            for each in (sock, other):
                self._pairs.pop(each)
                each.close()

    def _close_pairs(self) -> None:
        for sock in self._pairs:
            sock.close()
        self._pairs.clear()
