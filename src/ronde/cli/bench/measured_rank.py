"""The program of a measured rank: `python measured_rank.py LIBRARY DIRECTORY [RANK SIZE]`. Started by `ronde bench`.

It is run by its path, without the ronde around it, and needs NumPy and the library that it measures, nothing else: an
MPI library may be installed in another environment, and what the ranks of DDP do not use must not count as their
memory. Commands come as lines of JSON through the pipe `to-RANK` in the directory, replies leave through `from-RANK`.
Between commands a rank blocks in read(), outside of the library, so it uses no core while others are measured. When the
process that started it has ended, the pipe ends, and so does the rank.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float32]

START_S = 60.0
"""How long the ranks wait for each other at the start."""
LEARNING_RATE = 1e-5
"""So small that the network hardly changes: every step costs the same, and no number overflows."""
MOMENTUM = 0.9
MAX_MEMORY_SAMPLES = 100

Network = Any
Optimizer = Any
Options = dict[str, Any]
"""`codec`: what gradients are on the wire, or None. For DDP also `view` and `bucket_mb`."""


@dataclass(frozen=True)
class PreparedStep:
    """An allreduce to measure: its arrays, one step of it, and what frees it."""

    arrays: Sequence[Array]
    run: Callable[[], object]
    close: Callable[[], object] = lambda: None


class Library:
    """A library that sums arrays or averages gradients over ranks. This one does not communicate."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def prepare(self, path: str, counts: list[int]) -> PreparedStep:
        """Get ready to sum float32 arrays of these sizes over all ranks, in place. `path` is how."""
        raise ValueError(f"no path {path!r} without communication")

    def distribute(self, network: Network, optimizer: Optimizer, options: Options) -> tuple[Network, Optimizer]:
        """Make them average gradients over all ranks. The parameters are equal on all ranks already."""
        return network, optimizer

    def close(self) -> None:
        """Leave the library in good order."""


class RondeLibrary(Library):
    """ronde through its public interface."""

    def __init__(self) -> None:
        import ronde

        ronde.init(start_s=START_S)
        self._ronde = ronde
        super().__init__(ronde.rank(), ronde.size())

    def prepare(self, path: str, counts: list[int]) -> PreparedStep:
        """`array`: the caller's memory. `bucket`, `many-25MB`: planned buckets. `many`: named operations."""
        if path in ("bucket", "many-25MB"):
            return self._plan(counts)
        arrays = make_arrays(counts)
        allreduce = self._ronde.allreduce
        if path == "array":
            (x,) = arrays
            return PreparedStep(arrays, lambda: allreduce(x, out=x))
        named = [(x, f"gradient {index}") for index, x in enumerate(arrays)]
        return PreparedStep(arrays, lambda: wait_all([allreduce(x, out=x, name=name, wait=False) for x, name in named]))

    def _plan(self, counts: list[int]) -> PreparedStep:
        plan = self._ronde.plan([self._ronde.Bucket(count, "float32", op="sum") for count in counts])
        if len(counts) == 1:
            return PreparedStep(plan.arrays, lambda: plan.run(0), plan.close)
        indices = range(len(counts))
        return PreparedStep(plan.arrays, lambda: wait_all([plan.start(index) for index in indices]), plan.close)

    def distribute(self, network: Network, optimizer: Optimizer, options: Options) -> tuple[Network, Optimizer]:
        import ronde.torch

        named = network.named_parameters()
        return network, ronde.torch.DistributedOptimizer(optimizer, named_parameters=named, codec=options["codec"])

    def close(self) -> None:
        self._ronde.shutdown()


class BarrierOnly(RondeLibrary):
    """Ranks that only wait for each other before every step of the optimizer; no gradient is sent."""

    def distribute(self, network: Network, optimizer: Optimizer, options: Options) -> tuple[Network, Optimizer]:
        optimizer.register_step_pre_hook(lambda *_: self._ronde.barrier())
        return network, optimizer


class HorovodLibrary(Library):
    """Horovod's interface, as the compatibility package has it over ronde; on tensors over NumPy's memory."""

    def __init__(self) -> None:
        import torch

        import horovod.torch as hvd

        torch.set_num_threads(1)
        hvd.init()
        self._hvd = hvd
        self._tensor = torch.from_numpy
        super().__init__(hvd.rank(), hvd.size())

    def prepare(self, path: str, counts: list[int]) -> PreparedStep:
        """`array`: one blocking call. `many`: a named asynchronous call for each, then all waited for."""
        arrays = make_arrays(counts)
        named = [(self._tensor(x), f"gradient {index}") for index, x in enumerate(arrays)]
        hvd = self._hvd
        if path == "array":
            ((tensor, name),) = named
            return PreparedStep(arrays, lambda: hvd.allreduce_(tensor, name=name, op=hvd.Sum))

        def run() -> None:
            for handle in [hvd.allreduce_async_(tensor, name=name, op=hvd.Sum) for tensor, name in named]:
                hvd.synchronize(handle)

        return PreparedStep(arrays, run)

    def distribute(self, network: Network, optimizer: Optimizer, options: Options) -> tuple[Network, Optimizer]:
        compression = {None: self._hvd.Compression.none, "float16": self._hvd.Compression.fp16}[options["codec"]]
        named = network.named_parameters()
        return network, self._hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)

    def close(self) -> None:
        self._hvd.shutdown()


