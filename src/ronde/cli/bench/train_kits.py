"""Who trains in `ronde bench train`, and how their ranks are started. Used by command.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ronde.cli.bench.measure import COMPATIBLE, OURS
from ronde.cli.bench.ours import start_job
from ronde.cli.bench.peers import ONE_THREAD, is_installed
from ronde.cli.bench.processes import Processes, Started
from ronde.errors import RondeError

__all__ = [
    "ALONE",
    "APART",
    "DDP",
    "LOCKSTEP",
    "TRAIN_PROGRAM",
    "TrainKit",
    "TrainKits",
    "TrainSettings",
    "find_kits",
    "parse_codec",
]

TRAIN_PROGRAM = str(Path(__file__).with_name("train_rank.py"))
ALONE = "alone"
APART = "apart"
LOCKSTEP = "lockstep"
DDP = "ddp"
CODECS = ("none", "float16", "bfloat16")
PEERS = (DDP, COMPATIBLE)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """What a rank is told about the way it trains."""

    codec: str | None = None
    """What gradients are on the wire; None: as they are."""
    view: bool = False
    """DDP: gradients are views of its buckets, and it sends no buffers (as ronde does not)."""
    bucket_mb: int | None = None
    """DDP: size of its buckets; None: as it comes, which is 1 MB for the first and 25 MB for the others."""


@dataclass(frozen=True)
class TrainKit:
    """One way to train."""

    name: str
    """As tables show it."""
    role: str
    """As train_rank.py calls it."""
    size: int
    settings: TrainSettings = field(default_factory=TrainSettings)

    @property
    def communicates(self) -> bool:
        """Whether its ranks have the same gradients after a step."""
        return self.role not in (APART, LOCKSTEP)

    def start(self, directory: Path, size: int) -> Started:
        """One process per rank; those that use ronde as a job."""
        program = (sys.executable, TRAIN_PROGRAM, self.role, str(directory))
        if self.role in (OURS, LOCKSTEP, COMPATIBLE):
            return start_job(program, size)
        env = (*ONE_THREAD, "GLOO_SOCKET_IFNAME=lo")
        return Processes([(*env, *program, str(rank), str(size)) for rank in range(size)])


@dataclass(frozen=True)
class TrainKits:
    """All that can train here, and for what cannot, why."""

    kits: tuple[TrainKit, ...]
    notes: tuple[str, ...] = ()


def find_kits(size: int, codec: str | None, peers: str | None, buckets_mb: Sequence[int]) -> TrainKits:
    """One process alone, `size` that do not communicate, `size` that only wait for each other, ronde, and the peers:
    `ddp,hvd`, or `none`; None: all."""
    if not is_installed("torch"):
        raise RondeError("ronde bench train needs PyTorch: pip install 'ronde[torch]'")
    wanted = set(PEERS) if peers is None else {name.strip() for name in peers.split(",") if name.strip()} - {"none"}
    for name in sorted(wanted):
        if name not in PEERS:
            raise ValueError(f"no such peer: {name!r}; there are {', '.join(PEERS)}, none")
    kits = [
        TrainKit(ALONE, APART, 1),
        TrainKit(APART, APART, size),
        TrainKit(LOCKSTEP, LOCKSTEP, size),
        TrainKit(OURS, OURS, size, TrainSettings(codec=codec)),
    ]
    notes = []
    if codec == "bfloat16" and wanted:
        codec = "float16"
        notes.append("only ronde sends bfloat16 here; the others send float16, which has as many bits")
    if COMPATIBLE in wanted and is_installed("horovod"):
        kits.append(TrainKit(COMPATIBLE, COMPATIBLE, size, TrainSettings(codec=codec)))
    elif COMPATIBLE in wanted:
        why = "ronde-horovod is not installed; pip install ronde-horovod"
        if peers is not None:
            raise ValueError(why)
        notes.append(f"{COMPATIBLE} is left out: {why}")
    if DDP in wanted:
        kits += _ddp_kits(size, codec, buckets_mb)
    return TrainKits(tuple(kits), tuple(notes))


def _ddp_kits(size: int, codec: str | None, buckets_mb: Sequence[int]) -> list[TrainKit]:
    """As it comes, without copies, and with other sizes of buckets: the best of them is what ronde is held against."""
    kits = [TrainKit(DDP, DDP, size, TrainSettings(codec=codec))]
    for bucket_mb in (None, *dict.fromkeys(buckets_mb)):
        name = f"{DDP}-view" if bucket_mb is None else f"{DDP}-view-{bucket_mb}MB"
        kits.append(TrainKit(name, DDP, size, TrainSettings(codec=codec, view=True, bucket_mb=bucket_mb)))
    return kits


def parse_codec(text: str) -> str | None:
    """What gradients are on the wire."""
    if text not in CODECS:
        raise ValueError(f"codec must be one of {', '.join(CODECS)}, got {text!r}")
    return None if text == "none" else text
