"""The run log's file: one JSON object per line, and what a whole file adds up to. Written by RunLog, read for reports.

    {"type":"begun","step":0,"at_s":0.0,"facts":{"model":"AlexNet"},"hosts":["a","a"]}
    {"type":"values","step":20,"at_s":3.1,"values":{"train/loss":0.7}}
    {"type":"sampled","step":20,"at_s":3.1,"ranks":[…]}
    {"type":"ended","at_s":80.2}

Lines are only ever appended, so a run that was killed leaves a readable log; at most its last line is torn, and is
skipped. A run that goes on writes `begun` again with the step it goes on from: what the log has of later steps never
became part of the training, and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec

from ronde.dash.meter import RankShare

__all__ = ["Begun", "Ended", "Record", "Run", "Sampled", "Values", "collect", "decode", "encode", "read_log"]


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag="begun"):
    """The run begins, or goes on after so many steps."""

    step: int = 0
    at_s: float = 0.0
    facts: dict[str, str] = {}
    hosts: tuple[str, ...] = ()
    """By rank."""


class Values(msgspec.Struct, frozen=True, kw_only=True, tag="values"):
    """Numbers after so many steps. A number that is none (NaN, infinite) is None."""

    step: int
    at_s: float
    values: dict[str, float | None]


class Sampled(msgspec.Struct, frozen=True, kw_only=True, tag="sampled"):
    """What all ranks did up to this step."""

    step: int
    at_s: float
    ranks: tuple[RankShare, ...]


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """The run came to its end."""

    at_s: float


Record: TypeAlias = Begun | Values | Sampled | Ended

_decoder = msgspec.json.Decoder(Record)


def encode(record: Record) -> bytes:
    """One line."""
    return msgspec.json.encode(record) + b"\n"


def decode(line: bytes) -> Record:
    """The record of a line; msgspec.ValidationError or DecodeError says what is wrong with it."""
    record: Record = _decoder.decode(line)
    return record


@dataclass
class Run:
    """A whole log, in the order of training."""

    facts: dict[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    values: list[Values] = field(default_factory=list)
    samples: list[Sampled] = field(default_factory=list)
    num_resumes: int = 0
    num_torn: int = 0
    """Lines that could not be read: each time the run was killed while it wrote, one."""
    ended: bool = False
    at_s: float = 0.0
    """Seconds of the run, without the time between being killed and going on."""

    def series(self, name: str) -> list[tuple[int, float | None]]:
        """All values of this name with their steps. What was told again, after a restart, counts as told last."""
        return list({record.step: record.values[name] for record in self.values if name in record.values}.items())

    def names(self) -> list[str]:
        """Names of values, in the order in which they first came."""
        return list(dict.fromkeys(name for record in self.values for name in record.values))

    def shares(self, rank: int) -> list[tuple[int, RankShare]]:
        """What one rank did, with the steps up to which it did it."""
        return [(sample.step, share) for sample in self.samples for share in sample.ranks if share.rank == rank]

    def ranks(self) -> list[int]:
        """Ranks that were ever seen."""
        seen = {share.rank for sample in self.samples for share in sample.ranks}
        return sorted(seen | set(range(len(self.hosts))))


def read_log(path: Path | str) -> Run:
    """A log's file as a whole. Raises ValueError if it is not one."""
    lines = Path(path).read_bytes().splitlines()
    run = collect(lines)
    if lines and run.num_torn == len(lines):
        raise ValueError(f"{path} is not a run log: none of its {len(lines)} lines is a record")
    return run


def collect(lines: Iterable[bytes]) -> Run:
    """What these lines add up to."""
    run = Run()
    for line in lines:
        try:
            _add(run, decode(line))
        except msgspec.DecodeError:  # ValidationError is one, too
            run.num_torn += 1
    return run


def _add(run: Run, record: Record) -> None:
    run.at_s = record.at_s
    run.ended = isinstance(record, Ended)
    if isinstance(record, Values):
        run.values.append(record)
    elif isinstance(record, Sampled):
        run.samples.append(record)
    elif isinstance(record, Begun):
        run.num_resumes += record.step > 0
        run.values = [kept for kept in run.values if kept.step <= record.step]
        run.samples = [kept for kept in run.samples if kept.step <= record.step]
        run.facts.update(record.facts)
        run.hosts = record.hosts
