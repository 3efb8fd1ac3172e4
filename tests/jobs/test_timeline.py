"""The timeline of a real job: one valid Chrome trace with all ranks on one clock, whatever becomes of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ronde.settings import Settings
from ronde.types import Deadline
from tests.commands import run_command
from tests.jobs.kit import start_ranks
from tests.limits import PATIENCE_S, promised_s
from tests.services import needs

Trace = dict[str, Any]
STEPS = {"TEST_STEPS": "timeline"}
AHEAD_S = 5000
OTHER_CLOCK = ("unshare", "--time", "--monotonic", str(AHEAD_S))
"""Runs a command under a monotonic clock that is ahead, as that of another host may be."""


def steps(trace: Trace, rank: int) -> dict[str, tuple[float, float]]:
    """When the rank's named operations began and ended, in microseconds."""
    return {
        event["name"]: (event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event["pid"] == rank and event["ph"] == "X" and "step" in event["name"]
    }


def await_trace(path: Path, condition: Callable[[Trace], bool]) -> bytes:
    """The file of a running job, as soon as its trace fulfils the condition."""
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        data = path.read_bytes()
        with suppress(json.JSONDecodeError):  # in the middle of a write; only what is found afterwards counts
            if condition(json.loads(data)):
                return data
    raise TimeoutError(f"the trace has not become as it should: {path.read_text()[:2000]}")


def await_standstill(path: Path) -> None:
    """Wait until nothing more is written: rank 0 waits for the other one."""
    deadline, size = Deadline(PATIENCE_S), -1
    while size != (size := path.stat().st_size) and not deadline.expired:
        time.sleep(1.0)


def has_both_ranks(trace: Trace) -> bool:
    return min(len(steps(trace, 0)), len(steps(trace, 1))) > 2


def read_complete(path: Path) -> Trace:
    """The trace of a job that is over; a viewer has to show it well."""
    trace: Trace = json.loads(path.read_bytes())
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "i", "M", "b", "e") and event["pid"] in (0, 1) and event["tid"] >= 0
        assert event["ts"] >= 0 and event.get("dur", 0) >= 0
    named = [event for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert sorted(event["pid"] for event in named) == [0, 1]
    return trace


@pytest.mark.parametrize("clocks", ["one clock", pytest.param("two clocks", marks=needs("time namespaces"))])
def test_operations_of_all_ranks_lie_side_by_side(clocks: str, tmp_path: Path) -> None:
    if clocks == "two clocks" and (not shutil.which("unshare") or run_command([*OTHER_CLOCK, "true"]).returncode):
        pytest.skip("no time namespaces here (needs root and `unshare --time`)")
    path = tmp_path / "trace.json"
    before = {1: OTHER_CLOCK} if clocks == "two clocks" else {}
    with start_ranks("until_stopped", 2, env=STEPS, settings=Settings(timeline=str(path)), prefixes=before) as job:
        job.receive_all((0, 1), "running")
        await_trace(path, has_both_ranks)
        job.send((0, 1), stop=True)
        assert job.wait() == [0, 0], job.printed()
    trace = read_complete(path)
    mine, other = steps(trace, 0), steps(trace, 1)
    assert mine.keys() == other.keys() and len(mine) > 2
    # No rank can leave an allreduce before the last one has come to it. The distance of two clocks is known to half of
    # the shortest round trip of a heartbeat, on a busy machine a millisecond or two; they are 5000 s apart.
    error = promised_s(2_000.0) if clocks == "two clocks" else 0.0
    apart = [name for name in mine if max(mine[name][0], other[name][0]) > min(mine[name][1], other[name][1]) + error]
    assert not apart, {name: (mine[name], other[name]) for name in apart}
    times = [event["ts"] for event in trace["traceEvents"] if event["ph"] != "M"]
    assert max(times) - min(times) < PATIENCE_S * 1e6, "all that happened, happened during the job"
    totals = trace["otherData"]
    assert (totals["written_events"], totals["dropped_events"]) == (len(trace["traceEvents"]), 0)


def test_it_is_complete_when_a_rank_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with start_ranks("until_stopped", 2, env=STEPS, settings=Settings(timeline=str(path))) as job:
        job.receive_all((0, 1), "running")
        await_trace(path, has_both_ranks)
        os.kill(job.pids[1], signal.SIGSTOP)
        await_standstill(path)  # or rank 0 could still be inside of a step that rank 1 has told of
        os.kill(job.pids[1], signal.SIGKILL)
        job.receive(0, "lost")
        assert job.wait() == [0, -signal.SIGKILL], job.printed()
    trace = read_complete(path)
    assert steps(trace, 0).keys() >= steps(trace, 1).keys() != set()
    lost = [event for event in trace["traceEvents"] if event["name"] == "PeerGone"]
    assert [(event["pid"], event["args"]["peer"]) for event in lost] == [(0, 1)]


def test_it_does_not_grow_beyond_its_limit(tmp_path: Path) -> None:
    path, limit = tmp_path / "trace.json", 40
    with start_ranks(
        "until_stopped", 2, env=STEPS, settings=Settings(timeline=str(path), timeline_events=limit)
    ) as job:
        job.receive_all((0, 1), "running")
        data = await_trace(path, lambda trace: trace["otherData"]["dropped_events"] > 0)
        job.send((0, 1), stop=True)
        assert job.wait() == [0, 0], job.printed()
    trace = read_complete(path)
    assert len(trace["traceEvents"]) == trace["otherData"]["written_events"] == limit
    assert trace["otherData"]["dropped_events"] > 0
    assert path.stat().st_size == len(data) < limit * 500
