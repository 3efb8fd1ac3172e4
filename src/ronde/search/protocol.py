"""The messages between the driver of a search and the ranks of a trial, which travel as rank messages of the launcher.
Values only."""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

ParameterValue: TypeAlias = bool | int | float | str | None


class SearchMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages."""


# --- from the driver -------------------------------------------------------------------------------------------------


class StartTrial(SearchMessage, frozen=True):
    number: int
    attempt: int
    """1 the first time; after the loss of a rank the trial is tried again."""
    params: dict[str, ParameterValue]
    seed: int
    has_pruner: bool
    """Whether every report gets a PruneDecision."""


class PruneDecision(SearchMessage, frozen=True):
    """What the pruner says about a report of rank 0. Sent to every rank of the trial."""

    number: int
    attempt: int
    step: int
    prune: bool


class AbandonTrial(SearchMessage, frozen=True):
    """A rank of the trial has ended it, so no report is answered any more."""

    number: int
    attempt: int
    reason: str


class StopWorker(SearchMessage, frozen=True):
    """There are no more trials."""


DriverToWorker: TypeAlias = StartTrial | PruneDecision | AbandonTrial | StopWorker


# --- from a rank -----------------------------------------------------------------------------------------------------


class WorkerReady(SearchMessage, frozen=True):
    """The objective is loaded and the setup has returned."""


class WorkerFailed(SearchMessage, frozen=True):
    """The objective could not be loaded, or the setup has raised: no trial can run."""

    reason: str


class ReportedValue(SearchMessage, frozen=True):
    """An intermediate value. Only that of rank 0 counts, and only rank 0 sends it."""

    number: int
    attempt: int
    step: int
    value: float


class Outcome(enum.Enum):
    """How a trial has ended: COMPLETE, PRUNED or FAILED."""

    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"


class TrialEnded(SearchMessage, frozen=True):
    """The objective has returned or raised in this rank."""

    number: int
    attempt: int
    outcome: Outcome
    value: float = 0.0
    """If it is COMPLETE: what the objective has returned."""
    reason: str = ""
    """If it FAILED: the error in a line."""
    is_consequence: bool = False
    """Whether it FAILED only because another rank had left the trial."""


WorkerToDriver: TypeAlias = WorkerReady | WorkerFailed | ReportedValue | TrialEnded

_encoder = msgspec.msgpack.Encoder()
encode_message = _encoder.encode
decode_for_worker = msgspec.msgpack.Decoder(DriverToWorker).decode
decode_for_driver = msgspec.msgpack.Decoder(WorkerToDriver).decode
