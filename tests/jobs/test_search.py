"""Searches with real workers: kills of ranks and drivers, pruning on all ranks alike, trials that fail, scripts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

import ronde.search
from ronde.errors import JobFailed
from ronde.search.protocol import Outcome
from ronde.types import Deadline
from tests.commands import ROOT
from tests.jobs.kit import RONDE, SshHosts, needs_hosts, processes_with
from tests.jobs.scripts import search_objectives
from tests.limits import LONG_S, LONG_TEST_S

pytestmark = pytest.mark.timeout(LONG_TEST_S)

SCRIPT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--layers", type=int)
options = parser.parse_args()
import ronde
ronde.init()
for epoch in range(3):
    loss = (options.lr - 0.1) ** 2 + options.layers + 1 / (epoch + 1)
    if ronde.rank() == 0:
        print(f"epoch {epoch} loss={'nan' if options.layers == 3 else loss}", flush=True)
    ronde.barrier()
if options.layers == 2:
    raise SystemExit("two layers are too many")
"""


def run_driver(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.jobs.scripts.search_objectives", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONG_S, check=False)


def test_killed_ranks_and_killed_drivers_leave_exactly_the_trials_that_were_asked_for(tmp_path: Path) -> None:
    """Drivers are killed inside a write, early and late; each time the next one goes on, and ranks are killed, too."""
    printed = ""
    for num_writes in (7, 25, 30):
        done = run_driver(str(tmp_path), str(num_writes))
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert (tmp_path / "journal.log.lock").is_symlink()
        assert not (tmp_path / "journal.log").read_bytes().endswith(b"\n")
        printed += done.stderr
    done = run_driver(str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "trials.json").read_text())
    trials = result["trials"]
    assert [trial["number"] for trial in trials] == list(range(search_objectives.NUM_TRIALS))
    assert len({json.dumps(trial["params"]) for trial in trials}) == search_objectives.NUM_TRIALS
    assert result["counts"]["failed"] == 0
    assert result["counts"]["pruned"] > 0
    assert result["best"]["value"] == min(trial["value"] for trial in trials if trial["outcome"] == "complete")
    # Ranks of these trials are killed, unless the driver was killed first; whoever has noticed says so.
    printed += done.stderr
    again = [trial["number"] for trial in trials if trial["attempts"] == 2]
    assert again and {*again} <= {5, 18, 31}
    for number in again:
        assert f"trial {number} is run again (attempt 2): rank {number % 2} on host" in printed
        assert "killed by signal 9 (SIGKILL)" in printed
    # Every rank of a pruned trial has ended at the same step: the last one that was reported.
    for trial in trials:
        printed = (
            (tmp_path / f"output/trial-{trial['number']:04}.txt").read_text() if trial["outcome"] == "pruned" else ""
        )
        if printed:
            last = max(map(int, trial["reported"]))
            assert {f"[{rank}] pruned at step {last}" for rank in range(2)} <= {*printed.splitlines()}, printed
    # Optuna itself reads the journal, and finds the same.
    import optuna
    from optuna.storages.journal import JournalFileBackend

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(tmp_path / "journal.log")))
        study = optuna.load_study(study_name="ronde", storage=storage)
    assert len(study.trials) == search_objectives.NUM_TRIALS
    assert all(trial.state.is_finished() for trial in study.trials)


def test_workers_stay_warm_and_every_trial_finds_them_as_the_first_did(tmp_path: Path) -> None:
    def search(folder: Path, trials_per_worker: int = 0) -> list[dict[str, object]]:
        space, setup = {"x": {"low": 0.0, "high": 1.0}}, search_objectives.load_data
        result = ronde.search.run(
            search_objectives.probe,
            space,
            setup=setup,
            trials=5,
            trials_per_worker=trials_per_worker,
            parallel=1,
            folder=folder,
        )
        assert [trial.value for trial in result.trials] == [0.0, 1.0, 2.0, 3.0, 4.0]
        return [json.loads((folder / f"output/trial-{number:04}.txt").read_text()) for number in range(5)]

    first, second = search(tmp_path / "a"), search(tmp_path / "b", trials_per_worker=2)
    assert len({found["pid"] for found in first}) == 1
    assert {found["cwd"] for found in first} == {str(Path.cwd())}
    kept = {(found["variable"], found["handler"], found["timer"]) for found in first}
    assert kept == {(None, str(signal.SIG_DFL), 0.0)}
    assert len({found["random"] for found in first}) == 5
    for name in ("random", "numpy"):
        assert [found[name] for found in first] == [found[name] for found in second]
    assert [second[0]["pid"], second[2]["pid"], second[4]["pid"]] == [second[number]["pid"] for number in (1, 3, 4)]
    assert len({found["pid"] for found in second}) == 3


def test_a_trial_that_fails_says_why_and_the_others_go_on() -> None:
    optuna = ["prune as in Optuna", "suggest as in Optuna"]
    space = {
        "how": ["fine", "fork", "nan", "text", "error", "exit", "cancelled", "silent", "report nan", "late", *optuna]
    }
    result = ronde.search.run(search_objectives.moody, space, sampler="grid", parallel=1)
    reasons = {trial.params["how"]: trial.reason for trial in result.trials if trial.outcome is Outcome.FAILED}
    assert result.best.params == {"how": "fine"}
    assert result.folder == ""
    assert "what the objective returned is NaN" in reasons["nan"]
    assert "must be a number, got str: 'good'" in reasons["text"]
    assert re.fullmatch(r"KeyError: 'no such layer' \(search_objectives.py:\d+\)", reasons["error"])
    assert re.fullmatch(r"it called sys.exit\('enough'\) \(search_objectives.py:\d+\)", reasons["exit"])
    assert reasons["cancelled"].startswith("CancelledError (search_objectives.py:")
    assert reasons["silent"].startswith("SilentError (search_objectives.py:")
    assert "the value of lr is trial.params['lr']" in reasons["suggest as in Optuna"]
    outcomes = {trial.params["how"]: trial.outcome for trial in result.trials}
    assert (outcomes["fork"], outcomes["prune as in Optuna"]) == (Outcome.COMPLETE, Outcome.PRUNED)
    assert "the reported value is NaN" in reasons["report nan"]
    assert "step 2 is reported after step 3" in reasons["late"]


