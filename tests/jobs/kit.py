"""How tests of jobs start ranks, talk to them, and end them.

ControlledRanks, start_ranks()   ranks that run a script of tests/jobs/scripts and have a socket to the test
RondeRun, run(), ask()           the installed command `ronde`, a process of its own, as users start it
Terminal                         a command on a terminal, and somebody who types
SshHosts                         hosts with a real sshd, each a network namespace

No test sleeps: a rank reports where it is, the test sends it what to do, and every wait has a deadline and fails with
the output of all ranks. What a rank prints is complete only when it has ended: before that it is quoted in failures
and compared with nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import termios
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil
import pytest

from ronde.coordinator.round_planning import ElasticLimits
from ronde.coordinator.server import CoordinatorServer
from ronde.launch.tty import set_window_size
from ronde.settings import Settings
from ronde.types import Deadline
from tests.limits import PATIENCE_S, SECONDS_S
from tests.local_job import LocalJob
from tests.services import needs

ROOT = Path(__file__).resolve().parents[2]
RONDE = str(Path(sys.executable).with_name("ronde"))
MAX_MESSAGE_BYTES = 1 << 20


def script(name: str, *arguments: str, python: str | Path = sys.executable) -> list[str]:
    """The command of a rank that runs a script of tests/jobs/scripts. Only what our own environment has installed is
    without warnings."""
    strict = ["-W", "error"] if python == sys.executable else []
    return [str(python), *strict, "-m", f"tests.jobs.scripts.{name}", *arguments]


def kill(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """End a process, if it still runs, and close its pipes."""
    if process.poll() is None:
        process.kill()
    process.wait(PATIENCE_S)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid}: {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return f"process {process.pid}"


# --- ranks with a socket to the test -------------------------------------------------------------------------------


class ControlledRanks:
    """The sockets to the ranks of a job, and the files with their output. Whoever starts the ranks gives them `env` and
    `outputs`. Each wait takes at most `patience_s`."""

    def __init__(self, num_ranks: int, folder: Path, opened: ExitStack, patience_s: float = PATIENCE_S) -> None:
        self._opened = opened
        self._patience_s = patience_s
        self._listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        # A path, not an abstract name: it can be reached from other network namespaces, too.
        self._listener.bind(str(folder / "socket"))
        self._listener.listen(num_ranks)
        self._paths = [folder / f"rank{rank}" for rank in range(num_ranks)]
        self.outputs = [opened.enter_context(path.open("wb")) for path in self._paths]
        python_path = os.pathsep.join(map(str, (ROOT, ROOT / "src")))
        self.env = {"TEST_SOCKET": str(folder / "socket"), "PYTHONPATH": python_path}
        self.pids: dict[int, int] = {}
        self._sockets: dict[int, socket.socket] = {}

    def accept(self, num_ranks: int | None = None) -> None:
        """Wait until every rank has connected, or so many more of those that will be."""
        deadline = Deadline(self._patience_s)
        expected = len(self._paths) if num_ranks is None else len(self._sockets) + num_ranks
        while len(self._sockets) < expected:
            self._await_readable(self._listener, deadline, "every rank to connect")
            connection = self._opened.enter_context(self._listener.accept()[0])
            first = json.loads(connection.recv(MAX_MESSAGE_BYTES))
            self._sockets[first["rank"]] = connection
            self.pids[first["rank"]] = first["pid"]

    def send(self, ranks: Iterable[int], **message: object) -> None:
        for rank in ranks:
            # Of a rank that has ended, receive() and wait() say how.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._sockets[rank].send(json.dumps(message).encode())

    def receive(self, rank: int, kind: str) -> dict[str, Any]:
        """The next message of a rank, which has to be of this kind."""
        connection = self._sockets[rank]
        self._await_readable(connection, Deadline(self._patience_s), f"rank {rank} to report {kind!r}")
        try:
            data = connection.recv(MAX_MESSAGE_BYTES)
        except ConnectionResetError:  # it closed before it had read all; what it sent before is still there
            data = connection.recv(MAX_MESSAGE_BYTES)
        message: dict[str, Any] = json.loads(data) if data else {"kind": "end of connection"}
        if not data:
            self._await_exit(rank)
        assert message["kind"] == kind, f"rank {rank} had to report {kind!r}, but sent {message}\n{self.printed()}"
        return message

    def receive_all(self, ranks: Iterable[int], kind: str) -> dict[int, dict[str, Any]]:
        return {rank: self.receive(rank, kind) for rank in ranks}

    def printed(self) -> str:
        return "\n".join(f"--- rank {rank}\n{self.output(rank)}" for rank in range(len(self._paths)))

    def output(self, rank: int) -> str:
        return self._paths[rank].read_text(errors="replace")

    def _await_exit(self, rank: int) -> None:
        """Wait until a rank that has closed its socket has also ended, and so has printed why. It may never end."""
        deadline = Deadline(SECONDS_S)
        with contextlib.suppress(psutil.NoSuchProcess):
            while psutil.Process(self.pids[rank]).status() != psutil.STATUS_ZOMBIE and not deadline.expired:
                time.sleep(0.01)

    def _await_readable(self, sock: socket.socket, deadline: Deadline, what: str) -> None:
        if not select.select([sock], [], [], deadline.remaining_s)[0]:
            raise TimeoutError(f"waited {deadline.timeout_s:g} s for {what}\n{self.printed()}")


class LocalRanks(ControlledRanks):
    """Ranks of this host with their coordinator in the test's process."""

    job: LocalJob

    @property
    def coordinator(self) -> CoordinatorServer:
        return self.job.coordinator

    def start_worker(self) -> int:
        """Start one more worker of an elastic job; returns its number when it has connected."""
        number = self.job.start(self.outputs[len(self.job.pids)])
        self.accept(1)
        return number

    def wait(self) -> list[int]:
        """The exit codes, when all ranks have ended."""
        try:
            return self.job.wait(Deadline(self._patience_s))
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.printed()}") from None


