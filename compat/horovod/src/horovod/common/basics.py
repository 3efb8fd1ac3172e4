"""HorovodBasics: init(), rank(), size() and what else needs no framework. Each framework module has one."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import ronde
from horovod.common import util
from horovod.common.exceptions import translate_errors
from horovod.common.process_sets import ProcessSet, global_process_set, init_process_sets, process_set_table
from horovod.common.variables import is_true, set_log_level, settings_from, timeline_from, warn_without_effect
from ronde.comm.world import current_world, rejoin
from ronde.errors import JobFinished, StateLost
from ronde.observe.stacks import treat_as_library
from ronde.observe.timeline import TraceStyle

logger = logging.getLogger("horovod")


class HorovodBasics:
    """The part of Horovod that knows no framework."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5

    # What the functions on numbers of process sets returned; scripts may compare with them.
    HOROVOD_PROCESS_SET_ERROR_INIT = -1
    HOROVOD_PROCESS_SET_ERROR_DYNAMIC = -2
    HOROVOD_PROCESS_SET_ERROR_UNKNOWN_SET = -3
    HOROVOD_PROCESS_SET_ERROR_FOREIGN_SET = -4
    HOROVOD_PROCESS_SET_ERROR_SHUTDOWN = -5
    HOROVOD_PROCESS_SET_ERROR_EXISTING_SET = -6

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        """The arguments, the place of Horovod's native library, are not used."""

    # --- beginning and end -----------------------------------------------------------------------------------------

    def init(self, comm: Any = None, process_sets: str | list[ProcessSet] | None = None) -> None:
        """Join the job. `process_sets` is a list of sets to begin with, or "dynamic" to allow them later. If the others
        have finished an elastic job meanwhile, this process ends.

        `comm` may be an mpi4py communicator of all ranks; a list of ranks has no effect, as it had none with Gloo.
        """
        if isinstance(process_sets, str):
            if process_sets.lower() != "dynamic":
                raise ValueError(f'process_sets must be a list of ProcessSet, or "dynamic", got {process_sets!r}')
            os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
            process_sets = None
        given = list(process_sets or ())
        communicator = _communicator(comm)
        if communicator is None and any(process_set.mpi_comm is not None for process_set in given):
            raise NotImplementedError("a process set made of a communicator needs hvd.init(comm=<a communicator>)")
        treat_as_library(Path(__file__).parents[1])
        fresh = not ronde.is_initialized()
        if fresh:
            self._start()
        global_process_set.mpi_comm = communicator
        with translate_errors():
            init_process_sets(given, fresh=fresh)

    def _start(self) -> None:
        if os.environ.get("HOROVOD_LOG_LEVEL"):
            set_log_level(os.environ["HOROVOD_LOG_LEVEL"], hide_time=is_true(os.environ.get("HOROVOD_LOG_HIDE_TIME")))
        try:
            ronde.init(**settings_from(os.environ))
        except JobFinished:  # an elastic one, while this process was being started
            raise SystemExit(0) from None
        except ronde.RondeError as error:
            raise ValueError(f"Horovod could not start: {error}") from error
        process_set_table.start_round(dynamic=is_true(os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS")))
        if ronde.rank() == 0:
            warn_without_effect(os.environ, logger)
            path = timeline_from(os.environ)
            if path is not None:
                self.start_timeline(path, is_true(os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES")))

    def shutdown(self) -> None:
        """Leave the job. Without one it does nothing; hvd.init() may begin another."""
        process_set_table.clear()
        ronde.shutdown()

    def rejoin(self) -> None:
        """Leave the round and join the next one of an elastic job. Of the process sets only the global one is left.
        RuntimeError if this process cannot be in the next round, and SystemExit if the others have finished the job."""
        process_set_table.clear()
        try:
            rejoin()
        except (JobFinished, StateLost):  # after the latter another process is started in the place of this one
            raise SystemExit(0) from None
        except ronde.RondeError as error:
            raise RuntimeError(f"Horovod cannot go on: {error}") from error
        process_set_table.start_round(dynamic=process_set_table.dynamic)

    is_initialized = staticmethod(ronde.is_initialized)

    # --- ranks and sizes: ValueError before init() -----------------------------------------------------------------

    # Methods and no wrapped functions: scripts pickle hvd.rank.
    @translate_errors()
    def size(self) -> int:
        return ronde.size()

    @translate_errors()
    def local_size(self) -> int:
        return ronde.local_size()

    @translate_errors()
    def cross_size(self) -> int:
        return ronde.cross_size()

    @translate_errors()
    def rank(self) -> int:
        return ronde.rank()

    @translate_errors()
    def local_rank(self) -> int:
        return ronde.local_rank()

    @translate_errors()
    def cross_rank(self) -> int:
        return ronde.cross_rank()

    def is_master(self) -> bool:
        """Whether this is rank 0, the one that prints and saves."""
        return self.rank() == 0

    @translate_errors()
    def is_homogeneous(self) -> bool:
        """Whether every host has the same number of processes."""
        hosts = current_world("is_homogeneous()").topology.host_indices
        return len({hosts.count(host) for host in hosts}) == 1

    # --- timeline --------------------------------------------------------------------------------------------------

    @translate_errors()
    def start_timeline(self, file_path: str, mark_cycles: bool = False) -> None:
        """Write a timeline of all processes from now on. Rank 0's call counts; the others return at once.

        There are no cycles: mark_cycles marks when negotiated operations start.
        """
        if self.rank() == 0:
            style = TraceStyle(horovod=True, batch_markers=mark_cycles)
            current_world("start_timeline()").start_timeline(file_path, style)

    @translate_errors()
    def stop_timeline(self) -> None:
        """End the timeline; its file is complete then. Without one it does nothing."""
        if self.rank() == 0:
            ronde.stop_timeline()

    # --- what is available -----------------------------------------------------------------------------------------

    def mpi_threads_supported(self) -> bool:
        """Whether MPI may be called from several threads."""
        if not self.mpi_enabled():
            raise ValueError("MPI is not in use; HOROVOD_CPU_OPERATIONS=mpi sends operations through it")
        return True

    def mpi_enabled(self) -> bool:
        """Whether operations go through MPI."""
        return ronde.is_initialized() and current_world("mpi_enabled()").settings.backend == "mpi"

    def mpi_built(self) -> bool:
        """Whether operations could go through MPI."""
        return self.mpi_enabled() or util.mpi_built()

    def gloo_enabled(self) -> bool:
        """Whether operations go through ronde's own data plane, which replaces Gloo."""
        return ronde.is_initialized() and not self.mpi_enabled()

    gloo_built = staticmethod(util.gloo_built)
    nccl_built = staticmethod(util.nccl_built)
    ddl_built = staticmethod(util.ddl_built)
    ccl_built = staticmethod(util.ccl_built)

    def cuda_built(self) -> bool:
        """CUDA in the data plane: not yet."""
        return False

    def rocm_built(self) -> bool:
        """ROCm in the data plane: not yet."""
        return False

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """All process sets, as some scripts and tests look at them."""
        return process_set_table.ranks_by_id()


def _communicator(comm: Any) -> Any:  # mpi4py's, if it is one
    if comm is None:
        return None
    if isinstance(comm, list | tuple):
        logger.warning("hvd.init(comm=%s): a list of ranks has no effect; use process sets", list(comm))
        return None
    if not hasattr(comm, "Get_size"):
        raise ValueError(f"comm must be an mpi4py communicator or a list of ranks, got {type(comm).__name__}")
    return comm