def test_ranks_that_do_different_things_fail_their_trial_and_not_the_next() -> None:
    space = {"how": ["fine", "rank 1 raises", "other steps", "rank 0 returns early", "fine again"]}
    result = ronde.search.run(
        search_objectives.unequal, space, sampler="grid", parallel=1, ranks_per_trial=2, pruner="median"
    )
    found = {trial.params["how"]: (trial.outcome, trial.value, trial.reason) for trial in result.trials}
    assert found["fine"] == found["fine again"] == (Outcome.COMPLETE, 2.0, "")
    assert found["rank 1 raises"][2].startswith("rank 1: RuntimeError: rank 1 does not like it (search_objectives.py:")
    assert "rank 1 reports step 2, and rank 0 step 1" in found["other steps"][2]
    assert "rank 0 has ended the trial" in found["rank 0 returns early"][2]
    assert {trial.attempts for trial in result.trials} == {1}  # none of them has lost a process


def test_a_setup_that_raises_ends_the_search_with_its_error() -> None:
    def setup() -> None:
        raise FileNotFoundError("there are no images")

    with pytest.raises(JobFailed, match="the workers cannot begin: FileNotFoundError: there are no images"):
        ronde.search.run(search_objectives.probe, {"x": [1, 2]}, setup=setup, parallel=1)


def test_unchanged_scripts_are_searched_on_several_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "job.yaml").write_text(
        f"""
search:
  command: {sys.executable} train.py --layers={{layers}}
  metric: 'loss=([-+.\\w]+)'
  space:
    lr: {{low: 1e-3, high: 1e-1, log: true}}
    layers: [1, 2, 3]
  points: [{{lr: 0.01, layers: 1}}, {{lr: 0.01, layers: 2}}, {{lr: 0.01, layers: 3}}]
  ranks_per_trial: 2
  parallel: 1
"""
    )
    env = {**os.environ, "TEST_MARK": str(tmp_path)}
    command = [RONDE, "search", "job.yaml", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    first, second, third = result["trials"]
    assert (first["outcome"], first["value"]) == ("complete", pytest.approx(0.09**2 + 1 + 1 / 3))
    assert [*first["reported"]] == ["0", "1", "2"]
    assert second["outcome"] == "failed"
    assert "exited with code 1 (two layers are too many)" in second["reason"]
    assert third["reason"] == "its metric is NaN: the parameters do not work"
    assert result["best"]["number"] == 0
    assert "trial 0 complete: 1.34, lr=0.01 layers=1" in done.stderr
    assert (tmp_path / "search/trials.csv").read_text().startswith("number,outcome,value,lr,layers,")
    assert "trial 0: 1.34" in (tmp_path / "search/report.html").read_text()
    # The same command finds that all is done, and starts nothing.
    again = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert json.loads(again.stdout)["trials"] == result["trials"]
    assert "3 of 3 trials have ended before" in again.stderr
    assert not processes_with(f"TEST_MARK={tmp_path}")


@needs_hosts
def test_the_ranks_of_a_trial_may_be_on_other_hosts(hosts: SshHosts, tmp_path: Path) -> None:
    _, b, c = hosts.addresses
    job_file = tmp_path / "job.yaml"
    job_file.write_text(
        f"""
search:
  objective: tests.jobs.scripts.search_objectives:chaos
  space: {{x: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]}}
  ranks_per_trial: 2
  pruner: median
  output: {tmp_path}/out
"""
    )
    done = hosts.run(str(job_file), "-H", f"{b}:1,{c}:1", "--json", verb="search")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert len(result["trials"]) == 6
    assert result["counts"]["failed"] == 0
    assert [trial["attempts"] for trial in result["trials"]] == [1, 1, 1, 1, 1, 2]
    assert f"rank 1 on host {c}" in done.stderr


def test_ctrl_c_ends_everything_and_the_search_goes_on_later(tmp_path: Path) -> None:
    job_file = tmp_path / "job.yaml"
    job_file.write_text(
        """
search:
  objective: tests.jobs.scripts.search_objectives:wait_for_file
  space: {x: [1, 2]}
  parallel: 2
  output: out
"""
    )
    (tmp_path / "wait").touch()
    env = {**os.environ, "TEST_FOLDER": str(tmp_path), "PYTHONPATH": str(ROOT), "TEST_MARK": str(tmp_path)}
    command = [RONDE, "search", str(job_file), "--json"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as driver:
        deadline = Deadline(LONG_S)
        while len([*tmp_path.glob("begun-*")]) < 2:
            assert driver.poll() is None and not deadline.expired
            time.sleep(0.05)
        driver.send_signal(signal.SIGTERM)  # which ends it as Ctrl-C does
        printed = driver.communicate(timeout=LONG_S)[1]
    assert driver.returncode == 130
    assert "interrupted; the same command goes on from here" in printed
    assert not processes_with(f"TEST_MARK={tmp_path}")
    (tmp_path / "wait").unlink()
    done = subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert [trial["outcome"] for trial in json.loads(done.stdout)["trials"]] == ["complete", "complete"]
