"""A warm worker: a rank that runs one trial after another. Its interpreter, imports and data stay; what a trial has
changed is put back between trials. Started by worker_group as the function of a function rank."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ronde.errors import RoundEnded
from ronde.launch.environment import KeptVariables
from ronde.launch.named_functions import load_function
from ronde.launch.rank_messages import MessagePipes
from ronde.search.protocol import (
    Outcome,
    StartTrial,
    StopWorker,
    TrialEnded,
    WorkerFailed,
    WorkerReady,
    decode_for_worker,
    encode_message,
)
from ronde.search.trial import Trial, TrialPruned, as_result
from ronde.settings import Settings
from ronde.text import shorten

MAX_REASON_CHARS = 500
LIBRARY_FOLDERS = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
        Path(__file__).parents[1],
    )
)
"""An error is said to come from the user's line that has called into these."""
RESTORED_SIGNALS = tuple(sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}))
"""Without SIGCHLD, whose handler PyTorch's DataLoader sets once for the whole process."""
TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


def run_worker(
    objective: Callable[..., Any] | str, setup: Callable[[], Any] | str | None, slots: Sequence[int], report_s: float
) -> None:
    """Run trials until the driver says that there are no more. A text is `module:function`. `slots` has Trial.slot by
    rank."""
    pipes = MessagePipes()
    rank, own_pid = Settings.load().rank, os.getpid()
    try:
        call = load_function(objective) if isinstance(objective, str) else objective
        make_data = load_function(setup) if isinstance(setup, str) else setup
        data = () if make_data is None else (make_data(),)
    except Exception as error:  # whatever a user's module or setup raises
        traceback.print_exc()
        pipes.send(encode_message(WorkerFailed(describe_error(error))))
        return
    state = ProcessState()
    _flush()
    pipes.send(encode_message(WorkerReady()))
    while True:
        try:
            message = decode_for_worker(pipes.receive())
        except EOFError:
            return
        if isinstance(message, StopWorker):
            return
        if isinstance(message, StartTrial):  # others are late answers to a trial that has ended
            trial = Trial(message, pipes, rank=rank, slot=slots[rank], report_s=report_s)
            ended = _run_trial(trial, call, data, state, own_pid)
            _flush()
            pipes.send(encode_message(ended))


def _run_trial(
    trial: Trial, call: Callable[..., Any], data: tuple[Any, ...], state: ProcessState, own_pid: int
) -> TrialEnded:
    state.seed(trial.seed)
    value, error, reason = 0.0, None, ""
    try:
        value = as_result(call(trial, *data))
    except BaseException as raised:  # also sys.exit() and what asyncio raises: it ends the trial, not the worker
        is_child = os.getpid() != own_pid
        if isinstance(raised, KeyboardInterrupt) and not is_child:
            raise
        reason = describe_error(raised)
        if not is_pruned(raised) and not (is_child and isinstance(raised, SystemExit)):
            traceback.print_exception(type(raised), raised, _without_own_frames(raised))
        error = raised.with_traceback(None)  # its frames hold what the trial has allocated
    if os.getpid() != own_pid:
        # A child that the objective has forked, and that has returned or called sys.exit(): the trial is its parent's.
        _flush()
        os._exit(_exit_code(error))
    state.restore(error)
    if error is None:
        return TrialEnded(trial.number, trial.attempt, Outcome.COMPLETE, value)
    if is_pruned(error):
        return TrialEnded(trial.number, trial.attempt, Outcome.PRUNED)
    is_consequence = isinstance(error, RoundEnded)
    return TrialEnded(trial.number, trial.attempt, Outcome.FAILED, reason=reason, is_consequence=is_consequence)


def is_pruned(error: BaseException) -> bool:
    """Return whether this is TrialPruned, ours or Optuna's."""
    if isinstance(error, TrialPruned):
        return True
    exceptions = sys.modules.get("optuna.exceptions")
    return exceptions is not None and isinstance(error, exceptions.TrialPruned)


