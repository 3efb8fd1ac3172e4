"""Options of horovodrun as variables of the environment, and options from a YAML file.

One table says which option is which variable; everything here follows from it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any, NamedTuple

HOROVOD_FUSION_THRESHOLD = "HOROVOD_FUSION_THRESHOLD"
HOROVOD_CYCLE_TIME = "HOROVOD_CYCLE_TIME"
HOROVOD_CACHE_CAPACITY = "HOROVOD_CACHE_CAPACITY"
HOROVOD_HIERARCHICAL_ALLREDUCE = "HOROVOD_HIERARCHICAL_ALLREDUCE"
HOROVOD_HIERARCHICAL_ALLGATHER = "HOROVOD_HIERARCHICAL_ALLGATHER"
HOROVOD_TORUS_ALLREDUCE = "HOROVOD_TORUS_ALLREDUCE"
HOROVOD_AUTOTUNE = "HOROVOD_AUTOTUNE"
HOROVOD_AUTOTUNE_LOG = "HOROVOD_AUTOTUNE_LOG"
HOROVOD_AUTOTUNE_WARMUP_SAMPLES = "HOROVOD_AUTOTUNE_WARMUP_SAMPLES"
HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE = "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"
HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES = "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES"
HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE = "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE"
HOROVOD_TIMELINE = "HOROVOD_TIMELINE"
HOROVOD_TIMELINE_MARK_CYCLES = "HOROVOD_TIMELINE_MARK_CYCLES"
HOROVOD_STALL_CHECK_DISABLE = "HOROVOD_STALL_CHECK_DISABLE"
HOROVOD_STALL_CHECK_TIME_SECONDS = "HOROVOD_STALL_CHECK_TIME_SECONDS"
HOROVOD_STALL_SHUTDOWN_TIME_SECONDS = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
HOROVOD_MPI_THREADS_DISABLE = "HOROVOD_MPI_THREADS_DISABLE"
HOROVOD_NUM_NCCL_STREAMS = "HOROVOD_NUM_NCCL_STREAMS"
HOROVOD_THREAD_AFFINITY = "HOROVOD_THREAD_AFFINITY"
HOROVOD_GLOO_TIMEOUT_SECONDS = "HOROVOD_GLOO_TIMEOUT_SECONDS"
HOROVOD_LOG_LEVEL = "HOROVOD_LOG_LEVEL"
HOROVOD_LOG_HIDE_TIME = "HOROVOD_LOG_HIDE_TIME"

LOG_LEVELS = ["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"]
MEGABYTE = 1024 * 1024


class _ValueKind(NamedTuple):
    """What an option may be in a configuration file, and its text in a variable."""

    description: str
    is_valid: Callable[[object], bool]
    format_value: Callable[[Any], str] = str


WHOLE = _ValueKind("a whole number", lambda value: type(value) is int)
MEGABYTES = WHOLE._replace(format_value=lambda value: str(value * MEGABYTE))
NUMBER = _ValueKind("a number", lambda value: type(value) in (int, float))
SWITCH = _ValueKind("true or false", lambda value: value in (True, False), lambda value: str(int(value)))
OPPOSITE = SWITCH._replace(format_value=lambda value: str(int(not value)))
TEXT = _ValueKind("a text", lambda value: type(value) in (str, int))
LEVEL = _ValueKind(f"one of {', '.join(LOG_LEVELS)}", lambda value: str(value).upper() in LOG_LEVELS)


class _Option(NamedTuple):
    """One option: its section and key in a configuration file, its name in the parsed arguments, and the variable that
    it sets."""

    section: str
    key: str
    dest: str
    variable: str
    kind: _ValueKind


_OPTIONS = (
    _Option("params", "fusion_threshold_mb", "fusion_threshold_mb", HOROVOD_FUSION_THRESHOLD, MEGABYTES),
    _Option("params", "cycle_time_ms", "cycle_time_ms", HOROVOD_CYCLE_TIME, NUMBER),
    _Option("params", "cache_capacity", "cache_capacity", HOROVOD_CACHE_CAPACITY, WHOLE),
    _Option("params", "hierarchical_allreduce", "hierarchical_allreduce", HOROVOD_HIERARCHICAL_ALLREDUCE, SWITCH),
    _Option("params", "hierarchical_allgather", "hierarchical_allgather", HOROVOD_HIERARCHICAL_ALLGATHER, SWITCH),
    _Option("params", "torus_allreduce", "torus_allreduce", HOROVOD_TORUS_ALLREDUCE, SWITCH),
    _Option("autotune", "enabled", "autotune", HOROVOD_AUTOTUNE, SWITCH),
    _Option("autotune", "log_file", "autotune_log_file", HOROVOD_AUTOTUNE_LOG, TEXT),
    *(
        _Option("autotune", key, f"autotune_{key}", f"HOROVOD_AUTOTUNE_{key.upper()}", kind)
        for key, kind in (
            ("warmup_samples", WHOLE),
            ("steps_per_sample", WHOLE),
            ("bayes_opt_max_samples", WHOLE),
            ("gaussian_process_noise", NUMBER),
        )
    ),
    _Option("timeline", "filename", "timeline_filename", HOROVOD_TIMELINE, TEXT),
    _Option("timeline", "mark_cycles", "timeline_mark_cycles", HOROVOD_TIMELINE_MARK_CYCLES, SWITCH),
    _Option("stall_check", "enabled", "no_stall_check", HOROVOD_STALL_CHECK_DISABLE, SWITCH),
    *(
        _Option("stall_check", f"{key}_time_seconds", f"stall_check_{key}_time_seconds", variable, WHOLE)
        for key, variable in (
            ("warning", HOROVOD_STALL_CHECK_TIME_SECONDS),
            ("shutdown", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS),
        )
    ),
    _Option("library_options", "mpi_threads_disable", "mpi_threads_disable", HOROVOD_MPI_THREADS_DISABLE, SWITCH),
    _Option("library_options", "num_nccl_streams", "num_nccl_streams", HOROVOD_NUM_NCCL_STREAMS, WHOLE),
    # A number, or a list of them with commas between.
    _Option("library_options", "thread_affinity", "thread_affinity", HOROVOD_THREAD_AFFINITY, TEXT),
    _Option("library_options", "gloo_timeout_seconds", "gloo_timeout_seconds", HOROVOD_GLOO_TIMEOUT_SECONDS, WHOLE),
    _Option("logging", "level", "log_level", HOROVOD_LOG_LEVEL, LEVEL),
    _Option("logging", "with_timestamp", "log_with_timestamp", HOROVOD_LOG_HIDE_TIME, OPPOSITE),
)
_NEEDED = {"autotune": "autotune", "timeline": "timeline_filename"}
"""By section: the option without which the others of the section set no variable."""


def set_args_from_config(args: argparse.Namespace, config: Mapping[str, Any], override_args: Collection[str]) -> None:
    """Take options from a file, except for those that were given on the command line."""
    controller = config.get("controller")
    if controller and not (args.use_gloo or args.use_mpi or args.use_jsrun):
        if str(controller).lower() not in ("gloo", "mpi"):
            raise ValueError(f"controller must be gloo or mpi, got {controller!r}")
        setattr(args, f"use_{str(controller).lower()}", True)
    for option in _OPTIONS:
        section = config.get(option.section) or {}
        if not isinstance(section, Mapping):
            raise ValueError(f"{option.section} must hold options such as `{option.key}: …`, got {section!r}")
        value = section.get(option.key)
        if option.dest in override_args or value is None:
            continue
        if not option.kind.is_valid(value):
            raise ValueError(f"{option.key} in {option.section} must be {option.kind.description}, got {value!r}")
        if option.kind in (SWITCH, OPPOSITE):
            value = bool(value) != (option.dest == "no_stall_check")  # the flag is the opposite of `enabled`
        setattr(args, option.dest, value)


def validate_config_args(args: argparse.Namespace) -> None:
    """Raise ValueError if an option has a number outside of its range."""
    noise = getattr(args, "autotune_gaussian_process_noise", None)
    if noise is not None and not 0 <= noise <= 1:
        raise ValueError(f"--autotune-gaussian-process-noise must be from 0 to 1, got {noise}")
    for option in _OPTIONS:
        value = getattr(args, option.dest, None)
        if option.kind in (WHOLE, MEGABYTES, NUMBER) and value is not None and value < 0:
            raise ValueError(f"--{option.dest.replace('_', '-')} must be at least 0, got {value}")


def set_env_from_args(env: MutableMapping[str, str], args: argparse.Namespace) -> MutableMapping[str, str]:
    """Put the options that were given into an environment; what is there already and was not given stays."""
    for option in _OPTIONS:
        value = getattr(args, option.dest, None)
        needed = _NEEDED.get(option.section)
        is_used = needed is None or option.dest == "timeline_filename" or getattr(args, needed, None)
        if value is not None and is_used:
            env[option.variable] = option.kind.format_value(value)
    return env
