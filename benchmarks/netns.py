"""Allreduce between two hosts with a link of known speed, on one machine: two network namespaces, one shaped link.

    sudo python benchmarks/netns.py --rate 1gbit --sizes 16M,64M

Measures in turn, so that all see the same noise: what plain TCP gets through the link in both directions at once
(goodput.py), ronde and gloo with one rank per host, and ronde with two ranks per host as a flat ring and two-level.
How the bounds are computed is in README.md. The namespaces are removed however this ends, short of SIGKILL.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ronde.cli.bench.cases import parse_works
from ronde.cli.bench.runner import RANK_PROGRAM, AllreduceCase, MeasurementBudget, PeerProcesses, RankPool
from ronde.errors import RondeError
from ronde.net.keys import new_job_key
from ronde.text import format_exact_bytes
from ronde.types import Deadline

ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORTS = itertools.count(29400)
"""A namespace is new and empty: every port is free."""
COMMAND_S = 30.0
GOODPUT_BYTES = 64 << 20


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=COMMAND_S)


class Hosts:
    """Two namespaces, joined by a pair of virtual interfaces that send at the given rate."""

    def __init__(self, rate: str) -> None:
        self._names = [f"ronde-{os.getpid()}-{index}" for index in range(2)]
        self.interfaces = [f"rv{os.getpid()}-{index}" for index in range(2)]
        self._rate = rate

    def __enter__(self) -> Hosts:
        try:
            for name in self._names:
                run("ip", "netns", "add", name)
            run("ip", "link", "add", self.interfaces[0], "type", "veth", "peer", "name", self.interfaces[1])
            for name, interface, address in zip(self._names, self.interfaces, ADDRESSES, strict=True):
                run("ip", "link", "set", interface, "netns", name)
                inside = ("ip", "-n", name)
                run(*inside, "address", "add", f"{address}/24", "dev", interface)
                run(*inside, "link", "set", "lo", "up")
                run(*inside, "link", "set", interface, "up")
                shape = ("tbf", "rate", self._rate, "burst", "256kb", "latency", "50ms")
                run("tc", "-n", name, "qdisc", "add", "dev", interface, "root", *shape)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # The interfaces go with their namespaces; before they have moved there they are still ours.
        subprocess.run(("ip", "link", "del", self.interfaces[0]), check=False, stderr=subprocess.DEVNULL)
        for name in self._names:
            subprocess.run(("ip", "netns", "del", name), check=False, stderr=subprocess.DEVNULL)

    def inside(self, index: int) -> tuple[str, ...]:
        """How a command is run on that host."""
        return ("ip", "netns", "exec", self._names[index])


def ronde_ranks(
    hosts: Hosts, per_host: int, settings: Mapping[str, str], program: str = RANK_PROGRAM
) -> Callable[[Path], PeerProcesses]:
    """Ranks of ronde on both hosts; rank 0 hosts the coordinator. The key travels in the environment only."""
    size = 2 * per_host
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RONDE_SIZE": str(size),
        "RONDE_COORDINATOR": f"{ADDRESSES[0]}:{next(PORTS)}",
        "RONDE_KEY": new_job_key(),
        **settings,
    }

    def start(directory: Path) -> PeerProcesses:
        rank_program = (sys.executable, program, "ronde", str(directory))
        return PeerProcesses(
            [(*hosts.inside(r // per_host), "env", f"RONDE_RANK={r}", *rank_program) for r in range(size)], env
        )

    return start


def gloo_ranks(hosts: Hosts, program: str = RANK_PROGRAM, role: str = "gloo") -> Callable[[Path], PeerProcesses]:
    """One rank of gloo on each host."""

    def start(directory: Path) -> PeerProcesses:
        commands = []
        for rank, interface in enumerate(hosts.interfaces):
            env = ("env", "OMP_NUM_THREADS=1", f"GLOO_SOCKET_IFNAME={interface}")
            rank_program = (sys.executable, program, role, str(directory), str(rank), "2")
            commands.append((*hosts.inside(rank), *env, *rank_program))
        return PeerProcesses(commands)

    return start


def goodput(hosts: Hosts) -> float:
    """Gigabits per second of plain TCP, both directions at once; the slower end's."""
    program = (sys.executable, str(Path(__file__).with_name("goodput.py")))
    end = (ADDRESSES[0], str(next(PORTS)), str(GOODPUT_BYTES))
    ends = [
        subprocess.Popen((*hosts.inside(index), *program, role, *end), stdout=subprocess.PIPE, text=True)
        for index, role in enumerate(("listen", "connect"))
    ]
    try:
        return min(float(process.communicate(timeout=COMMAND_S * 4)[0]) for process in ends)
    finally:
        for process in ends:
            process.kill()
            process.wait()


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the table: who runs, and how many times the array each host has to send."""

    words: str
    crew: RankPool
    path: str
    factor: float


def entries(hosts: Hosts, stack: ExitStack, console: Console) -> list[Entry]:
    """Start everybody."""

    def crew(name: str, size: int, start: Callable[[Path], PeerProcesses]) -> RankPool:
        console.print(f"starting {name}", style="dim")
        started = RankPool(name, size, start, Deadline(120))
        stack.callback(started.close)
        return started

    one = crew("ronde 1+1", 2, ronde_ranks(hosts, 1, {}))
    found = [Entry("ronde 1+1 array", one, "array", 1.0), Entry("ronde 1+1 bucket", one, "bucket", 1.0)]
    if importlib.util.find_spec("torch") is not None:
        found.append(Entry("gloo 1+1", crew("gloo 1+1", 2, gloo_ranks(hosts)), "array", 1.0))
    for algorithm, factor in (("ring", 1.5), ("two_level", 1.0)):
        two = crew(f"ronde 2+2 {algorithm}", 4, ronde_ranks(hosts, 2, {"RONDE_ALGORITHM": algorithm}))
        found.append(Entry(f"ronde 2+2 {algorithm}", two, "array", factor))
    return found


def measure(
    hosts: Hosts, work_bytes: int, everybody: list[Entry], pace: MeasurementBudget
) -> tuple[float, list[AllreduceCase]]:
    """Goodput of the link and everybody's times, in turn."""
    lanes = [AllreduceCase(entry.crew, entry.path, (work_bytes // 4,)) for entry in everybody]
    for lane in lanes:
        lane.prepare()
        lane.settle(pace)
    link = []
    for _ in range(pace.repeats):
        link.append(goodput(hosts))
        for lane in lanes:
            lane.run(pace)
    for crew in {id(lane.crew): lane.crew for lane in lanes}.values():
        crew.ask("releasing", Deadline(60), do="release")
    return statistics.median(link), lanes


def row(entry: Entry, lane: AllreduceCase, num_bytes: int, link: float) -> tuple[str, ...]:
    """What one line of the table says."""
    record = lane.record("allreduce", num_bytes)
    bound_ms = entry.factor * 8 * num_bytes / link / 1e6
    times = (f"{bound_ms:.1f}", f"{record.median_us / 1e3:.1f}", f"{record.min_us / 1e3:.1f}")
    return (
        format_exact_bytes(num_bytes),
        entry.words,
        f"{link:.3f}",
        *times,
        f"{100e3 * bound_ms / record.median_us:.0f} %",
    )


def main(
    rate: Annotated[str, typer.Option(help="Speed of the link in each direction, as tc writes it.")] = "1gbit",
    sizes: Annotated[str, typer.Option(help="Bytes per rank.")] = "16M,64M",
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    seconds: Annotated[float, typer.Option(help="Seconds per line and size, shared by its bursts.")] = 5.0,
) -> None:
    """Measure allreduce between two namespaces against what the link allows."""
    if os.geteuid() != 0:
        raise typer.BadParameter("network namespaces need root: run with sudo")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console()
    table = Table("bytes", "", "goodput Gbit/s", "bound ms", "median ms", "fastest ms", "of the bound")
    works = parse_works(sizes)
    try:
        with ExitStack() as stack:
            hosts = stack.enter_context(Hosts(rate))
            everybody = entries(hosts, stack, console)
            for work in works:
                console.print(f"measuring {work.name}", style="dim")
                link, lanes = measure(
                    hosts, work.num_bytes, everybody, MeasurementBudget(repeats=repeats, seconds=seconds)
                )
                for entry, lane in zip(everybody, lanes, strict=True):
                    table.add_row(*row(entry, lane, work.num_bytes, link))
                table.add_section()
    except RondeError as error:
        console.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
