"""A model check of the rounds of an elastic job: every order of events up to a bound. elastic_model has the model.

It checks after every event that ranks are right, that no lost worker is a member again, and that all state is of one
history: no two rounds make progress side by side, and no step is counted twice.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Hashable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.coordinator.elastic_model import FAULTS, Action, ElasticModel


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    """Losses are logged, and there are thousands of them here."""
    logger = logging.getLogger("ronde.coordinator")
    logger.disabled = True
    yield
    logger.disabled = False


def explore(num_workers: int, num_steps: int, faults: tuple[str, ...]) -> int:
    """Go through all orders in which each of the faults happens once, or not at all, and to any worker. Returns the
    number of states. From all of them the job must be able to go on to its end without a further event from outside."""
    first = ElasticModel(num_workers, num_steps)
    ids: dict[Hashable, int] = {(first.key(), faults): 0}
    stack: list[tuple[ElasticModel, tuple[str, ...], tuple[Action, ...]]] = [(first, faults, ())]
    predecessors: defaultdict[int, list[int]] = defaultdict(list)
    ends: list[int] = []
    paths: list[tuple[Action, ...]] = [()]
    while stack:
        model, faults_left, path = stack.pop()
        state = ids[model.key(), faults_left]
        own = [*model.actions(), *model.slow_actions()]
        if not model.actions() and not model.describe_unfinished():
            ends.append(state)
        if not faults_left:
            own = _first_independent(own, faults) or own
        actions = [*own, *(fault for fault in model.faults() if fault.name in faults_left)]
        for index, action in enumerate(actions):
            after = model.copy() if index + 1 < len(actions) else model
            after.do(action)
            assert not after.problems, f"{after.problems} after {(*path, action)}"
            left = faults_left
            if action.name in FAULTS:
                used = faults_left.index(action.name)
                left = faults_left[:used] + faults_left[used + 1 :]
            key = (after.key(), left)
            is_new = key not in ids
            found = ids.setdefault(key, len(ids))
            if action.name not in (*FAULTS, "wake"):
                predecessors[found].append(state)
            if is_new:
                paths.append((*path, action))
                stack.append((after, left, (*path, action)))
    can_end = set(ends)
    while ends:
        ends = [before for state in ends for before in predecessors[state] if before not in can_end]
        can_end.update(ends)
    stuck = next((path for state, path in enumerate(paths) if state not in can_end), None)
    assert stuck is None, f"the job cannot go on after {stuck}"
    return len(ids)


def _first_independent(actions: list[Action], faults: tuple[str, ...]) -> list[Action]:
    """When nothing more goes wrong, it does not matter when a survivor connects, as it is waited for; nor when a member
    contributes, if nobody wants a change."""
    names = ("connect",) if {"add", "preempt"} & set(faults) else ("connect", "contribute")
    return [action for action in actions if action.name in names][:1]


@pytest.mark.parametrize(
    ("num_workers", "faults", "min_states"),
    [
        (2, ("suspend",), 400),
        (2, ("hang",), 300),
        (2, ("hang", "suspend"), 300),
        (3, ("hang",), 300),
        (2, ("kill", "kill"), 900),
        (2, ("kill", "kill leaving"), 300),
        (2, ("kill", "suspend"), 2000),
        (2, ("suspend", "suspend"), 1500),
        (2, ("kill", "preempt"), 1500),
        (1, ("add", "preempt"), 100),
        (1, ("kill", "add"), 400),
        (1, ("suspend", "add"), 300),
        (1, ("add", "add"), 300),
        (3, ("kill",), 2500),
        pytest.param(2, ("kill", "add"), 10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        pytest.param(2, ("add", "preempt"), 2_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        pytest.param(3, ("suspend",), 5_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
    ids=lambda value: " and ".join(value) if isinstance(value, tuple) else str(value),
)
def test_whatever_the_order_of_events_one_round_makes_progress_and_the_job_comes_to_its_end(
    num_workers: int, faults: tuple[str, ...], min_states: int
) -> None:
    assert explore(num_workers, 1, faults) >= min_states, "the model does not do what it is made for"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 4), st.integers(0, 3), st.sampled_from([None, 4]), st.data())
def test_after_any_long_schedule_the_job_comes_to_its_end(
    num_workers: int, num_steps: int, max_ranks: int | None, data: st.DataObject
) -> None:
    model = ElasticModel(num_workers, num_steps, max_ranks=max_ranks)
    path = []
    for kind in data.draw(st.lists(st.sampled_from(["own", "own", "own", "slow", "fault"]), max_size=60)):
        choices = {"own": model.actions, "slow": model.slow_actions, "fault": model.faults}[kind]()
        if choices:
            path.append(data.draw(st.sampled_from(choices)))
            model.do(path[-1])
            assert not model.problems, f"{model.problems} after {path}"
    model.run_to_the_end()
    assert not model.problems, f"{model.problems} after {path}"
    assert not model.describe_unfinished(), f"{model.describe_unfinished()} after {path}"
