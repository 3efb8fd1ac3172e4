"""The command `horovodrun`: Horovod's flags, carried out by ronde's launcher."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod
from horovod.common.util import ccl_built, ddl_built, extension_available, gloo_built, mpi_built, nccl_built
from horovod.runner.common.util import config_parser
from horovod.runner.flags import make_parser
from ronde.errors import RondeError
from ronde.launch.driver import Driver, Outcome
from ronde.launch.hosts import parse_hosts, read_hostfile
from ronde.launch.job import Host, Job, Ssh
from ronde.launch.output.options import Place, PrintOptions, Target
from ronde.launch.output.printer import Printer

__all__ = ["check_build", "make_job", "parse_args", "parse_arguments", "run_commandline"]

NO_ELASTIC = "elastic mode is not part of ronde-horovod yet; leave --min-np, --max-np and --host-discovery-script away"
WRONG_CODE = 2

WITHOUT_EFFECT: dict[str, str] = {
    "disable_cache": "nothing is remembered between jobs",
    "nics": "addresses are found by trying",
    "cycle_time_ms": "there is no cycle: operations start when every process is ready",
    "cache_capacity": "repeated operations are always announced by a short number",
    "hierarchical_allreduce": "the algorithm is chosen by size and places",
    "hierarchical_allgather": "the algorithm is chosen by size and places",
    "torus_allreduce": "the algorithm is chosen by size and places",
    "autotune": "there is nothing to tune while training",
    "mpi_threads_disable": "MPI's threads are not needed",
    "mpi_args": "processes are started by ronde, not by mpirun",
    "binding_args": "use `ronde run --bind core` to bind processes to cores",
    "num_nccl_streams": "NCCL is not used",
    "thread_affinity": "use `ronde run --bind core` to bind processes to cores",
    "use_mpi": "processes are started by ronde; HOROVOD_CPU_OPERATIONS=mpi sends operations through MPI",
    "use_gloo": "ronde's own data plane stands where Gloo did",
    "use_jsrun": "processes are started by ronde over ssh",
    "timeline_mark_cycles": "there are no cycles to mark",
}
"""Flags that are taken for the sake of old scripts, and why they change nothing."""


def parse_args() -> argparse.Namespace:
    """The options of sys.argv, those of a configuration file included. ValueError for values that cannot be."""
    return parse_arguments(sys.argv[1:])


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command line."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.config_file:
        config_parser.set_args_from_config(args, _read_config(args.config_file), args.override_args)
    config_parser.validate_config_args(args)
    if args.command[:1] == ["--"]:
        args.command = args.command[1:]
    args.run_func = None
    if args.num_proc is None and not (args.check_build or args.version):
        parser.error("-np is needed: the number of processes")
    return args


def _read_config(path: str) -> Mapping[str, Any]:
    import yaml  # only who has a file waits for it

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if found is not None and not isinstance(found, dict):
        raise ValueError(f"{path} must hold sections such as `params:`, got a {type(found).__name__}")
    return found or {}


def run_commandline() -> None:
    """The console script."""
    try:
        code = _run(parse_args())
    except (RondeError, ValueError, OSError) as error:
        _say(f"horovodrun: {' '.join(str(error).split())}")
        code = WRONG_CODE
    raise SystemExit(code)


def _run(args: argparse.Namespace) -> int:
    if args.version:
        _say(horovod.__version__, file=sys.stdout)
        return 0
    if args.check_build:
        _say(check_build(), file=sys.stdout)
        return 0
    if not args.command:
        raise ValueError("there is no command to run; give one, as in: horovodrun -np 2 python train.py")
    for line in notes(args):
        _say(line)
    if args.log_level:
        logging.basicConfig(level=logging.getLevelNamesMapping()[_PYTHON_LEVELS.get(args.log_level, args.log_level)])
    outcome = start(make_job(args, tuple(args.command), os.environ), Showing.of(args))
    if outcome.summary:
        _say(outcome.summary)
    return outcome.code


_PYTHON_LEVELS = {"TRACE": "DEBUG", "FATAL": "CRITICAL"}


def notes(args: argparse.Namespace) -> list[str]:
    """One line for each flag that was given and changes nothing."""
    return [
        f"horovodrun: --{name.replace('use_', '').replace('nics', 'network-interfaces').replace('_', '-')} "
        f"has no effect: {why}"
        for name, why in WITHOUT_EFFECT.items()
        if getattr(args, name, None) not in (None, False)
    ]


def make_job(args: argparse.Namespace, command: tuple[str, ...], environ: Mapping[str, str], call: bytes = b"") -> Job:
    """The job that the options ask for."""
    if args.min_num_proc is not None or args.max_num_proc is not None or args.host_discovery_script:
        raise ValueError(NO_ELASTIC)
    hosts = _hosts(args)
    given = config_parser.set_env_from_args({}, args)
    if args.tcp_flag:
        given["NCCL_IB_DISABLE"] = "1"
    return Job(
        command=command,
        num_ranks=args.num_proc,
        hosts=hosts,
        ssh=Ssh(
            port=args.ssh_port or 0,
            identity=args.ssh_identity_file or "",
            options=("StrictHostKeyChecking=no",),
            start_s=float(args.start_timeout),
        ),
        env={**given, **_places(hosts, args.num_proc)},
        call=call,
    )


def _hosts(args: argparse.Namespace) -> tuple[Host, ...]:
    if args.hostfile:
        return read_hostfile(args.hostfile)
    return parse_hosts(args.hosts) if args.hosts else ()


def _places(hosts: tuple[Host, ...], num_proc: int) -> dict[str, str]:
    """What every process may read of the job before hvd.init(); its own rank is set where it is known."""
    return {"HOROVOD_SIZE": str(num_proc), "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}


@dataclass(frozen=True)
class Showing:
    """How to show what processes print."""

    folder: str = ""
    timestamps: bool = False
    target: Target | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Showing:
        """As the options say."""
        return cls(args.output_filename or "", args.prefix_output_with_timestamp)


def start(job: Job, showing: Showing) -> Outcome:
    """Run the job to its end."""
    target = showing.target or Target(sys.stdout.buffer, sys.stderr.buffer)
    place = Place.of(target)
    options = PrintOptions(fold=False, timestamps=showing.timestamps, color=False, folder=showing.folder, place=place)
    printer = Printer(target, num_ranks=job.num_ranks, options=options)
    try:
        return Driver(job, printer).run()
    finally:
        printer.close()


def check_build() -> str:
    """What there is, as a list of boxes."""
    frameworks = {"TensorFlow": "tensorflow", "PyTorch": "torch", "MXNet": "mxnet"}
    sections = {
        "Frameworks": {title: extension_available(name) for title, name in frameworks.items()},
        "Controllers": {"MPI": mpi_built(), "Gloo": gloo_built()},
        "Tensor Operations": {
            "NCCL": bool(nccl_built()),
            "DDL": ddl_built(),
            "CCL": ccl_built(),
            "MPI": mpi_built(),
            "Gloo": gloo_built(),
        },
    }
    lines = [f"Horovod v{horovod.__version__}:"]
    for title, boxes in sections.items():
        lines += ["", f"Available {title}:"]
        lines += [f"    [{'X' if there else ' '}] {name}" for name, there in boxes.items()]
    return "\n".join(lines)


def _say(text: str, file: Any = None) -> None:  # noqa: ANN401  # a text stream
    print(text, file=file or sys.stderr, flush=True)


if __name__ == "__main__":
    run_commandline()
