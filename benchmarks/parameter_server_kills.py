"""Kill random servers and workers of a parameter server, one after the other, and count the samples in the weights.

    python benchmarks/parameter_server_kills.py --kills 100 --mode sync,bounded,dynamic,async

For each mode it runs an elastic job of two workers and three server processes, and kills some of them at random
moments: a worker, a server, or one of both at once, whenever the parts of the last one that was lost are on two servers
again. At the end it checks that each sample of each epoch is in the weights exactly once: no acknowledged update is
lost, and none is applied twice. Checkpoints that are made meanwhile have to be of one version. It prints how long the
slowest steps took, which is the longest failover.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ronde.ps import Optimizer, ParameterServer, load_checkpoint

NUM_SAMPLES = 400
NUM_WORKERS, NUM_SERVERS = 2, 3
NUM_TENSORS = 3
TENSOR_SIZE = 10_000
"""So that there are several parts, on all servers."""
NUM_SLOTS = 16
"""The last elements of each tensor: those of a gradient say which workers are in it."""
NUM_STEPS_BETWEEN = 5
"""Each worker takes so many steps with all servers before the next one is killed: each of them is staged on the backups
of all parts, behind the copies that those have asked for."""
SLOW_S = 0.2
"""Longer steps are those in which a process was lost or came."""
EPOCHS_PER_CHECKPOINT = 4
LAST_EPOCH = "last-epoch"
NUM_EPOCHS_AHEAD = 10
"""The last epoch is so many after the one that workers are at when they are told of it: none has begun it."""
LIMIT_S = 60.0
"""How long a process may take to be replaced."""


class CountSamples(Optimizer):
    """The values count how often each sample was used. In "sync" mode a gradient is the mean of several workers'."""

    needs_whole_tensors = True

    def compute(self, values: Any, gradient: Any, states: Any, step: int) -> Any:
        num_workers = np.rint(1.0 / gradient[-NUM_SLOTS:].max())
        return values + np.rint(gradient * num_workers)


def train(folder: Path, mode: str) -> None:
    """A worker: trains up to the epoch in a file `last-epoch`, and says in a file how far it has come."""
    import ronde

    ronde.init()
    counts = [np.zeros(TENSOR_SIZE) for _ in range(NUM_TENSORS)]
    server = ParameterServer(counts, CountSamples(), mode=mode, staleness=4)
    status = folder / f"worker-{os.getpid()}"
    slot = int(os.environ["RONDE_WORKER"]) % NUM_SLOTS
    epoch, num_steps, servers = 0, 0, server.servers
    while not server.is_finished:
        for indices in server.samples(NUM_SAMPLES, 10, epoch=epoch):
            gradient = np.zeros(TENSOR_SIZE)
            gradient[indices] = gradient[TENSOR_SIZE - NUM_SLOTS + slot] = 1.0
            begun_s = time.monotonic()
            server.step([gradient] * NUM_TENSORS)
            if time.monotonic() - begun_s > SLOW_S:
                with (folder / f"slow-{os.getpid()}").open("a") as slow:
                    slow.write(f"{begun_s} {time.monotonic() - begun_s}\n")
            if server.servers != servers:
                num_steps, servers = 0, server.servers
            num_steps += 1
            if len(servers) == NUM_SERVERS and num_steps >= NUM_STEPS_BETWEEN:
                status.write_text(f"{servers}\n{epoch}")
        epoch += 1
        if epoch % EPOCHS_PER_CHECKPOINT == 0 and not server.is_finished:
            check_checkpoint(server.save(folder / f"checkpoints-{os.getpid()}"))
        if (folder / LAST_EPOCH).exists() and epoch > int((folder / LAST_EPOCH).read_text()):
            break
    server.pull()
    is_exact = all(bool((each[:NUM_SAMPLES] == epoch).all()) for each in counts)
    print(f"exact: {is_exact}, {epoch} epochs", flush=True)
    server.close()


def check_checkpoint(path: str) -> None:
    """Its tensors count the same, so they are of one version, whoever was killed while they were written."""
    values = [*load_checkpoint(path)["parameters"].values()]
    if any((each[:NUM_SAMPLES] != values[0][:NUM_SAMPLES]).any() for each in values):
        print(f"exact: False, {path} has parts of several versions", flush=True)
    shutil.rmtree(path)


def find_processes(driver: int) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """The servers and the workers that run."""
    servers, workers = [], []
    for process in psutil.Process(driver).children(recursive=True):
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "ronde.ps.server_process" in command:
            servers.append(process)
        elif "--folder" in command and "ronde.cli.main" not in command:
            workers.append(process)
    return servers, workers


