"""State and its parts: step ends, commits, and synchronization of ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import ronde
from ronde.comm.world import World, current_world
from ronde.elastic import RoundChange, State, StatePart, register_part
from ronde.errors import PeerLost
from ronde.net.messages import LeaveReason
from ronde.training.agreement import check_equal
from tests.unit.elastic.thread_states import Weights, part_of, run_ranks


@pytest.fixture
def alone() -> Iterator[World]:
    ronde.init()
    yield current_world()
    ronde.shutdown()


# --- names ---------------------------------------------------------------------------------------------------------


def test_objects_and_values_are_attributes(alone: World) -> None:
    weights = Weights()
    state = State(weights=weights, epoch=3)
    state.epoch += 1
    state.best = [0.5]
    assert (state.weights, state.epoch, state.best, state.steps) == (weights, 4, [0.5], 0)
    with pytest.raises(AttributeError, match=r"no 'lr'; give it to State\(lr=…\)"):
        _ = state.lr
    with pytest.raises(AttributeError, match="'weights' is an object of the state"):
        state.weights = Weights()


@pytest.mark.parametrize("name", ["steps", "commit", "_parts"])
def test_a_name_of_its_own_is_refused(name: str) -> None:
    with pytest.raises(AttributeError, match="cannot be a name in a state"):
        State(**{name: 1})


def test_an_object_of_a_framework_without_its_binding_is_refused() -> None:
    kind = type("Module", (), {"__module__": "torch.nn.modules.module", "state_dict": lambda self: {}})
    with pytest.raises(TypeError, match=r"model is a Module of torch: import ronde\.torch before State"):
        State(model=kind())


def test_a_value_that_cannot_be_copied_is_refused() -> None:
    with pytest.raises(TypeError, match=r"the value 'mutex' of the state cannot be copied .*lock"):
        State(epoch=[0], mutex=threading.Lock())


# --- steps and commits ---------------------------------------------------------------------------------------------


def test_a_step_that_has_not_ended_is_undone(alone: World) -> None:
    array = np.zeros(2)
    state = State(weights=Weights(), seen=[], array=array, same=array)
    state.seen.append(1)
    state.end_step()
    state.seen.append(2)
    state.array += 1
    state.weights.forward()
    state.undo_step()
    assert (state.seen, state.array.tolist(), state.weights.buffer, state.steps) == ([1], [0, 0], 0, 1)
    state.array += 1
    assert state.same.tolist() == [1, 1], "what two values share is shared by their copies"
    state.undo_step()
    assert state.array.tolist() == [0, 0], "the copy of the step end is used again"


def test_an_optimizer_that_has_stepped_is_not_undone(alone: World) -> None:
    state = State(weights=Weights(), count=0)
    state.weights.step()
    state.count = 1
    state.undo_step()
    assert (state.weights.value, state.count, part_of(state).calls) == (1, 1, [])


class Frozen:
    """A value that never changes, and may be gone or broken: as an array of JAX."""

    def __init__(self, number: int, error: str = "") -> None:
        self.number, self.error, self.is_gone = number, error, False


class FrozenKind:
    def accepts(self, value: Any) -> bool:
        return isinstance(value, Frozen)

    def keep(self, value: Any) -> Any:
        return value

    def copy(self, value: Any) -> Any:
        assert not value.is_gone
        return Frozen(value.number)

    def is_intact(self, kept: Any) -> bool:
        return not kept.is_gone

    def has_changed(self, value: Any, kept: Any) -> bool:
        return value is not kept

    def wait(self, value: Any) -> None:
        if value.error:
            raise ValueError(value.error)


def test_values_of_a_registered_kind_are_kept_by_reference_and_committed_as_copies(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ronde.elastic.state._value_kinds", [FrozenKind()])
    state = State(frozen=Frozen(0), seen=[])
    state.commit()
    first = state.frozen = Frozen(1)
    assert state.has_stepped(), "the parameters of the next step are other ones"
    state.end_step()
    assert not state.has_stepped()
    state.frozen = Frozen(2)
    state.undo_step()
    assert state.frozen is first, "an interrupted step has left the values before as they are"
    state.frozen = Frozen(3, error="the step has failed")
    with pytest.raises(ValueError, match="the step has failed"):
        state.end_step()
    assert state.steps == 1, "a step counts when its numbers are there"
    first.is_gone = True
    state.undo_step()
    assert state.frozen.number == 3, "a step that has given its values away cannot be undone"
    for _ in range(2):
        state.restore()
        assert state.frozen.number == 0
        state.frozen.is_gone = True


def test_what_a_part_leaves_out_is_not_called(alone: World) -> None:
    class Constant:
        pass

    class ConstantPart(StatePart):
        def __init__(self, constant: Constant, state: State) -> None:
            pass

        def commit(self) -> int:
            return 0

        def restore(self, committed: int) -> None:
            pass

        def sync(self, givers: Sequence[int]) -> None:
            pass

    register_part(Constant, ConstantPart)
    state = State(constant=Constant(), weights=Weights())
    called = [call.__self__ for call in (*state._end_step_calls, *state._has_stepped_calls)]  # type: ignore[attr-defined]
    assert part_of(state) in called
    assert state._parts["constant"] not in called
    state.commit()
    state.weights.step()
    state.end_step()
    state.undo_step()
    state.reset()
    assert state.steps == 1


def test_a_commit_is_whole_or_not_at_all(alone: World) -> None:
    state = State(first=Weights(), second=Weights(), epoch=0)
    state.commit()
    state.first.step()
    state.second.step()
    state.epoch = 1
    part_of(state, "second").fails = MemoryError()
    with pytest.raises(MemoryError):
        state.commit()
    state.restore()
    assert (state.first.value, state.second.value, state.epoch, state.steps) == (0, 0, 0, 0)


def test_a_commit_ends_the_step(alone: World) -> None:
    state = State(weights=Weights(), epoch=0)
    state.weights.step()
    state.commit()
    assert (state.steps, part_of(state).has_stepped()) == (1, False)
    state.epoch = 5
    state.commit()
    state.epoch = 6
    state.undo_step()
    assert (state.steps, state.epoch) == (1, 5), "what a commit has kept is not undone"


def test_restore_can_be_called_again(alone: World) -> None:
    state = State(seen=[0])
    with pytest.raises(ValueError, match=r"nothing was committed: call State\.commit"):
        state.restore()
    state.commit()
    for _ in range(2):
        state.seen.append(1)
        state.restore()
        assert state.seen == [0]


# --- changes of the round ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["end_step", "commit"])
def test_all_ranks_leave_at_the_same_step_end(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(world: World) -> int:
        state = State(weights=Weights())
        for step in range(3):
            state.weights.step()
            world.change_wanted = world.change_wanted or (step == 1 and world.rank == 1)
            try:
                getattr(state, end)()
            except RoundChange:
                break
        return state.steps

    assert run_ranks(monkeypatch, 3, body) == [2, 2, 2]


def test_what_the_reducer_has_agreed_on_needs_no_operation(alone: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(alone.group), "allreduce", lambda *_, **__: pytest.fail("an operation"))
    state = State(weights=Weights())
    alone.change_checked = True
    state.end_step()
    assert not alone.change_checked
    alone.change_checked = alone.change_agreed = True
    with pytest.raises(RoundChange):
        state.end_step()
    assert state.steps == 2


def test_a_candidate_cannot_end_a_step(alone: World) -> None:
    alone.is_candidate = True
    state = State(weights=Weights())
    state.commit()
    for step in (state.end_step, ronde.mark_step):
        with pytest.raises(ronde.RondeError, match=r"an elastic job that is under way.* ronde\.elastic\.run"):
            step()
    state.weights.step()
    with pytest.raises(ronde.RondeError, match=r"ronde\.elastic\.run"):
        state.commit()
    with pytest.raises(ronde.RondeError, match=r"add_group\(\): this process has come to an elastic job"):
        ronde.add_group([0])


# --- synchronization -----------------------------------------------------------------------------------------------


def train_to(state: State, steps: int, *, has_stepped: bool = False) -> None:
    """Let the state be that of a rank that has lost another one after so many steps."""
    for step in range(steps):
        state.weights.step()
        state.seen.append(step)
        state._end_step()
    if has_stepped:
        state.weights.step()
    state._is_survivor = True
    state.undo_step()


def test_at_first_all_take_what_the_script_of_rank_0_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(world: World) -> tuple[Any, ...]:
        state = State(weights=Weights(10 + world.rank), epoch=world.rank)
        state.sync()
        return state.weights.value, state.epoch, part_of(state).calls

    assert run_ranks(monkeypatch, 3, body) == [(10, 0, ["sync [0]"])] * 3


@pytest.mark.parametrize(
    ("steps", "stepped", "givers"),
    [((2, 3, 3, 0), (), [1, 2]), ((2, 2, 2, 2), (0, 2), [1, 3]), ((3, 2, 3, 3), (0, 1, 2), [3])],
)
def test_all_take_the_state_of_those_that_have_come_farthest(
    steps: tuple[int, ...], stepped: tuple[int, ...], givers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(world: World) -> tuple[Any, ...]:
        state = State(weights=Weights(), seen=[])
        train_to(state, steps[world.rank], has_stepped=world.rank in stepped)
        state.sync()
        part = part_of(state)
        return state.weights.value, state.seen, state.steps, part.calls[-1], part.has_stepped()

    newest = steps[givers[0]]
    assert run_ranks(monkeypatch, 4, body) == [(newest, [*range(newest)], newest, f"sync {givers}", False)] * 4


def test_if_all_have_stepped_all_return_to_the_newest_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(world: World) -> tuple[Any, ...]:
        state = State(weights=Weights(), seen=[])
        for step in range(4):
            state.weights.step()
            state.seen.append(step)
            state._end_step()
            if step == 0 or (step == 2 and world.rank):  # rank 0 has not come to the end of its second commit
                state._keep_commit(state._position)
        state._is_survivor = True
        state.weights.step()
        state.undo_step()
        state.sync()
        return state.weights.value, state.seen, state.steps, part_of(state).calls

    assert run_ranks(monkeypatch, 3, body) == [(3, [0, 1, 2], 3, ["sync [1, 2]"])] * 3


def test_a_rank_that_fails_to_take_state_returns_to_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(world: World) -> tuple[Any, ...]:
        state = State(weights=Weights(), seen=[])
        train_to(state, 2 - world.rank)
        if world.rank == 1:
            state._keep_commit(state._position)
            state.seen.append("not committed")
            part_of(state).fails = PeerLost(rank=1, peer=2)
        with pytest.raises(PeerLost):
            state.sync()
        return state.weights.value, state.seen, state.steps

    assert run_ranks(monkeypatch, 2, body) == [(2, [0, 1], 2), (1, [0], 1)]


@pytest.mark.parametrize("how", ["other objects", "another model"])
def test_newcomers_that_differ_are_refused_and_lost_for_the_others(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is a newcomer, too, and fits."""

    def body(world: World) -> str:
        state = State(weights=Weights()) if how != "other objects" or world.rank != 2 else State(model=Weights())
        state._is_survivor = world.rank == 0
        if how == "another model":
            layers = ["a layer"] * (1 + world.rank // 2)
            monkeypatch.setattr(part_of(state), "sync", lambda givers: check_equal(world.group, "sync", layers))
        try:
            state.sync()
        except ronde.Mismatch as error:
            world.close(LeaveReason.FAILED, str(error))
            return "Mismatch"
        except PeerLost as error:
            return f"rank {error.peer} is lost"
        return "no error"

    assert run_ranks(monkeypatch, 3, body) == ["rank 2 is lost", "rank 2 is lost", "Mismatch"]


@pytest.mark.parametrize("survivors", [(), (0, 1), (0, 1, 2)])
def test_survivors_and_first_ranks_that_differ_all_raise(
    survivors: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(world: World) -> str:
        state = State(weights=Weights()) if world.rank != 1 else State(model=Weights())
        state._is_survivor = world.rank in survivors
        with pytest.raises(ronde.Mismatch, match="states of different objects"):
            state.sync()
        return "Mismatch"

    assert run_ranks(monkeypatch, 3, body) == ["Mismatch"] * 3


def test_states_of_different_objects_are_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(world: World) -> str:
        state = State(weights=Weights()) if world.rank else State(model=Weights())
        with pytest.raises(ronde.Mismatch) as raised:
            state.sync()
        return str(raised.value)

    told = (
        "ranks have states of different objects: rank 0 gave model; rank 1 gave weights; give State() the same on all"
    )
    assert run_ranks(monkeypatch, 2, body) == [told] * 2


def test_objects_with_different_settings_are_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(world: World) -> str:
        state = State(same=Weights(), weights=Weights())
        part_of(state).settings = f"seed={world.rank // 2}"
        with pytest.raises(ronde.Mismatch) as raised:
            state.sync()
        return str(raised.value)

    told = (
        "weights of the state differs between ranks: ranks 0, 1 gave seed=0; rank 2 gave seed=1; make it with the "
        "same settings on all"
    )
    assert run_ranks(monkeypatch, 3, body) == [told] * 3
