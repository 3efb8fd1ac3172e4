"""What HOROVOD_* variables mean here: a setting of ronde, or nothing any more, and then what replaces it.

Read once, at hvd.init(). Every variable that has no effect gets one line of warning on rank 0.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["WITHOUT_EFFECT", "is_true", "settings_from", "warn_without_effect"]

PATIENCE_S = 7 * 24 * 3600.0
"""Horovod waits for an operation for ever unless told otherwise; a week is as good."""
STALL_S = 60.0
DYNAMIC = "DYNAMIC"

WITHOUT_EFFECT: dict[str, str] = {
    "HOROVOD_CYCLE_TIME": "ronde has no cycle: operations start when every rank is ready",
    "HOROVOD_CACHE_CAPACITY": "repeated operations are always announced by a short number",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "chosen by itself; RONDE_ALGORITHM forces one",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "chosen by itself",
    "HOROVOD_TORUS_ALLREDUCE": "chosen by itself; RONDE_ALGORITHM forces one",
    "HOROVOD_AUTOTUNE": "there is nothing to tune while training; `ronde bench` measures a machine",
    "HOROVOD_AUTOTUNE_LOG": "there is nothing to tune while training; `ronde bench` measures a machine",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "there is nothing to tune while training",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "there is nothing to tune while training",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "there is nothing to tune while training",
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "there is nothing to tune while training",
    "HOROVOD_MPI_THREADS_DISABLE": "ronde does not need MPI's threads",
    "HOROVOD_NUM_NCCL_STREAMS": "ronde's data plane does not use NCCL streams",
    "HOROVOD_THREAD_AFFINITY": "bind ranks to cores with `ronde run --bind core`",
    "HOROVOD_BATCH_D2D_MEMCOPIES": "there are no copies between devices",
    "HOROVOD_DISABLE_GROUP_FUSION": "the tensors of a group travel together in any case",
    "HOROVOD_ENABLE_ASYNC_COMPLETION": "operations complete without blocking in any case",
    "HOROVOD_DISABLE_NVTX_RANGES": "there are no NVTX ranges; use a timeline",
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": "Adasum does not go through MPI",
    "HOROVOD_CCL_CACHE": "ronde does not use oneCCL",
    "HOROVOD_GLOO_IFACE": "addresses are found by trying; RONDE_ADDRESS gives one",
    "HOROVOD_LOG_HIDE_TIME": "ronde's log lines carry no time of their own",
}


def is_true(text: str | None) -> bool:
    """As Horovod reads a switch: a whole number above 0. Words for yes count, too, which Horovod took for no."""
    if text is None:
        return False
    if text.strip().lower() in ("true", "yes", "on"):
        return True
    try:
        return int(text) > 0
    except ValueError:
        return False


def settings_from(environ: Mapping[str, str]) -> dict[str, Any]:
    """Settings of ronde for the variables that are set; those that ronde's own variables give are left to them."""
    found: dict[str, Any] = {"operation_s": PATIENCE_S, "stall_s": STALL_S}
    for name, (setting, read) in _MEANING.items():
        if environ.get(name):
            value = _read(name, environ[name], read)
            if value is not None:
                found[setting] = value
    if is_true(environ.get("HOROVOD_STALL_CHECK_DISABLE")):
        found["stall_s"] = 0.0
    return {name: value for name, value in found.items() if f"RONDE_{name.upper()}" not in environ}


def warn_without_effect(environ: Mapping[str, str], logger: logging.Logger) -> None:
    """One line for each variable that is set and means nothing here."""
    for name in sorted(WITHOUT_EFFECT.keys() & environ.keys()):
        if environ[name] not in ("", "0"):
            logger.warning("%s has no effect here: %s", name, WITHOUT_EFFECT[name])


def _timeline(text: str) -> str | None:
    return None if text.upper() == DYNAMIC else os.path.expanduser(text)  # noqa: PTH111  # stays the text it was


def _shutdown_s(text: str) -> float | None:
    return float(text) or None


def _backend(text: str) -> str | None:
    if text.lower() not in ("mpi", "gloo", "ccl"):
        raise ValueError("must be mpi, gloo or ccl")
    return "mpi" if text.lower() == "mpi" else None


_MEANING: dict[str, tuple[str, Callable[[str], Any]]] = {
    "HOROVOD_FUSION_THRESHOLD": ("fusion_bytes", int),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": ("stall_s", float),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ("operation_s", _shutdown_s),
    "HOROVOD_GLOO_TIMEOUT_SECONDS": ("start_s", float),
    "HOROVOD_TIMELINE": ("timeline", _timeline),
    "HOROVOD_CPU_OPERATIONS": ("backend", _backend),
}


def _read(name: str, text: str, read: Callable[[str], Any]) -> Any:  # noqa: ANN401  # the setting's type
    try:
        return read(text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r} cannot be read: {error}") from None
