"""`ronde doctor` without jobs: what it makes of what was found, and how it says it. Real hosts: tests/jobs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ronde.cli.doctor.command import format_job_error
from ronde.cli.doctor.link_speed import LinkSpeed
from ronde.cli.doctor.problems import make_doctor_report
from ronde.cli.doctor.report import MAX_PAIRS_SHOWN, DoctorReport, HostPairReport, HostReport, render_report
from ronde.cli.doctor.system_info import (
    ComponentStatus,
    CpuInfo,
    MemoryInfo,
    ResourceLimits,
    SharedMemoryInfo,
    SystemInfo,
    check_component,
    check_components,
)
from ronde.errors import StartFailed
from ronde.types import Deadline
from tests.unit.cli.commands import drawn

MB, GB = 10**6, 10**9
NATIVE, MPI = ComponentStatus("native", "usable", "1", "avx2 kernels"), ComponentStatus("mpi", "missing")
TORCH = ComponentStatus("torch", "usable", "2.13.0")
GOOD = SystemInfo(
    node="node7",
    ronde="0.1.0",
    python="3.12.1",
    executable="/opt/venv/bin/python",
    system="Linux 6.1.0 x86_64",
    cpu="A CPU of some make with a long name and a number",
    libraries={"numpy": "2.1.0"},
    cores=CpuInfo(64, 8, 3.5),
    memory=MemoryInfo(64 * GB, 32 * GB, 48 * GB),
    shared_memory=SharedMemoryInfo(True, dev_shm_bytes=32 * GB),
    limits=ResourceLimits(65536, None, 8 << 20),
    backends=(NATIVE, MPI, ComponentStatus("nccl", "missing")),
    frameworks=(TORCH, ComponentStatus("jax", "missing", note="not installed")),
)
FAST = LinkSpeed(0.00005, 1.1 * GB, 1.2 * GB, 0.0001)


def host(name: str = "a", **changes: Any) -> HostReport:
    return HostReport(name, msgspec.structs.replace(GOOD, **changes))


def pair(first: str = "a", second: str = "b", **changes: float) -> HostPairReport:
    return HostPairReport(first, second, msgspec.structs.replace(FAST, **changes))


def shown(report: DoctorReport) -> str:
    return drawn(render_report(report), 80)


def test_where_nothing_is_wrong_all_is_well() -> None:
    report = make_doctor_report([host("a"), host("b")], [pair(), pair("a", "a"), pair("b", "b")])
    assert report.healthy and report.problems == ()
    assert shown(report).rstrip().endswith("all is well")


@pytest.mark.parametrize(
    ("changes", "severity", "check", "what"),
    [
        ({"backends": (ComponentStatus("native", "broken", note="no file"), MPI)}, "broken", "native", "no file"),
        ({"shared_memory": SharedMemoryInfo(False, "not permitted")}, "broken", "shared", "not permitted"),
        ({"backends": (ComponentStatus("native", "usable", "1", "portable"), MPI)}, "warning", "native", "AVX2"),
        ({"backends": (NATIVE, ComponentStatus("mpi", "broken", note="x"))}, "warning", "mpi", "x"),
        ({"frameworks": (TORCH, ComponentStatus("jax", "broken", note="libtpu"))}, "warning", "jax", "libtpu"),
        ({"shared_memory": SharedMemoryInfo(True, dev_shm_bytes=64 * MB)}, "warning", "shared", "only 64 MB"),
        ({"memory": MemoryInfo(GB, 100 * MB)}, "warning", "memory", "only 100 MB"),
        ({"limits": ResourceLimits(256, None, None)}, "warning", "limits", "only 256 open files"),
        ({"limits": ResourceLimits(None, 100, None)}, "warning", "limits", "only 100 processes"),
    ],
)
def test_what_is_wrong_with_a_host_is_named_with_what_to_do(
    changes: dict[str, Any], severity: str, check: str, what: str
) -> None:
    report = make_doctor_report([host("a", **changes)], [])
    (problem,) = report.problems
    assert (problem.severity, problem.where, problem.check) == (severity, "a", check)
    assert what in problem.what and problem.advice
    assert report.healthy == (severity == "warning")
    text = shown(report)
    assert any(line.split()[:2] == [severity, check] for line in text.splitlines()), text
    assert what in text


def test_a_small_dev_shm_bothers_only_those_with_pytorch() -> None:
    small = SharedMemoryInfo(True, dev_shm_bytes=64 * MB)
    missing = (ComponentStatus("torch", "missing"),)
    assert make_doctor_report([host(shared_memory=small, frameworks=missing)], []).problems == ()


def test_a_host_that_cannot_be_used_is_broken_and_the_others_are_still_shown() -> None:
    report = make_doctor_report([HostReport("a", error="its name is not known"), host("b")], [pair("b", "b")])
    assert not report.healthy
    assert report.problems[0].what == "its name is not known"
    text = shown(report)
    assert "a: its name is not known" in text and "host b (node7)" in text
    assert text.rstrip().endswith("jobs will fail: 1 broken")


def test_versions_that_differ_between_hosts_are_named() -> None:
    other = (ComponentStatus("torch", "usable", "2.1.0"),)
    (problem,) = make_doctor_report([host("a"), host("b", frameworks=other), host("c")], []).problems
    assert problem.what == "different versions: 2.13.0 on a, c; 2.1.0 on b"


@pytest.mark.parametrize(
    ("found", "severity", "what"),
    [
        (HostPairReport("a", "b", error="a cannot reach b"), "broken", "a cannot reach b"),
        (pair(back_bytes_per_s=11e6), "warning", "only 11 MB/s"),
        (pair(round_trip_s=0.03), "warning", "30 ms"),
        (pair(clock_ahead_s=-7.5), "warning", "clocks differ by 7.5 s"),
    ],
)
def test_what_is_wrong_between_two_hosts_is_named(found: HostPairReport, severity: str, what: str) -> None:
    report = make_doctor_report([host("a"), host("b")], [found])
    (problem,) = report.problems
    assert (problem.severity, problem.where) == (severity, "a, b") and what in problem.what
    assert what in shown(report)


def test_ranks_of_one_host_are_not_judged_by_the_measure_of_a_network() -> None:
    assert make_doctor_report([host("a")], [pair("a", "a", bytes_per_s=1e6, round_trip_s=1.0)]).problems == ()


def test_a_pair_that_is_slower_than_most_is_told_from_them() -> None:
    pairs = [pair("a", "b"), pair("a", "c"), pair("b", "c", bytes_per_s=0.3 * GB)]
    (problem,) = make_doctor_report([], pairs).problems
    assert problem.where == "b, c" and "300 MB/s, where most have 1.1e+03" in problem.what


def test_of_very_many_pairs_the_slowest_are_shown() -> None:
    pairs = [pair(f"h{index}", f"g{index}", bytes_per_s=(index + 1) * GB) for index in range(100)]
    text = shown(make_doctor_report([], pairs))
    assert f"the slowest {MAX_PAIRS_SHOWN} of 100" in text
    assert "h0 " in text and "h99" not in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("the host cannot be used:\n  b: its name is not known", "its name is not known"),
        ("the hosts of this job cannot all reach each other:\n  a cannot reach b\n  b cannot reach a",
         "a cannot reach b; b cannot reach a"),
        ("it took longer than 50 s", "it took longer than 50 s"),
        ("", "StartFailed"),
    ],
)  # fmt: skip
def test_the_reason_of_a_failed_job_is_put_in_one_line(text: str, words: str) -> None:
    assert format_job_error(StartFailed(text), "b") == words


def test_bad_installs_are_told_with_their_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "jax": "print('hello')\nraise ImportError('no libtpu.so\\n\\nsee the manual')",
        "keras": "import tensorflow_of_nowhere",
        "tensorflow": "import os; os.kill(os.getpid(), 11)",
        "torch": "import os; os._exit(0)",
        "theano": "__version__ = '9.9'\nprint('a banner')\nimport atexit; atexit.register(lambda: None)",
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = {each.name: each for each in check_components((*modules, "nowhere"), Deadline(30))}
    assert found["jax"] == ComponentStatus("jax", "broken", note="see the manual")
    assert found["keras"].note == "ModuleNotFoundError: No module named 'tensorflow_of_nowhere'"
    assert found["tensorflow"].note == "killed by signal 11 (SIGSEGV)"
    assert (found["theano"].state, found["theano"].version) == ("usable", "9.9")
    assert found["torch"] == ComponentStatus("torch", "broken", note="exited with code 0")
    assert found["nowhere"] == ComponentStatus("nowhere", "missing", note="not installed")


def test_an_import_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jax.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start_s = time.monotonic()
    assert check_component("jax", Deadline(0.3)).note == "it could not be imported within 0.3 s"
    assert time.monotonic() - start_s < 20


def test_the_native_library_says_which_kernels_it_uses() -> None:
    native = check_component("native", Deadline(30))
    assert native.state == "usable" and native.note.endswith(" kernels")