class TorchLibrary(Library):
    """torch.distributed over gloo, and DistributedDataParallel. Ranks find each other through a file in the directory;
    tensors are over NumPy's memory."""

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
        super().__init__(rank, size)

    def prepare(self, path: str, counts: list[int]) -> PreparedStep:
        """`array`: one blocking call. `many`, `many-25MB`: all started, then waited for."""
        arrays = make_arrays(counts)
        tensors = [self._tensor(x) for x in arrays]
        all_reduce = self._distributed.all_reduce
        if path == "array":
            (tensor,) = tensors
            return PreparedStep(arrays, lambda: all_reduce(tensor))
        return PreparedStep(arrays, lambda: wait_all([all_reduce(tensor, async_op=True) for tensor in tensors]))

    def distribute(self, network: Network, optimizer: Optimizer, options: Options) -> tuple[Network, Optimizer]:
        """With `view`, DDP does no more than ronde does: it makes no copy of gradients, and sends no buffers."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.nn.parallel import DistributedDataParallel

        view = options["view"]
        wrapped = DistributedDataParallel(
            network,
            bucket_cap_mb=options["bucket_mb"],
            gradient_as_bucket_view=view,
            broadcast_buffers=not view,
        )
        if options["codec"] == "float16":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif options["codec"] is not None:
            raise ValueError(f"DDP over gloo cannot send {options['codec']}")
        return wrapped, optimizer

    def close(self) -> None:
        self._distributed.destroy_process_group()


class MpiLibrary(Library):
    """The MPI library of the environment, through mpi4py."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        super().__init__(self._world.Get_rank(), self._world.Get_size())

    def prepare(self, path: str, counts: list[int]) -> PreparedStep:
        """`array`: one blocking call. `many`: one blocking call each. `many-iallreduce`: all started, then Waitall."""
        arrays = make_arrays(counts)
        in_place, world = self._mpi.IN_PLACE, self._world
        if path == "array":
            (x,) = arrays
            return PreparedStep(arrays, lambda: world.Allreduce(in_place, x))
        if path == "many-iallreduce":
            wait_all = self._mpi.Request.Waitall
            return PreparedStep(arrays, lambda: wait_all([world.Iallreduce(in_place, x) for x in arrays]))

        def run() -> None:
            for x in arrays:
                world.Allreduce(in_place, x)

        return PreparedStep(arrays, run)

    def close(self) -> None:
        self._mpi.Finalize()


def make_arrays(counts: Sequence[int]) -> list[Array]:
    """NumPy's memory for every library, so that alignment and pages are the same for all."""
    return [np.zeros(count, np.float32) for count in counts]


