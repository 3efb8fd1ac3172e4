"""`ronde run --min-np`: workers that are lost are started again and join, hosts come and go, and every sample of the
epoch is in the weights exactly once (the script checks that). And `ronde run --restarts`."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import ronde
from tests.jobs.kit import Result, RondeRun, run, script
from tests.jobs.scripts.elastic import NUM_SAMPLES
from tests.limits import LONG_S, OPERATION_S, PATIENCE_S

Event = tuple[str, int, str]
FLAGS = ("--no-fold", "--operation-s", str(OPERATION_S))
COOLDOWN = ("--cooldown", "0.1", "1")


def environment(events: Sequence[Event], folder: Path | None = None) -> dict[str, str]:
    return {"TEST_EVENTS": json.dumps(events), "TEST_FOLDER": str(folder or "")}


def train(*words: str, events: Sequence[Event], folder: Path | None = None) -> Result:
    """The training of scripts/elastic_run to its end."""
    return run(*FLAGS, *COOLDOWN, *words, *script("elastic_run"), env=environment(events, folder), limit_s=LONG_S)


def finished(done: Result) -> list[str]:
    """What workers have printed at their end, by rank."""
    assert done.code == 0, done
    return sorted(line.partition("done as ")[2] for line in done.out.splitlines() if "done as" in line)


def test_a_worker_that_is_killed_is_started_again_and_joins(tmp_path: Path) -> None:
    words = ("-np", "3", "--min-np", "2", "--timeline", str(tmp_path / "trace.json"))
    done = train(*words, events=[("worker 1", 12, "kill"), ("rank 0", 36, "grow 3")])
    assert finished(done) == ["rank 0 of [3, 2, 3]", "rank 1 of [3, 2, 3]", "rank 2 of [3]"], done
    assert "[3] done as rank 2 of [3]" in done.out, "its number is new"
    lost = "worker 1 on host localhost killed by signal 9 (SIGKILL)"
    rounds = ["round 0: 3 ranks", f"round 1: 2 ranks; {lost}"]
    rounds.append("round 2: 3 ranks, worker 3 among them for the first time")
    assert done.summary == rounds, done.err
    assert [f"[ronde] {line}" for line in rounds[1:]] == [
        line for line in done.err.splitlines() if line.startswith("[ronde] round")
    ]
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    sizes = {each["pid"]: each["args"]["size"] for each in trace if each["name"] == "Started"}
    assert sizes == {0: 3, 1: 3, 2: 3}, "one timeline of all rounds, to the end"


def test_below_the_minimum_the_job_waits_until_there_are_enough_again() -> None:
    done = train("-np", "2", "--min-np", "2", events=[("worker 0", 12, "kill")])
    assert finished(done) == ["rank 0 of [2, 2]", "rank 1 of [2]"], done
    assert "1 of the 2 ranks that are needed are ready" in done.err


def test_when_all_with_the_state_are_lost_others_begin_again_from_the_checkpoint_of_the_script(tmp_path: Path) -> None:
    """Also the worker that was about to join them: as it has never had rank 0, it has not loaded the checkpoint."""
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n")
    events = [
        ("worker 0", 12, "save"),
        ("worker 0", 18, "write hosts localhost:2"),
        ("worker 0", 18, "file built"),
        ("worker 0", 18, "write dying now"),
        ("worker 0", 18, "kill"),
        ("worker 1", -1, "write built now"),
        ("worker 1", -1, "file dying"),
    ]
    done = train(
        *("-np", "1", "--min-np", "1", "--max-np", "2", "--hostfile", str(hosts)), events=events, folder=tmp_path
    )
    assert finished(done), done
    assert "restored at 12" in done.out and "[1] done as" not in done.out, done
    assert "all ranks that had the state of training are lost" in done.err, done
    assert "which begin again from the checkpoint of the script" in "\n".join(done.summary), done


def test_a_worker_that_is_stopped_for_too_long_is_left_behind_and_its_slot_starts_afresh() -> None:
    events = [("worker 1", 12, "stop"), ("rank 0", 36, "grow 3")]
    done = train("-np", "3", "--min-np", "2", "--suspend-s", "2", events=events)
    assert finished(done) == ["rank 0 of [3, 2, 3]", "rank 1 of [3, 2, 3]", "rank 2 of [3]"], done
    assert "worker 1 on host localhost was silent for too long and was left behind" in done.err
    assert "it has woken up" not in done.out, "it is killed while it is stopped, so it never goes on"
    assert "[3] done as rank 2 of [3]" in done.out, "its number is new"


RESTORE = """
import os, pathlib, sys, torch, ronde, ronde.torch
ronde.init()
folder = pathlib.Path(sys.argv[1])
model = torch.nn.Linear(2, 1)
checkpoints = ronde.torch.Checkpoints(folder / "checkpoints", model=model)
if not checkpoints.steps():
    checkpoints.save(7)
elif ronde.rank() == 0 and not (folder / "killed").exists():
    (folder / "killed").touch()
    os.kill(os.getpid(), 9)
