"""Options of horovodrun as variables of the environment, and options from a YAML file.

One table says which option is which variable; everything here follows from it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any, NamedTuple

__all__ = [
    "HOROVOD_AUTOTUNE",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
    "HOROVOD_AUTOTUNE_LOG",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    "HOROVOD_CACHE_CAPACITY",
    "HOROVOD_CYCLE_TIME",
    "HOROVOD_FUSION_THRESHOLD",
    "HOROVOD_GLOO_TIMEOUT_SECONDS",
    "HOROVOD_HIERARCHICAL_ALLGATHER",
    "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "HOROVOD_LOG_HIDE_TIME",
    "HOROVOD_LOG_LEVEL",
    "HOROVOD_MPI_THREADS_DISABLE",
    "HOROVOD_NUM_NCCL_STREAMS",
    "HOROVOD_STALL_CHECK_DISABLE",
    "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "HOROVOD_THREAD_AFFINITY",
    "HOROVOD_TIMELINE",
    "HOROVOD_TIMELINE_MARK_CYCLES",
    "HOROVOD_TORUS_ALLREDUCE",
    "LOG_LEVELS",
    "set_args_from_config",
    "set_env_from_args",
    "validate_config_args",
]

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


def _switch(value: bool) -> str:
    return str(int(value))


def _megabytes(value: int) -> str:
    return str(value * MEGABYTE)


def _opposite(value: bool) -> str:
    return _switch(not value)


class _ValueKind(NamedTuple):
    """What an option may be in a configuration file."""

    description: str
    is_valid: Callable[[object], bool]


WHOLE = _ValueKind("a whole number", lambda value: type(value) is int)
NUMBER = _ValueKind("a number", lambda value: type(value) in (int, float))
SWITCH = _ValueKind("true or false", lambda value: value in (True, False))
TEXT = _ValueKind("a text", lambda value: type(value) in (str, int))
LEVEL = _ValueKind(f"one of {', '.join(LOG_LEVELS)}", lambda value: str(value).upper() in LOG_LEVELS)


class _Option(NamedTuple):
    """One option: its section and key in a configuration file, and the variable that it sets."""

    dest: str
    section: str
    key: str
    variable: str
    kind: _ValueKind
    format_value: Callable[[Any], str] = str
    """Converts the value to the text of the variable."""
    needs: str = ""
    """Another option, without which this one sets no variable."""


_PARAMS = (
    _Option("fusion_threshold_mb", "params", "fusion_threshold_mb", HOROVOD_FUSION_THRESHOLD, WHOLE, _megabytes),
    _Option("cycle_time_ms", "params", "cycle_time_ms", HOROVOD_CYCLE_TIME, NUMBER),
    _Option("cache_capacity", "params", "cache_capacity", HOROVOD_CACHE_CAPACITY, WHOLE),
    *(
        _Option(name, "params", name, f"HOROVOD_{name.upper()}", SWITCH, _switch)
        for name in ("hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce")
    ),
)
_AUTOTUNE = (
    _Option("autotune", "autotune", "enabled", HOROVOD_AUTOTUNE, SWITCH, _switch, "autotune"),
    _Option("autotune_log_file", "autotune", "log_file", HOROVOD_AUTOTUNE_LOG, TEXT, str, "autotune"),
    *(
        _Option(f"autotune_{key}", "autotune", key, f"HOROVOD_AUTOTUNE_{key.upper()}", kind, str, "autotune")
        for key, kind in (
            ("warmup_samples", WHOLE),
            ("steps_per_sample", WHOLE),
            ("bayes_opt_max_samples", WHOLE),
            ("gaussian_process_noise", NUMBER),
        )
    ),
)
_TIMELINE_AND_STALL_CHECK = (
    _Option("timeline_filename", "timeline", "filename", HOROVOD_TIMELINE, TEXT),
    _Option(
        "timeline_mark_cycles",
        "timeline",
        "mark_cycles",
        HOROVOD_TIMELINE_MARK_CYCLES,
        SWITCH,
        _switch,
        "timeline_filename",
    ),
    _Option("no_stall_check", "stall_check", "enabled", HOROVOD_STALL_CHECK_DISABLE, SWITCH, _switch),
    _Option(
        "stall_check_warning_time_seconds",
        "stall_check",
        "warning_time_seconds",
        HOROVOD_STALL_CHECK_TIME_SECONDS,
        WHOLE,
    ),
    _Option(
        "stall_check_shutdown_time_seconds",
        "stall_check",
        "shutdown_time_seconds",
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS,
        WHOLE,
    ),
)
_LIBRARY = (
    _Option(
        "mpi_threads_disable",
        "library_options",
        "mpi_threads_disable",
        HOROVOD_MPI_THREADS_DISABLE,
        SWITCH,
        _switch,
    ),
    _Option("num_nccl_streams", "library_options", "num_nccl_streams", HOROVOD_NUM_NCCL_STREAMS, WHOLE),
    # A number, or a list of them with commas between.
    _Option("thread_affinity", "library_options", "thread_affinity", HOROVOD_THREAD_AFFINITY, TEXT),
    _Option("gloo_timeout_seconds", "library_options", "gloo_timeout_seconds", HOROVOD_GLOO_TIMEOUT_SECONDS, WHOLE),
)
_LOGGING = (
    _Option("log_level", "logging", "level", HOROVOD_LOG_LEVEL, LEVEL),
    _Option("log_with_timestamp", "logging", "with_timestamp", HOROVOD_LOG_HIDE_TIME, SWITCH, _opposite),
)
_OPTIONS = (*_PARAMS, *_AUTOTUNE, *_TIMELINE_AND_STALL_CHECK, *_LIBRARY, *_LOGGING)

_NOT_NEGATIVE = (
    "fusion_threshold_mb",
    "cycle_time_ms",
    "cache_capacity",
    "autotune_warmup_samples",
    "autotune_steps_per_sample",
    "autotune_bayes_opt_max_samples",
    "stall_check_warning_time_seconds",
    "stall_check_shutdown_time_seconds",
    "num_nccl_streams",
    "gloo_timeout_seconds",
)


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
        if option.kind is SWITCH:
            value = bool(value) != (option.dest == "no_stall_check")  # the flag is the opposite of `enabled`
        setattr(args, option.dest, value)


def validate_config_args(args: argparse.Namespace) -> None:
    """Raise ValueError if an option has a number outside of its range."""
    for name in _NOT_NEGATIVE:
        value = getattr(args, name, None)
        if value is not None and value < 0:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 0, got {value}")
    noise = getattr(args, "autotune_gaussian_process_noise", None)
    if noise is not None and not 0 <= noise <= 1:
        raise ValueError(f"--autotune-gaussian-process-noise must be from 0 to 1, got {noise}")


def set_env_from_args(env: MutableMapping[str, str], args: argparse.Namespace) -> MutableMapping[str, str]:
    """Put the options that were given into an environment; what is there already and was not given stays."""
    for option in _OPTIONS:
        value = getattr(args, option.dest, None)
        if value is None or (option.needs and not getattr(args, option.needs, None)):
            continue
        env[option.variable] = option.format_value(value)
    return env