def describe_error(error: BaseException) -> str:
    """Return an error in a line, with the line of the program that has raised it."""
    try:
        text = str(error).strip().splitlines()
    except Exception:  # of a user's class
        text = []
    shown = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    if isinstance(error, SystemExit):
        shown = f"it called sys.exit({error.code!r})"
    place = _find_place(error)
    return shorten(f"{shorten(shown, MAX_REASON_CHARS - len(place))}{place}", MAX_REASON_CHARS)


def _find_place(error: BaseException) -> str:
    """Return ` (train.py:12)` for the innermost line that is not of a library; empty if there is none."""
    found = [
        frame
        for frame in traceback.extract_tb(_without_own_frames(error))
        if not frame.filename.startswith(LIBRARY_FOLDERS) and not frame.filename.startswith("<frozen")
    ]
    return f" ({Path(found[-1].filename).name}:{found[-1].lineno})" if found else ""


def _exit_code(error: BaseException | None) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        return error.code or 0
    return 0 if error is None else 1


class ProcessState:
    """What trials may change in a process and the next trial is to find as it was: random numbers, numbers of threads,
    the working directory, environment variables, signal handlers and timers, the round, memory. ML libraries are looked
    up among those that the objective has imported."""

    def __init__(self) -> None:
        self._cwd = os.getcwd()  # noqa: PTH109  # a text is all that chdir needs
        self._variables = KeptVariables()
        self._handlers = {number: signal.getsignal(number) for number in RESTORED_SIGNALS}
        self._timers = {timer: signal.getitimer(timer) for timer in TIMERS}
        self._num_threads: tuple[int, bool] | None = None
        self._default_dtype: Any = None
        self._num_modules = 0
        self._remember_torch()
        self._collect()

    def seed(self, seed: int) -> None:
        """Let the random numbers of Python, NumPy and PyTorch begin with this seed."""
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        if self._remember_torch():
            sys.modules["torch"].manual_seed(seed)
        if "tensorflow" in sys.modules:
            sys.modules["tensorflow"].random.set_seed(seed % 2**31)

    def restore(self, error: BaseException | None) -> None:
        """Put everything back after a trial, and leave its round; `error` is what ended it, if it was one."""
        self._restore_signals()
        world = sys.modules.get("ronde.comm.world")
        if world is not None and world.is_initialized():
            if error is None:
                world.shutdown()
            else:
                world.leave(_leave_reason(error), describe_error(error))
        os.chdir(self._cwd)
        self._variables.restore()
        torch = sys.modules.get("torch")
        if torch is not None and self._num_threads is not None:
            num_threads, is_deterministic = self._num_threads
            torch.set_num_threads(num_threads)
            torch.use_deterministic_algorithms(is_deterministic)
            torch.set_default_dtype(self._default_dtype)
            torch.set_grad_enabled(True)
        elif torch is not None:  # the trial was the first to import it
            self._remember_torch()
        self._collect()
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _restore_signals(self) -> None:
        for timer, before in self._timers.items():
            if signal.getitimer(timer)[0] and not before[0]:
                signal.setitimer(timer, 0)
        for number, handler in self._handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:  # None: not one of Python
                signal.signal(number, handler)

    def _collect(self) -> None:
        """Free what nothing refers to any more. What was imported since the last time is left out from now on: to go
        through PyTorch's objects takes longer than a short trial."""
        gc.collect()
        if len(sys.modules) != self._num_modules:
            self._num_modules = len(sys.modules)
            gc.freeze()

    def _remember_torch(self) -> bool:
        """Return whether PyTorch is imported, and remember what it begins with."""
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "manual_seed"):  # the latter while another thread imports it
            return False
        if self._num_threads is None:
            self._num_threads = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
            self._default_dtype = torch.get_default_dtype()
        return True


def _leave_reason(error: BaseException) -> Any:
    from ronde.net.messages import LeaveReason

    return LeaveReason.SHUTDOWN if is_pruned(error) else LeaveReason.FAILED


def _without_own_frames(error: BaseException) -> Any:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _flush() -> None:
    """Write what was printed, so that it is reported before the message that follows."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed by the objective
            pass
