"""Which launcher other than `ronde run` started this process: rank, size and the coordinator's host from its variables.
The table is in docs/guides/launching.md. Variables are inherited, also by processes they were not meant for. So:

- An MPI inside of a Slurm job starts its daemons with srun, and its ranks inherit those daemons' SLURM_PROCID: MPI's
  variables count more. Only where the two agree does srun count, because it knows the hosts.
- The shell of an sbatch script has SLURM_PROCID=0 and SLURM_NTASKS, but is no rank: only srun sets SLURM_STEP_ID, and
  the steps of Slurm's own shells have very large ids. In `srun --pty bash` the step has one task: a job of one.
- RANK and WORLD_SIZE alone prove nothing; without torchrun's own variable they come last.
- Half of a set of variables is no set.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ronde.observe.stacks import split_proc_stat

NUM_PORTS = 16
"""How many ports rank 0 may try."""
FIRST_PORT, LAST_PORT = 20000, 29999
"""Ports from a job's id: below those that systems hand out by themselves, above those of known services."""
FIRST_INTERNAL_STEP = 0xFFFFFFF0
"""From here on, Slurm's ids of steps are those of its own shells and daemons."""
LOCALHOST = "127.0.0.1"

# Rank, size, ranks per host, and the address and port of a rendezvous:
TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
HOROVOD_VARIABLES = tuple(
    f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_SIZE", "GLOO_RENDEZVOUS_ADDR", "GLOO_RENDEZVOUS_PORT")
)
OPEN_MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
MPICH_VARIABLES = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherEnvironment:
    """What the variables of another launcher mean."""

    launcher: str
    rank: int
    size: int
    job: str = ""
    """Equal on all ranks of the job and on no others; empty when it is not known."""
    host: str = ""
    """The host of rank 0; empty when it is not known."""
    is_one_host: bool = False
    """Whether all ranks are known to be on this host."""
    port: int = 0
    """A port that the launcher chose for its own use; the next ones are probably free. 0 when there is none."""
    rank_variable: str = ""
    """A variable that the ranks have and the launcher itself does not have."""


def detect_launcher(environ: Mapping[str, str] | None = None) -> LauncherEnvironment | None:
    """The launcher that started this process; None when there is none that it knows."""
    environ = os.environ if environ is None else environ
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    name = "torchrun" if run else "torch.distributed's variables"
    torch = _from_variables(environ, name, TORCH_VARIABLES, run)
    if torch is not None and "TORCHELASTIC_RUN_ID" in environ:
        return torch
    slurm = _detect_slurm(environ)
    hydra = _from_variables(environ, "MPICH", MPICH_VARIABLES, "")
    if hydra is not None and slurm is not None and (hydra.rank, hydra.size) == (slurm.rank, slurm.size):
        hydra = None
    job = environ.get("PMIX_NAMESPACE", "") or environ.get("OMPI_MCA_ess_base_jobid", "")
    open_mpi = _from_variables(environ, "Open MPI", OPEN_MPI_VARIABLES, f"Open MPI {job}" if job else "")
    found = open_mpi or hydra or slurm or torch
    return found or _from_variables(environ, "Horovod's variables", HOROVOD_VARIABLES, "")


def coordinator_port_range(host: str, port: int, job: str) -> str:
    """`host:first-last`: where the ranks of a job look for the coordinator, as the setting `coordinator` takes it."""
    if port:
        first = port + 1 if port + NUM_PORTS <= 65535 else port - NUM_PORTS
    else:
        number = int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big")
        first = FIRST_PORT + number % ((LAST_PORT + 1 - FIRST_PORT) // NUM_PORTS) * NUM_PORTS
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{first}-{first + NUM_PORTS - 1}"


def find_launcher_process(rank_variable: str, process: Path = Path("/proc/self")) -> str:
    """Pid and start time of the process that started the ranks of this host: the nearest ancestor without
    `rank_variable` in its environment. The start time makes it unique. Empty when /proc does not show it."""
    prefix = rank_variable.encode() + b"="
    try:
        while True:
            fields = split_proc_stat((process / "stat").read_bytes())
            environ = (process / "environ").read_bytes().split(b"\0")
            if not any(line.startswith(prefix) for line in environ):
                return f"{process.resolve().name}-{fields[19]}"
            process = process.parent / fields[1]
    except OSError:  # hidden, or of another user
        return ""


def _from_variables(
    environ: Mapping[str, str], launcher: str, names: tuple[str, ...], job: str
) -> LauncherEnvironment | None:
    """From the variables of rank, size, ranks per host, and of the address and port of a rendezvous if there is one."""
    rank_name, size_name, local_size_name, *rendezvous = names
    if not all(environ.get(name) for name in (rank_name, size_name, *rendezvous)):
        return None
    rank, size = _rank_and_size(environ, rank_name, size_name)
    is_one_host = environ.get(local_size_name) == str(size)
    host, port = "", 0
    if rendezvous:
        host, port = environ[rendezvous[0]], _number(environ, rendezvous[1])
        is_one_host = is_one_host or host in ("localhost", LOCALHOST, "::1")
        job = f"{rendezvous[1]} {host} {port} {job}"
    return LauncherEnvironment(
        launcher=launcher,
        rank=rank,
        size=size,
        job=job,
        host=LOCALHOST if is_one_host else host,
        is_one_host=is_one_host,
        port=port,
        rank_variable=rank_name,
    )


def _detect_slurm(environ: Mapping[str, str]) -> LauncherEnvironment | None:
    if not all(environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")):
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    step = environ["SLURM_STEP_ID"]
    if not environ.get(size_name) or not step.isdigit() or int(step) >= FIRST_INTERNAL_STEP:
        return None
    rank, size = _rank_and_size(environ, "SLURM_PROCID", size_name)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    num_nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES", "")
    is_one_host = num_nodes == "1" if num_nodes else not re.search(r",|\d-", nodes)
    return LauncherEnvironment(
        launcher="srun",
        rank=rank,
        size=size,
        job=f"slurm {environ.get('SLURM_CLUSTER_NAME', '')} {environ['SLURM_JOB_ID']} {step}",
        host=LOCALHOST if is_one_host else first_slurm_host(nodes),
        is_one_host=is_one_host,
    )


def first_slurm_host(nodes: str) -> str:
    """The first host of a Slurm node list, `gpu[07-12,20],cpu1` → `gpu07`."""
    depth = 0
    for index, character in enumerate(nodes):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            nodes = nodes[:index]
            break
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", nodes)


def _rank_and_size(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = _number(environ, rank_name), _number(environ, size_name)
    if rank >= size:
        raise ValueError(
            f"{rank_name}={rank} does not fit to {size_name}={size}; set RONDE_RANK and RONDE_SIZE instead"
        )
    return rank, size


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name} must be a whole number, got {text!r}; set RONDE_RANK and RONDE_SIZE, or unset {name}")
    return int(text)
