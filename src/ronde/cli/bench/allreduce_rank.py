"""One measured rank. A program of its own, started by crew.py: `python rank.py IMPLEMENTATION DIRECTORY [RANK SIZE]`.

It needs NumPy and the library it measures, nothing else, because an MPI library lives in an environment of its own.
Commands come as lines of JSON through the pipe `to-RANK` in the directory, answers leave through `from-RANK`.
Between commands the rank is blocked in read(), outside of the library it measures: it burns no core while the others
have their turn. When whoever started it is gone, the pipe ends and so does the rank.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float32]

__all__ = ["attend", "forget_neighbours", "main"]

START_S = 60.0
"""How long the ranks wait for each other at the start."""


@dataclass(frozen=True)
class PreparedStep:
    """Something to measure: the memory it works on, one step of it, and how to let go of it."""

    arrays: Sequence[Array]
    step: Callable[[], object]
    close: Callable[[], object] = lambda: None


class _AllreduceLibrary(Protocol):
    """One library whose allreduce is measured."""

    rank: int
    size: int

    def prepare(self, path: str, counts: list[int]) -> PreparedStep:
        """Get ready to sum float32 arrays of these sizes over all ranks, in place."""

    def close(self) -> None:
        """Leave the library in good order."""


def arrays_of(counts: Sequence[int]) -> list[Array]:
    """The memory of every implementation: NumPy's, so that alignment and pages are the same for all."""
    return [np.zeros(count, np.float32) for count in counts]


def unknown(path: str, name: str) -> ValueError:
    """A path this implementation does not have."""
    return ValueError(f"{name} has no path {path!r}")


class _RondeAllreduce:
    """ronde through its public interface."""

    def __init__(self) -> None:
        import ronde

        ronde.init(start_s=START_S)
        self._ronde = ronde
        self.rank = ronde.rank()
        self.size = ronde.size()

    def prepare(self, path: str, counts: list[int]) -> PreparedStep:
        """`array`: the caller's memory. `bucket`, `many-25MB`: planned buckets. `many`: named operations."""
        if path in ("bucket", "many-25MB"):
            return self._planned(counts)
        arrays = arrays_of(counts)
        allreduce = self._ronde.allreduce
        if path == "array":
            (x,) = arrays
            return PreparedStep(arrays, lambda: allreduce(x, out=x))
        if path == "many":
            named = [(x, f"gradient {index}") for index, x in enumerate(arrays)]

            def step() -> None:
                works = [allreduce(x, out=x, name=name, wait=False) for x, name in named]
                for work in works:
                    work.wait()

            return PreparedStep(arrays, step)
        raise unknown(path, "ronde")

    def _planned(self, counts: list[int]) -> PreparedStep:
        plan = self._ronde.plan([self._ronde.Bucket(count, "float32", op="sum") for count in counts])
        if len(counts) == 1:
            return PreparedStep(plan.arrays, lambda: plan.run(0), plan.close)

        def step() -> None:
            for work in [plan.start(index) for index in range(len(counts))]:
                work.wait()

        return PreparedStep(plan.arrays, step, plan.close)

    def close(self) -> None:
        """Leave the round."""
        self._ronde.shutdown()


class _GlooAllreduce:
    """torch.distributed with gloo, on tensors over NumPy's memory. Ranks meet through a file in the directory."""

    def __init__(self, directory: Path, rank: int, size: int) -> None:
        import torch
        from torch import distributed

        torch.set_num_threads(1)
        # Public in its documentation, private to the type checker.
        store = distributed.FileStore(str(directory / "gloo"), size)  # type: ignore[attr-defined]  # PyTorch's types lack it
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=START_S)
        )
        self._tensor = torch.from_numpy
        self._distributed = distributed
        self.rank = rank
        self.size = size

    def prepare(self, path: str, counts: list[int]) -> PreparedStep:
        """`array`: one blocking call. `many`, `many-25MB`: all started, then waited for."""
        arrays = arrays_of(counts)
        tensors = [self._tensor(x) for x in arrays]
        all_reduce = self._distributed.all_reduce
        if path == "array":
            (tensor,) = tensors
            return PreparedStep(arrays, lambda: all_reduce(tensor))
        if path in ("many", "many-25MB"):

            def step() -> None:
                for work in [all_reduce(tensor, async_op=True) for tensor in tensors]:
                    work.wait()

            return PreparedStep(arrays, step)
        raise unknown(path, "gloo")

    def close(self) -> None:
        """Leave the process group."""
        self._distributed.destroy_process_group()


class _HorovodAllreduce:
    """Horovod's interface, as the compatibility package has it over ronde, on tensors over NumPy's memory."""

    def __init__(self) -> None:
        import torch

        import horovod.torch as hvd

        torch.set_num_threads(1)
        hvd.init()
        self._hvd = hvd
        self._tensor = torch.from_numpy
        self.rank = hvd.rank()
        self.size = hvd.size()

    def prepare(self, path: str, counts: list[int]) -> PreparedStep:
        """`array`: one blocking call. `many`: a named asynchronous call for each, then all waited for."""
        arrays = arrays_of(counts)
        named = [(self._tensor(x), f"gradient {index}") for index, x in enumerate(arrays)]
        hvd = self._hvd
        if path == "array":
            ((tensor, name),) = named
            return PreparedStep(arrays, lambda: hvd.allreduce_(tensor, name=name, op=hvd.Sum))
        if path == "many":

            def step() -> None:
                for handle in [hvd.allreduce_async_(tensor, name=name, op=hvd.Sum) for tensor, name in named]:
                    hvd.synchronize(handle)

            return PreparedStep(arrays, step)
        raise unknown(path, "hvd")

    def close(self) -> None:
        """Leave the job."""
        self._hvd.shutdown()


