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

__all__ = ["Ending", "On", "Stage", "Step"]

INTERRUPT_S = 3.0
"""After Ctrl-C, ranks get so long to end by themselves."""
HURRY_S = 2.0
"""Who has pressed Ctrl-C does not want to wait: most between SIGTERM and SIGKILL then."""
KILL_S = 5.0
"""A killed process ends at once, unless the kernel is busy for it."""


class Stage(enum.Enum):
    """How far it has come."""

    RUNNING = enum.auto()
    GRACE = enum.auto()
    """A rank has failed; the others end by themselves, as the coordinator has told them."""
    INTERRUPT = enum.auto()
    TERMINATE = enum.auto()
    KILL = enum.auto()
    GIVEN_UP = enum.auto()
    """Some did not even end when killed: their host does not answer."""


class On(enum.Enum):
    """What moves it."""

    FAILED = enum.auto()
    """A rank has ended, and not well."""
    CTRL_C = enum.auto()
    STOP = enum.auto()
    """The driver itself is to end: SIGTERM, SIGHUP, stop()."""
    TIME = enum.auto()
    """What was given for this stage is over."""


NEXT: dict[tuple[Stage, On], Stage] = {
    (Stage.RUNNING, On.FAILED): Stage.GRACE,
    (Stage.RUNNING, On.CTRL_C): Stage.INTERRUPT,
    (Stage.RUNNING, On.STOP): Stage.TERMINATE,
    (Stage.GRACE, On.CTRL_C): Stage.INTERRUPT,
    (Stage.GRACE, On.STOP): Stage.TERMINATE,
    (Stage.GRACE, On.TIME): Stage.TERMINATE,
    (Stage.INTERRUPT, On.CTRL_C): Stage.KILL,
    (Stage.INTERRUPT, On.STOP): Stage.KILL,
    (Stage.INTERRUPT, On.TIME): Stage.TERMINATE,
    (Stage.TERMINATE, On.CTRL_C): Stage.KILL,
    (Stage.TERMINATE, On.STOP): Stage.KILL,
    (Stage.TERMINATE, On.TIME): Stage.KILL,
    (Stage.KILL, On.TIME): Stage.GIVEN_UP,
}
"""What is not in it changes nothing."""

SIGNALS = {
    Stage.INTERRUPT: signal.SIGINT,
    Stage.TERMINATE: signal.SIGTERM,
    Stage.KILL: signal.SIGKILL,
}


@dataclass(frozen=True, slots=True)
class Step:
    """What to do on entering a stage."""

    stage: Stage
    signal: signal.Signals | None
    """For all ranks that still run."""
    limit_s: float | None
    """When On.TIME is due; None for never."""


class Ending:
    """The stage of one job."""

    def __init__(self, *, grace_s: float, terminate_s: float) -> None:
        self.stage = Stage.RUNNING
        self._limits = {
            Stage.GRACE: grace_s,
            Stage.INTERRUPT: INTERRUPT_S,
            Stage.TERMINATE: terminate_s,
            Stage.KILL: KILL_S,
        }

    def on(self, event: On) -> Step | None:
        """What to do now, if anything."""
        stage = NEXT.get((self.stage, event))
        if stage is None:
            return None
        if stage is Stage.INTERRUPT:
            self._limits[Stage.TERMINATE] = min(HURRY_S, self._limits[Stage.TERMINATE])
        self.stage = stage
        return Step(stage, SIGNALS.get(stage), self._limits.get(stage))
