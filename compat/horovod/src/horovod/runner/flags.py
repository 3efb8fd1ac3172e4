"""Every flag of horovodrun. Used by launch; what a flag does is decided there."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Sequence
from typing import Any

from horovod.runner.common.util.config_parser import LOG_LEVELS


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
    add("--reset-limit", type=int, help="most restarts")
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
    group.add_argument("--tcp", dest="tcp_flag", action="store_true", help="sets NCCL_IB_DISABLE=1")
    group.add_argument("--binding-args", help="without effect; see `ronde run --bind`")
    _add_value(group, "num-nccl-streams", int, "without effect")
    _add_value(group, "thread-affinity", int, "without effect; see `ronde run --bind`")
    _add_value(group, "gloo-timeout-seconds", int, "seconds for the processes to find each other")

    group = parser.add_argument_group("logging")
    group.add_argument("--log-level", action=StoreOverride, choices=LOG_LEVELS, help="how much to log")
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
