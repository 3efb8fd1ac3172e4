"""Which rank failed first, and the report about it for the user. Pure. Used by the driver when all ranks have ended.

The order of exits is not the order of failures: a failing rank informs its peers before its interpreter has ended, and
they may be gone before it is. So whom the coordinator lost first counts more; scripts that do not use ronde have no
coordinator, and for them the order of exits is all there is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ronde.coordinator.rounds import LostPeer, MembershipEnd
from ronde.launch.protocol import ExitReason, RankExit
from ronde.net.messages import LeaveReason
from ronde.observe.stacks import RankStack
from ronde.observe.stalls import Whereabouts
from ronde.text import describe_exit_code, format_count, format_ranks, shell_exit_code, shorten

MAX_LINE_CHARS = 500
"""Characters of an error that is quoted in passing."""

_NO_PROCESS = (ExitReason.NOT_STARTED, ExitReason.HOST_LOST)
"""Reasons that are not the end of a rank's process."""


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Somebody has ended the job from outside."""

    exit_code: int
    reason: str
    """Empty when the user needs no explanation."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job has ended."""

    exit_code: int
    """For the shell: 0, or that of the rank that failed first."""
    summary: str
    """Which rank failed, where and why, with its last output; then what became of the others. Empty after a success."""
    first_failed_rank: int | None = None
    exit_codes: dict[int, int] = field(default_factory=dict)
    """By rank, a signal below 0, in the order in which they came; empty when none was started."""
    return_values: dict[int, bytes] = field(default_factory=dict)
    """By rank, the pickled return value or exception of its function (see function_rank)."""
    stop_request: StopRequest | None = None
    """Who ended it from outside, if anybody did."""


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


def make_job_result(
    exits: Sequence[RankExit],
    *,
    num_ranks: int,
    tail: Callable[[int, int], str] = lambda rank, code: "",
    first_lost: tuple[int, MembershipEnd] | None = None,
    lost_peers: Mapping[int, LostPeer] | None = None,
    whereabouts: Whereabouts | None = None,
    return_values: dict[int, bytes] | None = None,
    stop_request: StopRequest | None = None,
) -> JobResult:
    """Report on these exits, which are in the order in which they came. The coordinator knows `first_lost`, the rank
    that it lost first and how, and `lost_peers`, by rank those that failed because another one was gone; `tail` is
    Printer.tail."""
    exit_codes = {each.rank: each.exit_code for each in exits}
    values = return_values or {}
    lost_peers = lost_peers or {}
    unrequested = [each for each in exits if not each.requested]
    failed = [each for each in unrequested if each.exit_code != 0]
    still_running = sorted(set(range(num_ranks)) - exit_codes.keys())
    last_lines = []
    if still_running:
        last_lines = [f"{format_ranks(still_running)} did not end, not even when killed; look at their hosts"]
    stopped = [stop_request.reason] if stop_request is not None and stop_request.reason else []
    if not failed:
        code = stop_request.exit_code if stop_request is not None else 1 if still_running else 0
        return JobResult(code, "\n".join([*stopped, *last_lines]), None, exit_codes, values, stop_request)
    lost = next((each for each in unrequested if first_lost is not None and each.rank == first_lost[0]), None)
    membership_end = first_lost[1] if first_lost is not None else None
    first = lost if lost is not None and lost.exit_code != 0 else failed[0]
    has_process = first.reason not in _NO_PROCESS
    # Several ranks that could not be started, or whose host was lost, are one failure.
    together = [first]
    if not has_process:
        together = [each for each in failed if (each.reason, each.detail) == (first.reason, first.detail)]
    # The rank that the first failed rank missed, if that one had ended with code 0.
    lost_peer = lost_peers.get(first.rank)
    exited_early = next(
        (each for each in unrequested if lost_peer and each.rank == lost_peer.rank and each.exit_code == 0), None
    )
    missing: tuple[RankStack, ...] = ()
    if lost_peer is not None and exited_early is not None:
        how = _describe_end(exited_early, membership_end if exited_early is lost else None)
        lines = [
            f"{_format_ranks_and_hosts([exited_early])} left too early: {how}",
            *_quote_lines(tail(exited_early.rank, exited_early.exit_code)),
            f"rank {first.rank} then {describe_exit(first)}: {shorten(lost_peer.error, MAX_LINE_CHARS)}",
        ]
    else:
        where = whereabouts if whereabouts is not None and whereabouts.first == first.rank else None
        missing = where.missing if where is not None else ()
        how = describe_exit(first)
        if has_process:
            waited = f"waited in vain for {format_ranks(each.rank for each in missing)}" if missing else "failed first"
            how = f"{waited}: {_describe_end(first, membership_end if lost is first else None)}"
        lines = [
            f"{_format_ranks_and_hosts(together)} {how}",
            *_quote_lines(tail(first.rank, first.exit_code)),
            *_describe_disagreement(where.disagreeing if where is not None else ()),
        ]
        if lost is not None and lost.exit_code == 0:  # perhaps the reason, perhaps not
            how = _describe_end(lost, membership_end)
            lines.append(f"before that, {_format_ranks_and_hosts([lost])} had left the others: {how}")
    late = {each.rank for each in missing}
    others = [each for each in exits if each.exit_code != 0 and each not in together and each.rank not in late]
    alike = [
        each
        for each in others
        if has_process
        and each.reason not in _NO_PROCESS
        and each.exit_code == first.exit_code
        and not each.requested
        and each.rank not in lost_peers
    ]
    if first_lost is not None or exited_early is not None:
        alike = []  # once a rank is lost or has left too early, the others fail because of that, with any code
    if alike:
        how = describe_exit_code(first.exit_code)
        lines.append(f"{format_count(len(alike), 'other rank')} failed, too: {how}")
    if len(others) > len(alike):
        lines.append(f"{format_count(len(others) - len(alike), 'other rank')} ended in consequence")
    lines += [*last_lines, *stopped]
    for each in missing:
        where_it_was = f"it was at {each.line}" if each.line else f"it {each.why}"
        lines.append(f"rank {each.rank} on host {each.host}, pid {each.pid}, did not come: {where_it_was}")
    code = shell_exit_code(first.exit_code)
    return JobResult(code, "\n".join(lines), first.rank, exit_codes, values, stop_request)


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
