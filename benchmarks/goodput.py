"""What plain TCP gets through a link, in both directions at once. Started twice by netns.py, once per end.

    python goodput.py listen ADDRESS PORT BYTES
    python goodput.py connect ADDRESS PORT BYTES

Each end sends BYTES and receives BYTES at the same time, as a ring of two hosts does, and prints the gigabits per
second of payload that it received.
"""

from __future__ import annotations

import socket
import sys
import threading
import time

TIMEOUT_S = 60.0


def connect(role: str, address: str, port: int) -> socket.socket:
    if role == "listen":
        with socket.create_server((address, port)) as listener:
            listener.settimeout(TIMEOUT_S)
            return listener.accept()[0]
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return socket.create_connection((address, port), timeout=TIMEOUT_S)
        except ConnectionRefusedError:  # the other end does not listen yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def receive(peer: socket.socket, num_bytes: int) -> None:
    buffer = bytearray(1 << 20)
    while num_bytes:
        received = peer.recv_into(buffer, min(num_bytes, len(buffer)))
        if not received:
            raise SystemExit("the other end has closed the connection")
        num_bytes -= received


def main(role: str, address: str, port: int, num_bytes: int) -> None:
    with connect(role, address, port) as peer:
        peer.settimeout(TIMEOUT_S)
        peer.sendall(b".")  # both are connected: the clock starts at both ends
        receive(peer, 1)
        sender = threading.Thread(target=peer.sendall, args=(bytes(num_bytes),))
        start = time.perf_counter_ns()
        sender.start()
        receive(peer, num_bytes)
        took_ns = time.perf_counter_ns() - start
        sender.join()
    print(8 * num_bytes / took_ns)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
