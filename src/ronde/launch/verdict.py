"""Who failed first, and what the job's user is told about it. Pure. Used by the driver when all ranks have ended.

The order of exits is not the order of failures: a failing rank tells its peers before its interpreter has ended, and
they may be gone before it is. So whom the coordinator lost first counts more; scripts that do not use ronde have no
coordinator, and for them the order of exits is all there is.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ronde.observe.events import name_ranks, shorten
from ronde.observe.stacks import RankStack
from ronde.observe.stall import Whereabouts

__all__ = [
    "LOST_CODE",
    "NOT_EXECUTABLE_CODE",
    "NOT_STARTED_CODE",
    "End",
    "Stop",
    "Verdict",
    "describe_code",
    "exit_code",
    "judge",
]

NOT_EXECUTABLE_CODE = 126
"""As shells say of a file that is no program."""
NOT_STARTED_CODE = 127
"""As they say of a command that is not there; here, of all else that keeps a rank from starting."""
LOST_CODE = 255
"""As ssh says of a connection that has ended: how the rank itself ended, nobody knows."""
LINE_LIMIT = 500
"""Characters of one error that is told in passing."""
LEFT = re.compile(r"[\w.]+: (?:rank \d+ lost rank (\d+)\b|ranks? (\d+)\b[\d, -]* ended before the round began)")
"""An error that names the rank it is about: the words of PeerLost, and of the coordinator when nobody can start."""

Tail: TypeAlias = Callable[[int, int], str]
"""The last words of a rank that ended with this code: Screen.tail."""


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
    """Empty when its user wants no word of it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of the job."""

    code: int
    culprit: int | None = None
    """The rank that failed first."""
    lines: tuple[str, ...] = ()
    """Who, where and why, with its last words; then what became of the others. Empty when all is well."""


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
    ends: Sequence[End],
    *,
    num_ranks: int,
    tail: Tail = lambda rank, code: "",
    first_lost: tuple[int, str] | None = None,
    whereabouts: Whereabouts | None = None,
    stop: Stop | None = None,
) -> Verdict:
    """What to make of these ends, which are in the order in which they came."""
    by_themselves = [end for end in ends if not end.ordered]
    failed = [end for end in by_themselves if end.code != 0]
    missing = sorted(set(range(num_ranks)) - {end.rank for end in ends})
    never_ended = [f"{name_ranks(missing)} did not end, not even when killed; look at their hosts"] if missing else []
    stopped = [stop.why] if stop is not None and stop.why else []
    if not failed:
        code = 1 if missing else 0
        return Verdict(code if stop is None else stop.code, None, (*stopped, *never_ended))
    lost = next((end for end in by_themselves if first_lost is not None and end.rank == first_lost[0]), None)
    culprit = lost if lost is not None and lost.code != 0 else failed[0]
    # Several that could not be started, or whose host was lost: one story.
    together = [end for end in failed if end.how and end.how == culprit.how] or [culprit]
    why = first_lost[1] if first_lost is not None and lost is not None else ""
    said = tail(culprit.rank, culprit.code)
    left, error = _find_left(said, by_themselves)
    absent: tuple[RankStack, ...] = ()
    if left is not None:
        lines = [f"{_name([left])} left too early: {_add(left.words, why if left is lost else '')}"]
        lines += _quote(tail(left.rank, left.code))
        lines += [f"rank {culprit.rank} then {culprit.words}: {shorten(error, LINE_LIMIT)}"]
    else:
        where = whereabouts if whereabouts is not None and whereabouts.first == culprit.rank else None
        absent = where.missing if where is not None else ()
        lines = [_headline(culprit, together, why if lost is culprit else "", absent), *_quote(said)]
        lines += _disagreements(where.disagreeing if where is not None else ())
        if lost is not None and lost.code == 0:
            # Perhaps the reason, perhaps not: so it is said, no more.
            lines += [f"before that, {_name([lost])} had left the others: {_add(lost.words, why)}"]
    late = {each.rank for each in absent}
    others = [end for end in ends if end.code != 0 and end not in together and end.rank not in late]
    # Once the coordinator has lost one, or one has left too early, the others fail for that, with any code.
    same = [] if first_lost is not None or left is not None else [end for end in others if _is_same(end, culprit, tail)]
    lines += _count_others(len(same), f"failed, too: {describe_code(culprit.code)}")
    lines += _count_others(len(others) - len(same), "ended in consequence")
    return Verdict(exit_code(culprit.code), culprit.rank, (*lines, *never_ended, *stopped, *map(_absence, absent)))


def _find_left(said: str, ends: Sequence[End]) -> tuple[End | None, str]:
    """Whoever ended well, but too early, says the error of one that needed it; and that error."""
    well = {end.rank: end for end in ends if end.code == 0}
    for line in said.split("\n"):
        found = LEFT.match(line)
        if found is not None and (left := well.get(int(found[1] or found[2]))) is not None:
            return left, line
    return None, ""


def _headline(culprit: End, together: Sequence[End], why: str, missing: Sequence[RankStack]) -> str:
    who = _name(together)
    if culprit.how:
        return f"{who} {culprit.words}"
    failed = f"waited in vain for {name_ranks(each.rank for each in missing)}" if missing else "failed first"
    return f"{who} {failed}: {_add(culprit.words, why)}"


def _absence(missing: RankStack) -> str:
    where = f"it was at {missing.line}" if missing.line else f"it {missing.why}"
    return f"rank {missing.rank} on host {missing.host}, pid {missing.pid}, did not come: {where}"


def _disagreements(stacks: Sequence[RankStack]) -> list[str]:
    """The lines that did not fit together, and whose they are."""
    by_line: dict[str, list[int]] = {}
    for each in stacks:
        by_line.setdefault(each.line or "a line that is not known", []).append(each.rank)
    return [f"{name_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} at {line}" for line, ranks in by_line.items()]


def _name(ends: Sequence[End]) -> str:
    hosts = list(dict.fromkeys(end.host for end in ends))
    return f"{name_ranks(end.rank for end in ends)} on host{'s' * (len(hosts) > 1)} {', '.join(hosts)}"


def _quote(said: str) -> list[str]:
    return [f"  | {line}" for line in said.rstrip("\n").split("\n")] if said.strip() else []


def _add(words: str, why: str) -> str:
    """What the coordinator heard of it, unless it is what we told it."""
    return words if why in ("", words) else f"{words} ({why})"


def _is_same(end: End, culprit: End, tail: Tail) -> bool:
    """Whether it ended as the culprit did, by itself, and does not say that it lost somebody."""
    told = end.ordered or end.how or culprit.how or end.code != culprit.code
    return not told and not any(LEFT.match(line) for line in tail(end.rank, end.code).split("\n"))


def _count_others(num: int, words: str) -> list[str]:
    return [f"{num} other rank{'s' * (num > 1)} {words}"] if num else []
