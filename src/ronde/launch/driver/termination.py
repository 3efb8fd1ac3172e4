"""How a job is brought to its end: who gets which signal, and when. A table; the driver carries it out.

RUNNING ── a rank failed ──► GRACE ── time ──► TERMINATE ── time ──► KILL ── time ──► ABANDONED
   └────── Ctrl-C ─────────► INTERRUPT ── time ──┘                    ▲
                                 └── Ctrl-C again: at once ───────────┘

The driver does not pass on repeats of a signal within moments, see driver.SIGNAL_REPEAT_S.
"""

from __future__ import annotations

import enum
import signal
from typing import NamedTuple

from ronde.launch.timeouts import INTERRUPT_TIMEOUT_S, INTERRUPTED_TERMINATE_TIMEOUT_S, KILL_TIMEOUT_S


class TerminationStage(enum.Enum):
    RUNNING = enum.auto()
    GRACE = enum.auto()
    """A rank has failed; the others end by themselves, because the coordinator sends them RankLost."""
    INTERRUPT = enum.auto()
    TERMINATE = enum.auto()
    KILL = enum.auto()
    ABANDONED = enum.auto()
    """Some ranks have not ended even when killed: their host does not answer."""


class TerminationEvent(enum.Enum):
    RANK_FAILED = enum.auto()
    INTERRUPTED = enum.auto()
    STOP_REQUESTED = enum.auto()
    """The driver itself is to end: SIGTERM, SIGHUP, stop()."""
    TIMED_OUT = enum.auto()
    """The time of this stage is over."""


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
"""Any other event changes nothing."""

STAGE_SIGNALS = {
    TerminationStage.INTERRUPT: signal.SIGINT,
    TerminationStage.TERMINATE: signal.SIGTERM,
    TerminationStage.KILL: signal.SIGKILL,
}


class TerminationStep(NamedTuple):
    """What to do on entering a stage."""

    stage: TerminationStage
    signal: signal.Signals | None
    """To send to all ranks that still run."""
    timeout_s: float | None
    """After which TIMED_OUT is due; None for never."""


class Termination:
    """The stage of one job. handle_event() returns what to do now, if anything."""

    def __init__(self, *, grace_s: float, terminate_s: float) -> None:
        self.stage = TerminationStage.RUNNING
        self._timeouts_s = {
            TerminationStage.GRACE: grace_s,
            TerminationStage.INTERRUPT: INTERRUPT_TIMEOUT_S,
            TerminationStage.TERMINATE: terminate_s,
            TerminationStage.KILL: KILL_TIMEOUT_S,
        }

    def handle_event(self, event: TerminationEvent) -> TerminationStep | None:
        stage = TRANSITIONS.get((self.stage, event))
        if stage is None:
            return None
        if stage is TerminationStage.INTERRUPT:
            self._timeouts_s[TerminationStage.TERMINATE] = min(
                INTERRUPTED_TERMINATE_TIMEOUT_S, self._timeouts_s[TerminationStage.TERMINATE]
            )
        self.stage = stage
        return TerminationStep(stage, STAGE_SIGNALS.get(stage), self._timeouts_s.get(stage))
