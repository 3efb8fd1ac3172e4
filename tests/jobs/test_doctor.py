"""`ronde doctor` with real ranks: this machine, and hosts over ssh of which some are of no use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from ronde.cli.doctor.report import DoctorReport
from ronde.types import Deadline
from tests.jobs.kit import SshHosts, ip, needs_hosts
from tests.limits import PATIENCE_S, SECONDS_S

DOCTOR = (sys.executable, "-W", "error", "-m", "ronde.cli.main", "doctor")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Where frameworks fail at once: the real ones take seconds to import, on every host."""
    for name in ("torch", "tensorflow", "keras", "mxnet", "jax"):
        (tmp_path / f"{name}.py").write_text("import ctypes; ctypes.CDLL('libnowhere.so')")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def run(command: list[str] | tuple[str, ...], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def ends(pid: int) -> bool:
    """Whether a process that was killed has ended, or does so soon: the kernel takes a moment."""
    deadline = Deadline(SECONDS_S)
    try:
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:  # an orphan's end is for init to see
            if deadline.expired:
                return False
            time.sleep(0.01)
    except psutil.NoSuchProcess:
        pass
    return True


def parse(text: str) -> DoctorReport:
    return msgspec.json.decode(text, type=DoctorReport)


def test_this_machine_is_examined_and_measured(env: dict[str, str]) -> None:
    done = run((*DOCTOR, "--json"), env)
    report = parse(done.stdout)
    assert (done.returncode, done.stderr, report.healthy) == (0, "", True)
    (host,) = report.hosts
    assert host.facts is not None and host.facts.executable == sys.executable
    assert [each.state for each in host.facts.frameworks] == ["broken"] * 5
    assert "libnowhere.so: cannot open shared object file" in host.facts.frameworks[0].note
    (pair,) = report.pairs
    assert pair.speed is not None
    assert 0 < pair.speed.round_trip_s < 1 and pair.speed.bytes_per_s > 1e6 and pair.speed.back_bytes_per_s > 1e6
    assert abs(pair.speed.clock_ahead_s) < 0.5


def test_ctrl_c_ends_it_and_everything_that_it_started(tmp_path: Path, env: dict[str, str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "jax.py").write_text(
        f"import os, time; open({str(pipe)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    )
    with subprocess.Popen(DOCTOR, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as doctor:
        try:
            pid = int(pipe.read_text())  # waits for the writer
            doctor.send_signal(signal.SIGINT)
            out, err = doctor.communicate(timeout=PATIENCE_S)
        finally:
            doctor.kill()
    assert (doctor.returncode, out) == (130, ""), err
    assert ends(pid)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with SshHosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@needs_hosts
def test_hosts_that_are_well_are_shown_in_a_table(hosts: SshHosts, env: dict[str, str]) -> None:
    a, b, _ = hosts.addresses
    done = run(hosts.command("-H", f"{a},{b}", verb="doctor"), env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"host {b}" in done.stdout and done.stdout.count("the same host") == 2
    assert [a, b] in [line.split()[:2] for line in done.stdout.splitlines()]
    assert max(map(len, done.stdout.splitlines())) <= 80
    hosts.await_nothing_left()


@needs_hosts
def test_who_is_of_no_use_is_named_and_the_others_are_still_examined(hosts: SshHosts, env: dict[str, str]) -> None:
    _, b, c = hosts.addresses
    for one, other in ((1, c), (2, b)):
        ip("-n", hosts.names[one], "route", "add", "unreachable", f"{other}/32")
    done = run(hosts.command("-H", f"{b},{c},nowhere.invalid", "--json", verb="doctor"), env)
    report = parse(done.stdout)
    assert done.returncode == 1 and not report.healthy
    assert [host.facts is not None for host in report.hosts] == [True, True, False]
    assert report.hosts[2].error.startswith("its name is not known")
    assert [(pair.first, pair.second) for pair in report.pairs if pair.speed is not None] == [(b, b), (c, c)]
    assert f"{b} cannot reach {c} (tried " in report.pairs[2].error
    broken = [problem.where for problem in report.problems if problem.severity == "broken"]
    assert broken == ["nowhere.invalid", f"{b}, {c}"]
    hosts.await_nothing_left()
