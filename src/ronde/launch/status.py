"""A running job as `ronde top` shows it and other programs read it: what the ranks tell (observe/vitals) and what their
driver knows besides. Values only; as JSON, docs/internals/watching.md describes it field by field.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ronde.observe.stacks import RankStack
from ronde.observe.vitals import JobVitals, RankState, RankVitals

__all__ = ["JobStatus", "RankFacts", "RankStatus", "describe_job", "describe_stacks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """What a driver knows about one rank. None stands for what it does not know (yet)."""

    host: str = ""
    """As the user calls it."""
    local_rank: int = 0
    pid: int = 0
    """0 before it was started."""
    cpu: float | None = None
    """Share of one core; above 1 with more than one busy thread."""
    memory_bytes: int | None = None
    """Resident."""
    gpu: float | None = None
    """Share of time in which its GPU was busy."""
    gpu_bytes: int | None = None
    exit_code: int | None = None
    """Below 0: the signal that ended it."""


class RankStatus(RankVitals, frozen=True, kw_only=True):
    """One rank: its vitals, and what the driver adds."""

    local_rank: int = 0
    cpu: float | None = None
    memory_bytes: int | None = None
    gpu: float | None = None
    gpu_bytes: int | None = None
    exit_code: int | None = None


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A job at one moment."""

    name: str
    command: tuple[str, ...] = ()
    at: float = 0.0
    """Seconds since 1970."""
    elapsed_s: float = 0.0
    """Since the job began."""
    size: int
    round: int = -1
    slowest: int | None = None
    ranks: tuple[RankStatus, ...] = ()


def describe_job(
    name: str, command: Sequence[str], vitals: JobVitals, facts: Sequence[RankFacts], elapsed_s: float
) -> JobStatus:
    """The status of a job; facts by rank."""
    ranks = tuple(_describe_rank(each, known) for each, known in zip(vitals.ranks, facts, strict=True))
    return JobStatus(
        name=name,
        command=tuple(command),
        at=time.time(),
        elapsed_s=elapsed_s,
        size=vitals.size,
        round=vitals.round,
        slowest=vitals.slowest,
        ranks=ranks,
    )


def describe_stacks(stacks: Sequence[RankStack], facts: Sequence[RankFacts]) -> tuple[RankStack, ...]:
    """The stacks of all ranks, with hosts and processes as the driver knows them; facts by rank."""
    return tuple(
        msgspec.structs.replace(each, host=known.host or each.host, pid=known.pid or each.pid)
        for each, known in zip(stacks, facts, strict=True)
    )


def _describe_rank(vitals: RankVitals, facts: RankFacts) -> RankStatus:
    known = {field: getattr(vitals, field) for field in vitals.__struct_fields__}
    state, why = _state(vitals, facts)
    known |= {"state": state, "why": why, "host": facts.host or vitals.host, "pid": facts.pid or vitals.pid}
    return RankStatus(
        **known,
        local_rank=facts.local_rank,
        cpu=facts.cpu,
        memory_bytes=facts.memory_bytes,
        gpu=facts.gpu,
        gpu_bytes=facts.gpu_bytes,
        exit_code=facts.exit_code,
    )


def _state(vitals: RankVitals, facts: RankFacts) -> tuple[RankState, str]:
    """The coordinator knows who has left the round; only the driver knows how a process has ended."""
    code = facts.exit_code
    if code is None:
        return (
            ("starting", "has not been started yet") if not facts.pid and not vitals.pid else (vitals.state, vitals.why)
        )
    if vitals.state == "lost":
        return "lost", vitals.why
    ended = f"killed by signal {-code}" if code < 0 else f"exited with code {code}"
    return ("left" if code == 0 else "lost"), ended