@contextmanager
def short_folder() -> Iterator[tuple[Path, ExitStack]]:
    """A folder whose path is short, as that of a socket must be, and what closes before it is removed."""
    with tempfile.TemporaryDirectory(prefix="ronde") as folder, ExitStack() as opened:
        yield Path(folder), opened


@contextmanager
def start_ranks(
    name: str,
    num_ranks: int,
    *,
    settings: Settings | None = None,
    env: Mapping[str, str] | None = None,
    prefixes: Mapping[int, Sequence[str]] | None = None,
    python: str | Path = sys.executable,
    patience_s: float = PATIENCE_S,
    limits: ElasticLimits | None = None,
    max_workers: int = 0,
) -> Iterator[LocalRanks]:
    """A job on this host that runs a script of tests/jobs/scripts; every rank has connected. `prefixes` are commands
    that start a rank's command, and `python` is that of another environment. With limits the job is elastic, and has up
    to `max_workers` processes in its life."""
    with short_folder() as (folder, opened):
        ranks = LocalRanks(max(num_ranks, max_workers), folder, opened, patience_s)
        command, env = [*_prefix_command(prefixes or {}), *script(name, python=python)], {**ranks.env, **(env or {})}
        ranks.job = LocalJob(command, num_ranks, outputs=ranks.outputs, env=env, settings=settings, limits=limits)
        opened.enter_context(ranks.job)
        ranks.accept(num_ranks)
        yield ranks


def _prefix_command(prefixes: Mapping[int, Sequence[str]]) -> list[str]:
    """All ranks of a local job have one command: a shell finds out which rank it is."""
    cases = "".join(f'{rank}) exec {shlex.join(words)} "$@";; ' for rank, words in prefixes.items())
    return ["sh", "-c", f'case $RONDE_RANK in {cases}*) exec "$@";; esac', "sh"] if prefixes else []


def hosted_by_rank_0() -> dict[str, object]:
    """Settings of a job whose coordinator is a thread of rank 0: no launcher says how a rank has ended."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]  # nobody uses it now
    return {"coordinator": f"127.0.0.1:{port}", "coordinator_hosted": False}


# --- `ronde run` ---------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """How a command has ended. Bytes that are no text are in the texts as surrogates."""

    code: int
    out: str
    err: str

    @property
    def summary(self) -> list[str]:
        """The last lines of `ronde run`: those after the last line with a rank's number in front."""
        lines = self.err.splitlines()
        while lines and any(line.startswith("[") for line in lines):
            lines.pop(0)
        return lines


