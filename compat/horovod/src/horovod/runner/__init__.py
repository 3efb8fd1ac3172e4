"""Starting jobs: `horovodrun` (launch), and run(), which calls a function on many processes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ronde.launch.driver.driver import INTERRUPTED
from ronde.launch.function import FUNCTION_RANK_COMMAND, pickle_call, unpickle_results

__all__ = ["run"]


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call func(*args, **kwargs) on num_proc processes, and return what it returned, by rank.

    With min_num_proc or a discovery script the job is elastic, and results are those of the first min_num_proc ranks.
    RuntimeError when a process fails; what it raised is the cause.
    """
    # Not above: `python -m horovod.runner.launch` imports this package first, and launch must not come with it.
    from horovod.runner.launch import make_job, no_effect_messages, parse_arguments, run_job

    num_proc = _prefer_new_name("np", np, "num_proc", num_proc)
    min_num_proc = _prefer_new_name("min_np", min_np, "min_num_proc", min_num_proc)
    max_num_proc = _prefer_new_name("max_np", max_np, "max_num_proc", max_num_proc)
    network_interfaces = _prefer_new_name(
        "network_interface", network_interface, "network_interfaces", network_interfaces
    )
    if hosts and hostfile:
        raise ValueError("give hosts or hostfile, not both")
    if use_gloo and use_mpi:
        raise ValueError("give use_gloo or use_mpi, not both")
    if host_discovery_script and (hosts or hostfile):
        raise ValueError("give hosts or host_discovery_script, not both")
    options = parse_arguments(
        _make_arguments(
            {
                "-np": num_proc,
                "-H": hosts,
                "--hostfile": hostfile,
                "--host-discovery-script": host_discovery_script,
                "--min-np": min_num_proc,
                "--max-np": max_num_proc,
                "--start-timeout": start_timeout,
                "-p": ssh_port,
                "-i": ssh_identity_file,
                "--output-filename": output_filename,
                "--network-interfaces": network_interfaces,
                "--slots-per-host": slots,
                "--reset-limit": reset_limit,
            },
            {"--disable-cache": disable_cache, "--mpi": use_mpi},
        )
    )
    options.mpi_args, options.cooldown_range = mpi_args, cooldown_range
    for line in no_effect_messages(options):
        warnings.warn(f"horovod.run: {line}", stacklevel=2)
    command = (executable, *FUNCTION_RANK_COMMAND[1:]) if executable else FUNCTION_RANK_COMMAND
    job = make_job(options, command, os.environ, call=pickle_call(func, args, kwargs or {}))
    outcome = run_job(job, options)
    if outcome.stop_request == INTERRUPTED:
        raise KeyboardInterrupt
    try:
        return unpickle_results(outcome, job.num_ranks if job.limits is None else job.limits.min_ranks)
    except Exception as error:  # whatever the function has raised
        raise RuntimeError(f"horovod.run has failed: {type(error).__name__}: {error}") from error


def _prefer_new_name(old_name: str, old: Any, name: str, value: Any) -> Any:  # of any type
    if old is None:
        return value
    warnings.warn(f"{old_name} is deprecated; use {name}", DeprecationWarning, stacklevel=3)
    return old


def _make_arguments(values: Mapping[str, object], switches: Mapping[str, object]) -> list[str]:
    """Return the arguments of a command line with these flags."""
    arguments = [argument for flag, value in values.items() if value is not None for argument in (flag, str(value))]
    return arguments + [flag for flag, on in switches.items() if on]
