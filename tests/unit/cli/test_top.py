"""`ronde top` and `ronde stack`, which look at a running job."""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from ronde.cli import top
from ronde.cli.stack import format_stacks
from ronde.cli.top import render_status_table, watch_job
from ronde.launch.driver.monitor import GoneWorker, JobStatus, MonitorServer, RankStatus, RoundRecord, find_job
from ronde.observe.stacks import RankStack
from tests.unit.cli.commands import drawn, ronde


def running(rank: int, **more: object) -> RankStatus:
    shares = {"computing": 0.5, "waiting": 0.4, "moving": 0.1, "operations_per_s": 20.0}
    return RankStatus(rank=rank, state="running", host="here", **{**shares, **more})  # type: ignore[arg-type]


def status_of(*ranks: RankStatus, slowest: int | None = None) -> JobStatus:
    return JobStatus(name="demo", size=len(ranks), ranks=ranks, slowest=slowest, elapsed_s=75.0)


def table(status: JobStatus, *, max_rows: int = 1000, width: int = 150) -> str:
    return drawn(render_status_table(status, max_rows=max_rows, width=width), width)


def row(text: str, start: str) -> list[str]:
    return next(line for line in text.splitlines() if line.strip().startswith(start)).split()


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 150])
def test_a_row_has_everything_about_its_rank(width: int) -> None:
    text = table(status_of(running(0, cpu=1.5, memory_bytes=1_230_000_000, held_up_s=7.25)), width=width)
    assert text.startswith("job demo: 1 rank, 1 min 15 s")
    shown = row(text, "0 ")
    assert shown[:14] == "0 here running 20 50 % 40 % 10 % 150 % 1.23 GB".split()
    assert "7.2 s" in text


@pytest.mark.parametrize("width", [30, 40, 60, 80, 119, 120])
def test_on_a_narrow_terminal_columns_are_left_out_and_none_is_cut(width: int) -> None:
    gpu = {"gpu": 0.95, "gpu_bytes": 10**9}
    assert "GPU" not in table(status_of(running(0)))
    ranks = (running(rank, cpu=1.5, memory_bytes=1_230_000_000, steps=300, steps_per_s=2.5, **gpu) for rank in (0, 1))
    text = table(status_of(*ranks, slowest=1), width=width)
    heading, *rows = text.splitlines()[1:4]
    assert heading.split()[:3] == ["rank", "host", "state"] and "waited for" in heading
    assert ("waiting" in heading, "GPU mem" in heading, "95 %" in text) == (width >= 40, width >= 120, width >= 60)
    assert all("…" not in line for line in (heading, *rows)), text


def test_steps_are_shown_instead_of_operations_where_they_are_marked() -> None:
    assert "ops/s" in table(status_of(running(0))) and "steps/s" not in table(status_of(running(0)))
    for steps_per_s in (2.5, 0.0):  # a job that hangs has marked steps, too
        text = table(status_of(running(0, steps=30, steps_per_s=steps_per_s), running(1)))
        assert "steps/s" in text and "ops/s" not in text
        assert row(text, "0 ")[3:5] == ["30", f"{steps_per_s:g}"] and row(text, "1 ")[3:5] == ["-", "-"]


def test_the_slowest_rank_is_marked() -> None:
    text = table(status_of(running(0), running(1), slowest=1), width=80)
    assert row(text, "▶")[:2] == ["▶", "1"]
    assert "▶" not in table(status_of(running(0), running(1)))


def test_what_is_not_known_is_not_made_up() -> None:
    lost = RankStatus(rank=0, state="lost", why="killed by signal 9")
    assert row(table(status_of(lost)), "0 ") == "0 - lost - - - - - - 0.0 s 0 % killed by signal 9".split()


def test_what_a_rank_waits_in_is_shown_or_that_it_is_silent() -> None:
    waiting = running(0, doing="waits 3.2 s for rank 1 in barrier", silent_s=0.5)
    assert "waits 3.2 s for rank 1 in barrier" in table(status_of(waiting))
    assert "silent for 9 s" in table(status_of(running(0, doing="waits", silent_s=9.0)))


def test_of_many_ranks_those_that_matter_are_shown() -> None:
    ranks = [running(rank, holding_up=0.5 if rank == 77 else 0.0) for rank in range(100)]
    ranks[50] = RankStatus(rank=50, state="lost")
    text = table(status_of(*ranks, slowest=77), max_rows=4)
    shown = [line.split()[0] for line in text.splitlines() if " here " in line or " lost " in line]
    assert shown == ["0", "1", "50", "▶"]
    assert "96 more ranks not shown" in text


def test_names_cannot_break_the_table() -> None:
    text = table(status_of(RankStatus(rank=0, state="lost", host="[red]a\n", why="[/] boom\x1b[2J")))
    assert "[red]a" in text and "\x1b" not in text


