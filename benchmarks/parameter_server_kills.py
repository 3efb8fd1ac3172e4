"""Kill random servers and workers of a parameter server, one after the other, and count the samples in the weights.

    python benchmarks/parameter_server_kills.py --kills 100

It runs an elastic job of two workers and three server processes, kills one of them whenever all are there again, and
checks at the end that each sample of each epoch is in the weights exactly once: no acknowledged update is lost, and
none is applied twice. It prints how long the slowest step took, which is the longest failover.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

NUM_SAMPLES = 2000
SETTLE_S = 1.0
"""After all processes are there, for the copies of parts."""
LIMIT_S = 60.0
"""How long a process may take to be replaced."""


def train(folder: Path, mode: str) -> None:
    """A worker: trains epoch after epoch until there is a file `stop`, and reports to a file of its own."""
    import ronde
    from ronde.ps import SGD, ParameterServer

    ronde.init()
    counts = [np.zeros(NUM_SAMPLES), np.zeros(NUM_SAMPLES)]
    server = ParameterServer(counts, SGD(lr=1.0), mode=mode, staleness=4)
    (folder / f"trains-{os.getpid()}").touch()
    epoch, longest_s = 0, 0.0
    while not server.is_finished:
        for indices in server.samples(NUM_SAMPLES, 20, epoch=epoch):
            gradient = np.zeros(NUM_SAMPLES)
            gradient[indices] = -1.0
            begun_s = time.monotonic()
            server.step([gradient, gradient])
            longest_s = max(longest_s, time.monotonic() - begun_s)
            (folder / f"servers-{os.getpid()}").write_text(str(len(server.servers)))
        epoch += 1
        if (folder / "stop").exists():
            break
    server.pull()
    is_exact = bool((counts[0] == counts[0][0]).all() and (counts[0] == counts[1]).all())
    print(f"exact: {is_exact}, {counts[0][0]:g} epochs, longest step {longest_s:.3f} s", flush=True)
    server.close()


def find_processes(driver: int, folder: Path) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """The servers, and the workers that train."""
    servers, workers = [], []
    for process in psutil.Process(driver).children(recursive=True):
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "ronde.ps.server_process" in command:
            servers.append(process)
        elif (folder / f"trains-{process.pid}").exists():
            workers.append(process)
    return servers, workers


def all_there(driver: int, folder: Path) -> bool:
    servers, workers = find_processes(driver, folder)
    if len(servers) < 3 or len(workers) < 2:
        return False
    counts = [folder / f"servers-{worker.pid}" for worker in workers]
    return all(count.exists() and count.read_text() == "3" for count in counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--mode", default="async")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        train(options.folder, options.mode)
        return 0
    choose = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "ronde.cli.main", "run", "-np", "2", "--min-np", "1", "--servers", "3"]
        command += ["--cooldown", "0.1", "0.1", sys.executable, __file__, "--mode", options.mode, "--folder", name]
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        killed = {"server": 0, "worker": 0}
        try:
            while sum(killed.values()) < options.kills:
                begun_s = time.monotonic()
                while not all_there(job.pid, folder):
                    if job.poll() is not None or time.monotonic() - begun_s > LIMIT_S:
                        raise RuntimeError("not all processes came back")
                    time.sleep(0.05)
                time.sleep(SETTLE_S + choose.random() * 0.2)
                servers, workers = find_processes(job.pid, folder)
                kind = "worker" if choose.random() < 0.25 else "server"
                victim = choose.choice(servers if kind == "server" else workers)
                victim.send_signal(signal.SIGKILL)
                killed[kind] += 1
                for each in folder.glob("servers-*"):
                    each.unlink(missing_ok=True)
        except RuntimeError as error:
            print(f"{error}, after {killed}")
        (folder / "stop").touch()
        out, err = job.communicate(timeout=10 * LIMIT_S)
        lines = [line for line in out.splitlines() if "exact" in line]
        print(f"{killed} killed, {options.mode}; exit code {job.returncode}")
        print("\n".join(lines))
        if job.returncode or not lines or any("exact: True" not in line for line in lines):
            print(err[-3000:])
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