restored = checkpoints.restore()
state = ronde.elastic.State(model=model, step=restored.step if restored else 0)
ronde.elastic.run(lambda state: print("goes on at", state.step, flush=True), state)
"""


def test_a_rank_that_is_lost_while_a_checkpoint_is_restored_does_not_let_others_begin_without_it(
    tmp_path: Path,
) -> None:
    words = (sys.executable, "-c", RESTORE, str(tmp_path))
    assert run("-np", "1", *words, limit_s=LONG_S).code == 0
    done = run(*FLAGS, "-np", "2", "--min-np", "2", *words, limit_s=LONG_S)
    assert done.code == 0, done
    assert sorted(re.findall(r"goes on at \d+", done.out)) == ["goes on at 7"] * 2, done


DIFFERS = """
import os, torch, ronde, ronde.torch
from ronde.comm.world import current_world
from tests.jobs.scripts.control import until
ronde.init()
is_new = int(os.environ["RONDE_WORKER"]) >= 2
model = torch.nn.Linear(2 + is_new, 1)
optimizer = ronde.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
state = ronde.elastic.State(model=model, optimizer=optimizer, sizes=[])
def train(state):
    state.sizes.append(ronde.size())
    while state.steps < 8:
        if state.steps == 4 and len(state.sizes) < 2:
            until(lambda: current_world().change_wanted, "another rank")
        optimizer.zero_grad()
        model(torch.ones(1, model.in_features)).sum().backward()
        optimizer.step()
        state.end_step()
    print("done", state.steps, state.sizes, flush=True)
