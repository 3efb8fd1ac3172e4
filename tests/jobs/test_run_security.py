"""A job of `ronde run` as an attacker finds it: docs/security.md lists what listens and what an attacker gets, and
there is nothing else."""

from __future__ import annotations

import os
import re
import select
import socket
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from ronde.net.handshake import VERSION
from ronde.net.keys import JobKey
from ronde.types import Deadline
from tests.jobs.kit import ROOT, ControlledRanks, Result, RondeRun, run, script, short_folder
from tests.jobs.test_strangers import NOISE, Address, connect, listening_tcp, listening_unix, send
from tests.limits import PATIENCE_S, SECONDS_S
from tests.services import needs

NOBODY = 65534
CHALLENGE = re.compile(re.escape(b"RONDd" + bytes([VERSION])) + rb".{32}(\x01\0\0\0\0)?", re.DOTALL)
ZEROMQ = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\x01" + bytes(31)

needs_root = needs("another user", missing="" if os.geteuid() == 0 else "only root can become somebody else")


class SecretJob(ControlledRanks):
    """Two ranks of `ronde run`, with lines to the test. All that it may write to is in one folder."""

    running: RondeRun
    folder: Path

    def variable(self, name: str) -> str:
        """Of the environment of its ranks."""
        return psutil.Process(self.pids[0]).environ()[name]

    def processes(self) -> dict[str, list[int]]:
        """Process ids: of the driver, of the ranks, and of all else that the job has started."""
        everything = {process.pid for process in self.running.processes()}
        driver, ranks = self.running.driver.pid, list(self.pids.values())
        return {"driver": [driver], "rank": ranks, "other": sorted(everything - {*ranks})}

    def finish(self) -> Result:
        """Let it end; it has to, and well: a wrong number anywhere would have failed it."""
        self.send(self.pids, stop=True)
        self.receive_all(self.pids, "over")
        done = self.running.result()
        assert (done.code, done.summary) == (0, []), done
        return done


@contextmanager
def start_job(*flags: str) -> Iterator[SecretJob]:
    with short_folder() as (folder, opened), ExitStack() as running:
        job = SecretJob(2, folder, opened)
        job.folder = folder / "all"
        env = {**job.env, "PYTHONPATH": str(ROOT), "TEST_STEPS": "logging"}
        for name in ("XDG_RUNTIME_DIR", "TMPDIR", "HOME"):
            (job.folder / name).mkdir(parents=True)
            env[name] = str(job.folder / name)
        words = ("-np", "2", "--no-fold", "--name", "secret", "--output", str(job.folder / "output"), *flags)
        job.running = running.enter_context(RondeRun(*words, *script("until_stopped"), env=env))
        job.accept()
        job.receive_all((0, 1), "running")
        yield job


# --- what listens --------------------------------------------------------------------------------------------------


def documented() -> Counter[tuple[str, str]]:
    """(process, kind) → how many, from the first table of docs/security.md."""
    rows = re.findall(
        r"^\| (driver|rank) \| ([^|]+) \| (\d+) \| ", (ROOT / "docs/security.md").read_text(), re.MULTILINE
    )
    return Counter({(process, kind): int(number) for process, kind, number in rows})


def listening(pid: int) -> list[tuple[str, Address]]:
    """(kind, address) of everything where a process listens."""
    found: list[tuple[str, Address]] = [("TCP", address) for address in listening_tcp(pid)]
    found += [("Unix, a path" if name.startswith("/") else "Unix, abstract", name) for name in listening_unix(pid)]
    return found + [("UDP", str(each.laddr)) for each in psutil.Process(pid).net_connections(kind="udp")]


def listening_at(pid: int, kind: str) -> list[Address]:
    return [address for each, address in listening(pid) if each == kind]


def test_only_what_the_documentation_lists_listens() -> None:
    wanted = documented()
    assert len(wanted) == 4
    with start_job() as job:
        for what, pids in job.processes().items():
            of_this = Counter({kind: number for (process, kind), number in wanted.items() if process == what})
            for pid in pids:
                assert Counter(kind for kind, _ in listening(pid)) == of_this
                assert {host for host, _ in listening_tcp(pid)} <= {"127.0.0.1"}
        path = str(job.folder / "XDG_RUNTIME_DIR/ronde/secret.sock")
        assert listening_at(job.running.driver.pid, "Unix, a path") == [path]
        job.finish()


def test_a_job_of_one_without_a_launcher_listens_at_nothing() -> None:
    program = "import psutil, ronde; ronde.init(); print([c for c in psutil.Process().net_connections('all')])"
    env = {name: value for name, value in os.environ.items() if not name.startswith("RONDE_")}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, timeout=PATIENCE_S, check=True)
    assert done.stdout == b"[]\n"


# --- processes without the key -------------------------------------------------------------------------------------


def until_cut_off(client: socket.socket, deadline: Deadline) -> bytes:
    """All that it receives until it is cut off, which has to happen: nobody waits for it."""
    got = b""
    poll = select.poll()
    poll.register(client, select.POLLIN)
    while True:
        assert poll.poll(1000 * deadline.remaining_s), "it was not cut off"
        data = b""
        with suppress(ConnectionResetError):
            data = client.recv(4096)
        if not data:
            return got
        got += data


