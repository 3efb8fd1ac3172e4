"""Allreduce between two hosts with a link of known speed, on one machine: two network namespaces, one shaped link.

    sudo python benchmarks/netns.py --rate 1gbit --sizes 16M,64M

Measures in turn, so that all see the same noise: what plain TCP gets through the link in both directions at once
(goodput.py), ronde and gloo with one rank per host, and ronde with two ranks per host as a flat ring and two-level.
How the bounds are computed is in README.md. The namespaces are removed however this ends, short of SIGKILL.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from ronde.cli.bench.allreduce import FLOAT_BYTES, AllreduceCase, parse_sizes
from ronde.cli.bench.peers import RANK_PROGRAM, is_installed
from ronde.cli.bench.runner import START_TIMEOUT_S, BenchmarkCase, MeasurementBudget, RankPool
from ronde.errors import RondeError
from ronde.net.keys import new_job_key
from ronde.text import format_exact_bytes
from ronde.types import Deadline

ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORTS = itertools.count(29400)
"""A namespace is new and empty: every port is free."""
COMMAND_S = 30.0
GOODPUT_BYTES = 64 << 20


class Hosts:
    """Two namespaces, joined by a pair of virtual interfaces that send at the given rate."""

    def __init__(self, rate: str) -> None:
        self._names = [f"ronde-{os.getpid()}-{index}" for index in range(2)]
        self.interfaces = [f"rv{os.getpid()}-{index}" for index in range(2)]
        first, second = self.interfaces
        self._commands = [f"ip netns add {name}" for name in self._names]
        self._commands.append(f"ip link add {first} type veth peer name {second}")
        for name, interface, address in zip(self._names, self.interfaces, ADDRESSES, strict=True):
            self._commands += [
                f"ip link set {interface} netns {name}",
                f"ip -n {name} address add {address}/24 dev {interface}",
                f"ip -n {name} link set lo up",
                f"ip -n {name} link set {interface} up",
                f"tc -n {name} qdisc add dev {interface} root tbf rate {rate} burst 256kb latency 50ms",
            ]

    def __enter__(self) -> Hosts:
        try:
            for command in self._commands:
                subprocess.run(command.split(), check=True, timeout=COMMAND_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # The interfaces go with their namespaces; before they have moved there they are still ours.
        for command in (f"ip link del {self.interfaces[0]}", *(f"ip netns del {name}" for name in self._names)):
            subprocess.run(command.split(), check=False, stderr=subprocess.DEVNULL)

    def inside(self, index: int) -> tuple[str, ...]:
        """How a command is run on that host."""
        return ("ip", "netns", "exec", self._names[index])


def start_ronde(name: str, hosts: Hosts, per_host: int = 1, settings: Mapping[str, str] | None = None) -> RankPool:
    """Ranks of ronde on both hosts; rank 0 hosts the coordinator. The key travels in the environment only."""
    size = 2 * per_host
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RONDE_SIZE": str(size),
        "RONDE_COORDINATOR": f"{ADDRESSES[0]}:{next(PORTS)}",
        "RONDE_KEY": new_job_key(),
        **(settings or {}),
    }
    program = (sys.executable, RANK_PROGRAM, "ronde")
    commands = [(*hosts.inside(rank // per_host), "env", f"RONDE_RANK={rank}", *program) for rank in range(size)]
    return RankPool(name, size, commands, Deadline(START_TIMEOUT_S), env)


def start_peer(name: str, hosts: Hosts, library: str = "gloo") -> RankPool:
    """One rank of a library of measured_rank.py on each host."""
    commands = []
    for rank, interface in enumerate(hosts.interfaces):
        env = ("env", "OMP_NUM_THREADS=1", f"GLOO_SOCKET_IFNAME={interface}")
        commands.append((*hosts.inside(rank), *env, sys.executable, RANK_PROGRAM, library, str(rank), "2"))
    return RankPool(name, 2, commands, Deadline(START_TIMEOUT_S))


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


class NetnsRow(NamedTuple):
    """A row of the table."""

    name: str
    pool: RankPool
    path: str
    factor: float
    """How many times its array each host has to send."""


def start_all(hosts: Hosts, stack: ExitStack, console: Console) -> list[NetnsRow]:
    def start(name: str, start_pool: Callable[..., RankPool], *arguments: Any) -> RankPool:
        console.print(f"starting {name}", style="dim")
        return stack.enter_context(closing(start_pool(name, hosts, *arguments)))

    one = start("ronde 1+1", start_ronde)
    started = [NetnsRow(f"ronde 1+1 {path}", one, path, 1.0) for path in ("array", "bucket")]
    if is_installed("torch"):
        started.append(NetnsRow("gloo 1+1", start("gloo 1+1", start_peer), "array", 1.0))
    for algorithm, factor in (("ring", 1.5), ("two_level", 1.0)):
        name = f"ronde 2+2 {algorithm}"
        two = start(name, start_ronde, 2, {"RONDE_ALGORITHM": algorithm})
        started.append(NetnsRow(name, two, "array", factor))
    return started


def measure(hosts: Hosts, cases: Sequence[BenchmarkCase], budget: MeasurementBudget) -> float:
    """Measure the cases in turn; gigabits per second of the link, measured in turn with them."""
    for case in cases:
        case.setup()
        case.calibrate(budget)
    link = []
    for index in range(budget.rounds):
        link.append(goodput(hosts))
        first = index % len(cases)
        for case in (*cases[first:], *cases[:first]):
            case.run_round()
    return statistics.median(link)


def format_row(row: NetnsRow, case: AllreduceCase, num_bytes: int, link: float) -> tuple[str, ...]:
    result = case.result("allreduce", num_bytes)
    bound_ms = row.factor * 8 * num_bytes / link / 1e6
    times = (f"{bound_ms:.1f}", f"{result.median_us / 1e3:.1f}", f"{result.min_us / 1e3:.1f}")
    share = f"{100e3 * bound_ms / result.median_us:.0f} %"
    return (format_exact_bytes(num_bytes), row.name, f"{link:.3f}", *times, share)


def run_as_root(parser: argparse.ArgumentParser, measure_all: Callable[[argparse.Namespace, Console], Table]) -> None:
    """Print the table that is measured; SIGTERM ends it in order, too."""
    flags = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("network namespaces need root: run with sudo")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console()
    try:
        console.print(measure_all(flags, console))
    except (RondeError, ValueError) as error:
        sys.exit(f"error: {error}")


def measure_all(flags: argparse.Namespace, console: Console) -> Table:
    table = Table("bytes", "", "goodput Gbit/s", "bound ms", "median ms", "fastest ms", "of the bound")
    workloads = list(parse_sizes(flags.sizes))
    budget = MeasurementBudget(rounds=flags.repeats, seconds=flags.seconds)
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(flags.rate))
        started = start_all(hosts, stack, console)
        for counts in workloads:
            num_bytes = FLOAT_BYTES * sum(counts)
            console.print(f"measuring {format_exact_bytes(num_bytes)}", style="dim")
            cases = [AllreduceCase(each.pool, each.path, counts) for each in started]
            link = measure(hosts, cases, budget)
            for each in started:
                each.pool.request("releasing", Deadline(60), do="release")
            for each, case in zip(started, cases, strict=True):
                table.add_row(*format_row(each, case, num_bytes, link))
            table.add_section()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure allreduce between two namespaces against what the link allows."
    )
    parser.add_argument("--rate", default="1gbit", help="speed of the link in each direction, as tc writes it")
    parser.add_argument("--sizes", default="16M,64M", help="bytes per rank")
    parser.add_argument("--repeats", type=int, default=5, help="rounds per row and size")
    parser.add_argument("--seconds", type=float, default=5.0, help="time per row and size, shared by its rounds")
    run_as_root(parser, measure_all)


if __name__ == "__main__":
    main()
