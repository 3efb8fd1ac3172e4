"""The loop around a training function that lets it survive changes of the ranks: ronde.elastic.run()."""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TypeVar, overload

from ronde.comm.world import current_world, is_initialized, leave, rejoin
from ronde.elastic.state import RoundChange, State, check_before_run, count_progress, running, running_state
from ronde.errors import JobFinished, OperationTimeout, PeerLost, RondeError, RoundEnded, StateLost
from ronde.net.messages import LeaveReason
from ronde.observe.events import RoundChanged
from ronde.types import Deadline

_Result = TypeVar("_Result")

logger = logging.getLogger("ronde.elastic")

LOSS_REPORT_S = 1.0
"""The error of an operation may be raised before it is known everywhere in this process that a rank is lost."""
LOSS_CHECK_S = 0.01


@overload
def run(train: Callable[..., _Result]) -> Callable[..., _Result | None]: ...


@overload
def run(train: Callable[..., _Result], state: State, *args: Any, **kwargs: Any) -> _Result | None: ...


def run(train: Callable[..., Any], state: State | None = None, *args: Any, **kwargs: Any) -> Any:  # train's result
    """Call train(state, …) and return its result. When ranks are lost, leave or come meanwhile, go on with those that
    are there: give all of them the same state, and call train again. Also a decorator of train.

    train begins where the state says: at its epoch, at the position of its sampler. It marks the end of every step, by
    `sampler.track()` or State.end_step(). All ranks have to come to its end. None is returned on a rank that comes when
    the others have finished.

    SIGTERM lets this rank leave after the step under way, and raises SystemExit: with 0 in an elastic job of `ronde
    run`, which goes on, else with 143. A second SIGTERM ends the process at once. Errors that no loss of a rank has
    caused are raised. A rank that does not come to an operation within operation_s counts as lost, if it does not come
    back.
    """
    if state is None:

        @functools.wraps(train)
        def run_train(state: State, *args: Any, **kwargs: Any) -> Any:
            return run(train, state, *args, **kwargs)

        return run_train
    if not isinstance(state, State):
        raise TypeError(f"ronde.elastic.run() needs a ronde.elastic.State, got {type(state).__name__}")
    world = current_world("ronde.elastic.run()")
    if running_state() is not None or world.control_thread.is_finished:
        when = "inside of another run()" if running_state() is not None else "again in the same round"
        raise ValueError(
            f"ronde.elastic.run() was called {when}: a rank that joins later would begin with the first one. Call it "
            "once, for a function that does all of the training and sees in the state where to go on"
        )
    check_before_run(state)
    # In a job that cannot do without this rank, the launcher's SIGTERM means the end of all.
    is_handled = world.can_rejoin or world.size == 1
    with running(state), TerminationSignal(is_handled=is_handled) as termination:
        return _run(functools.partial(train, state, *args, **kwargs), state, termination)


def _run(train: Callable[[], Any], state: State, termination: TerminationSignal) -> Any:
    needs_round = current_world("ronde.elastic.run()").is_candidate
    noticed_ns, why = time.monotonic_ns(), "it is new"
    timeout: RondeError | None = None
    result = None
    while True:
        try:
            if needs_round:
                with termination.at_once():
                    rejoin(progress=count_progress(state), timeout=timeout)
                joined_ns = time.monotonic_ns()
                state.reset()
            state.sync()
            if needs_round:
                _record_change(why, noticed_ns, joined_ns)
            result = train()
            current_world("the end of ronde.elastic.run()").finish()
            return result
        except JobFinished:
            logger.info("the others have finished the job")
            return result
        except StateLost as error:
            logger.warning("%s: this process ends, and is started again", error)
            raise SystemExit(0) from None
        except RoundChange:
            noticed_ns, why, timeout = time.monotonic_ns(), "ranks come or go", None
        except Exception as raised:
            found = find_original(raised)
            if not is_loss(found):
                if not termination.has_come:
                    raise
                # SIGTERM to a process group ends the workers of a data loader, too; then the step cannot be finished.
                logger.warning("leaving in the middle of a step, told to end by SIGTERM: %s", found)
                leave_preempted()
            noticed_ns, why, timeout = time.monotonic_ns(), str(found), find_timeout(found)
            # Without the rank of this process and its operation: so `ronde run` shows equal lines of all ranks once.
            lost = f"rank {found.peer} is lost ({found.why})" if isinstance(found, PeerLost) else str(found)
            logger.warning("%s; training goes on", lost)
            state.undo_step()
        if termination.has_come:
            leave_preempted()
        needs_round = True


