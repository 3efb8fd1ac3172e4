"""Who failed first, and what the job's user is told about it. Pure. Used by the driver when all ranks have ended.

The order of exits is not the order of failures: a failing rank tells its peers before its interpreter has ended, and
they may be gone before it is. So whom the coordinator lost first counts more; scripts that do not use ronde have no
coordinator, and for them the order of exits is all there is.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from ronde.observe.events import name_ranks

__all__ = ["LOST_CODE", "NOT_STARTED_CODE", "End", "Stop", "Verdict", "describe_code", "exit_code", "judge"]

NOT_STARTED_CODE = 127
"""As shells say of a command that cannot be started."""
LOST_CODE = 255
"""As ssh says of a connection that has ended: how the rank itself ended, nobody knows."""


@dataclass(frozen=True, slots=True)
class End:
    """How one rank has ended."""

    rank: int
    host: str
    code: int
    """A signal counts below 0."""
    how: str = ""
    """In words, when the code is not the story: it could not be started, its host was lost."""
    note: str = ""
    """What else is known, such as that the host ran out of memory."""
    ordered: bool = False
    """It ended after the driver had told it to."""

    @property
    def words(self) -> str:
        """For the summary and for the coordinator."""
        return (self.how or describe_code(self.code)) + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True, slots=True)
class Stop:
    """The job was ended from outside."""

    code: int
    why: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of the job."""

    code: int
    culprit: int | None = None
    """The rank that failed first."""
    lines: tuple[str, ...] = ()
    """Who, where and why; then what became of the others. Empty when all is well."""

    def summary(self, tail: str = "") -> str:
        """All of it as text, with the last lines that the culprit printed."""
        if not self.lines:
            return ""
        printed = [f"  | {line}" for line in tail.rstrip("\n").split("\n")] if tail.strip() else []
        return "\n".join([self.lines[0], *printed, *self.lines[1:]])


def exit_code(code: int) -> int:
    """The job's, for a rank's."""
    return 128 - code if code < 0 else code


def describe_code(code: int) -> str:
    """In words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"killed by signal {-code}"


def judge(
    ends: Sequence[End], *, first_lost: tuple[int, str] | None = None, stop: Stop | None = None, num_ranks: int
) -> Verdict:
    """What to make of these ends, which are in the order in which they came."""
    by_themselves = [end for end in ends if not end.ordered]
    failed = [end for end in by_themselves if end.code != 0]
    missing = sorted(set(range(num_ranks)) - {end.rank for end in ends})
    never_ended = [f"{name_ranks(missing)} did not end, not even when killed; look at their hosts"] if missing else []
    if not failed:
        if stop is not None:
            return Verdict(stop.code, None, (stop.why, *never_ended))
        return Verdict(1 if missing else 0, None, tuple(never_ended))
    lost = next((end for end in by_themselves if first_lost is not None and end.rank == first_lost[0]), None)
    culprit = lost if lost is not None and lost.code != 0 else failed[0]
    # Several that could not be started, or whose host was lost: one story.
    together = [end for end in failed if end.how and end.how == culprit.how] or [culprit]
    why = first_lost[1] if first_lost is not None and lost is not None else ""
    lines = [_headline(culprit, together, why if lost is culprit else "")]
    if lost is not None and lost.code == 0:
        # Perhaps the reason, perhaps not: so it is said, no more.
        lines.append(f"before that, rank {lost.rank} on host {lost.host} had left the others: {_add(lost.words, why)}")
    lines += _consequences(len([end for end in ends if end.code != 0]) - len(together))
    return Verdict(exit_code(culprit.code), culprit.rank, (*lines, *never_ended, *([stop.why] if stop else [])))


def _headline(culprit: End, together: Sequence[End], why: str) -> str:
    hosts = list(dict.fromkeys(end.host for end in together))
    who = f"{name_ranks(end.rank for end in together)} on host{'s' * (len(hosts) > 1)} {', '.join(hosts)}"
    return f"{who} {culprit.words}" if culprit.how else f"{who} failed first: {_add(culprit.words, why)}"


def _add(words: str, why: str) -> str:
    """What the coordinator heard of it, unless it is what we told it."""
    return words if why in ("", words) else f"{words} ({why})"


def _consequences(num_others: int) -> list[str]:
    if num_others < 1:
        return []
    return [f"{num_others} other rank{'s' * (num_others > 1)} ended in consequence"]
