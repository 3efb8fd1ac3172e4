"""The agents of all hosts of a job: called in parallel, checked, and asked where they reach each other. Used by the
driver, and by whoever else wants to know about hosts.

A *place* is a host of the job, by its index; the driver's own machine is the last one, when it is not a host itself:
it has no ranks, but all ranks call the coordinator there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ronde.errors import StartFailed
from ronde.launch.here import Machine, find_here
from ronde.launch.job import Host, Job
from ronde.launch.line import AgentLine, LocalLine, SshLine
from ronde.launch.loop import Loop
from ronde.launch.messages import Beat, Failed, FromAgent, FromDriver, Hello, Probe, Probed
from ronde.launch.reach import Finding, choose_addresses
from ronde.launch.ssh import SshCall, Trouble, no_directory
from ronde.net.addresses import free_port

__all__ = ["Crew", "Ground", "Site", "Stopped"]

LOOPBACK = "127.0.0.1"
PROBE_S = 5.0
"""How long an address may take to answer."""
ANSWER_S = 5.0
"""Beyond that, until the answer of an agent is here."""
END_S = 5.0
"""How long agents may take to end."""
BEATS_LOST = 6
"""An agent that hears nothing for so many beats takes the network for cut, and ends. Generous: its driver may only be
very busy, and ranks that use ronde notice a cut by themselves, and earlier."""
WEEK_S = 7 * 24 * 3600.0


Answer = TypeVar("Answer", Hello, Probed)


class Stopped(Exception):
    """Somebody wants the job to end before it has begun."""


@dataclass(frozen=True, slots=True)
class Site:
    """What was found out about one host."""

    cpus: tuple[int, ...]
    """Cores that ranks may use."""
    address: str = ""
    """Where ranks of other hosts reach it; empty when there are none."""
    ports: tuple[int, ...] = ()
    """TCP ports that nobody uses there."""
    is_here: bool = True
    """Whether it is the driver's own machine."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What has to be known before ranks start."""

    coordinator: str
    """The driver's address that all ranks reach."""
    sites: tuple[Site, ...]
    """By host."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where every rank reaches each host."""
        return tuple(site.address or LOOPBACK for site in self.sites)


