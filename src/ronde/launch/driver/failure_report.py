"""Which rank failed first, and the report about it for the user. Pure. Used by the driver when all ranks have ended.

The order of exits is not the order of failures: a failing rank informs its peers before its interpreter has ended, and
they may be gone before it is. So whom the coordinator lost first counts more; scripts that do not use ronde have no
coordinator, and for them the order of exits is all there is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ronde.coordinator.rounds import LostPeer, MembershipEnd
from ronde.exit_codes import describe_exit_code, shell_exit_code
from ronde.launch.protocol import ExitReason, RankExit
from ronde.net.messages import LeaveReason
from ronde.observe.stacks import RankStack
from ronde.observe.stalls import FailureStacks
from ronde.text import format_count, format_ranks, shorten

MAX_LINE_CHARS = 500
"""Characters of an error that is quoted in passing."""

MAX_LOSSES_SHOWN = 8
"""Workers that the report of an elastic job names."""
ELASTIC_FAILURE_CODE = 1
"""The exit code of an elastic job that cannot go on: no worker alone is to blame."""

FOREIGN_DEVICE = ("explicitly assigned to /job:", "available devices are [ /job:localhost")
"""What TensorFlow says of a session whose graph has devices of other processes."""
_TF_CONFIG_ADVICE = (
    "TensorFlow found these devices in TF_CONFIG, which every rank has got: in a v1 graph MirroredStrategy() takes "
    "those of all ranks. Give it this rank's own, as in MirroredStrategy(['/cpu:0']), or start the job with "
    "--no-tf-config"
)

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


def format_processes(numbers: Sequence[int], names: Mapping[int, str], noun: str = "rank") -> str:
    """Name processes: ranks, or workers, by their numbers, and others by their names."""
    ranks = [number for number in numbers if number not in names]
    others = [names[number] for number in numbers if number in names]
    return ", ".join([*([format_ranks(ranks, noun)] if ranks else []), *others])


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


@dataclass(frozen=True, slots=True)
class _FirstFailure:
    """The rank that failed first, and what is known about that."""

    exit: RankExit
    together: list[RankExit]
    """With it those that failed for the same reason: several ranks that could not be started, or whose host was lost,
    are one failure."""
    lost: RankExit | None
    """The exit of the rank that the coordinator lost first: of this one, or of another."""
    membership_end: MembershipEnd | None
    """How the coordinator lost that rank; None if it lost none."""
    lost_peer: LostPeer | None
    """The rank because of which this one failed, if it did."""
    exited_early: RankExit | None
    """The exit of that rank, if it had ended with code 0."""
    missing: tuple[RankStack, ...]
    """The ranks that it waited for in vain."""
    disagreeing: tuple[RankStack, ...]
    """The ranks that asked for different things."""

    @property
    def has_process(self) -> bool:
        return self.exit.reason not in _NO_PROCESS

    def describe_end(self, rank_exit: RankExit) -> str:
        """Describe an exit, with what the coordinator knows about it, unless it knows that from the driver."""
        description, end = describe_exit(rank_exit), self.membership_end
        if rank_exit is not self.lost or end is None or end.reason is LeaveReason.PROCESS_ENDED:
            return description
        return f"{description} ({end.description})"


def make_job_result(
    exits: Sequence[RankExit],
    *,
    still_running: Sequence[int] = (),
    tail: Callable[[int, int], str] = lambda rank, code: "",
    first_lost: tuple[int, MembershipEnd] | None = None,
    lost_peers: Mapping[int, LostPeer] | None = None,
    failure_stacks: FailureStacks | None = None,
    return_values: dict[int, bytes] | None = None,
    stop_request: StopRequest | None = None,
    has_tf_config: bool = False,
) -> JobResult:
    """Report on these exits, which are in the order in which they came; `still_running` did not end. The coordinator
    knows `first_lost`, the rank that it lost first and how, and `lost_peers`, by rank those that failed because another
    one was gone; `tail` is Printer.tail. `has_tf_config`: the ranks have got a TF_CONFIG that their user has not
    written."""
    exit_codes = {each.rank: each.exit_code for each in exits}
    values = return_values or {}
    last_lines = []
    if still_running:
        last_lines = [f"{format_ranks(still_running)} did not end, not even when killed; look at their hosts"]
    stopped = [stop_request.reason] if stop_request is not None and stop_request.reason else []
    first = _find_first_failure(exits, first_lost, lost_peers or {}, failure_stacks)
    if first is None:
        code = stop_request.exit_code if stop_request is not None else 1 if still_running else 0
        return JobResult(code, "\n".join([*stopped, *last_lines]), None, exit_codes, values, stop_request)
    lines = [
        *_describe_first_failure(first, tail),
        *(_advise_on_tf_config(first.exit, tail) if has_tf_config else ()),
        *_count_others(first, exits, lost_peers or {}),
        *last_lines,
        *stopped,
        *_describe_missing(first.missing),
    ]
    code = shell_exit_code(first.exit.exit_code)
    return JobResult(code, "\n".join(lines), first.exit.rank, exit_codes, values, stop_request)


def make_elastic_failure(
    reason: str, losses: Sequence[RankExit], *, exit_codes: dict[int, int], tail: Callable[[int, int], str]
) -> JobResult:
    """Report that an elastic job cannot go on, and on the last workers that it has lost; ranks are worker numbers."""
    lines = [f"the job cannot go on: {reason}"]
    lines += [f"worker {each.rank} on host {each.host} {describe_exit(each)}" for each in losses[-MAX_LOSSES_SHOWN:]]
    with_output = [each for each in losses if each.reason not in _NO_PROCESS and tail(each.rank, each.exit_code)]
    if with_output:
        last = with_output[-1]
        lines += [f"the last output of worker {last.rank}:", *_quote_lines(tail(last.rank, last.exit_code))]
    if len(losses) > MAX_LOSSES_SHOWN:
        lines.insert(1, f"{len(losses)} workers were lost, these last:")
    return JobResult(ELASTIC_FAILURE_CODE, "\n".join(lines), exit_codes=exit_codes)


def _find_first_failure(
    exits: Sequence[RankExit],
    first_lost: tuple[int, MembershipEnd] | None,
    lost_peers: Mapping[int, LostPeer],
    failure_stacks: FailureStacks | None,
) -> _FirstFailure | None:
    """Find the rank that failed first; None if no rank did."""
    unrequested = [each for each in exits if not each.requested]
    failed = [each for each in unrequested if each.exit_code != 0]
    if not failed:
        return None
    lost = next((each for each in unrequested if first_lost is not None and each.rank == first_lost[0]), None)
    first = lost if lost is not None and lost.exit_code != 0 else failed[0]
    together = [first]
    if first.reason in _NO_PROCESS:
        together = [each for each in failed if (each.reason, each.detail) == (first.reason, first.detail)]
    lost_peer = lost_peers.get(first.rank)
    exited_early = next(
        (each for each in unrequested if lost_peer and each.rank == lost_peer.rank and each.exit_code == 0), None
    )
    stacks = failure_stacks
    if stacks is None or stacks.first != first.rank or exited_early is not None:
        stacks = FailureStacks(first.rank)
    membership_end = first_lost[1] if first_lost is not None else None
    return _FirstFailure(
        first, together, lost, membership_end, lost_peer, exited_early, stacks.missing, stacks.disagreeing
    )


def _describe_first_failure(failure: _FirstFailure, tail: Callable[[int, int], str]) -> list[str]:
    """Return who failed first and how, the last output, and the lines of code that did not fit together."""
    first, early, lost = failure.exit, failure.exited_early, failure.lost
    if early is not None and failure.lost_peer is not None:
        return [
            f"{_format_ranks_and_hosts([early])} left too early: {failure.describe_end(early)}",
            *_quote_lines(tail(early.rank, early.exit_code)),
            f"rank {first.rank} then {describe_exit(first)}: {shorten(failure.lost_peer.error, MAX_LINE_CHARS)}",
        ]
    how = describe_exit(first)
    if failure.has_process:
        waited = "failed first"
        if failure.missing:
            waited = f"waited in vain for {format_ranks(each.rank for each in failure.missing)}"
        how = f"{waited}: {failure.describe_end(first)}"
    lines = [
        f"{_format_ranks_and_hosts(failure.together)} {how}",
        *_quote_lines(tail(first.rank, first.exit_code)),
        *_describe_disagreement(failure.disagreeing),
    ]
    if lost is not None and lost.exit_code == 0:  # perhaps the reason, perhaps not
        how = failure.describe_end(lost)
        lines.append(f"before that, {_format_ranks_and_hosts([lost])} had left the others: {how}")
    return lines


def _advise_on_tf_config(first: RankExit, tail: Callable[[int, int], str]) -> list[str]:
    """Return what to do about a session that has looked for the devices of other ranks."""
    output = tail(first.rank, first.exit_code)
    return [_TF_CONFIG_ADVICE] if all(words in output for words in FOREIGN_DEVICE) else []


def _count_others(failure: _FirstFailure, exits: Sequence[RankExit], lost_peers: Mapping[int, LostPeer]) -> list[str]:
    """Return how many other ranks failed in the same way, and how many because of the first failure."""
    first, late = failure.exit, {each.rank for each in failure.missing}
    others = [each for each in exits if each.exit_code != 0 and each not in failure.together and each.rank not in late]
    alike = [
        each
        for each in others
        if failure.has_process
        and each.reason not in _NO_PROCESS
        and each.exit_code == first.exit_code
        and not each.requested
        and each.rank not in lost_peers
    ]
    if failure.membership_end is not None or failure.exited_early is not None:
        alike = []  # once a rank is lost or has left too early, the others fail because of that, with any code
    lines = []
    if alike:
        how = describe_exit_code(first.exit_code)
        lines.append(f"{_count_processes(alike)} failed, too: {how}")
    if len(others) > len(alike):
        lines.append(f"{_count_processes([each for each in others if each not in alike])} ended in consequence")
    return lines


def _count_processes(exits: Sequence[RankExit]) -> str:
    if not any(each.name for each in exits):
        return format_count(len(exits), "other rank")
    return f"{len(exits)} other process{'es' * (len(exits) > 1)}"


def _describe_missing(missing: Sequence[RankStack]) -> list[str]:
    """Return where the ranks were that the first failed one waited for in vain."""
    lines = []
    for each in missing:
        where_it_was = f"it was at {each.line}" if each.line else f"it {each.why}"
        lines.append(f"rank {each.rank} on host {each.host}, pid {each.pid}, did not come: {where_it_was}")
    return lines


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
    who = format_processes([each.rank for each in exits], {each.rank: each.name for each in exits if each.name})
    return f"{who} on host{'s' * (len(hosts) > 1)} {', '.join(hosts)}"


def _quote_lines(output: str) -> list[str]:
    return [f"  | {line}" for line in output.rstrip("\n").split("\n")] if output.strip() else []
