"""What the environment says about rank and size, for scripts that ask before hvd.init()."""

from __future__ import annotations

import os
from collections.abc import Mapping

LOG_LEVEL_STR = ["FATAL", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE"]

_PAIRS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("RONDE_RANK", "RONDE_SIZE"),
)


def get_env_rank_and_size(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Rank and size, as the launcher has set them; (0, 1) without one."""
    environ = os.environ if environ is None else environ
    for rank_name, size_name in _PAIRS:
        rank, size = environ.get(rank_name), environ.get(size_name)
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            have, lack = (rank_name, size_name) if rank is not None else (size_name, rank_name)
            raise RuntimeError(f"{have} is set, but {lack} is not")
    return 0, 1