# --- stacks -----------------------------------------------------------------------------------------------------------


def test_a_rank_without_a_stack_has_a_reason() -> None:
    reason = "does not answer; its process is stopped"
    one, two = (RankStack(rank=rank, why=reason) for rank in range(2))
    assert format_stacks((one,)) == f"rank 0: {reason}"
    assert format_stacks((one, two)) == f"ranks 0, 1, each: {reason}"


def test_equal_stacks_are_printed_once() -> None:
    same = [RankStack(rank=rank, line="train.py:5 in step: x()", stack="main thread:\n  here\n") for rank in range(7)]
    other = RankStack(rank=7, host="b", pid=9, line="train.py:9 in load: y()", stack="main thread:\n  there\n")
    silent = RankStack(rank=8, host="b", pid=10, why="does not answer; its process is stopped")
    assert format_stacks((*same, other, silent)) == (
        "ranks 0-6: train.py:5 in step: x()\n  main thread:\n    here\n\n"
        "rank 7 on b, pid 9: train.py:9 in load: y()\n  main thread:\n    there\n\n"
        "rank 8 on b, pid 10: does not answer; its process is stopped"
    )


# --- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[MonitorServer]:
    with tempfile.TemporaryDirectory(prefix="ronde") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        stacks = (RankStack(rank=0, line="train.py:5"),)
        with MonitorServer("demo", lambda: status_of(running(0)), lambda limit_s, on_done: on_done(stacks)) as endpoint:
            yield endpoint


def test_top_prints_a_table_once_where_there_is_no_terminal(job: MonitorServer) -> None:
    for arguments in ((), ("demo",), ("demo", "--once")):
        finished = ronde("top", *arguments)
        assert finished.exit_code == 0 and finished.out.startswith("job demo: 1 rank,")


def test_top_prints_json_for_programs(job: MonitorServer) -> None:
    assert json.loads(ronde("top", "--json").out)["ranks"][0]["computing"] == 0.5


def test_stack_prints_stacks(job: MonitorServer) -> None:
    assert ronde("stack", "demo").out == "rank 0: train.py:5\n"
    assert json.loads(ronde("stack", "--json").out)["ranks"][0]["line"] == "train.py:5"


@pytest.mark.parametrize("command", ["top", "stack"])
def test_a_job_that_is_not_running_is_named_with_those_that_are(job: MonitorServer, command: str) -> None:
    finished = ronde(command, "nope")
    assert finished.exit_code == 2
    assert "no job named 'nope' is running" in finished.err and "running: demo" in finished.err


def test_top_ends_when_the_job_ends(job: MonitorServer, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            job.close()

    monkeypatch.setattr(top.time, "sleep", nap)  # type: ignore[attr-defined]
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=24)
    found = find_job("demo", Path(os.environ["XDG_RUNTIME_DIR"]) / "ronde")
    watch_job(found, status_of(running(0)), console)
    assert isinstance(console.file, io.StringIO)
    assert "job demo has ended" in console.file.getvalue()
    assert len(naps) == 3


def test_an_elastic_job_shows_who_came_who_was_lost_and_what_comes_next() -> None:
    gone = GoneWorker(1, "here", "killed by signal 9 (SIGKILL)")
    rounds = (
        RoundRecord(round=0, elapsed_s=1.0, members=(0, 1), plan="2 ranks"),
        RoundRecord(round=1, elapsed_s=70.0, members=(0,), gone=(gone,), plan="1 rank"),
    )
    newcomer = RankStatus(rank=-1, number=2, state="starting", host="here", pid=7, why="worker 2 is getting ready")
    status = JobStatus(
        name="demo", size=1, elapsed_s=75.0, ranks=(running(0, number=0), newcomer), rounds=rounds, plan="no change"
    )
    text = table(status)
    assert "round 1: 1 rank; worker 1 on host here killed by signal 9 (SIGKILL)" in text
    assert "round 1 since 5.0 s: no change" in text and "round 0" not in text
    assert row(text, "rank ")[:3] == ["rank", "worker", "host"] and "worker" not in table(status_of(running(0)))
    assert row(text, "- ")[:4] == ["-", "2", "here", "starting"] and "worker 2 is getting ready" in text
    assert "0 of the 2 ranks that are needed are ready" in table(
        JobStatus(name="demo", size=0, plan="0 of the 2 ranks that are needed are ready")
    )


def test_staleness_is_shown_where_there_is_a_parameter_server() -> None:
    text = table(status_of(running(0, staleness=1.25, max_staleness=7), running(1)))
    assert "1.2 (max 7)" in text and "staleness" in text
    assert "staleness" not in table(status_of(running(0)))