class RondeRun:
    """`ronde run` under way; a context. At its end the driver is dead and nothing that it has started is left, which is
    known by a variable in the environment of all processes of the job."""

    def __init__(
        self,
        *words: str,
        env: Mapping[str, str] | None = None,
        merged: bool = False,
        command: Sequence[str] = (RONDE, "run"),
    ) -> None:
        """`words` follow the command; `env` is added to the environment; merged: `2>&1`."""
        self._mark = uuid.uuid4().hex
        self._seen: list[psutil.Process] = []
        self.driver = subprocess.Popen(
            [*command, *words],
            cwd=ROOT,
            env={**os.environ, **(env or {}), "TEST_MARK": self._mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        )

    def __enter__(self) -> RondeRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.await_nothing_left()
        finally:
            kill(self.driver)

    def read_lines(self, count: int = 1) -> list[str]:
        """The next lines on standard output, sorted. pytest's time limit ends the wait."""
        assert self.driver.stdout is not None
        lines = [self.driver.stdout.readline().decode() for _ in range(count)]
        assert all(lines), self.result()
        self._seen = self.processes()
        return sorted(line.rstrip("\n") for line in lines)

    def read_errors_until(self, text: str) -> str:
        """Lines on standard error, up to the first that holds the text."""
        assert self.driver.stderr is not None
        seen = ""
        while text not in seen:
            line = self.driver.stderr.readline().decode()
            assert line, f"waited for {text!r}, saw {seen!r}"
            seen += line
        return seen

    def processes(self) -> list[psutil.Process]:
        """All processes of the job, but for the driver."""
        return psutil.Process(self.driver.pid).children(recursive=True)

    def signal(self, number: int) -> None:
        """Send it to the driver alone."""
        self.driver.send_signal(number)

    def result(self, limit_s: float = PATIENCE_S) -> Result:
        """Wait for the end."""
        out, err = self.driver.communicate(timeout=limit_s)
        texts = (data.decode(errors="surrogateescape") if data else "" for data in (out, err))
        return Result(self.driver.returncode, *texts)

    def await_nothing_left(self) -> None:
        _, left = psutil.wait_procs(self._seen, timeout=SECONDS_S)
        deadline = Deadline(SECONDS_S)
        while (found := [*map(describe, left), *processes_with(f"TEST_MARK={self._mark}")]) and not deadline.expired:
            left = [process for process in left if process.is_running()]
            time.sleep(0.01)
        assert not found, "\n".join(found)


def run(*words: str, env: Mapping[str, str] | None = None, limit_s: float = PATIENCE_S) -> Result:
    """`ronde run` to its end; it leaves nothing behind."""
    with RondeRun(*words, env=env) as job:
        return job.result(limit_s)


def ask(*words: str) -> Result:
    """Another command of ronde to its end."""
    done = subprocess.run([RONDE, *words], capture_output=True, timeout=PATIENCE_S, check=False)
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


def processes_with(variable: str) -> list[str]:
    """Descriptions of all living processes with this in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.append(f"process {path.parent.name}: {(path.parent / 'cmdline').read_bytes()!r}")
        except OSError:  # it ended while we looked, or is somebody else's
            continue
    return found


class Terminal:
    """A command on a terminal; a context."""

    def __init__(self, command: list[str], rows: int = 24, columns: int = 80) -> None:
        self._fd, self._child_end = os.openpty()
        set_window_size(self._child_end, rows, columns)
        self.before = termios.tcgetattr(self._child_end)
        end = self._child_end
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=end, stdout=end, stderr=end, start_new_session=True)
        self.shown = ""
        self._num_read = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        kill(self.process)
        os.close(self._fd)
        os.close(self._child_end)

    def read_until(self, text: str) -> str:
        """Wait until this is shown; returns what was shown since type() was last called."""
        deadline = Deadline(PATIENCE_S)
        while text not in self.shown[self._num_read :]:
            ready, _, _ = select.select([self._fd], [], [], deadline.remaining_s)
            assert ready, f"waited for {text!r}, saw {self.shown!r}"
            self.shown += os.read(self._fd, 1 << 16).decode()
        return self.shown[self._num_read :]

    def type(self, text: str) -> None:
        self._num_read = len(self.shown)
        os.write(self._fd, text.encode())

    def modes(self) -> list[object]:
        return termios.tcgetattr(self._child_end)

    def result(self) -> int:
        """The exit code; all that was shown is in `shown`."""
        deadline = Deadline(PATIENCE_S)
        while (code := self.process.poll()) is None or select.select([self._fd], [], [], 0)[0]:
            assert not deadline.expired, f"it does not end; saw {self.shown!r}"
            if select.select([self._fd], [], [], 0.01)[0]:
                self.shown += os.read(self._fd, 1 << 16).decode()
        return code


# --- hosts ---------------------------------------------------------------------------------------------------------

SSHD = "/usr/sbin/sshd"
HAS_NAMESPACES = os.geteuid() == 0 and shutil.which("ip") is not None
HAS_SSH = HAS_NAMESPACES and shutil.which("ssh") is not None and Path(SSHD).exists()
needs_namespaces = needs(
    "network namespaces", missing="" if HAS_NAMESPACES else "network namespaces need root and the command ip"
)
needs_hosts = needs(
    "ssh between network namespaces",
    missing="" if HAS_SSH else "hosts as network namespaces need root, the command ip, ssh and sshd",
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


class NetworkHosts:
    """Network namespaces on one switch; a context. They share one file system and one table of processes, so a test
    sees what is left on each of them."""

    def __init__(self, num_hosts: int) -> None:
        self._switch = f"ronde-{os.getpid()}-switch"
        self.names = [f"ronde-{os.getpid()}-host{index}" for index in range(num_hosts)]
        self.addresses = [f"10.79.0.{index + 1}" for index in range(num_hosts)]
        self._links = [f"rh{os.getpid()}-{index}" for index in range(num_hosts)]

    def __enter__(self) -> Self:
        try:
            self._open()
        except subprocess.CalledProcessError as error:
            self.__exit__()
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self.names, self._switch):  # the links go with them
            subprocess.run(("ip", "netns", "del", name), check=False, timeout=PATIENCE_S, capture_output=True)

    def _open(self) -> None:
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

    def cut(self, index: int, state: str = "down") -> None:
        """Take the link of a host down, or up again. While it is down nothing arrives, and nothing is closed."""
        ip("-n", self._switch, "link", "set", self._links[index], state)

    @contextmanager
    def cut_one_way(self, index: int) -> Iterator[None]:
        """A context in which nothing arrives at a host, while all that it sends arrives at the others."""
        # The switch drops it. A host that drops its own packets knows of it, and does not count lost probes.
        queue = ("tc", "-n", self._switch, "qdisc", "{}", "dev", self._links[index], "root", "pfifo", "limit", "0")
        change = [[word.format(verb) for word in queue] for verb in ("add", "del")]
        subprocess.run(change[0], check=True, timeout=PATIENCE_S, capture_output=True)
        try:
            yield
        finally:
            subprocess.run(change[1], check=True, timeout=PATIENCE_S, capture_output=True)

    def cut_between(self, first: int, second: int) -> None:
        """Let nothing arrive that two hosts send to each other, while both reach all others."""
        for here, there in ((first, second), (second, first)):
            nobody = ("lladdr", "02:00:00:00:00:99", "dev", "net0", "nud", "permanent")
            ip("-n", self.names[here], "neigh", "replace", self.addresses[there], *nobody)

    def heal_between(self, first: int, second: int) -> None:
        for here, there in ((first, second), (second, first)):
            ip("-n", self.names[here], "neigh", "del", self.addresses[there], "dev", "net0")

    def exec(self, index: int) -> list[str]:
        """What starts a command on a host."""
        return ["ip", "netns", "exec", self.names[index]]

    def processes(self, index: int) -> list[psutil.Process]:
        """The processes on a host, but for the sshd that listens."""
        command = ("ip", "netns", "pids", self.names[index])
        found = subprocess.run(command, check=True, timeout=PATIENCE_S, capture_output=True, text=True)
        processes = []
        for pid in map(int, found.stdout.split()):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended while we looked
                process = psutil.Process(pid)
                if process.cmdline()[:2] != [f"sshd: {SSHD}", "-D"] and "[listener]" not in " ".join(process.cmdline()):
                    processes.append(process)
        return processes

    def await_nothing_left(self, *, ignored: str = "nothing") -> None:
        """Wait until no host has a process of a job any more."""
        deadline = Deadline(SECONDS_S)
        left = ["?"]
        while left and not deadline.expired:
            time.sleep(0.02)
            hosts = range(len(self.names))
            found = [f"{index}: {describe(process)}" for index in hosts for process in self.processes(index)]
            left = [line for line in found if ignored not in line]
        assert not left, "\n".join(left)


class SshHosts(NetworkHosts):
    """Three hosts, each with a real sshd. Keys, configuration and known hosts are made in `folder`; nobody's ~/.ssh is
    touched."""

    port = 2022

    def __init__(self, folder: Path) -> None:
        super().__init__(num_hosts=3)
        self.folder = folder
        self._opened = ExitStack()

    def __exit__(self, *_: object) -> None:
        self._opened.close()
        super().__exit__()

    def _open(self) -> None:
        super()._open()
        for name in ("host", "user", "other"):
            command = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
            subprocess.run(command, check=True, timeout=PATIENCE_S, capture_output=True)
        for known, key in (("known", "host"), ("known-otherwise", "other")):
            public = (self.folder / f"{key}.pub").read_text()
            lines = [f"[{address}]:{self.port} {public}" for address in self.addresses]
            (self.folder / known).write_text("".join(lines))
        for index in range(len(self.names)):
            self._start_sshd(index)

    def _start_sshd(self, index: int) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd does not start without
        config = self.folder / "sshd_config"
        config.write_text(SSHD_CONFIG.format(port=self.port, folder=self.folder))
        sshd = subprocess.Popen(
            [*self.exec(index), SSHD, "-D", "-e", "-f", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self._opened.callback(kill, sshd)
        assert sshd.stderr is not None
        printed = ""
        while "Server listening" not in printed:
            assert select.select([sshd.stderr], [], [], PATIENCE_S)[0], f"sshd does not start: {printed}"
            data = os.read(sshd.stderr.fileno(), 4096)
            assert data, f"sshd has ended: {printed}"
            printed += data.decode()

    def command(
        self, *words: str, verb: str = "run", identity: str = "user", known: str = "known", port: int = 0
    ) -> list[str]:
        """A command of ronde on the first of the hosts."""
        flags = ["--ssh-port", str(port or self.port), "--ssh-identity", str(self.folder / identity)]
        for option in (f"UserKnownHostsFile={self.folder / known}", "IdentitiesOnly=yes", "StrictHostKeyChecking=yes"):
            flags += ["--ssh-option", option]
        return [*self.exec(0), sys.executable, "-m", "ronde.cli.main", verb, *flags, *words]

    def run(self, *words: str, **how: Any) -> subprocess.CompletedProcess[str]:
        """`ronde run` to its end; `how` as command() has it."""
        command = self.command(*words, **how)
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    def start(self, *words: str, heartbeat_s: float = 10.0) -> RondeRun:
        return RondeRun(command=self.command("--heartbeat-s", str(heartbeat_s), *words))

    def hang_up(self, index: int) -> None:
        """Kill what serves the ssh connections of a host, as if the host had died."""
        for process in self.processes(index):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended with the one before
                if process.name().startswith("sshd"):
                    process.kill()


def read_worker_results(folder: Path) -> dict[int, dict[str, Any]]:
    """What the workers of an elastic job have written, by their numbers. `sizes` are those of the rounds in which a
    worker has trained: one that came when the others had finished has none, and is left out."""
    written = {int(file.stem.partition("-")[2]): json.loads(file.read_text()) for file in folder.glob("worker-*.json")}
    return {worker: result for worker, result in written.items() if result["sizes"]}
