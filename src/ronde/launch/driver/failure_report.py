"""Who failed first, and what the job's user is told about it. Pure. Used by the driver when all ranks have ended.

The order of exits is not the order of failures: a failing rank tells its peers before its interpreter has ended, and
they may be gone before it is. So whom the coordinator lost first counts more; scripts that do not use ronde have no
coordinator, and for them the order of exits is all there is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ronde.observe.stacks import RankStack
from ronde.observe.stalls import Whereabouts
from ronde.text import describe_exit_code, format_ranks, shell_exit_code, shorten

__all__ = ["FailureReport", "RankExit", "StopRequest", "make_failure_report"]

MAX_LINE_CHARS = 500
"""Characters of one error that is told in passing."""
PEER_LEFT_ERROR = re.compile(
    r"[\w.]+: (?:rank \d+ lost rank (\d+)\b|ranks? (\d+)\b[\d, -]* ended before the round began)"
)
"""An error that names the rank it is about: the words of PeerLost, and of the coordinator when nobody can start."""

ReadTail: TypeAlias = Callable[[int, int], str]
"""The last words of a rank that ended with this code: Screen.tail."""


@dataclass(frozen=True, slots=True)
class RankExit:
    """How one rank has ended."""

    rank: int
    host: str
    exit_code: int
    """A signal counts below 0."""
    reason: str = ""
    """In words, when the code is not the story: it could not be started, its host was lost."""
    detail: str = ""
    """What else is known, such as that the host ran out of memory."""
    requested: bool = False
    """It ended after the driver had told it to."""

    @property
    def description(self) -> str:
        """For the summary and for the coordinator."""
        return (self.reason or describe_exit_code(self.exit_code)) + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True, slots=True)
class StopRequest:
    """The job was ended from outside."""

    exit_code: int
    reason: str
    """Empty when its user wants no word of it."""


@dataclass(frozen=True, slots=True)
class FailureReport:
    """The end of the job."""

    exit_code: int
    first_failed_rank: int | None = None
    """The rank that failed first."""
    lines: tuple[str, ...] = ()
    """Who, where and why, with its last words; then what became of the others. Empty when all is well."""


def make_failure_report(
    exits: Sequence[RankExit],
    *,
    num_ranks: int,
    tail: ReadTail = lambda rank, code: "",
    first_lost: tuple[int, str] | None = None,
    whereabouts: Whereabouts | None = None,
    stop_request: StopRequest | None = None,
) -> FailureReport:
    """What to make of these ends, which are in the order in which they came."""
    by_themselves = [end for end in exits if not end.requested]
    failed = [end for end in by_themselves if end.exit_code != 0]
    missing = sorted(set(range(num_ranks)) - {end.rank for end in exits})
    never_ended = [f"{format_ranks(missing)} did not end, not even when killed; look at their hosts"] if missing else []
    stopped = [stop_request.reason] if stop_request is not None and stop_request.reason else []
    if not failed:
        code = 1 if missing else 0
        return FailureReport(code if stop_request is None else stop_request.exit_code, None, (*stopped, *never_ended))
    lost = next((end for end in by_themselves if first_lost is not None and end.rank == first_lost[0]), None)
    culprit = lost if lost is not None and lost.exit_code != 0 else failed[0]
    # Several that could not be started, or whose host was lost: one story.
    together = [end for end in failed if end.reason and end.reason == culprit.reason] or [culprit]
    why = first_lost[1] if first_lost is not None and lost is not None else ""
    said = tail(culprit.rank, culprit.exit_code)
    left, error = _find_early_exit(said, by_themselves)
    absent: tuple[RankStack, ...] = ()
    if left is not None:
        lines = [
            f"{_format_ranks_and_hosts([left])} left too early: {_append_reason(left.description, why if left is lost else '')}"
        ]
        lines += _quote_lines(tail(left.rank, left.exit_code))
        lines += [f"rank {culprit.rank} then {culprit.description}: {shorten(error, MAX_LINE_CHARS)}"]
    else:
        where = whereabouts if whereabouts is not None and whereabouts.first == culprit.rank else None
        absent = where.missing if where is not None else ()
        lines = [
            _describe_first_failure(culprit, together, why if lost is culprit else "", absent),
            *_quote_lines(said),
        ]
        lines += _disagreements(where.disagreeing if where is not None else ())
        if lost is not None and lost.exit_code == 0:
            # Perhaps the reason, perhaps not: so it is said, no more.
            lines += [
                f"before that, {_format_ranks_and_hosts([lost])} had left the others: {_append_reason(lost.description, why)}"
            ]
    late = {each.rank for each in absent}
    others = [end for end in exits if end.exit_code != 0 and end not in together and end.rank not in late]
    # Once the coordinator has lost one, or one has left too early, the others fail for that, with any code.
    same = (
        []
        if first_lost is not None or left is not None
        else [end for end in others if _is_same_failure(end, culprit, tail)]
    )
    lines += _count_others(len(same), f"failed, too: {describe_exit_code(culprit.exit_code)}")
    lines += _count_others(len(others) - len(same), "ended in consequence")
    return FailureReport(
        shell_exit_code(culprit.exit_code), culprit.rank, (*lines, *never_ended, *stopped, *map(_absence, absent))
    )


def _find_early_exit(output: str, exits: Sequence[RankExit]) -> tuple[RankExit | None, str]:
    """Whoever ended well, but too early, says the error of one that needed it; and that error."""
    well = {end.rank: end for end in exits if end.exit_code == 0}
    for line in output.split("\n"):
        found = PEER_LEFT_ERROR.match(line)
        if found is not None and (left := well.get(int(found[1] or found[2]))) is not None:
            return left, line
    return None, ""


def _describe_first_failure(
    first_failure: RankExit, together: Sequence[RankExit], reason: str, missing: Sequence[RankStack]
) -> str:
    who = _format_ranks_and_hosts(together)
    if first_failure.reason:
        return f"{who} {first_failure.description}"
    failed = f"waited in vain for {format_ranks(each.rank for each in missing)}" if missing else "failed first"
    return f"{who} {failed}: {_append_reason(first_failure.description, reason)}"


def _absence(missing: RankStack) -> str:
    where = f"it was at {missing.line}" if missing.line else f"it {missing.why}"
    return f"rank {missing.rank} on host {missing.host}, pid {missing.pid}, did not come: {where}"


def _disagreements(stacks: Sequence[RankStack]) -> list[str]:
    """The lines that did not fit together, and whose they are."""
    by_line: dict[str, list[int]] = {}
    for each in stacks:
        by_line.setdefault(each.line or "a line that is not known", []).append(each.rank)
    return [
        f"{format_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} at {line}" for line, ranks in by_line.items()
    ]


def _format_ranks_and_hosts(exits: Sequence[RankExit]) -> str:
    hosts = list(dict.fromkeys(end.host for end in exits))
    return f"{format_ranks(end.rank for end in exits)} on host{'s' * (len(hosts) > 1)} {', '.join(hosts)}"


def _quote_lines(output: str) -> list[str]:
    return [f"  | {line}" for line in output.rstrip("\n").split("\n")] if output.strip() else []


def _append_reason(description: str, reason: str) -> str:
    """What the coordinator heard of it, unless it is what we told it."""
    return description if reason in ("", description) else f"{description} ({reason})"


def _is_same_failure(rank_exit: RankExit, first_failure: RankExit, tail: ReadTail) -> bool:
    """Whether it ended as the culprit did, by itself, and does not say that it lost somebody."""
    told = (
        rank_exit.requested
        or rank_exit.reason
        or first_failure.reason
        or rank_exit.exit_code != first_failure.exit_code
    )
    return not told and not any(
        PEER_LEFT_ERROR.match(line) for line in tail(rank_exit.rank, rank_exit.exit_code).split("\n")
    )


def _count_others(num: int, description: str) -> list[str]:
    return [f"{num} other rank{'s' * (num > 1)} {description}"] if num else []