class Job:
    """A job in one mode, whose processes are killed."""

    def __init__(self, mode: str, folder: Path) -> None:
        self._folder = folder
        command = [sys.executable, "-m", "ronde.cli.main", "run", "-np", str(NUM_WORKERS), "--min-np", "1"]
        command += ["--servers", str(NUM_SERVERS), "--cooldown", "0.01", "0.01", "--no-fold"]
        command += [sys.executable, __file__, "--mode", mode, "--folder", str(folder)]
        self._output = (folder / "output").open("w+")
        self.process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT)
        self.killed = {"servers": 0, "workers": 0}
        self.kills: list[tuple[float, str]] = []
        """When, and which."""

    def kill(self, choose: random.Random) -> None:
        """Kill a process, or two, when all are there."""
        victims = self.wait_until_complete()
        time.sleep(choose.random() * 0.1)
        kinds = choose.choice((["servers"], ["servers"], ["workers"], ["servers", "workers"]))
        for each in self._folder.glob("worker-*"):
            each.unlink(missing_ok=True)
        self.kills.append((time.monotonic(), " and ".join(kinds)))
        for kind in kinds:
            victim = choose.choice(victims[kind])
            if kind == "workers" and self.killed[kind] < NUM_WORKERS:  # first those with which the job began
                victim = min(victims[kind], key=lambda process: process.create_time())
            victim.send_signal(signal.SIGKILL)
            self.killed[kind] += 1

    def wait_until_complete(self) -> dict[str, list[psutil.Process]]:
        begun_s = time.monotonic()
        while self.process.poll() is None and time.monotonic() - begun_s < LIMIT_S:
            servers, workers = find_processes(self.process.pid)
            statuses = [path for each in workers if (path := self._folder / f"worker-{each.pid}").exists()]
            known = {path.read_text().partition("\n")[0] for path in statuses}
            if len(servers) == NUM_SERVERS and len(statuses) == NUM_WORKERS and len(known) == 1 and known != {""}:
                return {"servers": servers, "workers": workers}
            time.sleep(0.02)
        raise RuntimeError("not all processes came back")

    def find_longest_steps(self) -> dict[str, float]:
        """By what was killed before them."""
        longest = {kind: 0.0 for _, kind in self.kills}
        for path in self._folder.glob("slow-*"):
            for line in path.read_text().splitlines():
                begun_s, step_s = map(float, line.split())
                before = [kind for at_s, kind in self.kills if at_s < begun_s + step_s]
                if before:  # and not the first step, which waits for the others
                    longest[before[-1]] = max(step_s, longest[before[-1]])
        return longest

    def end(self) -> tuple[int, str]:
        """Let the workers finish. Return the exit code and what was printed."""
        epochs = [int(path.read_text().partition("\n")[2] or 0) for path in self._folder.glob("worker-*")]
        number = self._folder / "number"
        number.write_text(str(max(epochs, default=0) + NUM_EPOCHS_AHEAD))
        number.rename(self._folder / LAST_EPOCH)
        try:
            code = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            code = self.process.wait(LIMIT_S) or -1
        self._output.seek(0)
        with self._output:
            return code, self._output.read()


def kill_and_count(mode: str, num_kills: int, choose: random.Random) -> bool:
    """Run one job. Return whether all samples were counted exactly once."""
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        job = Job(mode, Path(name))
        try:
            while sum(job.killed.values()) < num_kills:
                job.kill(choose)
            job.wait_until_complete()
        except RuntimeError as error:
            print(f"{error}, after {job.killed}")
        code, output = job.end()
        longest = job.find_longest_steps()
    lines = [line for line in output.splitlines() if "exact:" in line]
    is_exact = not code and bool(lines) and all("exact: True" in line for line in lines)
    killed = " and ".join(f"{count} {kind}" for kind, count in job.killed.items())
    print(f"{mode}: killed {killed} in {time.monotonic() - begun_s:.0f} s; exit code {code}")
    print("  longest step after a kill of " + ", ".join(f"{kind}: {step_s:.2f} s" for kind, step_s in longest.items()))
    print("\n".join(lines) if is_exact else output[-8000:], flush=True)
    return is_exact and sum(job.killed.values()) >= num_kills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="how many processes to kill in each mode")
    parser.add_argument("--mode", default="sync,bounded,dynamic,async")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        train(options.folder, options.mode)
        return 0
    choose = random.Random(options.seed)
    return int(not all([kill_and_count(mode, options.kills, choose) for mode in options.mode.split(",")]))


if __name__ == "__main__":
    sys.exit(main())