def _record_change(why: str, noticed_ns: int, joined_ns: int) -> None:
    world = current_world()
    times = {"at_ns": time.monotonic_ns(), "noticed_ns": noticed_ns, "joined_ns": joined_ns}
    world.recorder.record_event(RoundChanged(rank=world.rank, size=world.size, why=why, **times))


_error_finders: list[Callable[[Exception], Exception | None]] = []


def register_error_finder(find: Callable[[Exception], Exception | None]) -> None:
    """For a framework that turns the errors of operations into its own: `find` returns the original of such an error,
    or None."""
    _error_finders.append(find)


def find_original(error: Exception) -> Exception:
    """The error that a framework has turned into this one; the error itself if there is none."""
    for find in _error_finders:
        found = find(error)
        if found is not None:
            return found
    return error


def is_loss(error: Exception) -> bool:
    """Whether the error, or the one from which user code has raised it, says that this round has lost a rank or is
    over, or that a rank did not come to an operation in time. An operation in a group of an earlier round also ends
    with RoundEnded, or with the PeerLost of that round; another round would not mend that."""
    error = find_original(error)
    if find_timeout(error) is not None:
        return is_initialized() and current_world().can_rejoin
    found = error if isinstance(error, RoundEnded) else error.__cause__
    if not isinstance(found, RoundEnded) or not is_initialized():
        return False
    world = current_world()
    if not world.can_rejoin:
        return False
    deadline = Deadline(LOSS_REPORT_S if isinstance(found, PeerLost) else 0.0)
    while not (world.is_over or world.has_lost_peer):
        if deadline.expired:
            return False
        time.sleep(LOSS_CHECK_S)
    return True


def find_timeout(error: Exception) -> RondeError | None:
    """The error, or the one from which user code has raised it, if ranks did not come to an operation in time, here or
    on another rank. Its `missing` are these ranks, or all others when they are not known."""
    found = error if isinstance(error, RondeError) else error.__cause__
    if isinstance(found, OperationTimeout) and not found.missing and is_initialized():
        found.missing = current_world().missing_ranks()
    return found if isinstance(found, OperationTimeout | RoundEnded) and found.missing else None


def leave_preempted() -> NoReturn:
    """Leave the job in good order, at a step end, because this process was told to end: the others go on without it."""
    exit_code = _exit_code_when_terminated()
    leave(LeaveReason.PREEMPTED, "it was told to end by SIGTERM")
    if exit_code:
        logger.warning("told to end by SIGTERM, this rank leaves before the training is finished")
    raise SystemExit(exit_code)


def _exit_code_when_terminated() -> int:
    """The launcher of an elastic job knows that a rank may leave. Anybody else takes 0 for the end of the training."""
    return 0 if is_initialized() and current_world().settings.elastic else 128 + signal.SIGTERM


class TerminationSignal:
    """A context in which SIGTERM lets all ranks leave the round at the end of the step, so that this one can go. A
    second SIGTERM ends the process. In another thread than the main one it does nothing."""

    def __init__(self, *, is_handled: bool) -> None:
        self.has_come = False
        """Whether this rank is to leave."""
        self._pid = os.getpid()
        self._is_handled = is_handled
        self._ends_at_once = False
        self._exit_code = _exit_code_when_terminated()
        self._former: Any = None  # as signal.getsignal() has it

    def __enter__(self) -> TerminationSignal:
        is_main = threading.current_thread() is threading.main_thread()
        # Without a former handler that Python knows, nothing could be restored.
        if self._is_handled and is_main and signal.getsignal(signal.SIGTERM) is not None:
            self._former = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._former is not None:
            signal.signal(signal.SIGTERM, self._former)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """While this rank is in no round, it need not wait for the end of a step to go."""
        self._ends_at_once = True
        try:
            if self.has_come:  # since it was looked at
                raise SystemExit(self._exit_code)
            yield
        finally:
            self._ends_at_once = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.has_come or os.getpid() != self._pid:  # a forked child is no rank
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.has_come = True
        if self._ends_at_once:
            raise SystemExit(self._exit_code)
        if is_initialized():
            current_world().change_wanted = True
