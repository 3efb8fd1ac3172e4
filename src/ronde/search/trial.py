"""A trial as the objective sees it, in one of its ranks. Made by the worker; the driver is at the other end."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, Protocol

from ronde.errors import RoundEnded
from ronde.search.protocol import (
    AbandonTrial,
    ParameterValue,
    PruneDecision,
    ReportedValue,
    StartTrial,
    decode_for_worker,
    encode_message,
)


class TrialPruned(Exception):
    """Raised by an objective to end a trial that is not worth going on with."""


class TrialPipes(Protocol):
    """The messages of a rank: MessagePipes, or a list of answers in tests."""

    def send(self, data: bytes) -> None: ...

    def receive(self, timeout_s: float | None = None) -> bytes: ...


class Trial:
    """One set of parameters that is tried. Every rank of the trial has one, and all of them are alike."""

    def __init__(self, start: StartTrial, pipes: TrialPipes, *, rank: int, slot: int, report_s: float) -> None:
        # `report_s` is how long ranks other than 0 wait for the answer to a report, which rank 0 has to make, too.
        self.number = start.number
        """Of this trial in its search, from 0."""
        self.params: dict[str, ParameterValue] = dict(start.params)
        """The parameters, by their names in the space."""
        self.seed = start.seed
        """A function of the seed of the search and of `number`. Random numbers of Python, NumPy and PyTorch begin with
        it in every rank."""
        self.attempt = start.attempt
        """1, or more after ranks of this trial were lost."""
        self.slot = slot
        """The number of this rank among those of all trials on its host, from 0, for the choice of a GPU:
        `torch.device("cuda", trial.slot % torch.cuda.device_count())`."""
        self._start = start
        self._pipes = pipes
        self._rank = rank
        self._report_s = report_s
        self._last_step: int | None = None
        self._is_pruned = False

    def report(self, value: Any, step: int) -> None:
        """Report an intermediate value, such as the loss after an epoch. Steps grow from report to report. All ranks of
        a trial call it with the same step; the value of rank 0 counts. A value that is no number fails the trial."""
        number, step = _as_number(value, "the reported value"), _as_step(step)
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} is reported after step {self._last_step}; steps grow from report to report")
        self._last_step = step
        if self._rank == 0:
            self._pipes.send(encode_message(ReportedValue(self.number, self.attempt, step, number)))
        if self._start.has_pruner:
            self._is_pruned = self._await_decision(step)

    def should_prune(self) -> bool:
        """Whether the trial is not worth going on with, as far as its last report shows. The answer is the same in all
        ranks. Raise TrialPruned then; Optuna's does, too."""
        return self._is_pruned

    if not TYPE_CHECKING:  # which would believe that a trial has any attribute

        def __getattr__(self, name: str) -> Any:
            # Called for names that a trial does not have.
            if name.startswith("suggest_"):
                raise AttributeError(
                    f"a trial of ronde has no {name}(): the space is an argument of run(), or in the job file, and the "
                    "value of lr is trial.params['lr']"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _await_decision(self, step: int) -> bool:
        while True:
            # Rank 0 has asked, so it waits for as long as there is a driver, also for one that is stopped (Ctrl-Z).
            within_s = None if self._rank == 0 else self._report_s
            message = decode_for_worker(self._pipes.receive(within_s))
            if not isinstance(message, PruneDecision | AbandonTrial):
                raise AssertionError(f"a message that no trial expects: {message}")
            if (message.number, message.attempt) != (self.number, self.attempt):
                continue  # of a former trial
            if isinstance(message, AbandonTrial):
                raise RoundEnded(message.reason)  # no answer will come
            if message.step == step:
                return message.prune
            raise ValueError(
                f"rank {self._rank} reports step {step}, and rank 0 step {message.step}: all ranks of a trial report "
                "the same steps"
            )


def _as_step(step: object) -> int:
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]  # what is none raises
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"the step of a report must be a whole number of at least 0, got {step!r}")
    return number


def _as_number(value: Any, what: str) -> float:
    """Return the value as a float: a number, or an array or tensor with one. ValueError for NaN and the rest."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{what} must be a number, got {type(value).__name__}: {value!r:.80}") from None
    if math.isnan(number):
        raise ValueError(f"{what} is NaN: the parameters do not work, or the learning rate is too high")
    return number


def as_result(value: Any) -> float:
    """Return what an objective has returned as a float. ValueError if it is no number."""
    return _as_number(value, "what the objective returned")
