"""`ronde search`: mistakes in the job file and in flags are one line, and nothing is started or written."""

from __future__ import annotations

from pathlib import Path

import pytest

from ronde.cli.search import render_search_table
from ronde.search.protocol import Outcome
from ronde.search.results import RunningTrial, SearchStatus, TrialResult
from tests.unit.cli.commands import drawn, ronde

GOOD = "search: {objective: 'a:b', space: {x: [1, 2]}, output: OUT}"


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("search:\n  objective: a:b\n  spaec: 1", "", "line 3: unknown key 'spaec' in the section 'search'; did you"),
        ("search:\n  objective: a:b\n  space: {x: [1]}\n  trials: many", "", "line 4: search: Expected `int`"),
        ("search: {space: {x: [1]}}", "", "give either `objective`, as in train:objective, or `command`"),
        ("search: {command: ls, space: {x: [1]}}", "", "a command needs `metric`"),
        ("search: {command: ls, setup: 'a:b', metric: x, space: {x: [1]}}", "", "`setup` is for an objective"),
        ("search: {objective: 'a:b', metric: x, space: {x: [1]}}", "", "`metric` and `metric_key` are for a command"),
        ("search: {objective: 'a:b', space: {x: {low: 1}}}", "", "job.yaml: search: x: high must be given"),
        ("search: {objective: 'a:b', space: {x: [1]}, points: [{x: 2}]}", "", "job.yaml: search: x=2 is not in"),
        ("search: {objective: 'a:b', space: {x: {low: 0.5, high: 1}}}", "", "give the number of trials"),
        ("search: {objective: 'a:b', space: {x: [1]}, retries: -1}", "", "retries must be at least 0, got -1"),
        (
            "search:\n  objective: a:b\n  space: {x: [1]}\n  sampler: bayes",
            "",
            "line 4: search: sampler must be one of",
        ),
        ("search:\n  objective: a:b\n space: {x: [1]}", "", "job.yaml, line 3 is no YAML: "),
        ("run: {num_ranks: 2}", "", "has no section `search:`"),
        (GOOD, "--pruner halving", "--pruner must be one of asha, hyperband, median, none, got 'halving'"),
        (GOOD, "--trials 0", "argument --trials: must be a whole number of at least 1"),
        (GOOD, "--trails 3", "no such flag: --trails; did you mean --trials?"),
        (GOOD, "-H a:1 --ranks-per-trial 2", "a trial has 2 ranks, and the hosts have only 1 slots"),
        (GOOD, "-H a:1 --parallel 2", "2 ranks, but only 1 slot"),
        (GOOD + "\nrun: {hosts: 'a:1,,b'}", "", "there is an empty place between two commas"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, text: str, flags: str, message: str) -> None:
    job_file = tmp_path / "job.yaml"
    job_file.write_text(text.replace("OUT", str(tmp_path / "out")))
    finished = ronde("search", str(job_file), *flags.split())
    assert (finished.exit_code, finished.out) == (2, ""), finished.err
    assert message in finished.err
    assert finished.err.count("\n") == 1
    assert [*tmp_path.iterdir()] == [job_file]


def test_the_table_shows_running_trials_and_the_best_ones() -> None:
    ended = [
        TrialResult(number=number, outcome=outcome, value=value, params={"lr": 0.1 * number}, seconds=2.0)
        for number, outcome, value in [
            (0, Outcome.COMPLETE, 0.5),
            (1, Outcome.FAILED, None),
            (2, Outcome.COMPLETE, 0.75),
            (3, Outcome.PRUNED, 0.1),
        ]
    ]
    status = SearchStatus(
        num_trials=10,
        seconds=61.0,
        ended=ended,
        running=[RunningTrial(4, 0, 2, {"lr": 0.25}, 3.0, 7, 0.375)],
        best=ended[2],
        num_ready_groups=1,
        num_groups=1,
    )
    lines = [line.rstrip() for line in drawn(render_search_table(status, "maximize"), width=80).splitlines()]
    assert lines[0].startswith("4 of 10 trials (2 complete, 1 pruned, 1 failed), 1 min 1 s")
    assert [line.split() for line in lines[2:]] == [
        ["4", "running", "again", "(2)", "7", "0.375", "3.0", "s", "lr=0.25"],
        ["2", "best", "0.75", "2.0", "s", "lr=0.2"],
        ["0", "complete", "0.5", "2.0", "s", "lr=0"],
    ]
