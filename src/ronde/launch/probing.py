"""Which hosts reach each other, by trying: opens doors that only this job's hosts can enter, and knocks at those of
others. Used by launch/agent.

All of it waits for the network, so it happens in threads; answers leave through the `answer` callable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ronde.errors import StartFailed
from ronde.launch.messages import Failed, Probe, Probed
from ronde.net.addresses import candidates, format_address, free_port, parse_address
from ronde.net.door import Caller, Connection, Door, knock
from ronde.net.keys import JobKey
from ronde.types import Deadline

__all__ = ["Prober", "summarize"]

NUM_KNOCKS = 128
"""At a time."""
PATIENCE_S = 2.0
"""A silent address is called again after so long, so that close() does not wait longer than this."""
PURPOSE = "probe"


class Prober:
    """Carries out the probes of one agent, one after the other. `answer` is called in its thread."""

    def __init__(self, answer: Callable[[Probed | Failed], None]) -> None:
        self._answer = answer
        self._doors: list[Door] = []
        self._closed = threading.Event()
        # Owned by the prober, and made with the first probe. Touches the doors; close() does so after its end.
        self._pool: ThreadPoolExecutor | None = None

    def probe(self, order: Probe) -> None:
        """Begin; the answer comes when it is done."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="ronde-probe")
        self._pool.submit(self._run, order)

    def close(self) -> None:
        """Close the doors, and give up what is under way. Idempotent."""
        self._closed.set()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        self._close_doors()

    def _run(self, order: Probe) -> None:
        try:
            key = JobKey(order.key)
            found = self._knock_all(order, key) if order.others else self._open(order, key)
        except Exception as error:  # the thread's edge: the driver has to learn of it
            self._answer(Failed(-1, f"the network could not be looked at: {error}"))
        else:
            if not self._closed.is_set():
                self._answer(found)

    def _open(self, order: Probe, key: JobKey) -> Probed:
        self._close_doors()
        opened, failed = [], []
        for address in candidates():
            try:
                door = Door(key, unix=False, tcp=address, arrived=_say_goodbye)
            except StartFailed as error:
                failed.append(str(error))
                continue
            self._doors.append(door)
            opened.append(format_address(address, door.tcp_port))
        first = parse_address(opened[0])[0] if opened else "127.0.0.1"
        return Probed((tuple(opened),), ("; ".join(failed),), _free_ports(first, order.num_ports))

    def _close_doors(self) -> None:
        for door in self._doors:
            door.close()
        self._doors.clear()

    def _knock_all(self, order: Probe, key: JobKey) -> Probed:
        deadline = Deadline(order.limit_s)
        everywhere = [address for host in order.others for address in host]
        with ThreadPoolExecutor(max(1, min(NUM_KNOCKS, len(everywhere))), thread_name_prefix="ronde-knock") as pool:
            problems = dict(zip(everywhere, pool.map(partial(self._knock, key, deadline), everywhere), strict=True))
        return summarize(order.others, problems)

    def _knock(self, key: JobKey, deadline: Deadline, address: str) -> str:
        """Why it does not answer; nothing if it does."""
        while not deadline.passed and not self._closed.is_set():
            patience = Deadline(min(PATIENCE_S, deadline.left_s))
            try:
                sock, _ = knock(address, key, Caller(PURPOSE, 0), patience, before_retry=_give_up)
            except (StartFailed, ValueError) as error:
                if not patience.passed:  # it has answered, if not as we wished
                    return str(error).rpartition(f"{PURPOSE!r}: ")[2]
            else:
                sock.close()
                return ""
        return f"no answer within {deadline.seconds:g} s; is the host up, and does a firewall let the port through?"


def summarize(others: Sequence[Sequence[str]], problems: Mapping[str, str]) -> Probed:
    """The answer for these hosts: which addresses have no problem, and the problems of the rest in words."""
    reached = tuple(tuple(address for address in host if not problems[address]) for host in others)
    errors = tuple(
        "; ".join(f"{address}: {problems[address]}" for address in host if problems[address]) for host in others
    )
    return Probed(reached, errors)


def _give_up() -> None:
    """Doors were opened before anybody was asked to knock: whoever finds none need not try again."""
    raise StartFailed("the connection was refused or cut; does a firewall reject it?")


def _say_goodbye(caller: Caller, sock: Connection) -> bool:
    """To have been let in was all that the caller wanted."""
    sock.close()
    return True


def _free_ports(host: str, num_ports: int) -> tuple[int, ...]:
    found: set[int] = set()
    for _ in range(100 * num_ports):  # the system repeats itself only when it has next to none
        if len(found) < num_ports:
            found.add(free_port(host))
    if len(found) < num_ports:
        raise StartFailed(f"there are no {num_ports} free TCP ports at {host}")
    return tuple(sorted(found))
