"""What HOROVOD_* variables mean here: a setting of ronde, or nothing any more, and then what replaces it.

Read once, at hvd.init(), and by horovodrun for the coordinator. Every variable that has no effect gets one line of
warning on rank 0.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

OPERATION_TIMEOUT_S = 7 * 24 * 3600.0
"""By default Horovod waits for an operation without limit; here it is a week."""
STALL_S = 60.0
DYNAMIC = "DYNAMIC"

_CHOSEN = "the algorithm is chosen by message size and hosts; RONDE_ALGORITHM forces one"
_NOT_TUNED = "there is nothing to tune while training; `ronde bench` measures a machine"

WITHOUT_EFFECT: dict[str, str] = {
    "HOROVOD_CONTROLLER": "processes meet through ronde's coordinator",
    "HOROVOD_CYCLE_TIME": "there is no cycle: operations start when every process is ready",
    "HOROVOD_CACHE_CAPACITY": "repeated operations are always announced by a short number",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": _CHOSEN,
    "HOROVOD_HIERARCHICAL_ALLGATHER": _CHOSEN,
    "HOROVOD_TORUS_ALLREDUCE": _CHOSEN,
    "HOROVOD_AUTOTUNE": _NOT_TUNED,
    "HOROVOD_AUTOTUNE_LOG": _NOT_TUNED,
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": _NOT_TUNED,
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": _NOT_TUNED,
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": _NOT_TUNED,
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": _NOT_TUNED,
    "HOROVOD_MPI_THREADS_DISABLE": "MPI's threads are not needed",
    "HOROVOD_NUM_NCCL_STREAMS": "NCCL is not used",
    "HOROVOD_THREAD_AFFINITY": "bind processes to cores with `ronde run --bind core`",
    "HOROVOD_BATCH_D2D_MEMCOPIES": "nothing is copied between devices",
    "HOROVOD_DISABLE_GROUP_FUSION": "the tensors of a group are one operation in any case",
    "HOROVOD_ENABLE_ASYNC_COMPLETION": "operations complete without blocking in any case",
    "HOROVOD_ENABLE_XLA_OPS": "there are no operations of its own for XLA",
    "HOROVOD_DISABLE_NVTX_RANGES": "there are no NVTX ranges; use a timeline",
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": "Adasum does not need MPI",
    "HOROVOD_CCL_CACHE": "oneCCL is not used",
    "HOROVOD_GLOO_IFACE": "addresses are found by trying; RONDE_ADDRESS gives one",
}

_SWITCHES = {
    *("HOROVOD_HIERARCHICAL_ALLREDUCE", "HOROVOD_HIERARCHICAL_ALLGATHER", "HOROVOD_TORUS_ALLREDUCE"),
    *("HOROVOD_AUTOTUNE", "HOROVOD_MPI_THREADS_DISABLE", "HOROVOD_DISABLE_GROUP_FUSION", "HOROVOD_CCL_CACHE"),
    *("HOROVOD_ENABLE_ASYNC_COMPLETION", "HOROVOD_ENABLE_XLA_OPS", "HOROVOD_DISABLE_NVTX_RANGES"),
}
"""Switches that have no effect here. One that is set to 0 needs no warning."""

_BUILD_PREFIXES = (
    *("HOROVOD_WITH_", "HOROVOD_WITHOUT_", "HOROVOD_GPU", "HOROVOD_CUDA_", "HOROVOD_ROCM_", "HOROVOD_NCCL_"),
    *("HOROVOD_NVTX_", "HOROVOD_BUILD_", "HOROVOD_CMAKE", "HOROVOD_DEBUG", "HOROVOD_SKIP_COMPILE"),
    *("HOROVOD_ALLOW_MIXED_GPU_IMPL", "HOROVOD_LOCAL_VERSION"),
)
"""Beginnings of names that Horovod's installation reads."""

