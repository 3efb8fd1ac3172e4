"""The loop of ronde.elastic.run() in a job of one, with a scripted way into the next round; and its signals."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import pytest
from msgspec.structs import replace

import ronde
from ronde.comm.world import World, current_world
from ronde.elastic import RoundChange, State, training_loop
from ronde.elastic.training_loop import TerminationSignal, is_loss
from ronde.errors import (
    JobFinished,
    LeftBehind,
    OperationTimeout,
    PeerLost,
    RondeError,
    RoundEnded,
    StartFailed,
    StateLost,
)
from ronde.net.messages import LeaveReason
from tests.limits import PATIENCE_S
from tests.unit.elastic.thread_states import Weights, part_of, run_ranks

LOST = PeerLost(rank=0, peer=1, why="killed by SIGKILL")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A job of one that behaves as if it could go on after a loss, and as if one had happened in its round."""
    ronde.init()
    monkeypatch.setattr(World, "can_rejoin", True)
    monkeypatch.setattr(World, "has_lost_peer", True)
    world = current_world()
    world.settings = replace(world.settings, elastic=True)
    yield world
    ronde.shutdown()


class Rounds:
    """In place of rejoin(): what it does each time, None for another round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *outcomes: Exception | Callable[[], object] | None) -> None:
        self.num_joined = 0
        self.missing: list[tuple[int, ...]] = []
        self._outcomes = list(outcomes)
        monkeypatch.setattr("ronde.elastic.training_loop.rejoin", self._rejoin)

    def _rejoin(self, *, progress: int, timeout: RondeError | None) -> None:
        self.num_joined += 1
        self.missing.append(timeout.missing if timeout is not None else ())
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is not None:
            outcome()


class Script:
    """A training function: in each call it counts one step, then does what comes next."""

    def __init__(self, *outcomes: BaseException | str) -> None:
        self.seen: list[int] = []
        """How many steps were finished at the start of each call."""
        self._outcomes = list(outcomes)

    def __call__(self, state: State) -> str:
        self.seen.append(state.steps)
        state.end_step()
        state.weights.forward()
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def test_it_returns_the_result_and_leaves_with_finished(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[LeaveReason] = []
    monkeypatch.setattr(world.control_thread, "leave", lambda message, deadline: left.append(message.reason))

    @ronde.elastic.run
    def train(state: State, batch: int, *, name: str) -> str:
        """Train."""
        state.end_step()
        return f"{name} {batch} {state.steps}"

    assert train(State(epoch=0), 8, name="batch") == "batch 8 1"
    assert (train.__name__, train.__doc__) == ("train", "Train.")
    assert ronde.size() == 1, "the round goes on to work"
    ronde.shutdown()
    assert left == [LeaveReason.FINISHED]


def wrapped(cause: Exception) -> Exception:
    error = ValueError("the loss could not be computed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("error", [LOST, RoundEnded("the round is over"), wrapped(LOST), RoundChange()], ids=repr)
def test_after_a_loss_it_joins_the_next_round_and_trains_on(
    error: Exception, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "is_over", True)
    rounds, script, state = Rounds(monkeypatch, None), Script(error, "done"), State(weights=Weights())
    state.register_reset_callbacks([lambda: part_of(state).calls.append("callback")])
    assert ronde.elastic.run(script, state) == "done"
    undone = [] if isinstance(error, RoundChange) else ["undo_step"]
    assert part_of(state).calls == ["sync [0]", *undone, "reset", "callback", "sync [0]"]
    assert (script.seen, rounds.num_joined) == ([0, 1], 1)


class FrameworkError(Exception):
    """The error of a framework, in which only the framework's package finds the original."""


def test_a_loss_inside_of_an_error_of_a_framework_is_a_loss(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_loop, "_error_finders", [])
    script = Script(FrameworkError("lost"), "done")
    training_loop.register_error_finder(lambda error: LOST if str(error) == "lost" else None)
    rounds, state = Rounds(monkeypatch, None), State(weights=Weights())
    assert ronde.elastic.run(script, state) == "done" and rounds.num_joined == 1
    assert not is_loss(FrameworkError("other"))


