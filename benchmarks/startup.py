"""What starting a job costs: `ronde run -np 2`, torchrun, and the same two processes started bare.

    python benchmarks/startup.py

All of them run `import ronde; ronde.init()` in two ranks, to their end. *Bare* are two processes with rank and size in
their environment, as a shell script would start them: nobody supervises them or shows what they print, and rank 0
hosts the coordinator. What a launcher adds to that is its *overhead*. All take turns, so all see the same noise;
medians count.

The second table says where the time of `ronde run` goes.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

RANK = (sys.executable, "-c", "import ronde; ronde.init()")
HERE = Path(sys.executable).parent
RONDE = (str(HERE / "ronde"), "run", "-np", "2")
TORCHRUN = (str(HERE / "torchrun"), "--standalone", "--nproc-per-node", "2", "--no-python")
TIMEOUT_S = 120.0

DRIVER = "import ronde.cli.run, ronde.launch.driver.driver, ronde.launch.output.printer"
PROBES: dict[str, tuple[str, ...]] = {
    "python": (sys.executable, "-c", "pass"),
    "driver": (sys.executable, "-c", DRIVER),
    "job of nothing": (*RONDE, "true"),
    "import ronde": (sys.executable, "-c", "import ronde"),
}


def run(command: tuple[str, ...]) -> None:
    subprocess.run(command, env=clean_environment(), check=True, timeout=TIMEOUT_S, capture_output=True)


def run_bare() -> None:
    """Two processes; rank 0 hosts the coordinator."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    shared = {"RONDE_SIZE": "2", "RONDE_COORDINATOR": f"127.0.0.1:{port}", "RONDE_KEY": secrets.token_hex(32)}
    ranks = [
        subprocess.Popen(RANK, env={**clean_environment(), **shared, "RONDE_RANK": str(rank)}) for rank in range(2)
    ]
    if any([rank.wait(TIMEOUT_S) for rank in ranks]):
        raise SystemExit("the bare processes have failed")


def clean_environment() -> Mapping[str, str]:
    """The environment without the variables of another job."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RONDE_")}


def measure(runs: Mapping[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each; they take turns, and the first turn does not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, call in runs.items():
            begin = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(each) for name, each in times.items()}


def show(console: Console, medians: Mapping[str, float]) -> None:
    bare = medians["bare"]
    table = Table("start", "seconds", "overhead", "against bare", title="two ranks, import ronde; ronde.init()")
    for name in ("bare", "ronde run", "torchrun"):
        if name in medians:
            took = medians[name]
            table.add_row(name, f"{took:.2f}", "" if name == "bare" else f"{took - bare:+.2f}", f"{took / bare:.2f}")
    console.print(table)

    python, driver, nothing = (medians[name] for name in ("python", "driver", "job of nothing"))
    parts = {
        "the interpreter of the driver starts": python,
        "the driver imports what it needs": driver - python,
        "agent, coordinator, monitor, orphan killer; two processes that do nothing": nothing - driver,
        "the ranks: interpreter, import ronde, ronde.init(), end": medians["ronde run"] - nothing,
        "(one process with `import ronde` alone)": medians["import ronde"],
    }
    table = Table("of `ronde run`", "seconds", title="where the time goes")
    for part, took in parts.items():
        table.add_row(part, f"{took:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what starting a job costs.")
    parser.add_argument("--repeats", type=int, default=15, help="how often each is started")
    flags = parser.parse_args()
    runs: dict[str, Callable[[], None]] = {"bare": run_bare, "ronde run": partial(run, (*RONDE, *RANK))}
    if Path(TORCHRUN[0]).exists():
        runs["torchrun"] = partial(run, (*TORCHRUN, *RANK))
    for name, command in PROBES.items():
        runs[name] = partial(run, command)
    show(Console(), measure(runs, flags.repeats))


if __name__ == "__main__":
    main()