def test_strangers_learn_nothing_and_change_nothing() -> None:
    with start_job() as job, ExitStack() as opened:
        addresses = [each for pids in job.processes().values() for pid in pids for each in listening(pid)]
        listener = ("127.0.0.1", int(job.variable("RONDE_COORDINATOR").rpartition(":")[2]))
        (control,) = listening_tcp(job.running.driver.pid) - {listener}
        callers = [
            (*each, noise, opened.enter_context(connect(each[1]))) for noise in NOISE.values() for each in addresses
        ]
        assert len(callers) == 7 * len(NOISE)
        for _, _, noise, client in callers:
            send(client, noise)
        deadline = Deadline(PATIENCE_S)
        lengths: Counter[int] = Counter()
        for kind, address, noise, client in callers:
            if address == control:  # ZeroMQ keeps a silent caller, and says nothing more to it
                got = until_silent(client)
                assert ZEROMQ.startswith(got), got
            elif kind != "Unix, a path":  # there it is the user himself
                got = until_cut_off(client, deadline)
                assert got == b"" or (CHALLENGE.fullmatch(got) and noise.startswith(b"RONDc")), got
                lengths[len(got)] += 1
        assert lengths[38] == lengths[43] == 5, "another version, and a wrong proof, at each of five listeners"
        done = job.finish()
    assert "[ronde] refused a connection from 127.0.0.1:" in done.err
    assert "[ronde] a connection to the control port: failed in the handshake" in done.err
    assert "Traceback" not in done.err


def until_silent(client: socket.socket) -> bytes:
    got = b""
    client.settimeout(0.05)
    with suppress(TimeoutError, ConnectionResetError):
        while data := client.recv(4096):
            got += data
    return got


# --- other users of the host ---------------------------------------------------------------------------------------

AS_NOBODY = """
import os, socket, sys
os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})
for path in sys.argv[2:]:
    try:
        print(path, len(open(path, "rb").read()))
    except OSError as error:
        print(path, error.strerror)
for address in sys.argv[1].split():
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout({patience})
    try:
        sock.connect(address.replace("@", chr(0)))
        sock.sendall(b"RONDc" + bytes([{version}, 0, 0]) + bytes(32))
        print(address, sock.recv(100))
    except OSError as error:
        print(address, error.strerror)
"""


@needs_root
def test_another_user_of_the_host_cannot_even_talk_to_it() -> None:
    with start_job() as job:
        sockets = [name for pids in job.processes().values() for pid in pids for name in listening_unix(pid)]
        path, *names = sorted(sockets, key=lambda name: name[0] != "/")
        for folder in (job.folder, job.folder.parent, job.folder / "XDG_RUNTIME_DIR"):
            folder.chmod(0o755)  # its own directory has to be enough
        environments = [f"/proc/{pid}/environ" for pid in (job.running.driver.pid, *job.pids.values())]
        program = AS_NOBODY.format(nobody=NOBODY, patience=SECONDS_S, version=VERSION)
        addresses = " ".join([path, *(f"@{name}" for name in names)])
        command = [sys.executable, "-c", program, addresses, *environments]
        said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
        refused = {
            address: said.split(f"{address} ")[1].split("\n")[0] for address in (*addresses.split(), *environments)
        }
        assert {refused[address] for address in environments} == {"Permission denied"}
        assert refused[path] == "Permission denied"
        assert {refused[f"@{name}"] for name in names} <= {"b''", "Connection reset by peer", "Broken pipe"}
        assert "belongs to another user" in job.finish().err


@needs_root
def test_a_directory_of_somebody_else_is_not_used_for_the_socket(tmp_path: Path) -> None:
    trap = tmp_path / f"ronde-{os.getuid()}"
    trap.mkdir(mode=0o777)
    os.chown(trap, NOBODY, NOBODY)
    done = run("-np", "1", "echo", "all the same", env={"TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": ""})
    assert (done.code, done.out) == (0, "[0] all the same\n")
    assert f"{trap} must be a directory of yours that nobody else can enter" in done.err
    assert not list(trap.iterdir())


# --- the key -------------------------------------------------------------------------------------------------------


def contents_of_open_files(pid: int) -> list[bytes]:
    """What is in the regular files that a process has open, also in those that have no name any more."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if stat.S_ISREG(link.stat().st_mode) and "memfd:" not in str(link.readlink()):
                found.append(link.read_bytes())
        except OSError:  # closed while we looked
            continue
    return found


def test_the_key_is_on_no_command_line_in_no_file_and_in_no_output(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    with start_job("--timeline", str(timeline)) as job:
        text_of_key = job.variable("RONDE_KEY")
        key = JobKey(text_of_key)
        secrets = [text_of_key.encode(), bytes.fromhex(text_of_key), key.server_secret, key.client_secret]
        job_processes = [pid for pids in job.processes().values() for pid in pids]
        texts = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in job_processes]
        assert any(b"until_stopped" in text for text in texts), "it can be seen what they run"
        texts += [text for pid in job_processes for text in contents_of_open_files(pid)]
        home = job.folder / "XDG_RUNTIME_DIR/ronde"
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        assert stat.S_IMODE((home / "secret.sock").stat().st_mode) == 0o600
        done = job.finish()
        written = [path for path in (*job.folder.rglob("*"), timeline) if path.is_file()]
        names = {path.name for path in written}
        assert {"rank-0.out", "rank-0.err", "rank-1.out", "rank-1.err", "timeline.json"} <= names
        texts += [path.read_bytes() for path in written]
        assert not list(home.iterdir()), "nothing is left"
    texts += [done.out.encode(), done.err.encode()]
    assert "DEBUG:root:these are the settings: Settings(" in done.err
    for text in texts:
        assert not any(secret in text for secret in secrets)