@pytest.mark.parametrize("kind", [OperationTimeout, RoundEnded])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_rank_that_does_not_come_to_an_operation_in_time_is_named_and_training_goes_on(
    kind: type[RondeError], is_wrapped: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = kind("rank 3 did not come in time")
    late.missing = (3,)
    script = Script(wrapped(late) if is_wrapped else late, RoundChange(), "done")
    rounds, state = Rounds(monkeypatch, None, None), State(weights=Weights())
    assert ronde.elastic.run(script, state) == "done"
    assert rounds.missing == [(3,), ()], "only once"


@pytest.mark.parametrize(
    "error",
    [ValueError("a mistake"), OperationTimeout("too late"), KeyboardInterrupt(), wrapped(OperationTimeout("too late"))],
    ids=repr,
)
def test_other_errors_are_raised(error: BaseException, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(monkeypatch)
    with pytest.raises(type(error)) as raised:
        ronde.elastic.run(Script(error), State(weights=Weights()))
    assert raised.value is error and rounds.num_joined == 0


@pytest.mark.parametrize("error", [RoundEnded("channel 0.ordered is closed"), LOST, wrapped(LOST)], ids=repr)
def test_an_operation_of_an_earlier_round_is_no_loss(
    error: Exception, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "has_lost_peer", False)
    rounds = Rounds(monkeypatch)
    with pytest.raises(type(error)) as raised:
        ronde.elastic.run(Script(error), State(weights=Weights()))
    assert raised.value is error and rounds.num_joined == 0


def test_a_connection_that_broke_between_two_ranks_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator has not reported a loss: it can reach both."""
    monkeypatch.setattr(World, "can_rejoin", True)
    is_over = threading.Event()

    def body(world: World) -> tuple[bool, ...]:
        if world.rank == 1:
            assert is_over.wait(PATIENCE_S)  # it is in the round until then
            return ()
        before = is_loss(LOST)
        for channel in world._open_channels.channels:
            channel.rank_lost(PeerLost(rank=0, peer=1, why="its connection closed"))
        with pytest.raises(PeerLost) as raised:
            world.group.barrier()
        found = before, world.is_over, is_loss(raised.value)
        is_over.set()
        return found

    assert run_ranks(monkeypatch, 2, body)[0] == (False, False, True)


def test_a_round_that_was_left_by_shutdown_is_not_joined_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(state: State) -> None:
        ronde.shutdown()
        raise LOST

    rounds = Rounds(monkeypatch)
    with pytest.raises(PeerLost):
        ronde.elastic.run(train, State(weights=Weights()))
    assert rounds.num_joined == 0


def test_losses_while_state_is_synchronized_and_at_the_end_are_losses(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = State(weights=Weights())

    def fail_to_sync() -> None:
        part_of(state).fails = LOST

    ends: list[Exception | None] = [LOST, None]

    def finish(self: World) -> None:
        end = ends.pop(0)
        if end is not None:
            raise end

    monkeypatch.setattr(World, "finish", finish)
    rounds, script = Rounds(monkeypatch, fail_to_sync, None, None), Script(LOST, "first", "second")
    assert ronde.elastic.run(script, state) == "second"
    assert (rounds.num_joined, script.seen) == (3, [0, 1, 2])


def test_who_comes_after_the_end_returns_what_it_has(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(self: World) -> None:
        raise LOST

    monkeypatch.setattr(World, "finish", finish)
    Rounds(monkeypatch, JobFinished("the job is finished"))
    assert ronde.elastic.run(Script("result"), State(weights=Weights())) == "result"
    Rounds(monkeypatch, JobFinished("the job is finished"))
    assert ronde.elastic.run(Script(LOST), State(weights=Weights())) is None


@pytest.mark.parametrize("refusal", [LeftBehind("worker 3 was left behind"), StartFailed("the reset limit")], ids=repr)
def test_a_refusal_is_raised(refusal: StartFailed, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    Rounds(monkeypatch, refusal)
    with pytest.raises(type(refusal), match=str(refusal)):
        ronde.elastic.run(Script(LOST), State(weights=Weights()))


def test_a_process_whose_state_would_have_come_from_lost_ranks_ends_so_that_another_one_is_started(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.is_candidate = True
    Rounds(monkeypatch, StateLost("all ranks that had the state of training are lost"))
    with pytest.raises(SystemExit, match="0"):
        ronde.elastic.run(Script("result"), State(weights=Weights()))


def test_a_candidate_joins_before_it_trains(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.is_candidate = True

    def join() -> None:
        world.is_candidate = False

    state = State(weights=Weights())
    Rounds(monkeypatch, join)
    assert ronde.elastic.run(Script("done"), state) == "done"
    assert part_of(state).calls == ["reset", "sync [0]"]


def test_a_second_run_in_a_round_is_refused(world: World) -> None:
    """A loss in it would be taken for the end of the job."""
    assert ronde.elastic.run(Script("done"), State(weights=Weights())) == "done"
    with pytest.raises(ValueError, match=r"called again in the same round.* Call it once"):
        ronde.elastic.run(Script("done"), State(weights=Weights()))
    ronde.shutdown()
    ronde.init()
    assert ronde.elastic.run(Script("done"), State(weights=Weights())) == "done"


def test_a_run_inside_of_another_one_is_refused(world: World) -> None:
    def train(state: State) -> None:
        ronde.elastic.run(Script("done"), State(weights=Weights()))

    for _ in range(2):
        with pytest.raises(ValueError, match=r"called inside of another run\(\)"):
            ronde.elastic.run(train, State(weights=Weights()))


def test_it_needs_init_and_a_state() -> None:
    with pytest.raises(ronde.NotInitialized, match=r"ronde\.elastic\.run\(\) needs a running round"):
        ronde.elastic.run(Script("done"), State())
    with pytest.raises(TypeError, match=r"needs a ronde\.elastic\.State, got dict"):
        ronde.elastic.run(Script("done"), {})  # type: ignore[call-overload]


# --- SIGTERM -------------------------------------------------------------------------------------------------------


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def handler() -> Iterator[list[int]]:
    """The user's own handler of SIGTERM; the signals that it has got."""
    came: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = signal.signal(signal.SIGTERM, on_signal)
    yield came
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[LeaveReason]:
    """Why rounds were left."""
    reasons: list[LeaveReason] = []
    original = World.close

    def close(self: World, reason: LeaveReason = LeaveReason.SHUTDOWN, why: str = "", **more: Any) -> None:
        reasons.append(reason)
        original(self, reason, why, **more)

    monkeypatch.setattr(World, "close", close)
    return reasons


def test_sigterm_lets_the_rank_leave_after_the_step(world: World, handler: list[int], left: list[LeaveReason]) -> None:
    steps: list[str] = []

    def train(state: State) -> None:
        terminate()
        steps.append("goes on")
        state.end_step()
        steps.append("never")

    with pytest.raises(SystemExit) as raised:
        ronde.elastic.run(train, State(weights=Weights()))
    assert (raised.value.code, steps, left) == (0, ["goes on"], [LeaveReason.PREEMPTED])
    terminate()
    assert handler == [signal.SIGTERM], "the user's handler is there again"


def test_sigterm_in_a_job_without_ronde_run_is_no_success(
    world: World, left: list[LeaveReason], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would start another rank, and what has started this one would take the training for finished."""
    world.settings = replace(world.settings, elastic=False)

    def train(state: State) -> None:
        terminate()
        state.end_step()

    with pytest.raises(SystemExit) as raised:
        ronde.elastic.run(train, State(weights=Weights()))
    assert (raised.value.code, left) == (143, [LeaveReason.PREEMPTED])
    assert "leaves before the training is finished" in caplog.text
    ronde.init()
    Rounds(monkeypatch, terminate)
    with pytest.raises(SystemExit) as raised:
        ronde.elastic.run(Script(LOST), State(weights=Weights()))
    assert raised.value.code == 143


def test_sigterm_before_a_loss_lets_the_rank_leave_at_the_loss(world: World, left: list[LeaveReason]) -> None:
    def train(state: State) -> None:
        terminate()
        raise LOST

    with pytest.raises(SystemExit):
        ronde.elastic.run(train, State(weights=Weights()))
    assert left == [LeaveReason.PREEMPTED]


def test_an_error_behind_sigterm_lets_the_rank_leave_in_good_order(
    world: World, left: list[LeaveReason], caplog: pytest.LogCaptureFixture
) -> None:
    """SIGTERM to a process group ends the workers of a data loader, and the rank cannot go on without them."""

    def train(state: State) -> None:
        terminate()
        raise RuntimeError("a worker of the data loader is gone")

    with pytest.raises(SystemExit) as raised:
        ronde.elastic.run(train, State(weights=Weights()))
    assert (raised.value.code, left) == (0, [LeaveReason.PREEMPTED])
    assert "a worker of the data loader is gone" in caplog.text


def test_sigterm_while_it_waits_for_the_next_round_ends_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    Rounds(monkeypatch, terminate)
    with pytest.raises(SystemExit) as raised:
        ronde.elastic.run(Script(LOST), State(weights=Weights()))
    assert raised.value.code == 0


def test_sigterm_just_before_the_round_is_left_ends_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not come yet when the loop looks at it, and has when it would wait for the next round."""
    rounds = Rounds(monkeypatch, None)
    leave_round = TerminationSignal.at_once

    def leave_after_signal(termination: TerminationSignal) -> AbstractContextManager[None]:
        terminate()
        return leave_round(termination)

    monkeypatch.setattr(TerminationSignal, "at_once", leave_after_signal)
    with pytest.raises(SystemExit) as raised:
        ronde.elastic.run(Script(LOST, "the end"), State(weights=Weights()))
    assert (raised.value.code, rounds.num_joined) == (0, 0)


def test_a_second_sigterm_ends_the_process(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []

    def train(state: State) -> str:
        terminate()
        monkeypatch.setattr(os, "kill", lambda *what: killed.append(what))
        signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        return "done"

    ronde.elastic.run(train, State(weights=Weights()))
    assert killed == [(os.getpid(), signal.SIGTERM)]


def test_a_forked_child_is_ended_by_sigterm(world: World) -> None:
    def train(state: State) -> int:
        child = os.fork()
        if not child:
            terminate()
            os._exit(0)
        return os.waitpid(child, 0)[1]

    assert os.waitstatus_to_exitcode(ronde.elastic.run(train, State(weights=Weights())) or 0) == -signal.SIGTERM


def test_a_job_that_needs_all_its_ranks_handles_no_signal(
    world: World, handler: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "can_rejoin", False)
    world.size = 2

    def train(state: State) -> None:
        terminate()
        state.end_step()

    ronde.elastic.run(train, State(weights=Weights()))
    assert handler == [signal.SIGTERM]


def test_in_another_thread_it_handles_no_signal(world: World, handler: list[int]) -> None:
    results: list[object] = []
    thread = threading.Thread(
        target=lambda: results.append(ronde.elastic.run(Script("done"), State(weights=Weights())))
    )
    thread.start()
    thread.join()
    terminate()
    assert (results, handler) == (["done"], [signal.SIGTERM])