ronde.elastic.run(train, state)
"""


def test_a_newcomer_with_another_model_is_refused_and_the_others_go_on() -> None:
    words = ("-np", "2", "--min-np", "1", "--max-np", "3", "-H", "localhost:3", "--cooldown", "60", "60")
    done = run(*FLAGS, *words, sys.executable, "-c", DIFFERS, limit_s=LONG_S)
    assert done.code == 0, done
    assert sorted(re.findall(r"done .*", done.out)) == ["done 8 [2, 2]"] * 2, done
    assert "rank 2 is lost (Mismatch: broadcast_parameters: the ranks differ" in done.err, done


def test_more_losses_than_the_limit_end_the_job_with_a_clear_error() -> None:
    events = [("worker 1", 12, "kill"), ("rank 0", 36, "grow 2"), ("worker 2", 42, "kill")]
    done = train("-np", "2", "--min-np", "1", "--reset-limit", "1", "--grace", str(PATIENCE_S), events=events)
    assert done.code == 1, done
    lines = [line for line in done.summary if not line.startswith("  |")]
    assert lines[0] == "the job cannot go on: ranks were lost more than 1 times (the reset limit)", done
    assert lines[1:3] == [f"worker {number} on host localhost killed by signal 9 (SIGKILL)" for number in (1, 2)], done


def test_not_enough_hosts_in_time_end_the_job_with_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost:1\n")
    words = ("-np", "2", "--min-np", "1", "--hostfile", str(tmp_path / "hosts"), "--elastic-timeout", "2")
    done = train(*words, events=[])
    assert done.code == 1, done
    # On a busy machine the only worker may not have come either.
    why = r"the job cannot go on: only [01] of the 2 ranks that are needed came in time"
    assert re.fullmatch(why, done.summary[0]), done


def test_a_script_that_cannot_start_is_not_started_for_ever() -> None:
    done = run("-np", "2", "--min-np", "1", sys.executable, "-c", "import no_such_module")
    assert done.code == 1, done
    assert "ModuleNotFoundError: No module named 'no_such_module'" in "\n".join(done.summary), done


def test_an_error_of_all_ranks_ends_the_job() -> None:
    events = [(f"rank {rank}", 12, "raise a mistake of the user") for rank in range(2)]
    done = train("-np", "2", "--min-np", "1", events=events)
    assert done.code == 1, done
    assert "ValueError: a mistake of the user" in "\n".join(done.summary), done


@pytest.mark.parametrize("stays", [False, True])
def test_a_rank_that_is_killed_behind_training_fails_the_job(stays: bool, tmp_path: Path) -> None:
    """It would have saved the model, and nobody does that in its place, whether another rank is still there or not."""
    events = [("rank 1", NUM_SAMPLES, "write through now"), ("rank 1", NUM_SAMPLES, "file never")][: 1 + stays]
    events += [("rank 0", NUM_SAMPLES, "file through"), ("rank 0", NUM_SAMPLES, "kill")]
    done = train("-np", "2", "--min-np", "1", "--grace", "1", events=events, folder=tmp_path)
    assert done.code == 137, done
    assert done.summary[0] == "rank 0 on host localhost failed first: killed by signal 9 (SIGKILL)", done


@pytest.mark.parametrize(("end", "code"), [("os.kill(os.getpid(), 9)", 137), ("sys.exit()", 1)])
def test_a_script_without_elastic_run_ends_when_a_rank_is_lost(end: str, code: int) -> None:
    text = f"import os, sys, numpy, ronde; ronde.init(); ronde.rank() == 1 and {end}; ronde.allreduce(numpy.ones(1))"
    done = run("-np", "2", "--min-np", "1", sys.executable, "-c", text)
    assert done.code == code, done
    assert done.summary[0].startswith("rank 1 on host localhost "), done


@pytest.mark.parametrize("how", ["script", "file"])
def test_slots_that_come_get_workers_and_workers_of_slots_that_go_leave_in_good_order(how: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    flags = ["--hostfile", str(hosts)] if how == "file" else ["--discover", f"cat {hosts}"]
    events = [
        ("rank 0", 12, "write hosts localhost:3"),
        ("rank 0", 12, "await"),
        ("rank 0", 36, "write hosts localhost:1"),
        ("rank 1", 36, "await"),
        ("rank 2", 36, "await"),
    ]
    done = train("-np", "2", "--min-np", "1", "--max-np", "3", *flags, events=events, folder=tmp_path)
    assert finished(done) == ["rank 0 of [2, 3, 1]"], done
    for number in (1, 2):
        asked = f"worker {number} on host localhost is asked to leave: its host has fewer slots now"
        assert asked in done.err and f"worker {number} on host localhost left in good order" in done.err


def test_a_discovery_script_that_fails_at_first_ends_the_job_and_later_is_reported(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    flags = ("-np", "1", "--min-np", "1", "--discover", f"cat {hosts}")
    done = train(*flags, events=[])
    assert done.code == 1 and f"the discovery script cat {hosts} exited with code 1" in done.err, done
    hosts.write_text("localhost\n")
    waits = f"rm {hosts}; until test -e {tmp_path}/reported; do sleep 0.05; done"
    with RondeRun(*flags, "sh", "-c", waits) as job:
        job.read_errors_until("exited with code 1")
        (tmp_path / "reported").touch()
        assert job.result().code == 0


def test_a_plain_script_of_an_elastic_job_is_not_started_again_when_it_is_done() -> None:
    done = run("-np", "2", "--min-np", "1", "--no-fold", "--cooldown", "0", "0", "sh", "-c", "echo $RONDE_WORKER")
    assert (done.code, sorted(done.out.splitlines())) == (0, ["[0] 0", "[1] 1"]), done


def test_ctrl_c_and_a_killed_driver_end_everything() -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        with RondeRun("-np", "2", "--min-np", "1", "--no-fold", *script("ronde_run", "stay")) as job:
            job.read_lines(2)
            job.signal(number)
            assert job.result().code == code


def test_a_discovery_script_that_hangs_ends_with_a_killed_driver(tmp_path: Path) -> None:
    first = tmp_path / "first"
    discover = tmp_path / "hosts.sh"
    discover.write_text(
        f"#!/bin/sh\ntest -e {first} && touch {tmp_path}/hangs && exec sleep 1000\ntouch {first}; echo localhost\n"
    )
    discover.chmod(0o755)
    waits = f"until test -e {tmp_path}/hangs; do sleep 0.05; done; echo it hangs; exec sleep 1000"
    with RondeRun("-np", "1", "--min-np", "1", "--discover", str(discover), "sh", "-c", waits) as job:
        assert job.read_lines(1) == ["[0] it hangs"]
        job.signal(signal.SIGKILL)
        assert job.result().code == -9


def test_a_job_with_restarts_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    trains = f"echo from $(cat {tmp_path}/$RANK 2>/dev/null || echo 0); test -e {tmp_path}/$RANK && exit 0; "
    saves = (
        f"echo 5 > {tmp_path}/new$RANK; mv {tmp_path}/new$RANK {tmp_path}/$RANK; test $RANK = 0 && exec sleep 1000; "
    )
    fails = f"until test -e {tmp_path}/0; do sleep 0.05; done; exit 3"
    done = run("-np", "2", "--no-fold", "--restarts", "2", "--grace", "0", "sh", "-c", trains + saves + fails)
    assert done.code == 0, done
    assert sorted(done.out.splitlines()) == ["[0] from 0", "[0] from 5", "[1] from 0", "[1] from 5"], done
    assert "[ronde] starting the job again (restart 1 of 2)" in done.err
    done = run("-np", "1", "--restarts", "2", "/nowhere/train.sh")
    assert done.code == 127 and "again" not in done.err, done


# --- ronde.run ------------------------------------------------------------------------------------------------------


def test_a_function_survives_the_loss_of_a_rank_and_returns_what_the_last_round_has_returned() -> None:
    def train_here() -> list[int]:
        from tests.jobs.scripts.elastic_run import main

        return main()

    events = [("worker 1", 12, "kill"), ("rank 0", 36, "grow 2")]
    found = ronde.run(train_here, np=2, min_np=1, env=environment(events), operation_s=OPERATION_S)
    assert found == [[2, 1, 2], [2]]
