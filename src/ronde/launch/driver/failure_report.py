"""Which rank failed first, and the report about it for the user. Pure. Used by the driver when all ranks have ended.

The order of exits is not the order of failures: a failing rank informs its peers before its interpreter has ended, and
they may be gone before it is. So whom the coordinator lost first counts more; scripts that do not use ronde have no
coordinator, and for them the order of exits is all there is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ronde.coordinator.rounds import LostPeer, MembershipEnd
from ronde.launch.protocol import ExitReason, RankExit
from ronde.net.messages import LeaveReason
from ronde.observe.stacks import RankStack
from ronde.observe.stalls import Whereabouts
from ronde.text import describe_exit_code, format_ranks, shell_exit_code, shorten

MAX_LINE_CHARS = 500
"""Characters of an error that is quoted in passing."""

ReadTail: TypeAlias = Callable[[int, int], str]
"""The last output of a rank that ended with this code: OutputSink.tail."""


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Somebody has ended the job from outside."""

    exit_code: int
    reason: str
    """Empty when the user needs no explanation."""


@dataclass(frozen=True, slots=True)
class FailureReport:
    """How the job has ended."""

    exit_code: int
    first_failed_rank: int | None = None
    lines: tuple[str, ...] = ()
    """Which rank failed, where and why, with its last output; then what became of the others. Empty after a success."""


def describe_exit(rank_exit: RankExit) -> str:
    """Say how a rank has ended; the rank is the subject."""
    match rank_exit.reason:
        case ExitReason.NOT_STARTED:
            return f"could not be started: {rank_exit.detail}"
        case ExitReason.HOST_LOST:
            return f"ended when the connection to it was lost ({rank_exit.detail})"
        case ExitReason.OOM_KILLED:
            more = " (the host ran out of memory)"
        case ExitReason.OOM_SUSPECTED:
            more = " (the host ran out of memory and the kernel killed a process, perhaps one of this rank's)"
        case ExitReason.EXITED:
            more = ""
    return describe_exit_code(rank_exit.exit_code) + more


def make_failure_report(
    exits: Sequence[RankExit],
    *,
    num_ranks: int,
    tail: ReadTail = lambda rank, code: "",
    first_lost: tuple[int, MembershipEnd] | None = None,
    lost_peers: Mapping[int, LostPeer] | None = None,
    whereabouts: Whereabouts | None = None,
    stop_request: StopRequest | None = None,
) -> FailureReport:
    """Report on these exits, which are in the order in which they came. The coordinator knows `first_lost`, the rank
    that it lost first and how, and `lost_peers`, by rank those that failed because another one was gone."""
    lost_peers = lost_peers or {}
    unrequested = [each for each in exits if not each.requested]
    failed = [each for each in unrequested if each.exit_code != 0]
    still_running = sorted(set(range(num_ranks)) - {each.rank for each in exits})
    last_lines = []
    if still_running:
        last_lines.append(f"{format_ranks(still_running)} did not end, not even when killed; look at their hosts")
    stopped = [stop_request.reason] if stop_request is not None and stop_request.reason else []
    if not failed:
        code = 1 if still_running else 0
        return FailureReport(code if stop_request is None else stop_request.exit_code, None, (*stopped, *last_lines))
    lost = next((each for each in unrequested if first_lost is not None and each.rank == first_lost[0]), None)
    membership_end = first_lost[1] if first_lost is not None else None
    first = lost if lost is not None and lost.exit_code != 0 else failed[0]
    # Several ranks that could not be started, or whose host was lost, are one failure.
    together = [each for each in failed if _is_one_failure(each, first)] or [first]
    exited_early = _find_early_exit(lost_peers.get(first.rank), unrequested)
    missing: tuple[RankStack, ...] = ()
    if exited_early is not None:
        lines = [
            f"{_format_ranks_and_hosts([exited_early])} left too early: "
            + _describe_end(exited_early, membership_end if exited_early is lost else None),
            *_quote_lines(tail(exited_early.rank, exited_early.exit_code)),
            f"rank {first.rank} then {describe_exit(first)}: {shorten(lost_peers[first.rank].error, MAX_LINE_CHARS)}",
        ]
    else:
        where = whereabouts if whereabouts is not None and whereabouts.first == first.rank else None
        missing = where.missing if where is not None else ()
        lines = [
            _describe_first_failure(together, membership_end if lost is first else None, missing),
            *_quote_lines(tail(first.rank, first.exit_code)),
            *_describe_disagreement(where.disagreeing if where is not None else ()),
        ]
        if lost is not None and lost.exit_code == 0:  # perhaps the reason, perhaps not
            how = _describe_end(lost, membership_end)
            lines.append(f"before that, {_format_ranks_and_hosts([lost])} had left the others: {how}")
    late = {each.rank for each in missing}
    others = [each for each in exits if each.exit_code != 0 and each not in together and each.rank not in late]
    # Once the coordinator has lost a rank, or one has left too early, the others fail because of that, with any code.
    alike = (
        [each for each in others if _is_same_exit(each, first) and each.rank not in lost_peers]
        if first_lost is None and exited_early is None
        else []
    )
    lines += _count_others(len(alike), f"failed, too: {describe_exit_code(first.exit_code)}")
    lines += _count_others(len(others) - len(alike), "ended in consequence")
    lines += [*last_lines, *stopped, *map(_describe_missing, missing)]
    return FailureReport(shell_exit_code(first.exit_code), first.rank, tuple(lines))


