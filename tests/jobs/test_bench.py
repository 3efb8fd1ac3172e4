"""`ronde bench` with real ranks: it measures, compares, writes its results down, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.limits import PATIENCE_S, SECONDS_S
from tests.services import needs

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("--repeats", "2", "--seconds", "0.02")
COMMAND = (sys.executable, "-m", "ronde.cli.main", "bench")
RANKS = (sys.executable, str(ROOT / "benchmarks/ranks.py"))


def bench(results: Path, *arguments: str, command: tuple[str, ...] = COMMAND) -> tuple[list[dict[str, Any]], str]:
    """The results that a run wrote, and what it printed."""
    env = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(
        (*command, *arguments, "--json", str(results)),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in results.read_text().splitlines()], done.stdout


def test_ronde_and_gloo_are_measured_and_compared(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    records, output = bench(tmp_path / "r", "allreduce", "-np", "2", "--sizes", "4K,64K", "--peers", "gloo", *SHORT)
    assert [(record["impl"], record["path"], record["bytes"]) for record in records] == [
        (impl, path, num_bytes)
        for num_bytes in (4096, 65536)
        for impl, path in (("ronde", "array"), ("ronde", "named"), ("ronde", "bucket"), ("gloo", "array"))
    ]
    for record in records:
        assert set(record) == {"impl", "op", "path", "ranks", "bytes", "median_us", "min_us", "gbps"}
        assert record["ranks"] == 2
        assert 0 < record["min_us"] <= record["median_us"]
        assert record["gbps"] == pytest.approx(8e-3 * record["bytes"] / record["median_us"], abs=0.01)
    assert output.count("best peer") == 3  # the heading, and one per size
    assert output.count("×") == 6


def test_many_gradients_are_reduced_in_every_way_ronde_has(tmp_path: Path) -> None:
    records, _ = bench(
        tmp_path / "r", "allreduce", "--sizes", "many", "--peers", "none", "--repeats", "1", "--seconds", "0.1"
    )
    assert [(record["path"], record["bytes"]) for record in records] == [
        ("many", 102_228_128),
        ("many-25MB", 102_228_128),
    ]


def test_negotiation_is_measured_per_operation(tmp_path: Path) -> None:
    records, output = bench(tmp_path / "r", "negotiation", "-np", "2", "--flight", "1,50", *SHORT)
    assert [(record["op"], record["path"], record["bytes"]) for record in records] == [
        ("negotiation", "flight-1", 4),
        ("negotiation", "flight-50", 4),
    ]
    assert "in flight" in output


def test_more_ranks_than_cores_work(tmp_path: Path) -> None:
    records, _ = bench(tmp_path / "r", "--counts", "1,6", "--sizes", "4K", *SHORT, command=RANKS)
    assert [(record["op"], record["ranks"]) for record in records] == [
        ("start", 1),
        ("allreduce", 1),
        ("start", 6),
        ("allreduce", 6),
    ]


@pytest.mark.parametrize(
    "library",
    [pytest.param("openmpi", marks=needs("Open MPI")), pytest.param("mpich", marks=needs("MPICH"))],
)
def test_an_mpi_library_in_an_environment_of_its_own_is_measured(library: str, tmp_path: Path) -> None:
    python = ROOT / f".venv-{library}/bin/python"
    if not python.exists():
        pytest.skip(f"there is no {python.relative_to(ROOT)}; `make build` makes it")
    records, _ = bench(
        tmp_path / "r", "allreduce", "--sizes", "4K", "--peers", library, "--mpi-python", str(python), *SHORT
    )
    assert [record["impl"] for record in records] == ["ronde", "ronde", "ronde", library]


@contextmanager
def running(directory: Path, *arguments: str) -> Iterator[psutil.Process]:
    """A run of the command that keeps its temporary files and sockets in the directory."""
    quiet = subprocess.DEVNULL
    env = {**os.environ, "TMPDIR": str(directory), "XDG_RUNTIME_DIR": str(directory)}
    with subprocess.Popen((*COMMAND, *arguments), stdout=quiet, stderr=quiet, env=env) as process:
        watched = psutil.Process(process.pid)
        try:
            yield watched
        finally:
            if process.poll() is None:
                for child in watched.children(recursive=True):
                    child.kill()
            process.kill()  # does nothing when it has ended


def ranks_of(command: psutil.Process, num_ranks: int) -> list[psutil.Process]:
    """The rank programs below a command, as soon as there are so many."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        ranks = [child for child in command.children(recursive=True) if _is_rank(child)]
        if len(ranks) == num_ranks:
            return ranks
        time.sleep(0.02)
    raise TimeoutError("the ranks did not start")


def _is_rank(process: psutil.Process) -> bool:
    try:
        return any(part.endswith("rank.py") for part in process.cmdline()[1:2])  # the launcher's has it further on
    except psutil.Error:  # it ended while we looked
        return False


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_command(how: signal.Signals, tmp_path: Path) -> None:
    long = ("--repeats", "1000", "--seconds", "600")
    with running(tmp_path, "negotiation", "--flight", "1", *long) as command:
        ranks = ranks_of(command, 2)
        command.send_signal(how)
        _, alive = psutil.wait_procs([command, *ranks], timeout=SECONDS_S)
        assert alive == []
    if how != signal.SIGKILL:
        assert [path for path in tmp_path.rglob("*") if path != tmp_path / "ronde"] == []  # where jobs are found


def test_a_parameter_server_is_measured_in_every_mode_and_beside_allreduce(tmp_path: Path) -> None:
    arguments = ("ps", "-np", "2", "--seconds", "0.5", "--repeats", "2", "--bytes", "4000", "--rows", "50000")
    records, output = bench(tmp_path / "r", *arguments)
    assert [(record["what"], record["mode"]) for record in records] == [
        *((what, mode) for what in ("slow", "turns") for mode in ("sync", "bounded", "dynamic", "async")),
        *(("step", way) for way in ("allreduce", "replicated", "one copy")),
        *(("sparse", way) for way in ("rows", "whole table", "RPC rows")),
        *(("rpc", way) for way in ("ronde", "flat RPC", "RPC per parameter")),
    ]
    for record in records:
        assert record["ranks"] == (3 if record["what"] in ("rpc", "sparse") else 2) and record["ratio"] > 0
        assert record["median_us"] > 0 if record["what"] in ("step", "rpc", "sparse") else record["steps_per_s"] > 0
        if record["mode"] == "sync":
            assert (record["ratio"], record["staleness"]) == (1, 0)
    by_rows, whole = (record["num_bytes"] for record in records if record["mode"] in ("rows", "whole table"))
    assert 2 * 1000 * 64 * 4 <= by_rows <= 1.1 * 2 * 1000 * (64 * 4 + 8)  # each row comes and goes
    assert 2 * 50_000 * 64 * 4 <= whole <= 1.3 * 2 * 50_000 * 64 * 4  # the first values may be counted late
    assert output.count("×") == 17
