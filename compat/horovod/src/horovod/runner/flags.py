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
    _add_general(parser)
    _add_tuneable(parser.add_argument_group("tuneable parameters"))
    _add_autotune(parser.add_argument_group("autotune"))
    _add_elastic(parser.add_argument_group("elastic"))
    _add_timeline_and_stall_check(parser.add_argument_group("timeline and stall check"))
    _add_library(parser.add_argument_group("library"))
    _add_logging(parser.add_argument_group("logging"))
    _add_hosts(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    return parser


def _add_general(parser: argparse.ArgumentParser) -> None:
    timeout_s = int(os.environ.get("HOROVOD_START_TIMEOUT", "30"))
    parser.add_argument("-v", "--version", action="store_true", help="print the version")
    parser.add_argument("-np", "--num-proc", dest="num_proc", type=int, help="number of processes")
    parser.add_argument("-cb", "--check-build", dest="check_build", action="store_true", help="print what there is")
    parser.add_argument("--disable-cache", action="store_true", help="without effect: nothing is cached between jobs")
    parser.add_argument("--start-timeout", type=int, default=timeout_s, help="seconds for hosts and processes to start")
    parser.add_argument("--network-interfaces", dest="nics", action=_Interfaces, help="without effect")
    parser.add_argument("--network-interface", dest="nics", action=_Interfaces, help="without effect")
    parser.add_argument("--output-filename", help="directory for what each process prints")
    parser.add_argument("--verbose", action="store_true", help="say more")
    parser.add_argument("--config-file", help="YAML file of options")
    parser.add_argument("-p", "--ssh-port", type=int, help="port of the hosts' ssh servers")
    parser.add_argument("-i", "--ssh-identity-file", help="file of the private key for ssh")


def _tri_state(group: argparse._ArgumentGroup, name: str, help: str) -> None:
    dest = name.replace("-", "_")
    group.add_argument(f"--{name}", dest=dest, action=StoreOverride, const=True, help=help)
    group.add_argument(f"--no-{name}", dest=dest, action=StoreOverride, const=False, help=argparse.SUPPRESS)


def _number(group: argparse._ArgumentGroup, name: str, kind: type, help: str) -> None:
    group.add_argument(f"--{name}", action=StoreOverride, type=kind, help=help)


def _add_tuneable(group: argparse._ArgumentGroup) -> None:
    _number(group, "fusion-threshold-mb", int, "maximum megabytes of tensors that are fused")
    _number(group, "cycle-time-ms", float, "without effect: there is no cycle")
    _number(group, "cache-capacity", int, "without effect: operations are always cached")
    for name in ("hierarchical-allreduce", "hierarchical-allgather", "torus-allreduce"):
        _tri_state(group, name, "without effect: the algorithm is chosen by message size and hosts")


def _add_autotune(group: argparse._ArgumentGroup) -> None:
    nothing = "without effect: there is nothing to tune while training"
    _tri_state(group, "autotune", nothing)
    group.add_argument("--autotune-log-file", action=StoreOverride, help=nothing)
    _number(group, "autotune-warmup-samples", int, nothing)
    _number(group, "autotune-steps-per-sample", int, nothing)
    _number(group, "autotune-bayes-opt-max-samples", int, nothing)
    _number(group, "autotune-gaussian-process-noise", float, nothing)


def _add_elastic(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--min-np", "--min-num-proc", dest="min_num_proc", type=int, help="fewest processes")
    group.add_argument("--max-np", "--max-num-proc", dest="max_num_proc", type=int, help="most processes")
    group.add_argument("--slots-per-host", dest="slots", type=int, help="slots of hosts without a number")
    group.add_argument("--elastic-timeout", type=int, help="seconds to wait for enough hosts")
    group.add_argument("--reset-limit", type=int, help="most restarts")
    group.add_argument(
        "--blacklist-cooldown-range",
        dest="cooldown_range",
        type=int,
        nargs=2,
        metavar=("LEAST", "MOST"),
        help="seconds before a failed host is tried again",
    )


def _add_timeline_and_stall_check(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--timeline-filename", action=StoreOverride, help="file for the timeline of all processes")
    _tri_state(group, "timeline-mark-cycles", "mark cycles in the timeline")
    group.add_argument("--no-stall-check", action=StoreOverride, const=True, help="report no stalls")
    group.add_argument(
        "--stall-check", dest="no_stall_check", action=StoreOverride, const=False, help=argparse.SUPPRESS
    )
    _number(group, "stall-check-warning-time-seconds", int, "report operations that wait longer than this")
    _number(group, "stall-check-shutdown-time-seconds", int, "end operations that wait longer than this")


def _add_library(group: argparse._ArgumentGroup) -> None:
    _tri_state(group, "mpi-threads-disable", "without effect")
    group.add_argument("--mpi-args", help="without effect: processes are not started by mpirun")
    group.add_argument("--tcp", dest="tcp_flag", action="store_true", help="sets NCCL_IB_DISABLE=1")
    group.add_argument("--binding-args", help="without effect; see `ronde run --bind`")
    _number(group, "num-nccl-streams", int, "without effect")
    _number(group, "thread-affinity", int, "without effect; see `ronde run --bind`")
    _number(group, "gloo-timeout-seconds", int, "seconds for the processes to find each other")


def _add_logging(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--log-level", action=StoreOverride, choices=LOG_LEVELS, help="how much to log")
    stamps = group.add_mutually_exclusive_group()
    dest = "log_with_timestamp"
    stamps.add_argument("--log-with-timestamp", dest=dest, action=StoreOverride, const=True, help=argparse.SUPPRESS)
    stamps.add_argument(
        "--log-without-timestamp", dest=dest, action=StoreOverride, const=False, help="no times in logs"
    )
    stamps.add_argument(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        dest="prefix_output_with_timestamp",
        action="store_true",
        help="begin each line of output with the time",
    )
    group.add_argument("--log-hide-timestamp", dest=dest, action=StoreOverride, const=False, help=argparse.SUPPRESS)
    group.add_argument("--no-log-hide-timestamp", dest=dest, action=StoreOverride, const=True, help=argparse.SUPPRESS)


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    hosts = parser.add_argument_group("hosts").add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", help="server1:2,server2:4")
    hosts.add_argument("-hostfile", "--hostfile", help="file of hosts, one per line: `server1 slots=2`")
    hosts.add_argument("--host-discovery-script", action=StoreOverride, help="elastic mode's source of hosts")
    controller = parser.add_argument_group("controller").add_mutually_exclusive_group()
    controller.add_argument("--gloo", dest="use_gloo", action="store_true", help="without MPI, as always")
    for name in ("mpi", "jsrun"):
        controller.add_argument(f"--{name}", dest=f"use_{name}", action="store_true", help="without effect")
