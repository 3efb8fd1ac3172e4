"""A rank that something else started (mpirun, torchrun, srun, plain python): what the settings leave open and its
surroundings tell. Used by the world's start.

Rank 0 of such a job hosts the coordinator. The key is derived from the user's own secret and the id of the launcher's
job, so ranks on one host, or with a home directory in common, agree on it without being told.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Callable, Mapping
from typing import Any

from ronde.comm.mpi.backend import mpi_settings
from ronde.errors import StartFailed
from ronde.net.addresses import candidates, resolve
from ronde.net.secret import derive_key, user_secret
from ronde.settings import Settings
from ronde.surroundings import Surroundings, config_folder, find_launcher, look_around, meeting_place

__all__ = ["complete", "settle"]


def complete(given: Mapping[str, Any]) -> Settings:
    """Settings from arguments and RONDE_* variables; the place that both leave open, from whoever started us."""
    settings = Settings.load(given)
    if settings.backend == "mpi":
        return mpi_settings(settings)
    if Settings.told(given) & {"rank", "size"}:  # half from here and half from there would fit by luck only
        return settings
    around = look_around()
    return settings if around is None or around.size == 1 else settle(settings, around)


def settle(
    settings: Settings, around: Surroundings, *, ask_mpi: Callable[[Settings], Settings] = mpi_settings
) -> Settings:
    """The place that the surroundings tell of. A coordinator or key in the settings stays."""
    settings = dataclasses.replace(settings, rank=around.rank, size=around.size)
    if not settings.coordinator and not around.host:
        return _ask(settings, around, ask_mpi)
    job = around.job
    if not job:
        # On several hosts the launcher is another process on each; but then the user has told where to meet.
        job = f"{around.launcher} {find_launcher(around.mark) if around.is_one_host else settings.coordinator}"
    key = settings.key or derive_key(user_secret(config_folder()), job)
    coordinator = settings.coordinator
    if not coordinator:
        host = around.host if around.is_one_host else _seen_from_others(around.host)
        coordinator = meeting_place(host, around.port, job)
    return dataclasses.replace(settings, coordinator=coordinator, key=key)


def _ask(settings: Settings, around: Surroundings, ask_mpi: Callable[[Settings], Settings]) -> Settings:
    try:
        return ask_mpi(settings)
    except StartFailed as error:
        raise StartFailed(
            f"{around.launcher} started {around.size} ranks on several hosts, and rank {around.rank} cannot find rank "
            f"0 ({error}). Without mpi4py, give all ranks RONDE_COORDINATOR=<host of rank 0>:<port>, and RONDE_KEY "
            "unless they have a home directory in common"
        ) from None


def _seen_from_others(host: str) -> str:
    """The host of rank 0. On that machine itself its name often stands for the loopback (in /etc/hosts), where nobody
    else can come: then an address that others can reach."""
    found, _ = resolve(host, 0)[0]
    return candidates()[0] if ipaddress.ip_address(found.partition("%")[0]).is_loopback else host
