"""The command `horovodrun`: Horovod's flags, for ronde's launcher."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import horovod
from horovod.common import variables
from horovod.common.util import ccl_built, ddl_built, extension_available, gloo_built, mpi_built, nccl_built
from horovod.runner.common.util import config_parser
from ronde.elastic.discovery import DiscoveryScript, WatchedHostfile
from ronde.errors import RondeError
from ronde.launch.driver.driver import Driver
from ronde.launch.driver.failure_report import JobResult
from ronde.launch.driver.host_source import HostSource
from ronde.launch.job import Job, SshOptions, load_settings, make_elastic_limits
from ronde.launch.output.printer import Printer, standard_output_options
from ronde.launch.output.terminal import open_standard_streams
from ronde.launch.placement import format_hosts, hosts_or_localhost, parse_hosts, read_hostfile

USAGE_EXIT_CODE = 2

_CHOSEN = "the algorithm is chosen by message size and hosts"
_NOT_TUNED = "there is nothing to tune while training; `ronde bench` measures a machine"
_NOT_ELASTIC = "the job is not elastic; --min-np or --host-discovery-script makes it so"
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
    "mpi_threads_disable": ("--mpi-threads-disable", "MPI's threads are not needed"),
    "mpi_args": ("--mpi-args", "processes are started by ronde, not by mpirun"),
    "binding_args": ("--binding-args", _BOUND),
    "num_nccl_streams": ("--num-nccl-streams", "NCCL is not used"),
    "thread_affinity": ("--thread-affinity", _BOUND),
    "use_mpi": ("--mpi", "processes are started by ronde; to go through MPI, start them with mpirun"),
    "use_jsrun": ("--jsrun", "processes are started by ronde over ssh"),
}
"""Flags that are accepted for old scripts, and why they have no effect."""

ONLY_ELASTIC: dict[str, tuple[str, str]] = {
    "max_num_proc": ("--max-np", _NOT_ELASTIC),
    "slots": ("--slots-per-host", _NOT_ELASTIC),
    "elastic_timeout": ("--elastic-timeout", _NOT_ELASTIC),
    "reset_limit": ("--reset-limit", _NOT_ELASTIC),
    "cooldown_range": ("--blacklist-cooldown-range", _NOT_ELASTIC),
}
"""Flags without effect in a job that is not elastic."""


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
    known = WITHOUT_EFFECT if is_elastic(args) else {**WITHOUT_EFFECT, **ONLY_ELASTIC}
    given = {name: getattr(args, name, None) for name in known}
    return [
        f"{flag} has no effect: {why}"
        for name, (flag, why) in known.items()
        if given[name] is not None and given[name] is not False
    ]


def is_elastic(args: argparse.Namespace) -> bool:
    """Whether the number of processes may change while the job runs."""
    return args.min_num_proc is not None or bool(args.host_discovery_script)


def make_job(args: argparse.Namespace, command: tuple[str, ...], environ: Mapping[str, str], call: bytes = b"") -> Job:
    """The job that the options describe. `environ` is the environment of the caller."""
    # Options without effect were reported as flags: as variables they would be reported again.
    wanted = config_parser.set_env_from_args({}, args)
    given = {name: text for name, text in wanted.items() if name not in variables.WITHOUT_EFFECT}
    if args.tcp_flag:
        given["NCCL_IB_DISABLE"] = "1"
    hosts = parse_hosts(args.hosts) if args.hosts else ()
    elastic = is_elastic(args)
    if elastic:
        given["HOROVOD_ELASTIC"] = "1"
        if args.elastic_timeout is not None:
            given["HOROVOD_ELASTIC_TIMEOUT"] = str(args.elastic_timeout)
    # The driver hosts the coordinator, so it has to know what the variables ask for, as the processes do.
    own = {**environ, **given}
    settings = load_settings(variables.settings_from(own), own, is_elastic=elastic)
    job = Job(
        command=command,
        num_ranks=args.num_proc,
        hosts=read_hostfile(args.hostfile) if args.hostfile and not elastic else hosts,
        ssh=SshOptions(
            port=args.ssh_port or 0,
            identity=args.ssh_identity_file or "",
            options=("StrictHostKeyChecking=no",),
            start_s=float(args.start_timeout),
        ),
        env=given,
        settings=settings,
        tf_config=args.tf_config,
        pickled_call=call,
        limits=make_elastic_limits(
            settings,
            args.num_proc,
            min_np=args.min_num_proc,
            max_np=_max_processes(args),
            reset_limit=args.reset_limit,
        )
        if elastic
        else None,
    )
    return replace(job, cooldown_s=tuple(args.cooldown_range)) if elastic and args.cooldown_range else job


def _max_processes(args: argparse.Namespace) -> int | None:
    """The most processes of an elastic job: without --max-np as many as its hosts have slots, as in Horovod. None for
    as many as are started, if there are no hosts but this machine."""
    if args.max_num_proc is not None:
        return int(args.max_num_proc)
    return sys.maxsize if args.hosts or args.hostfile or args.host_discovery_script else None


def make_host_source(args: argparse.Namespace) -> HostSource | None:
    """What says which hosts an elastic job may use; None if they never change."""
    slots_per_host = 1 if args.slots is None else args.slots
    if args.host_discovery_script:
        # A shell also runs a script without `#!`, as Horovod does.
        return DiscoveryScript(shlex.join(["/bin/sh", "-c", args.host_discovery_script]), slots_per_host=slots_per_host)
    if args.hostfile and is_elastic(args):
        return WatchedHostfile(args.hostfile, slots_per_host=slots_per_host)
    return None


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
        return Driver(job, printer, host_source=make_host_source(args)).run()


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


# --- the flags -----------------------------------------------------------------------------------------------------


class StoreOverride(argparse.Action):
    """Stores the value, and in `override_args` that the flag was given: it wins over the configuration file."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        if "const" in kwargs:
            kwargs.setdefault("nargs", 0)
        super().__init__(option_strings, dest, **kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)
        namespace.override_args = {*getattr(namespace, "override_args", ()), self.dest}


