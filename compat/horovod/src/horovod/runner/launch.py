"""The command `horovodrun`: Horovod's flags, for ronde's launcher."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import horovod
from horovod.common import variables
from horovod.common.util import ccl_built, ddl_built, extension_available, gloo_built, mpi_built, nccl_built
from horovod.runner.common.util import config_parser
from horovod.runner.flags import make_parser
from ronde.errors import RondeError
from ronde.launch.driver.driver import Driver, JobResult
from ronde.launch.job import Job, SshOptions
from ronde.launch.output.printer import Printer, standard_output_options
from ronde.launch.output.terminal import open_standard_streams
from ronde.launch.placement import format_hosts, hosts_or_localhost, parse_hosts, read_hostfile
from ronde.settings import ASSIGNED_BY_LAUNCHER, PREFIX, Settings

NO_ELASTIC = "elastic mode is not part of ronde-horovod yet; leave --min-np, --max-np and --host-discovery-script away"
USAGE_EXIT_CODE = 2

_CHOSEN = "the algorithm is chosen by message size and hosts"
_NOT_TUNED = "there is nothing to tune while training; `ronde bench` measures a machine"
_NOT_ELASTIC = "it is for elastic mode"
_BOUND = "use `ronde run --bind core` to bind processes to cores"

WITHOUT_EFFECT: dict[str, tuple[str, str]] = {
    "disable_cache": ("--disable-cache", "nothing is remembered between jobs"),
    "nics": ("--network-interfaces", "addresses are found by trying"),
    "cycle_time_ms": ("--cycle-time-ms", "there is no cycle: operations start when every process is ready"),
    "cache_capacity": ("--cache-capacity", "repeated operations are always announced by a short number"),
    "hierarchical_allreduce": ("--hierarchical-allreduce", _CHOSEN),
    "hierarchical_allgather": ("--hierarchical-allgather", _CHOSEN),
    "torus_allreduce": ("--torus-allreduce", _CHOSEN),
    "autotune": ("--autotune", _NOT_TUNED),
    "autotune_log_file": ("--autotune-log-file", _NOT_TUNED),
    "autotune_warmup_samples": ("--autotune-warmup-samples", _NOT_TUNED),
    "autotune_steps_per_sample": ("--autotune-steps-per-sample", _NOT_TUNED),
    "autotune_bayes_opt_max_samples": ("--autotune-bayes-opt-max-samples", _NOT_TUNED),
    "autotune_gaussian_process_noise": ("--autotune-gaussian-process-noise", _NOT_TUNED),
    "slots": ("--slots-per-host", _NOT_ELASTIC),
    "elastic_timeout": ("--elastic-timeout", _NOT_ELASTIC),
    "reset_limit": ("--reset-limit", _NOT_ELASTIC),
    "cooldown_range": ("--blacklist-cooldown-range", _NOT_ELASTIC),
    "mpi_threads_disable": ("--mpi-threads-disable", "MPI's threads are not needed"),
    "mpi_args": ("--mpi-args", "processes are started by ronde, not by mpirun"),
    "binding_args": ("--binding-args", _BOUND),
    "num_nccl_streams": ("--num-nccl-streams", "NCCL is not used"),
    "thread_affinity": ("--thread-affinity", _BOUND),
    "use_mpi": ("--mpi", "processes are started by ronde; to go through MPI, start them with mpirun"),
    "use_jsrun": ("--jsrun", "processes are started by ronde over ssh"),
}
"""Flags that are accepted for old scripts, and why they have no effect."""


def parse_args() -> argparse.Namespace:
    """The options of sys.argv, those of a configuration file included. ValueError for values that cannot be."""
    return parse_arguments(sys.argv[1:])


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command line."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    config_parser.validate_config_args(args)
    if args.config_file:
        _apply_config_file(args)
    if args.command[:1] == ["--"]:
        args.command = args.command[1:]
    if args.num_proc is None and not (args.check_build or args.version):
        parser.error("-np is needed: the number of processes")
    return args


def _apply_config_file(args: argparse.Namespace) -> None:
    import yaml  # a slow import that is rarely needed

    try:
        found = yaml.safe_load(Path(args.config_file).read_text(encoding="utf-8"))
        if found is not None and not isinstance(found, dict):
            raise ValueError(f"it must hold sections such as `params:`, got a {type(found).__name__}")
        config_parser.set_args_from_config(args, found or {}, args.override_args)
        config_parser.validate_config_args(args)
    except OSError as error:
        reason = f"it cannot be read: {error.strerror}"
    except yaml.YAMLError as error:
        reason = f"it is no YAML: {' '.join(str(error).split())}"
    except ValueError as error:
        reason = str(error)
    else:
        return
    raise ValueError(f"the configuration file {args.config_file} cannot be used: {reason}")


def run_commandline() -> None:
    """The console script."""
    try:
        code = _run(parse_args())
    except (RondeError, ValueError, OSError) as error:
        _print_message(f"horovodrun: {' '.join(str(error).split())}")
        code = USAGE_EXIT_CODE
    raise SystemExit(code)


def _run(args: argparse.Namespace) -> int:
    if args.version:
        _print_message(horovod.__version__, file=sys.stdout)
        return 0
    if args.check_build:
        _print_message(check_build(), file=sys.stdout)
        return 0
    if not args.command:
        raise ValueError("there is no command to run; give one, as in: horovodrun -np 2 python train.py")
    for line in no_effect_messages(args):
        _print_message(f"horovodrun: {line}")
    if args.log_level:
        variables.set_log_level(args.log_level, hide_time=args.log_with_timestamp is False)
    job = make_job(args, tuple(args.command), os.environ)
    if args.verbose:
        where = format_hosts(hosts_or_localhost(job.hosts, job.num_ranks))
        _print_message(f"horovodrun: {job.num_ranks} processes on {where}: {' '.join(job.command)}")
    outcome = run_job(job, args)
    if outcome.summary:
        _print_message(outcome.summary)
    return outcome.exit_code


def no_effect_messages(args: argparse.Namespace) -> list[str]:
    """One line for each flag that was given and changes nothing. A 0 is a value, a switch that is off is not."""
    given = {name: getattr(args, name, None) for name in WITHOUT_EFFECT}
    return [
        f"{flag} has no effect: {why}"
        for name, (flag, why) in WITHOUT_EFFECT.items()
        if given[name] is not None and given[name] is not False
    ]


def make_job(args: argparse.Namespace, command: tuple[str, ...], environ: Mapping[str, str], call: bytes = b"") -> Job:
    """The job that the options describe. `environ` is the environment of the caller."""
    if args.min_num_proc is not None or args.max_num_proc is not None or args.host_discovery_script:
        raise ValueError(NO_ELASTIC)
    # Options without effect were reported as flags: as variables they would be reported again.
    wanted = config_parser.set_env_from_args({}, args)
    given = {name: text for name, text in wanted.items() if name not in variables.WITHOUT_EFFECT}
    if args.tcp_flag:
        given["NCCL_IB_DISABLE"] = "1"
    hosts = parse_hosts(args.hosts) if args.hosts else ()
    # The driver hosts the coordinator, so it has to know what the variables ask for, as the processes do. What an outer
    # job has set is not for this one.
    of_an_outer_job = {PREFIX + name.upper() for name in ASSIGNED_BY_LAUNCHER}
    own = {name: text for name, text in {**environ, **given}.items() if name not in of_an_outer_job}
    return Job(
        command=command,
        num_ranks=args.num_proc,
        hosts=read_hostfile(args.hostfile) if args.hostfile else hosts,
        ssh=SshOptions(
            port=args.ssh_port or 0,
            identity=args.ssh_identity_file or "",
            options=("StrictHostKeyChecking=no",),
            start_s=float(args.start_timeout),
        ),
        env=given,
        settings=Settings.load(variables.settings_from(own), own),
        pickled_call=call,
    )


def run_job(job: Job, args: argparse.Namespace) -> JobResult:
    """Run the job to its end, showing what its processes print as the options say."""
    target = open_standard_streams()
    options = replace(
        standard_output_options(target, os.environ),
        fold=False,
        color=False,
        horovod_format=True,
        timestamps=args.prefix_output_with_timestamp,
        output_dir=args.output_filename or "",
    )
    with contextlib.closing(Printer(target, num_ranks=job.num_ranks, options=options)) as printer:
        return Driver(job, printer).run()


def check_build() -> str:
    """Return the text of --check-build: frameworks, controllers and operations, each with a box that is ticked if it
    can be used."""
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


def _print_message(text: str, file: Any = None) -> None:  # a text stream
    print(text, file=file or sys.stderr, flush=True)


if __name__ == "__main__":
    run_commandline()
