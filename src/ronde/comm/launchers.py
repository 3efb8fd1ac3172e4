"""Which launcher other than `ronde run` started this process: rank, size and the coordinator's host from its variables.
The table is in docs/guides/launching.md. Variables are inherited, also by processes they were not meant for. So:

- An MPI inside of a Slurm job starts its daemons with srun, and its ranks inherit those daemons' SLURM_PROCID: MPI's
  variables count more. Only where the two agree does srun count, because it knows the hosts.
- The shell of an sbatch script has SLURM_PROCID=0 and SLURM_NTASKS, but is no rank: only srun sets SLURM_STEP_ID, and
  the steps of Slurm's own shells have very large ids. In `srun --pty bash` the step has one task: a job of one.
- RANK and WORLD_SIZE alone prove nothing; without torchrun's own variable they come after all launchers.
- TF_CONFIG comes last, because clusters set it for any job. Ranks of `ronde run` have one, too, but also RONDE_RANK,
  which counts more than all of this.
- Half of a set of variables is no set.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from ronde.net.addresses import format_address, parse_address
from ronde.observe.stacks import split_proc_stat

NUM_PORTS = 16
"""How many ports rank 0 may try."""
FIRST_PORT, LAST_PORT = 20000, 29999
"""Ports from a job's id: below those that systems hand out by themselves, above those of known services."""
FIRST_INTERNAL_STEP = 0xFFFFFFF0
"""From here on, Slurm's ids of steps are those of its own shells and daemons."""
LOCALHOST = "127.0.0.1"
LOOPBACK_NAMES = frozenset(("localhost", LOCALHOST, "::1"))

# Rank, size, ranks per host, and the address and port of a rendezvous:
TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
HOROVOD_VARIABLES = tuple(
    f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_SIZE", "GLOO_RENDEZVOUS_ADDR", "GLOO_RENDEZVOUS_PORT")
)
OPEN_MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
MPICH_VARIABLES = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")

TF_RANK_TYPES = ("chief", "worker")
"""The types of TensorFlow's tasks that are ranks, in the order of ranks, which is also TensorFlow's."""
TF_OTHER_TYPES = ("ps", "evaluator")


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
    other_ports: frozenset[int] = frozenset()
    """More ports that the job opens itself."""
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
    found = found or _from_variables(environ, "Horovod's variables", HOROVOD_VARIABLES, "")
    return found or _from_tf_config(environ.get("TF_CONFIG", ""))


def coordinator_port_range(host: str, port: int, job: str, other_ports: Collection[int] = ()) -> str:
    """`host:first-last`: where the ranks of a job look for the coordinator, as the setting `coordinator` takes it.

    They are the next ports after that of the launcher, or, above 65535, the last ones before it, in a row without any
    of `other_ports`. Without a port of the launcher they come from the job's id."""
    if port:
        first, last = port + 1, port - 1
        for other in sorted(other_ports):
            if first <= other < first + NUM_PORTS:
                first = other + 1
        for other in sorted(other_ports, reverse=True):
            if last - NUM_PORTS < other <= last:
                last = other - 1
        if first + NUM_PORTS > 65536:
            first = last - NUM_PORTS + 1
        if first < 1:
            raise ValueError(f"the job leaves no {NUM_PORTS} ports in a row for the coordinator; set RONDE_COORDINATOR")
    else:
        number = int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big")
        first = FIRST_PORT + number % ((LAST_PORT + 1 - FIRST_PORT) // NUM_PORTS) * NUM_PORTS
    return f"{format_address(host, first)}-{first + NUM_PORTS - 1}"


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
        is_one_host = is_one_host or host in LOOPBACK_NAMES
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


class _TfConfig(msgspec.Struct):
    """What counts here of a TF_CONFIG. The task is read only if there is a cluster."""

    cluster: dict[str, list[str]] | None = None
    task: msgspec.Raw = msgspec.Raw(b"null")


class _TfTask(msgspec.Struct):
    type: str
    index: Annotated[int, msgspec.Meta(ge=0)]


def _decode_tf_task(encoded: msgspec.Raw) -> _TfTask:
    try:
        return msgspec.json.decode(encoded, type=_TfTask, strict=False)  # the index may be a text
    except msgspec.ValidationError as error:
        raise ValueError(
            f'there is a cluster, but no task such as {{"type": "worker", "index": 0}} ({error})'
        ) from None


def _from_tf_config(text: str) -> LauncherEnvironment | None:
    """From the text of TF_CONFIG. None if it has no cluster: then TensorFlow, too, takes this process for the only one.
    ValueError says what is wrong with it."""
    try:
        config = msgspec.json.decode(text, type=_TfConfig) if text else _TfConfig()
        if not config.cluster:
            return None
        task = _decode_tf_task(config.task)
        for kind in config.cluster:
            if kind not in (*TF_RANK_TYPES, *TF_OTHER_TYPES):
                known = ", ".join((*TF_RANK_TYPES, *TF_OTHER_TYPES))
                raise ValueError(f"the cluster has a {kind!r}; TensorFlow knows {known}")
        if task.type not in TF_RANK_TYPES:
            raise ValueError(
                f"this process is {task.type} {task.index}, and only chief and workers are ranks: start it without "
                "ronde.init() and hvd.init()"
            )
        ranks = [(kind, index) for kind in TF_RANK_TYPES for index in range(len(config.cluster.get(kind, ())))]
        if ranks.count(("chief", 1)):
            raise ValueError("there is more than one chief")
        if (task.type, task.index) not in ranks:
            raise ValueError(f"this process is {task.type} {task.index}, which the cluster does not have")
        addresses = {kind: [parse_address(each) for each in listed] for kind, listed in config.cluster.items()}
    except ValueError as error:  # msgspec's, too
        raise ValueError(
            f"TF_CONFIG cannot be used: {error}. Correct it, or unset it if it is not meant for this process"
        ) from None
    own = [addresses[kind][index] for kind, index in ranks]
    hosts = {host for host, _ in own}
    is_one_host = len(hosts) == 1 or hosts <= LOOPBACK_NAMES
    host, port = own[0]
    return LauncherEnvironment(
        launcher="TF_CONFIG",
        rank=ranks.index((task.type, task.index)),
        size=len(ranks),
        job=f"TF_CONFIG {own}",
        host=LOCALHOST if is_one_host else host,
        is_one_host=is_one_host,
        port=port,
        other_ports=frozenset(port for listed in addresses.values() for _, port in listed),
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


class JaxVariables(NamedTuple):
    """What `ronde run` says to jax.distributed.initialize()."""

    coordinator_address: str
    num_processes: int
    process_id: int


def read_jax_variables(environ: Mapping[str, str] | None = None) -> JaxVariables | None:
    """The variables for JAX, if `ronde run` has started this process; None if it has not, or they are incomplete."""
    environ = os.environ if environ is None else environ
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    if "RONDE_RANK" not in environ or not all(environ.get(name) for name in names):
        return None
    address, num_processes, process_id = (environ[name] for name in names)
    return JaxVariables(address, int(num_processes), int(process_id))
