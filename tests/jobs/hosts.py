"""Hosts for tests: network namespaces on one switch, each with a real sshd. Keys, configuration and known hosts are
made for the occasion in a directory of their own; nobody's ~/.ssh is touched.

All share one file system and one table of processes, so a test sees what is left on each of them.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from ronde.types import Deadline
from tests.jobs.running import end
from tests.limits import PATIENCE_S, SECONDS_S
from tests.services import needs

ROOT = Path(__file__).resolve().parents[2]
SSHD = "/usr/sbin/sshd"
NUM_HOSTS = 3

CAN_HAVE_HOSTS = os.geteuid() == 0 and shutil.which("ip") and shutil.which("ssh") and Path(SSHD).exists()
needs_hosts = needs(
    "ssh between network namespaces",
    missing="" if CAN_HAVE_HOSTS else "hosts as network namespaces need root, the command ip, ssh and sshd",
)

SSHD_CONFIG = """
Port {port}
ListenAddress 0.0.0.0
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
MaxStartups 100
"""


def ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, timeout=PATIENCE_S, capture_output=True)


class Hosts:
    """Three hosts; a context."""

    port = 2022

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._switch = f"ronde-{os.getpid()}-switch"
        self.names = [f"ronde-{os.getpid()}-host{index}" for index in range(NUM_HOSTS)]
        self.addresses = [f"10.79.0.{index + 1}" for index in range(NUM_HOSTS)]
        self._links = [f"rh{os.getpid()}-{index}" for index in range(NUM_HOSTS)]
        self._opened = ExitStack()

    def __enter__(self) -> Hosts:
        try:
            self._connect()
            self._make_keys()
            for name in self.names:
                self._start_sshd(name)
        except subprocess.CalledProcessError as error:
            self.__exit__()
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()
        for name in (*self.names, self._switch):  # the links go with them
            subprocess.run(("ip", "netns", "del", name), check=False, timeout=PATIENCE_S, capture_output=True)

    def _connect(self) -> None:
        for name in (self._switch, *self.names):
            ip("netns", "add", name)
        ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self._switch, "link", "set", "switch", "up")
        for name, link, address in zip(self.names, self._links, self.addresses, strict=True):
            peer = ("peer", "name", link, "netns", self._switch)
            ip("-n", name, "link", "add", "net0", "type", "veth", *peer)
            ip("-n", self._switch, "link", "set", link, "master", "switch", "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "net0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "net0", "up")

    def _make_keys(self) -> None:
        for name in ("host", "user", "stranger"):
            command = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
            subprocess.run(command, check=True, timeout=PATIENCE_S, capture_output=True)
        for known, key in (("known", "host"), ("known-otherwise", "stranger")):
            public = (self.folder / f"{key}.pub").read_text()
            lines = [f"[{address}]:{self.port} {public}" for address in self.addresses]
            (self.folder / known).write_text("".join(lines))

    def _start_sshd(self, name: str) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd does not start without
        config = self.folder / "sshd_config"
        config.write_text(SSHD_CONFIG.format(port=self.port, folder=self.folder))
        sshd = subprocess.Popen(
            ["ip", "netns", "exec", name, SSHD, "-D", "-e", "-f", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self._opened.callback(end, sshd)
        assert sshd.stderr is not None
        poll = select.poll()
        poll.register(sshd.stderr, select.POLLIN)
        said = ""
        while "Server listening" not in said:
            assert poll.poll(1000 * PATIENCE_S), f"sshd does not start: {said}"
            data = os.read(sshd.stderr.fileno(), 4096)
            assert data, f"sshd has ended: {said}"
            said += data.decode()

    # --- what tests do -----------------------------------------------------------------------------------------

    def command(
        self, *words: str, on: int = 0, identity: str = "user", known: str = "known", port: int = 0
    ) -> list[str]:
        """`ronde run` on one of the hosts."""
        flags = ["--ssh-port", str(port or self.port), "--ssh-identity", str(self.folder / identity)]
        for option in (f"UserKnownHostsFile={self.folder / known}", "IdentitiesOnly=yes", "StrictHostKeyChecking=yes"):
            flags += ["--ssh-option", option]
        return ["ip", "netns", "exec", self.names[on], sys.executable, "-m", "ronde.cli.main", "run", *flags, *words]

    def run(self, *words: str, **how: object) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        command = self.command(*words, **how)  # type: ignore[arg-type]  # as command() has them
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    def start(self, *words: str, heartbeat_s: float = 10.0) -> Running:
        """Start it, and wait until every rank has printed a line."""
        return Running(self.command("--heartbeat-s", str(heartbeat_s), *words))

    def processes(self, index: int) -> list[psutil.Process]:
        """All that runs on a host, but for the sshd that listens."""
        found = subprocess.run(
            ("ip", "netns", "pids", self.names[index]), check=True, timeout=PATIENCE_S, capture_output=True, text=True
        )
        processes = []
        for pid in map(int, found.stdout.split()):
            try:
                process = psutil.Process(pid)
                if process.cmdline()[:2] != [f"sshd: {SSHD}", "-D"] and "[listener]" not in " ".join(process.cmdline()):
                    processes.append(process)
            except psutil.NoSuchProcess:  # it ended while we looked
                pass
        return processes

    def hang_up(self, index: int) -> None:
        """Kill what serves the ssh connections of a host, as if the host had died: nobody says goodbye."""
        for process in self.processes(index):
            if process.name().startswith("sshd"):
                process.kill()

    def cut(self, index: int, state: str = "down") -> None:
        """Take the link of a host down (or up again): nothing is closed, nothing arrives."""
        ip("-n", self._switch, "link", "set", self._links[index], state)

    def nothing_left(self, *, but: str = "nothing") -> None:
        """On no host runs what a job has started."""
        deadline = Deadline(SECONDS_S)
        left = ["?"]
        while left and not deadline.expired:
            time.sleep(0.02)
            found = [f"{index}: {words(process)}" for index in range(NUM_HOSTS) for process in self.processes(index)]
            left = [line for line in found if but not in line]
        assert not left, "\n".join(left)


class Running:
    """A job under way; a context, at whose end its driver is dead."""

    def __init__(self, command: list[str]) -> None:
        self._command = command

    def __enter__(self) -> Running:
        self.driver = subprocess.Popen(
            self._command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        end(self.driver)

    def await_lines(self, count: int) -> list[str]:
        """The next lines that the job prints."""
        assert self.driver.stdout is not None
        lines = [self.driver.stdout.readline() for _ in range(count)]  # the test's own time limit ends it
        assert all(lines), self.driver.communicate(timeout=PATIENCE_S)
        return sorted(lines)

    def result(self) -> tuple[int, str]:
        """Exit code and error output, when it has ended."""
        _, err = self.driver.communicate(timeout=PATIENCE_S)
        return self.driver.returncode, err


def words(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return f"{process.pid}"
