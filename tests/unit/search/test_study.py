"""The study: no point twice, a journal that survives a kill, decisions of pruners about this attempt alone."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from ronde.errors import RondeError
from ronde.search import journal
from ronde.search.protocol import Outcome
from ronde.search.results import TrialResult
from ronde.search.run_search import remove_search
from ronde.search.space import parse_space, point_key
from ronde.search.study import JOURNAL_NAME, PlannedTrial, SearchStudy, StudyOptions, check_num_trials

SPACE = parse_space({"x": {"low": 0.0, "high": 1.0}, "kind": ["a", "b"]})


def open_study(folder: Path, space: Any = SPACE, points: Any = (), **options: Any) -> SearchStudy:
    return SearchStudy(folder, space, StudyOptions(**options), points)


def complete(planned: PlannedTrial, value: float, reported: dict[int, float] | None = None) -> TrialResult:
    return TrialResult(
        number=planned.number, outcome=Outcome.COMPLETE, value=value, params=planned.params, reported=reported or {}
    )


def ask(study: SearchStudy) -> PlannedTrial:
    planned = study.ask()
    assert planned is not None
    return planned


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_no_point_is_tried_twice_and_a_small_space_ends(tmp_path: Path, sampler: Any) -> None:
    space = parse_space({"a": [1, 2, 3, 4], "b": {"low": 1, "high": 4}})
    study = open_study(tmp_path, space, sampler=sampler)
    seen = set()
    for number in range(16):
        planned = ask(study)
        assert planned.number == number
        seen.add(point_key(planned.params))
        study.tell(complete(planned, float(number)))
    assert len(seen) == 16
    assert study.ask() is None
    study.close()
    assert check_num_trials(space, 20, 0, "tpe") == (
        16,
        "the space has only 16 points: the search ends after 16 trials instead of 20",
    )


def test_points_come_first_and_a_search_that_is_opened_again_goes_on(tmp_path: Path) -> None:
    points = [{"x": 0.5, "kind": "a"}, {"x": 0.25, "kind": "b"}]
    study = open_study(tmp_path, points=points)
    first, second = ask(study), ask(study)
    assert [first.params, second.params] == points
    study.tell(complete(first, 0.5, {0: 2.0, 3: 0.5}))
    study.close()

    study = open_study(tmp_path, points=points)
    assert study.interrupted() == [second]
    assert [(trial.number, trial.value, trial.reported) for trial in study.results()] == [(0, 0.5, {0: 2.0, 3: 0.5})]
    third = ask(study)
    assert third.number == 2
    assert third.params not in points
    study.close()
    changes: list[tuple[dict[str, Any], str]] = [
        ({"space": parse_space({"x": [1]})}, "another space"),
        ({"direction": "maximize"}, "another direction"),
        ({"what": "train:other"}, "another objective"),
    ]
    for change, problem in changes:
        with pytest.raises(ValueError, match=f"has a search with {problem}"):
            open_study(tmp_path, **change)


def test_a_torn_line_and_a_stale_lock_are_removed_and_the_torn_trial_never_was(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    study.tell(complete(ask(study), 1.0))
    study.close()
    path = tmp_path / JOURNAL_NAME
    whole = path.read_bytes()
    study = open_study(tmp_path)
    ask(study)
    study.close()
    record = path.read_bytes()[len(whole) :]
    for cut in (1, len(record) // 2, len(record) - 1):
        path.write_bytes(whole + record[:cut])
        Path(f"{path}.lock").symlink_to(path)
        study = open_study(tmp_path)
        assert path.read_bytes() == whole
        assert not os.path.lexists(f"{path}.lock")
        assert study.interrupted() == []
        assert len(study.results()) == 1
        study.close()
    path.write_bytes(whole + record[:9] + b"\n" + record)
    with pytest.raises(ValueError, match=r"journal.log, line \d+ is damaged, and others follow it"):
        open_study(tmp_path)
    path.write_bytes(whole)  # what was refused was not changed, and is free again
    open_study(tmp_path).close()


def test_a_journal_that_is_torn_anywhere_goes_on_and_nothing_of_a_lost_attempt_is_left(tmp_path: Path) -> None:
    """Trials report fewer values the second time, so that a value of the first would be seen."""
    points = [{"x": 0.5, "kind": "a"}, {"x": 0.25, "kind": "b"}]

    def finish(folder: Path, num_reports: int) -> list[TrialResult]:
        study = open_study(folder, points=points, pruner="asha")
        waiting = study.interrupted()
        for _ in range(2 - len(study.results())):
            planned = waiting.pop() if waiting else ask(study)
            study.begin_attempt(planned.number)
            reported: dict[int, float] = {}
            for step in range(1, num_reports + 1):
                reported[step] = float(num_reports)
                study.should_prune(planned.number, reported)
            study.tell(complete(planned, float(num_reports), reported))
        results = study.results()
        study.close()
        return results

    first = finish(tmp_path, 3)
    path = tmp_path / JOURNAL_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    ends = [sum(map(len, lines[:number])) for number in range(len(lines) + 1)]
    for cut in sorted({end + shift for end in ends for shift in (-1, 0, 1, 40)} & {*range(ends[-1])}):
        path.write_bytes(b"".join(lines)[:cut])
        results = finish(tmp_path, 2)
        assert [trial.params for trial in results] == [trial.params for trial in first]
        for trial in results:
            assert trial.value is not None
            assert trial.reported == {step: trial.value for step in range(1, int(trial.value) + 1)}, f"cut at {cut}"
    assert results[0] == first[0]
    assert results[1].value == 2.0


def test_only_one_driver_writes_a_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "LOCK_WAIT_S", 0.1)
    study = open_study(tmp_path)
    with pytest.raises(RondeError, match="another search is running in"):
        open_study(tmp_path)
    study.close()
    open_study(tmp_path).close()


def test_only_a_search_that_does_not_run_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "LOCK_WAIT_S", 0.1)
    (tmp_path / "output").mkdir()
    remove_search(tmp_path)
    assert (tmp_path / "output").exists()  # without a journal it is not that of a search
    study = open_study(tmp_path)
    with pytest.raises(RondeError, match="another search is running in"):
        remove_search(tmp_path)
    study.close()
    (tmp_path / "notes.txt").touch()
    remove_search(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_study_goes_on_only_with_the_same_space_and_objective_unless_nothing_was_tried(tmp_path: Path) -> None:
    open_study(tmp_path, what="tune:objectiv", direction="maximize").close()
    study = open_study(tmp_path, what="tune:objective")  # the name was a mistake
    ask(study)
    study.close()
    with pytest.raises(ValueError, match='another objective: "tune:objective"; choose another folder'):
        open_study(tmp_path, what="tune:other")
    other = {"x": {"low": 0.0, "high": 2.0}, "kind": ["a", "b"]}
    with pytest.raises(ValueError, match="another space: x was 0 to 1, and is 0 to 2; choose another folder"):
        open_study(tmp_path, parse_space(other), what="tune:objective")
    with pytest.raises(ValueError, match=r"another space: kind was a \| b, and is not there; choose another folder"):
        open_study(tmp_path, parse_space({"x": {"low": 0.0, "high": 1.0}}), what="tune:objective")


def test_a_full_disk_ends_the_search_and_it_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = open_study(tmp_path)
    planned = ask(study)

    def no_space(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", no_space)
        with pytest.raises(RondeError, match=r"cannot write .*journal.log: No space left on device; the search has"):
            study.tell(complete(planned, 1.0, {0: 2.0, 1: 1.0}))
    study.close()
    with (tmp_path / JOURNAL_NAME).open("rb+") as file:  # the disk had room for all but the end of it
        file.truncate(file.seek(0, os.SEEK_END) - 20)
    study = open_study(tmp_path)
    assert study.interrupted() == [planned]
    study.tell(complete(planned, 1.0, {0: 2.0, 1: 1.0}))
    assert study.results()[0].reported == {0: 2.0, 1: 1.0}
    study.close()


def test_a_trial_is_written_twice_and_whole(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    before = len((tmp_path / JOURNAL_NAME).read_bytes().splitlines())
    planned = ask(study)
    lines = (tmp_path / JOURNAL_NAME).read_bytes().splitlines()
    assert len(lines) == before + 1
    assert {*json.loads(lines[-1])["params"]} == {"x", "kind"}
    study.tell(complete(planned, 1.0, {step: 1.0 for step in range(100)}))
    assert study.results()[0].reported == {step: 1.0 for step in range(100)}
    study.close()


def test_the_median_pruner_knows_only_what_complete_trials_and_this_attempt_have_reported(tmp_path: Path) -> None:
    study = open_study(tmp_path, pruner="median", pruner_options={"n_startup_trials": 2})
    for value in (1.0, 2.0):
        study.tell(complete(ask(study), value, {0: value, 1: value}))
    planned = ask(study)
    assert study.should_prune(planned.number, {0: 9.0})
    study.begin_attempt(planned.number)  # its rank was lost: it begins anew
    assert not study.should_prune(planned.number, {0: 0.5})
    assert not study.should_prune(planned.number, {0: 0.5, 1: 9.0})  # its best value counts
    study.close()


@pytest.mark.parametrize("pruner", ["asha", "hyperband"])
def test_halving_ends_most_trials_early_and_forgets_a_lost_attempt(tmp_path: Path, pruner: Any) -> None:
    options = {"min_resource": 1, "reduction_factor": 2}
    if pruner == "hyperband":
        options["max_resource"] = 8
    study = open_study(tmp_path, pruner=pruner, pruner_options=options)

    def run(planned: PlannedTrial, value: float, *, lose_at: int = 99) -> int:
        reported: dict[int, float] = {}
        for step in range(1, 9):
            reported[step] = value
            if step == lose_at:  # a rank is lost, and the trial begins anew
                study.begin_attempt(planned.number)
                return run(planned, value)
            if study.should_prune(planned.number, reported):
                break
        study.tell(complete(planned, value, reported))
        return len(reported)

    lengths = [run(ask(study), float(value)) for value in range(1, 13)]  # worse and worse
    assert sum(lengths) < 12 * 8 * 0.75
    assert run(ask(study), 0.5, lose_at=3) == 8  # the best of all runs to its end, after a loss, too
    study.close()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"pruner": "median", "pruner_options": {"n_startup": 3}}, "pruner_options of median: .*n_startup"),
        ({"pruner": "asha", "pruner_options": {"reduction_factor": 1}}, "pruner_options of asha: .*reduction_factor"),
        ({"pruner_options": {"n_startup_trials": 3}}, "there are options for a pruner, and no pruner"),
        ({"points": [{"x": 0.5, "kind": "a"}] * 2}, "1 point of 2 are there twice"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(tmp_path: Path, options: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        open_study(tmp_path, **options)
    assert not (tmp_path / JOURNAL_NAME).exists()


def test_a_number_of_trials_is_needed_only_where_the_space_has_no_end() -> None:
    endless, small = SPACE, parse_space({"a": [1, 2, 3]})
    assert check_num_trials(small, 0, 0, "grid") == (3, "")
    assert check_num_trials(endless, 0, 4, "tpe") == (4, "")
    with pytest.raises(ValueError, match="give the number of trials"):
        check_num_trials(endless, 0, 0, "tpe")
    with pytest.raises(ValueError, match="a grid needs choices"):
        check_num_trials(endless, 5, 0, "grid")