def _is_one_failure(rank_exit: RankExit, first: RankExit) -> bool:
    own_reason = first.reason in (ExitReason.NOT_STARTED, ExitReason.HOST_LOST)
    return own_reason and (rank_exit.reason, rank_exit.detail) == (first.reason, first.detail)


def _is_same_exit(rank_exit: RankExit, first: RankExit) -> bool:
    process_ended = (ExitReason.EXITED, ExitReason.OOM_KILLED, ExitReason.OOM_SUSPECTED)
    return (
        not rank_exit.requested
        and rank_exit.reason in process_ended
        and first.reason in process_ended
        and rank_exit.exit_code == first.exit_code
    )


def _find_early_exit(lost_peer: LostPeer | None, exits: Sequence[RankExit]) -> RankExit | None:
    """Return the exit of the rank that the first failed rank missed, if that one had ended with code 0."""
    if lost_peer is None:
        return None
    return next((each for each in exits if each.rank == lost_peer.rank and each.exit_code == 0), None)


def _describe_first_failure(
    together: Sequence[RankExit], membership_end: MembershipEnd | None, missing: Sequence[RankStack]
) -> str:
    who, first = _format_ranks_and_hosts(together), together[0]
    if first.reason in (ExitReason.NOT_STARTED, ExitReason.HOST_LOST):
        return f"{who} {describe_exit(first)}"
    failed = f"waited in vain for {format_ranks(each.rank for each in missing)}" if missing else "failed first"
    return f"{who} {failed}: {_describe_end(first, membership_end)}"


def _describe_missing(missing: RankStack) -> str:
    where = f"it was at {missing.line}" if missing.line else f"it {missing.why}"
    return f"rank {missing.rank} on host {missing.host}, pid {missing.pid}, did not come: {where}"


def _describe_disagreement(stacks: Sequence[RankStack]) -> list[str]:
    """Return the lines of code that did not fit together, each with its ranks."""
    by_line: dict[str, list[int]] = {}
    for each in stacks:
        by_line.setdefault(each.line or "a line that is not known", []).append(each.rank)
    return [
        f"{format_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} at {line}" for line, ranks in by_line.items()
    ]


def _format_ranks_and_hosts(exits: Sequence[RankExit]) -> str:
    hosts = list(dict.fromkeys(each.host for each in exits))
    return f"{format_ranks(each.rank for each in exits)} on host{'s' * (len(hosts) > 1)} {', '.join(hosts)}"


def _quote_lines(output: str) -> list[str]:
    return [f"  | {line}" for line in output.rstrip("\n").split("\n")] if output.strip() else []


def _describe_end(rank_exit: RankExit, membership_end: MembershipEnd | None) -> str:
    """Describe an exit, with what the coordinator knows about it, unless it knows that from the driver."""
    description = describe_exit(rank_exit)
    if membership_end is None or membership_end.reason is LeaveReason.PROCESS_ENDED:
        return description
    return f"{description} ({membership_end.description})"


def _count_others(count: int, description: str) -> list[str]:
    return [f"{count} other rank{'s' * (count > 1)} {description}"] if count else []
