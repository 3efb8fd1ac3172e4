"""A parameter server over links of known speed, on one machine: four network namespaces, two with a server and two with
a worker, each with a link of its own to a switch.

    sudo python benchmarks/netns_parameter_server.py --rate 1gbit --sizes 16M,64M

Measures pushes, reads, both at once (each worker sends the next gradients while the parameters of the last step come),
and whole steps in sync mode, with and without a backup of each part. How the bounds are computed is in README.md. The
namespaces are removed however this ends, short of SIGKILL.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from netns import COMMAND_S, run_as_root
from rich.console import Console
from rich.table import Table

import ronde
from ronde.cli.bench.allreduce import FLOAT_BYTES, parse_sizes
from ronde.net.keys import new_job_key
from ronde.ps import SGD, ParameterServer
from ronde.text import format_exact_bytes

SERVERS, WORKERS = (0, 1), (2, 3)
NUM_HOSTS = len(SERVERS) + len(WORKERS)
RANKS_S = 600.0
WARM_UP = 2
"""Steps of each kind that are not counted."""


class SwitchedHosts:
    """Namespaces that are joined by a bridge; what enters and what leaves each of them has the given rate."""

    def __init__(self, rate: str) -> None:
        self.names = [f"ronde-ps-{os.getpid()}-{index}" for index in range(NUM_HOSTS)]
        self._switch = f"ronde-ps-{os.getpid()}-switch"
        self._shape = f"root tbf rate {rate} burst 256kb latency 50ms"

    def __enter__(self) -> SwitchedHosts:
        try:
            for name in (self._switch, *self.names):
                _run(f"ip netns add {name}")
            _run(f"ip -n {self._switch} link add bridge type bridge")
            _run(f"ip -n {self._switch} link set bridge up")
            for index, name in enumerate(self.names):
                port = f"port{index}"
                _run(f"ip -n {name} link add eth0 type veth peer name {port} netns {self._switch}")
                _run(f"ip -n {self._switch} link set {port} master bridge up")
                _run(f"ip -n {name} address add {address_of(index)}/24 dev eth0")
                _run(f"ip -n {name} link set lo up")
                _run(f"ip -n {name} link set eth0 up")
                _run(f"tc -n {name} qdisc add dev eth0 {self._shape}")
                _run(f"tc -n {self._switch} qdisc add dev {port} {self._shape}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self.names, self._switch):  # interfaces go with their namespaces
            subprocess.run(("ip", "netns", "del", name), check=False, stderr=subprocess.DEVNULL)

    def run(self, arguments: list[str]) -> list[dict[str, Any]]:
        """Run this file as a rank in each namespace; what the first worker has measured."""
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RONDE_SIZE": str(NUM_HOSTS),
            "RONDE_COORDINATOR": f"{address_of(0)}:29400",
            "RONDE_KEY": new_job_key(),
        }
        ranks = [
            subprocess.Popen(
                ("ip", "netns", "exec", name, sys.executable, __file__, "--is-rank", *arguments),
                env={**env, "RONDE_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, name in enumerate(self.names)
        ]
        try:
            printed = [rank.communicate(timeout=RANKS_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(rank.returncode for rank in ranks):
            raise ronde.RondeError("a rank has failed; its error is above")
        return [json.loads(line) for line in printed[WORKERS[0]].splitlines()]


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, timeout=COMMAND_S)


def address_of(index: int) -> str:
    return f"10.213.78.{index + 1}"


# --- in a rank -------------------------------------------------------------------------------------------------------


def measure_rank(flags: argparse.Namespace) -> None:
    ronde.init()
    for counts in parse_sizes(flags.sizes):
        for replicate in (False, True):
            for way in ("push", "pull", "both", "sync step"):
                seconds = measure_way(way, sum(counts), replicate, flags.repeats)
                if ronde.rank() == WORKERS[0]:
                    result = {"way": way, "bytes": FLOAT_BYTES * sum(counts), "replicate": replicate, "s": seconds}
                    print(json.dumps(result), flush=True)
    ronde.shutdown()


def measure_way(way: str, count: int, replicate: bool, repeats: int) -> float:
    """Seconds per step of the slower worker: the median."""
    values, gradient = np.zeros(count, np.float32), np.ones(count, np.float32)
    mode = "sync" if way == "sync step" else "async"
    server = ParameterServer([values], SGD(lr=0.1), mode=mode, servers=SERVERS, workers=WORKERS, replicate=replicate)
    times: list[float] = []
    if server.is_worker:
        do: Mapping[str, Callable[[], object]] = {
            "push": lambda: server.push([gradient]),
            "pull": server.pull,
            "both": lambda: server.start_step([gradient]),
            "sync step": lambda: server.step([gradient]),
        }
        for _ in range(repeats + WARM_UP):
            began_s = time.monotonic()
            do[way]()
            times.append(time.monotonic() - began_s)
        server.finish_step()
    server.close()
    by_rank: list[list[float]] = ronde.objects.allgather(times[WARM_UP:])
    return max(statistics.median(each) for each in by_rank if each)


# --- the table -------------------------------------------------------------------------------------------------------


def bound_s(way: str, num_bytes: int, replicate: bool, bytes_per_s: float) -> float:
    """What the links allow: README.md says how."""
    num_workers, num_servers = len(WORKERS), len(SERVERS)
    at_server = num_workers * num_bytes / num_servers
    push = max(num_bytes, at_server * (2 if replicate else 1))
    pull = max(num_bytes, at_server)
    both = max(push, pull + (at_server if replicate else 0))
    return {"push": push, "pull": pull, "both": both, "sync step": push + pull}[way] / bytes_per_s


def parse_rate(rate: str) -> float:
    """Bytes per second of a rate as tc writes it: 1gbit, 100mbit."""
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor / 8
    raise ValueError(f"--rate must be in gbit or mbit, got {rate!r}")


def measure_all(flags: argparse.Namespace, console: Console) -> Table:
    bytes_per_s = parse_rate(flags.rate)
    with SwitchedHosts(flags.rate) as hosts:
        console.print("measuring", style="dim")
        results = hosts.run(["--sizes", flags.sizes, "--repeats", str(flags.repeats)])
    table = Table("bytes", "", "backups", "bound ms", "median ms", "of the bound")
    with Path(flags.json or os.devnull).open("w", encoding="utf-8") as file:
        for each in results:
            bound = bound_s(each["way"], each["bytes"], each["replicate"], bytes_per_s)
            file.write(json.dumps({**each, "bound_s": bound, "share": bound / each["s"]}) + "\n")
            table.add_row(
                format_exact_bytes(each["bytes"]),
                each["way"],
                "yes" if each["replicate"] else "no",
                f"{bound * 1e3:.1f}",
                f"{each['s'] * 1e3:.1f}",
                f"{100 * bound / each['s']:.0f} %",
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a parameter server between four namespaces.")
    parser.add_argument("--rate", default="1gbit", help="speed of each link in each direction, as tc writes it")
    parser.add_argument("--sizes", default="16M,64M", help="bytes of parameters")
    parser.add_argument("--repeats", type=int, default=9, help="steps of each kind that are counted")
    parser.add_argument("--json", metavar="FILE", help="write the results to this file, one JSON object per line")
    parser.add_argument("--is-rank", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.is_rank:
        measure_rank(flags)
    else:
        run_as_root(parser, measure_all)


if __name__ == "__main__":
    main()