class _MpiAllreduce:
    """An MPI library through mpi4py; which one depends on the environment."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        self.rank = self._world.Get_rank()
        self.size = self._world.Get_size()

    def prepare(self, path: str, counts: list[int]) -> PreparedStep:
        """`array`: one blocking call. `many`: one blocking call each. `many-iallreduce`: all started, then Waitall."""
        arrays = arrays_of(counts)
        in_place, world = self._mpi.IN_PLACE, self._world
        if path == "array":
            (x,) = arrays
            return PreparedStep(arrays, lambda: world.Allreduce(in_place, x))
        if path == "many":

            def step() -> None:
                for x in arrays:
                    world.Allreduce(in_place, x)

            return PreparedStep(arrays, step)
        if path == "many-iallreduce":
            wait_all = self._mpi.Request.Waitall
            return PreparedStep(arrays, lambda: wait_all([world.Iallreduce(in_place, x) for x in arrays]))
        raise unknown(path, "mpi")

    def close(self) -> None:
        """Leave MPI."""
        self._mpi.Finalize()


class AllreduceCommandHandler:
    """Carries out one command after the other."""

    def __init__(self, implementation: _AllreduceLibrary) -> None:
        self._implementation = implementation
        self._prepared: dict[str, PreparedStep] = {}

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do what the command says."""
        match command["do"]:
            case "prepare":
                self._prepare(command["path"], command["counts"] * command.get("repeat", 1))
            case "burst":
                return self._burst(command["path"], command["num"])
            case "release":
                self.release()
            case other:
                raise ValueError(f"no such command: {other!r}")
        return {}

    def _prepare(self, path: str, counts: list[int]) -> None:
        prepared = self._prepared[path] = self._implementation.prepare(path, counts)
        # A number that is fast but wrong is worth nothing: the first step is checked.
        for x in prepared.arrays:
            x.fill(self._implementation.rank + 1)
        prepared.step()
        total = self._implementation.size * (self._implementation.size + 1) / 2
        for index, x in enumerate(prepared.arrays):
            if not (x == total).all():
                raise ArithmeticError(f"array {index} of {path} should be {total} everywhere, it is {x}")
            # Zeros stay zeros however often they are summed: no infinities, no slow denormal numbers.
            x.fill(0)

    def _burst(self, path: str, num: int) -> dict[str, Any]:
        """Nanoseconds of each of `num` steps back to back, after one untimed step in which the ranks meet."""
        step = self._prepared[path].step
        clock = time.perf_counter_ns
        took = []
        step()
        for _ in range(num):
            start = clock()
            step()
            took.append(clock() - start)
        return {"took_ns": took} if self._implementation.rank == 0 else {}

    def release(self) -> None:
        """Let go of all memory."""
        while self._prepared:
            self._prepared.popitem()[1].close()
        gc.collect()


class CommandHandler(Protocol):
    """Carries out commands."""

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do what the command says."""

    def release(self) -> None:
        """Let go of all memory."""


def serve(desk: CommandHandler, commands: IO[str], answers: IO[str]) -> None:
    """Answer until told to quit, until the pipe ends, or until something failed: a failed rank is of no more use."""
    for line in commands:
        command = json.loads(line)
        if command["do"] == "quit":
            break
        try:
            answer = desk.answer(command)
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if "error" in answer:
            break


def join(name: str, directory: Path, place: list[str]) -> _AllreduceLibrary:
    """Start the library; all but gloo know their place from their launcher."""
    if name == "ronde":
        return _RondeAllreduce()
    if name == "mpi":
        return _MpiAllreduce()
    if name == "hvd":
        return _HorovodAllreduce()
    if name == "gloo":
        return _GlooAllreduce(directory, *map(int, place))
    raise ValueError(f"no such implementation: {name!r}")


def attend(desk: CommandHandler, directory: Path, rank: int, size: int) -> None:
    """Say who is here, and answer commands until the end."""
    with (
        (directory / f"from-{rank}").open("w", encoding="ascii") as answers,
        (directory / f"to-{rank}").open(encoding="ascii") as commands,
    ):
        try:
            answers.write(json.dumps({"size": size}) + "\n")
            answers.flush()
            serve(desk, commands, answers)
            desk.release()
        except BrokenPipeError:  # nobody is left to hear the answer
            sys.exit(1)


def forget_neighbours() -> None:
    """Started by its path: the modules beside this one must not be taken for top-level ones."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]


def main(arguments: list[str]) -> None:
    """Join, serve, leave."""
    forget_neighbours()
    name, directory, *place = arguments
    implementation = join(name, Path(directory), place)
    gc.disable()
    attend(AllreduceCommandHandler(implementation), Path(directory), implementation.rank, implementation.size)
    implementation.close()


if __name__ == "__main__":
    main(sys.argv[1:])