def wait_all(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()


class TrainingLoop:
    """A network under training, always with the same batch."""

    def __init__(self, model: Any, batch: int, library: Library, options: Options) -> None:
        """`model` is a BenchmarkModel of models.py, which is imported without the ronde around it."""
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        network = model.build().train()
        optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        self._parameters = list(network.parameters())
        # From here on ranks have different data: a wrong average would show.
        torch.manual_seed(1 + library.rank)
        self._batch = model.make_batch(batch)
        self._loss = torch.nn.functional.cross_entropy
        self._network, self._optimizer = library.distribute(network, optimizer, options)

    def step(self) -> int:
        """Train one step; nanoseconds that backward() took, in which gradients are exchanged."""
        x, labels = self._batch
        self._optimizer.zero_grad()
        loss: Any = self._loss(self._network(x), labels)
        start = time.perf_counter_ns()
        loss.backward()
        took_ns = time.perf_counter_ns() - start
        self._optimizer.step()
        return took_ns

    def checksum(self) -> int:
        """Differs when any bit of the gradients does."""
        checksum = 0
        for parameter in self._parameters:
            checksum = zlib.crc32(parameter.grad.contiguous().numpy(), checksum)
        return checksum

    def peak_memory_kb(self) -> int:
        """The most memory that this process has during a step, sampled whenever a gradient is ready."""
        peak_kb = 0

        def sample(_: object) -> None:
            nonlocal peak_kb
            # Of shared memory each process counts its part: a bucket that all ranks map is there only once.
            peak_kb = max(peak_kb, sum_kilobytes(Path("/proc/self/smaps_rollup"), ("Pss_Anon", "Pss_Shmem")))

        sampled = self._parameters[:: 1 + len(self._parameters) // MAX_MEMORY_SAMPLES]
        hooks = [parameter.register_post_accumulate_grad_hook(sample) for parameter in sampled]
        try:
            self.step()
        finally:
            for hook in hooks:
                hook.remove()
        sample(None)
        return peak_kb

    def close(self) -> None:
        close = getattr(self._optimizer, "close", None)
        if close is not None:
            close()


def sum_kilobytes(path: Path, fields: Iterable[str]) -> int:
    """The sum of some fields of a file with lines `Name: number kB`; 0 where the kernel has no such file or field."""
    if not path.exists():
        return 0
    values = dict(line.split(":", 1) for line in path.read_text().splitlines() if line.endswith(" kB"))
    return sum(int(values[field].split()[0]) for field in fields if field in values)


class CommandLoop:
    """Carries out the commands that come through the pipe, with one library."""

    def __init__(self, library: Library, models: Mapping[str, Any]) -> None:
        self._library = library
        self._models = models
        self._steps: dict[str, PreparedStep] = {}
        self._training: TrainingLoop | None = None

    def run(self, directory: Path) -> None:
        """Reply to commands until `quit`, the end of the pipe, or the first error, after which a rank is unusable."""
        rank = self._library.rank
        with (
            (directory / f"from-{rank}").open("w", encoding="ascii") as replies,
            (directory / f"to-{rank}").open(encoding="ascii") as commands,
        ):

            def send(reply: dict[str, Any]) -> None:
                replies.write(json.dumps(reply) + "\n")
                replies.flush()

            try:
                send({"size": self._library.size})
                for line in commands:
                    command = json.loads(line)
                    if command["do"] == "quit":
                        break
                    try:
                        reply = self.handle(command)
                    except Exception:
                        send({"error": traceback.format_exc()})
                        break
                    send(reply)
                self.release()
            except BrokenPipeError:  # nobody is left to read the reply
                sys.exit(1)

    def handle(self, command: dict[str, Any]) -> dict[str, Any]:
        match command["do"]:
            case "prepare_allreduce":
                self._prepare_allreduce(command["path"], command["counts"] * command.get("repeat", 1))
            case "time_allreduce":
                took_ns, _ = time_steps(self._steps[command["path"]].run, command["num_steps"])
                return {"took_ns": took_ns} if self._library.rank == 0 else {}
            case "release":
                self.release()
            case "prepare_training":
                model = self._models[command["model"]]
                self._training = TrainingLoop(model, command["batch"], self._library, command["options"])
                self._training.step()
                return {"checksum": self._training.checksum()}
            case "time_training":
                assert self._training is not None, "it is prepared first"
                took_ns, backward_ns = time_steps(self._training.step, command["num_steps"])
                return {"took_ns": took_ns, "backward_ns": backward_ns}
            case "measure_memory":
                assert self._training is not None, "it is prepared first"
                peak_kb = self._training.peak_memory_kb()
                return {"memory_kb": peak_kb, "rss_kb": sum_kilobytes(Path("/proc/self/status"), ("VmHWM",))}
            case other:
                raise ValueError(f"no such command: {other!r}")
        return {}

    def _prepare_allreduce(self, path: str, counts: list[int]) -> None:
        """Prepare a step, and check that the first one computes the right sums."""
        gc.disable()
        step = self._steps[path] = self._library.prepare(path, counts)
        for x in step.arrays:
            x.fill(self._library.rank + 1)
        step.run()
        total = self._library.size * (self._library.size + 1) / 2
        for index, x in enumerate(step.arrays):
            if not (x == total).all():
                raise ArithmeticError(f"array {index} of {path} should be {total} everywhere, it is {x}")
            x.fill(0)  # zeros stay zeros however often they are summed: no infinities, no slow denormal numbers

    def release(self) -> None:
        """Free what was prepared."""
        while self._steps:
            self._steps.popitem()[1].close()
        if self._training is not None:
            self._training.close()
            self._training = None
        gc.collect()


def time_steps(step: Callable[[], Any], num_steps: int) -> tuple[list[int], list[Any]]:
    """Nanoseconds of each of these steps, back to back, and what each returned. One step before them is not timed: in
    it the ranks wait for the last of them."""
    clock = time.perf_counter_ns
    took_ns, returned = [], []
    step()
    for _ in range(num_steps):
        start = clock()
        value = step()
        took_ns.append(clock() - start)
        returned.append(value)
    return took_ns, returned


def join(name: str, directory: Path, rank_and_size: list[str]) -> Library:
    """Start the library. Those without RANK and SIZE have them from their launcher."""
    match name:
        case "ronde":
            return RondeLibrary()
        case "lockstep":
            return BarrierOnly()
        case "hvd":
            return HorovodLibrary()
        case "mpi":
            return MpiLibrary()
        case "gloo" | "ddp":
            return TorchLibrary(directory, *map(int, rank_and_size))
        case "apart":
            return Library(*map(int, rank_and_size))
        case _:
            raise ValueError(f"no such library: {name!r}")


def main(arguments: list[str]) -> None:
    # Python has put the directory of this file first on its path. Only models.py is wanted from there: the names of the
    # other modules may be those of libraries.
    models = importlib.import_module("models").MODELS
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    name, directory, *rank_and_size = arguments
    library = join(name, Path(directory), rank_and_size)
    CommandLoop(library, models).run(Path(directory))
    library.close()


if __name__ == "__main__":
    main(sys.argv[1:])