class _Interfaces(argparse.Action):
    """Collects the network interfaces of all uses of the flag in `nics`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if option_string == "--network-interface" and "," in values:
            warnings.warn("use --network-interfaces for a list of them", DeprecationWarning, stacklevel=2)
        namespace.nics = {*(namespace.nics or ()), *(name for name in values.split(",") if name)}


def make_parser() -> argparse.ArgumentParser:
    """All flags; what follows the first word that is none is the command."""
    parser = argparse.ArgumentParser(
        prog="horovodrun", description="Start a command as the processes of one job, on ronde.", allow_abbrev=False
    )
    parser.set_defaults(override_args=set(), nics=None)
    timeout_s = int(os.environ.get("HOROVOD_START_TIMEOUT", "30"))
    add = parser.add_argument
    add("-v", "--version", action="store_true", help="print the version")
    add("-np", "--num-proc", dest="num_proc", type=int, help="number of processes")
    add("-cb", "--check-build", dest="check_build", action="store_true", help="print what there is")
    add("--disable-cache", action="store_true", help="without effect: nothing is cached between jobs")
    add("--start-timeout", type=int, default=timeout_s, help="seconds for hosts and processes to start")
    add("--network-interfaces", dest="nics", action=_Interfaces, help="without effect")
    add("--network-interface", dest="nics", action=_Interfaces, help="without effect")
    add("--output-filename", help="directory for what each process prints")
    add("--verbose", action="store_true", help="say more")
    add("--config-file", help="YAML file of options")
    add("-p", "--ssh-port", type=int, help="port of the hosts' ssh servers")
    add("-i", "--ssh-identity-file", help="file of the private key for ssh")

    group = parser.add_argument_group("tuneable parameters")
    _add_value(group, "fusion-threshold-mb", int, "maximum megabytes of tensors that are fused")
    _add_value(group, "cycle-time-ms", float, "without effect: there is no cycle")
    _add_value(group, "cache-capacity", int, "without effect: operations are always cached")
    for name in ("hierarchical-allreduce", "hierarchical-allgather", "torus-allreduce"):
        _add_switch(group, name, "without effect: the algorithm is chosen by message size and hosts")

    group = parser.add_argument_group("autotune")
    nothing = "without effect: there is nothing to tune while training"
    _add_switch(group, "autotune", nothing)
    _add_value(group, "autotune-log-file", str, nothing)
    _add_value(group, "autotune-warmup-samples", int, nothing)
    _add_value(group, "autotune-steps-per-sample", int, nothing)
    _add_value(group, "autotune-bayes-opt-max-samples", int, nothing)
    _add_value(group, "autotune-gaussian-process-noise", float, nothing)

    add = parser.add_argument_group("elastic").add_argument
    add("--min-np", "--min-num-proc", dest="min_num_proc", type=int, help="fewest processes")
    add("--max-np", "--max-num-proc", dest="max_num_proc", type=int, help="most processes")
    add("--slots-per-host", dest="slots", type=int, help="slots of hosts without a number")
    add("--elastic-timeout", type=int, help="seconds to wait for enough hosts")
    add("--reset-limit", type=int, help="how often the job may go on after it has lost processes")
    cooldown: dict[str, Any] = {"dest": "cooldown_range", "type": int, "nargs": 2, "metavar": ("LEAST", "MOST")}
    add("--blacklist-cooldown-range", **cooldown, help="seconds before a failed host is tried again")

    group = parser.add_argument_group("timeline and stall check")
    _add_value(group, "timeline-filename", str, "file for the timeline of all processes")
    _add_switch(group, "timeline-mark-cycles", "mark cycles in the timeline")
    add = group.add_argument
    add("--no-stall-check", action=StoreOverride, const=True, help="report no stalls")
    add("--stall-check", dest="no_stall_check", action=StoreOverride, const=False, help=argparse.SUPPRESS)
    _add_value(group, "stall-check-warning-time-seconds", int, "report operations that wait longer than this")
    _add_value(group, "stall-check-shutdown-time-seconds", int, "end operations that wait longer than this")

    group = parser.add_argument_group("library")
    _add_switch(group, "mpi-threads-disable", "without effect")
    group.add_argument("--mpi-args", help="without effect: processes are not started by mpirun")
    _add_switch(group, "tf-config", "give processes a TF_CONFIG, as without the flag; --no-tf-config gives none")
    group.add_argument("--tcp", dest="tcp_flag", action="store_true", help="sets NCCL_IB_DISABLE=1")
    group.add_argument("--binding-args", help="without effect; see `ronde run --bind`")
    _add_value(group, "num-nccl-streams", int, "without effect")
    _add_value(group, "thread-affinity", int, "without effect; see `ronde run --bind`")
    _add_value(group, "gloo-timeout-seconds", int, "seconds for the processes to find each other")

    group = parser.add_argument_group("logging")
    group.add_argument("--log-level", action=StoreOverride, choices=config_parser.LOG_LEVELS, help="how much to log")
    stamps = group.add_mutually_exclusive_group()
    stamp: dict[str, Any] = {"dest": "log_with_timestamp", "action": StoreOverride}
    stamps.add_argument("--log-with-timestamp", **stamp, const=True, help=argparse.SUPPRESS)
    stamps.add_argument("--log-without-timestamp", **stamp, const=False, help="no times in logs")
    prefix = ("-prefix-timestamp", "--prefix-output-with-timestamp")
    stamps.add_argument(*prefix, action="store_true", help="begin each line of output with the time")
    group.add_argument("--log-hide-timestamp", **stamp, const=False, help=argparse.SUPPRESS)
    group.add_argument("--no-log-hide-timestamp", **stamp, const=True, help=argparse.SUPPRESS)

    add = parser.add_argument_group("hosts").add_mutually_exclusive_group().add_argument
    add("-H", "--hosts", help="server1:2,server2:4")
    add("-hostfile", "--hostfile", help="file of hosts, one per line: `server1 slots=2`")
    add("--host-discovery-script", action=StoreOverride, help="elastic mode's source of hosts")
    add = parser.add_argument_group("controller").add_mutually_exclusive_group().add_argument
    add("--gloo", dest="use_gloo", action="store_true", help="without MPI, as always")
    add("--mpi", dest="use_mpi", action="store_true", help="without effect")
    add("--jsrun", dest="use_jsrun", action="store_true", help="without effect")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    return parser


def _add_switch(group: argparse._ArgumentGroup, name: str, help: str) -> None:
    dest = name.replace("-", "_")
    group.add_argument(f"--{name}", dest=dest, action=StoreOverride, const=True, help=help)
    group.add_argument(f"--no-{name}", dest=dest, action=StoreOverride, const=False, help=argparse.SUPPRESS)


def _add_value(group: argparse._ArgumentGroup, name: str, kind: type, help: str) -> None:
    group.add_argument(f"--{name}", action=StoreOverride, type=kind, help=help)


if __name__ == "__main__":
    run_commandline()
