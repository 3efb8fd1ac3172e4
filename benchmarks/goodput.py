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

WAIT_S = 60.0
BLOCK = bytes(1 << 20)


def meet(role: str, address: str, port: int) -> socket.socket:
    if role == "listen":
        with socket.create_server((address, port)) as door:
            door.settimeout(WAIT_S)
            peer, _ = door.accept()
        return peer
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return socket.create_connection((address, port), timeout=WAIT_S)
        except ConnectionRefusedError:  # the other end is not there yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def send(peer: socket.socket, num_bytes: int) -> None:
    view = memoryview(BLOCK)
    while num_bytes:
        num_bytes -= peer.send(view[: min(num_bytes, len(view))])


def receive(peer: socket.socket, num_bytes: int) -> None:
    room = bytearray(1 << 20)
    while num_bytes:
        got = peer.recv_into(room, min(num_bytes, len(room)))
        if not got:
            raise SystemExit("the other end is gone")
        num_bytes -= got


def main(role: str, address: str, port: int, num_bytes: int) -> None:
    with meet(role, address, port) as peer:
        peer.settimeout(WAIT_S)
        send(peer, 1)  # both are here: the clock starts at both ends
        receive(peer, 1)
        start = time.perf_counter_ns()
        sender = threading.Thread(target=send, args=(peer, num_bytes))
        sender.start()
        receive(peer, num_bytes)
        took_ns = time.perf_counter_ns() - start
        sender.join()
    print(8 * num_bytes / took_ns)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