_READ_ELSEWHERE = {
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    *("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME"),
    *("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    *("HOROVOD_DYNAMIC_PROCESS_SETS", "HOROVOD_TIMELINE", "HOROVOD_TIMELINE_MARK_CYCLES"),
    *("HOROVOD_STALL_CHECK_DISABLE", "HOROVOD_LOG_LEVEL", "HOROVOD_LOG_HIDE_TIME", "HOROVOD_START_TIMEOUT"),
    *("HOROVOD_ELASTIC", "HOROVOD_TEST_GPU"),
}
"""Variables that other modules read: for rank and size, in hvd.init(), in horovodrun, in scripts, or in tests."""


LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}
LOGGERS = ("horovod", "ronde")


def is_true(text: str | None) -> bool:
    """Whether a switch is on: a whole number above 0, as in Horovod, or a word such as yes."""
    if text is None:
        return False
    if text.strip().lower() in ("true", "yes", "on"):
        return True
    try:
        return int(text) > 0
    except ValueError:
        return False


def settings_from(environ: Mapping[str, str]) -> dict[str, Any]:
    """Settings of ronde for the variables that are set. Where Horovod's defaults differ from ronde's, Horovod's, unless
    a RONDE_* variable says otherwise."""
    usual = {"operation_s": OPERATION_TIMEOUT_S, "stall_s": STALL_S}
    found = {name: value for name, value in usual.items() if f"RONDE_{name.upper()}" not in environ}
    for name, (setting, read) in _SETTING_BY_VARIABLE.items():
        if environ.get(name):
            try:
                value = read(environ[name])
            except ValueError as error:
                raise ValueError(f"{name}={environ[name]!r} cannot be read: {error}") from None
            if value is not None:
                found[setting] = value
    if is_true(environ.get("HOROVOD_STALL_CHECK_DISABLE")):
        found["stall_s"] = 0.0
    return found


def timeline_from(environ: Mapping[str, str]) -> str | None:
    """The file of a timeline that is to be written from hvd.init() on, if there is to be one."""
    path = environ.get("HOROVOD_TIMELINE", "")
    return path if path and path.upper() != DYNAMIC else None


def warn_without_effect(environ: Mapping[str, str], logger: logging.Logger) -> None:
    """One line for each variable that is set and means nothing here."""
    for name in sorted(name for name in environ if name.startswith("HOROVOD_") and environ[name]):
        if environ[name] == "0" and (name in _SWITCHES or name.startswith(_BUILD_PREFIXES)):
            continue
        if name in WITHOUT_EFFECT:
            logger.warning("%s has no effect here: %s", name, WITHOUT_EFFECT[name])
        elif name.startswith(_BUILD_PREFIXES):
            logger.warning("%s has no effect here: nothing is compiled", name)
        elif name not in _READ_ELSEWHERE and name not in _SETTING_BY_VARIABLE:
            logger.warning("%s is not known here, and has no effect", name)


def set_log_level(text: str, *, hide_time: bool = False) -> None:
    """Log from this level on. Levels below WARNING are printed on standard error; a script's own logging is left
    alone."""
    if text.upper() not in LEVELS:
        raise ValueError(f"HOROVOD_LOG_LEVEL must be one of {', '.join(LEVELS)}, got {text!r}")
    level = LEVELS[text.upper()]
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        if level < logging.WARNING and not logger.hasHandlers():
            handler = logging.StreamHandler(sys.stderr)
            time = "" if hide_time else "%(asctime)s "
            handler.setFormatter(logging.Formatter(f"{time}%(levelname)s %(name)s: %(message)s"))
            logger.addHandler(handler)
            logger.propagate = False


def _backend(text: str) -> str | None:
    if text.lower() not in ("mpi", "gloo", "ccl"):
        raise ValueError("must be mpi, gloo or ccl")
    return "mpi" if text.lower() == "mpi" else None


_SETTING_BY_VARIABLE: dict[str, tuple[str, Callable[[str], Any]]] = {
    "HOROVOD_FUSION_THRESHOLD": ("fusion_bytes", int),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": ("stall_s", float),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ("operation_s", lambda text: float(text) or None),
    "HOROVOD_GLOO_TIMEOUT_SECONDS": ("start_s", float),
    "HOROVOD_ELASTIC_TIMEOUT": ("elastic_timeout_s", float),
    "HOROVOD_CPU_OPERATIONS": ("backend", _backend),
}