class Crew:
    """The lines to all places. meet() them, find the ground(), take_over() what they report; close() at the end."""

    def __init__(self, loop: Loop, job: Job, hosts: Sequence[Host], python: str) -> None:
        self._loop = loop
        self._job = job
        self._python = python
        self._hosts = tuple(hosts)
        self._lines: list[AgentLine] = []
        self._troubles: dict[int, Trouble] = {}
        self._answers: dict[int, FromAgent] = {}
        self._met: set[int] = set()
        self._ended: set[int] = set()
        self._hear: Callable[[int, FromAgent], None] = self._note_answer
        self._lose: Callable[[int, Trouble], None] = self._troubles.__setitem__
        self._stopped = False
        self._silence_s = BEATS_LOST * job.settings.heartbeat_s
        self._done = threading.Event()
        # Owned by the crew. Touches nothing but AgentLine.beat: agents need a sign of life also while the driver's loop
        # waits for a terminal that does not go on.
        self._heart = threading.Thread(target=self._beat, name="ronde-heart", daemon=True)
        self.hellos: dict[int, Hello] = {}
        """What each place said of itself."""
        self.driver = 0
        """The place of the driver."""

    def meet(self) -> None:
        """Start an agent on every host, all at once. StartFailed says of each host that cannot be used why not."""
        here = find_here(self._hosts, Machine.this())
        self.driver = here.index(True) if True in here else len(self._hosts)
        hosts = self._hosts if True in here else (*self._hosts, Host("localhost"))
        for index, host in enumerate(hosts):
            self._open(index, host, local=index == len(self._hosts) or here[index])
        self.hellos = self._wait(Hello, self._job.ssh.start_s)
        self._compare(self.hellos)
        if not all(map(self._is_local, self.hellos)):
            self.sleep(False)
            self._heart.start()

    def ground(self, key: str, num_ports: Sequence[int]) -> Ground:
        """Find out where everybody reaches everybody, and so many free ports on each host."""
        if len(self._lines) == 1:
            return Ground(LOOPBACK, (Site(self.hellos[0].cpus, ports=_free_ports(num_ports[0])),))
        counts = (*num_ports, 0)
        own = self._ask({index: Probe(key, (), PROBE_S, counts[index]) for index in self.hellos})
        doors = tuple(own[index].reached[0] for index in sorted(own))
        tried = self._ask({index: Probe(key, doors, PROBE_S) for index in self.hellos})
        hosts = range(len(self._hosts))
        findings = [
            Finding(
                name=line.host.name if index in hosts else "this machine",
                doors=doors[index],
                calls=index in hosts,
                reached=tried[index].reached,
                errors=tried[index].errors,
            )
            for index, line in enumerate(self._lines)
        ]
        chosen = choose_addresses(findings)
        sites = [Site(self.hellos[i].cpus, chosen[i], own[i].ports, is_here=self._is_local(i)) for i in hosts]
        return Ground(chosen[self.driver], tuple(sites))

    def take_over(self, hear: Callable[[int, FromAgent], None], lose: Callable[[int, Trouble], None]) -> None:
        """From now on these hear what agents report, and which places are lost."""
        self._hear, self._lose = hear, lose
        for index, trouble in self._troubles.items():  # lost since they were last asked
            lose(index, trouble)

    def send(self, orders: Mapping[int, FromDriver]) -> None:
        """To each place its message. Those in this process come last: they carry it out at once."""
        for index in sorted(orders, key=self._is_local):
            self._lines[index].send(orders[index])

    def pause(self, on: bool) -> None:
        """Leave what agents say where it is, or go on."""
        for line in self._lines:
            line.pause(on)

    def sleep(self, on: bool) -> None:
        """The driver is about to be stopped by its user, and agents are not to worry; or it goes on."""
        for line in self._lines:
            line.send(Beat(WEEK_S if on else self._silence_s))

    def stop(self) -> None:
        """Do not wait for anybody any more."""
        self._stopped = True

    def close(self) -> None:
        """End all agents and what they started; wait for that as long as it is worth it. Idempotent."""
        lines, self._lines = self._lines, []
        if not lines:
            return
        self._hear = lambda index, message: None
        self._lose = lambda index, trouble: None
        self._done.set()
        for index in self._met - self._ended:  # whoever never said hello has started nothing
            lines[index].end()
        timer = self._loop.at(END_S, lambda: None)
        self._loop.run(lambda: self._met <= self._ended or not timer.waits)
        timer.cancel()
        if self._heart.is_alive():
            self._heart.join()
        for line in lines:
            line.close()

    def _open(self, index: int, host: Host, *, local: bool) -> None:
        def hear(_: AgentLine, message: FromAgent) -> None:
            self._hear(index, message)

        def lose(_: AgentLine, trouble: Trouble) -> None:
            self._ended.add(index)
            self._lose(index, trouble)

        if local:
            if not Path(self._job.cwd).is_dir() and index < len(self._hosts):
                self._troubles[index] = no_directory(self._job.cwd)
            self._lines.append(LocalLine(self._loop, host, hear, lose))
            return
        job = self._job
        call = SshCall(host=host, ssh=job.ssh, python=self._python, cwd=job.cwd, heartbeat_s=job.settings.heartbeat_s)
        try:
            self._lines.append(SshLine(self._loop, call, hear, lose))
        except OSError as error:
            raise StartFailed(f"ssh cannot be started here ({error.strerror}); install OpenSSH's client") from None

    def _is_local(self, index: int) -> bool:
        return isinstance(self._lines[index], LocalLine)

    def _note_answer(self, index: int, message: FromAgent) -> None:
        if isinstance(message, Hello):
            self._met.add(index)
        if isinstance(message, Hello | Probed | Failed):
            self._answers[index] = message

    def _ask(self, messages: Mapping[int, FromDriver]) -> dict[int, Probed]:
        self._answers.clear()
        self.send(messages)
        return self._wait(Probed, PROBE_S + ANSWER_S)

    def _wait(self, kind: type[Answer], limit_s: float) -> dict[int, Answer]:
        """Such an answer from every place. StartFailed, when one is in trouble or does not answer."""
        timer = self._loop.at(limit_s, lambda: None)
        everybody = frozenset(range(len(self._lines)))
        self._loop.run(
            lambda: self._stopped or not timer.waits or everybody <= self._answers.keys() | self._troubles.keys()
        )
        timer.cancel()
        if self._stopped:
            raise Stopped
        answers: dict[int, Answer] = {}
        for index in sorted(everybody):
            answer = self._answers.get(index)
            if isinstance(answer, kind):
                answers[index] = answer
            elif isinstance(answer, Failed):
                self._troubles.setdefault(index, Trouble("agent", answer.why))
            else:
                self._troubles.setdefault(index, Trouble("unreachable", f"it did not answer within {limit_s:g} s"))
        self._check()
        return answers

    def _compare(self, hellos: Mapping[int, Hello]) -> None:
        """Hosts have to be like this one, and different machines."""
        own = hellos[self.driver]
        seen: dict[str, int] = {}
        for index, hello in hellos.items():
            if hello.version != own.version:
                why = f"it has ronde {hello.version}, and this is {own.version}; install the same version on all hosts"
                self._troubles[index] = Trouble("version", why)
            elif self._job.call and _minor(hello.python) != _minor(own.python):
                why = f"it has Python {hello.python}, and this is {own.python}; a function needs the same on all hosts"
                self._troubles[index] = Trouble("python", why)
            elif index < len(self._hosts) and seen.setdefault(hello.host, index) != index:
                first = self._lines[seen[hello.host]].host.name
                why = f"it is the same machine as {first}; name it once, with all its slots"
                self._troubles[index] = Trouble("twice", why)
        self._check()

    def _check(self) -> None:
        if self._troubles:
            lines = [
                f"  {self._lines[index].host.name}: {self._troubles[index].why}" for index in sorted(self._troubles)
            ]
            num_hosts = len(self._hosts)
            some = f"{len(lines)} of {num_hosts} hosts" if num_hosts > 1 else "the host"
            raise StartFailed("\n".join([f"{some} cannot be used:", *lines]))

    def _beat(self) -> None:
        while not self._done.wait(self._job.settings.heartbeat_s):
            for line in tuple(self._lines):
                line.beat(Beat(self._silence_s))


def _free_ports(count: int) -> tuple[int, ...]:
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port(LOOPBACK))
    return tuple(found)


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
