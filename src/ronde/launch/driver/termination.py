"""How a job is brought to its end: who is asked, told and killed, and when. A table; the driver carries it out.

RUNNING ── a rank failed ──► GRACE ── time ──► TERMINATE ── time ──► KILL ── time ──► GIVEN_UP
   └────── Ctrl-C ─────────► INTERRUPT ── time ──┘                    ▲
                                 └── Ctrl-C again: at once ───────────┘

Repeats of a signal within moments do not get here, see signals.REPEAT_S.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

__all__ = ["Termination", "TerminationEvent", "TerminationStage", "TerminationStep"]

INTERRUPT_TIMEOUT_S = 3.0
"""After Ctrl-C, ranks get so long to end by themselves."""
INTERRUPTED_TERMINATE_TIMEOUT_S = 2.0
"""Who has pressed Ctrl-C does not want to wait: most between SIGTERM and SIGKILL then."""
KILL_TIMEOUT_S = 5.0
"""A killed process ends at once, unless the kernel is busy for it."""


class TerminationStage(enum.Enum):
    """How far it has come."""

    RUNNING = enum.auto()
    GRACE = enum.auto()
    """A rank has failed; the others end by themselves, as the coordinator has told them."""
    INTERRUPT = enum.auto()
    TERMINATE = enum.auto()
    KILL = enum.auto()
    ABANDONED = enum.auto()
    """Some did not even end when killed: their host does not answer."""


class TerminationEvent(enum.Enum):
    """What moves it."""

    RANK_FAILED = enum.auto()
    """A rank has ended, and not well."""
    INTERRUPTED = enum.auto()
    STOP_REQUESTED = enum.auto()
    """The driver itself is to end: SIGTERM, SIGHUP, stop()."""
    TIMED_OUT = enum.auto()
    """What was given for this stage is over."""


TRANSITIONS: dict[tuple[TerminationStage, TerminationEvent], TerminationStage] = {
    (TerminationStage.RUNNING, TerminationEvent.RANK_FAILED): TerminationStage.GRACE,
    (TerminationStage.RUNNING, TerminationEvent.INTERRUPTED): TerminationStage.INTERRUPT,
    (TerminationStage.RUNNING, TerminationEvent.STOP_REQUESTED): TerminationStage.TERMINATE,
    (TerminationStage.GRACE, TerminationEvent.INTERRUPTED): TerminationStage.INTERRUPT,
    (TerminationStage.GRACE, TerminationEvent.STOP_REQUESTED): TerminationStage.TERMINATE,
    (TerminationStage.GRACE, TerminationEvent.TIMED_OUT): TerminationStage.TERMINATE,
    (TerminationStage.INTERRUPT, TerminationEvent.INTERRUPTED): TerminationStage.KILL,
    (TerminationStage.INTERRUPT, TerminationEvent.STOP_REQUESTED): TerminationStage.KILL,
    (TerminationStage.INTERRUPT, TerminationEvent.TIMED_OUT): TerminationStage.TERMINATE,
    (TerminationStage.TERMINATE, TerminationEvent.INTERRUPTED): TerminationStage.KILL,
    (TerminationStage.TERMINATE, TerminationEvent.STOP_REQUESTED): TerminationStage.KILL,
    (TerminationStage.TERMINATE, TerminationEvent.TIMED_OUT): TerminationStage.KILL,
    (TerminationStage.KILL, TerminationEvent.TIMED_OUT): TerminationStage.ABANDONED,
}
"""What is not in it changes nothing."""

STAGE_SIGNALS = {
    TerminationStage.INTERRUPT: signal.SIGINT,
    TerminationStage.TERMINATE: signal.SIGTERM,
    TerminationStage.KILL: signal.SIGKILL,
}


@dataclass(frozen=True, slots=True)
class TerminationStep:
    """What to do on entering a stage."""

    stage: TerminationStage
    signal: signal.Signals | None
    """For all ranks that still run."""
    timeout_s: float | None
    """When On.TIME is due; None for never."""


class Termination:
    """The stage of one job."""

    def __init__(self, *, grace_s: float, terminate_s: float) -> None:
        self.stage = TerminationStage.RUNNING
        self._timeouts_s = {
            TerminationStage.GRACE: grace_s,
            TerminationStage.INTERRUPT: INTERRUPT_TIMEOUT_S,
            TerminationStage.TERMINATE: terminate_s,
            TerminationStage.KILL: KILL_TIMEOUT_S,
        }

    def handle_event(self, event: TerminationEvent) -> TerminationStep | None:
        """What to do now, if anything."""
        stage = TRANSITIONS.get((self.stage, event))
        if stage is None:
            return None
        if stage is TerminationStage.INTERRUPT:
            self._timeouts_s[TerminationStage.TERMINATE] = min(
                INTERRUPTED_TERMINATE_TIMEOUT_S, self._timeouts_s[TerminationStage.TERMINATE]
            )
        self.stage = stage
        return TerminationStep(stage, STAGE_SIGNALS.get(stage), self._timeouts_s.get(stage))
