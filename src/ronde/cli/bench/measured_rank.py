"""The program of a measured rank: `python measured_rank.py LIBRARY [RANK SIZE] DIRECTORY`. Started by `ronde bench`.

LIBRARY is what the rank measures, such as `ronde` or `mpi`. What trains with another framework than PyTorch is told so:
`ronde.tensorflow`, `apart.keras`.

It is run by its path, without the ronde around it, and needs NumPy and the library that it measures, nothing else: an
MPI library may be installed in another environment, and what the ranks of DDP do not use must not count as their
memory. Commands come as lines of JSON through the pipe `to-RANK` in the directory, replies leave through `from-RANK`.
Between commands a rank blocks in read(), outside of the library, so it uses no core while others are measured. When the
process that started it has ended, the pipe ends, and so does the rank.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float32]
    PreparedStep = tuple[Sequence[Array], Callable[[], object], Callable[[], object] | None]
    """The arrays of an allreduce, one step of it, and what frees it."""

START_S = 60.0
"""How long the ranks wait for each other at the start."""
LEARNING_RATE = 1e-5
"""So small that the network hardly changes: every step costs the same, and no number overflows."""
MOMENTUM = 0.9
MAX_MEMORY_SAMPLES = 100
MEMORY_SAMPLE_S = 0.005
"""How often a thread looks at the memory during a step."""
FRAMEWORK_TRAININGS = {
    "tensorflow": ("tensorflow_training", "TensorFlowTraining"),
    "keras": ("tensorflow_training", "TensorFlowTraining"),
    "jax": ("jax_training", "JaxTraining"),
    "mxnet": ("mxnet_training", "GluonTraining"),
}
"""By framework other than PyTorch, the module beside this one that trains with it, and its class."""


@dataclass
class Library:
    """A library that sums arrays or averages gradients over ranks. As it is, it does not communicate."""

    rank: int
    size: int
    prepare: Callable[[str, list[Array]], PreparedStep] | None = None
    """Gets ready to sum these arrays, or others of the same sizes, over all ranks, in place. A path says how."""
    distribute: Callable[..., tuple[Any, Any]] = lambda network, optimizer, **options: (network, optimizer)
    """Makes a network and its optimizer average gradients over all ranks. Their parameters are equal on all ranks
    already. Options: `codec` is what gradients are on the wire, or None; for DDP also `view` and `bucket_mb`."""
    start_training: Callable[..., Any] | None = None
    """Of another framework than PyTorch: makes what TrainingLoop is for PyTorch, of a model, a batch and options."""
    close: Callable[[], object] = lambda: None


def join_ronde() -> Library:
    """ronde through its public interface."""
    import ronde

    def prepare(path: str, arrays: list[Array]) -> PreparedStep:
        """`array`, `named`: the caller's memory. `bucket`, `many-25MB`: planned buckets. `many`: named operations."""
        if path in ("bucket", "many-25MB"):
            plan = ronde.plan([ronde.Bucket(x.size, "float32", op="sum") for x in arrays])
            if path == "bucket":
                return plan.arrays, lambda: plan.run(0), plan.close
            return plan.arrays, lambda: wait_all([plan.start(index) for index in range(len(arrays))]), plan.close
        allreduce = ronde.allreduce
        if path == "array":
            (x,) = arrays
            return arrays, lambda: allreduce(x, out=x), None
        if path == "named":
            (x,) = arrays
            return arrays, lambda: allreduce(x, out=x, name="gradient"), None
        named = [(x, f"gradient {index}") for index, x in enumerate(arrays)]
        return arrays, lambda: wait_all([allreduce(x, out=x, name=name, wait=False) for x, name in named]), None

    def distribute(network: Any, optimizer: Any, codec: str | None, **_: Any) -> tuple[Any, Any]:
        import ronde.torch

        named = network.named_parameters()
        return network, ronde.torch.DistributedOptimizer(optimizer, named_parameters=named, codec=codec)

    ronde.init(start_s=START_S)
    return Library(ronde.rank(), ronde.size(), prepare, distribute, close=ronde.shutdown)


def join_lockstep() -> Library:
    """Ranks that only wait for each other before every step of the optimizer; no gradient is sent."""
    import ronde

    def distribute(network: Any, optimizer: Any, **_: Any) -> tuple[Any, Any]:
        optimizer.register_step_pre_hook(lambda *_: ronde.barrier())
        return network, optimizer

    ronde.init(start_s=START_S)
    return Library(ronde.rank(), ronde.size(), None, distribute, close=ronde.shutdown)


def join_horovod() -> Library:
    """Horovod's interface, as the compatibility package has it over ronde; on tensors over NumPy's memory."""
    import torch

    import horovod.torch as hvd

    def prepare(path: str, arrays: list[Array]) -> PreparedStep:
        """`array`: one blocking call. `many`: a named asynchronous call for each, then all waited for."""
        named = [(torch.from_numpy(x), f"gradient {index}") for index, x in enumerate(arrays)]
        if path == "array":
            ((tensor, name),) = named
            return arrays, lambda: hvd.allreduce_(tensor, name=name, op=hvd.Sum), None

        def run() -> None:
            for handle in [hvd.allreduce_async_(tensor, name=name, op=hvd.Sum) for tensor, name in named]:
                hvd.synchronize(handle)

        return arrays, run, None

    def distribute(network: Any, optimizer: Any, codec: str | None, **_: Any) -> tuple[Any, Any]:
        compression = hvd.Compression.none if codec is None else hvd.Compression.fp16
        named = network.named_parameters()
        return network, hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)

    torch.set_num_threads(1)
    hvd.init()
    return Library(hvd.rank(), hvd.size(), prepare, distribute, close=hvd.shutdown)


def join_torch(rank: int, size: int, directory: Path) -> Library:
    """torch.distributed over gloo, and DistributedDataParallel. Ranks find each other through a file in the directory;
    tensors are over NumPy's memory."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    def prepare(path: str, arrays: list[Array]) -> PreparedStep:
        """`array`: one blocking call. `many`, `many-25MB`: all started, then waited for."""
        tensors = [torch.from_numpy(x) for x in arrays]
        all_reduce = distributed.all_reduce
        if path == "array":
            (tensor,) = tensors
            return arrays, lambda: all_reduce(tensor), None
        return arrays, lambda: wait_all([all_reduce(tensor, async_op=True) for tensor in tensors]), None

    def distribute(
        network: Any, optimizer: Any, codec: str | None, view: bool, bucket_mb: int | None
    ) -> tuple[Any, Any]:
        """With `view`, DDP does no more than ronde does: it makes no copy of gradients, and sends no buffers."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        wrapped = DistributedDataParallel(
            network, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=view, broadcast_buffers=not view
        )
        if codec is not None:  # float16: there is no other over gloo
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return wrapped, optimizer

    torch.set_num_threads(1)
    # Public in its documentation, private to the type checker.
    store = distributed.FileStore(str(directory / "gloo"), size)  # type: ignore[attr-defined]  # PyTorch's types lack it
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=START_S))
    return Library(rank, size, prepare, distribute, close=distributed.destroy_process_group)


def join_mpi() -> Library:
    """The MPI library of the environment, through mpi4py."""
    from mpi4py import MPI

    world, in_place = MPI.COMM_WORLD, MPI.IN_PLACE

    def prepare(path: str, arrays: list[Array]) -> PreparedStep:
        """`array`: one blocking call. `many`: one blocking call each. `many-iallreduce`: all started, then Waitall."""
        if path == "array":
            (x,) = arrays
            return arrays, lambda: world.Allreduce(in_place, x), None
        if path == "many-iallreduce":
            wait_all = MPI.Request.Waitall
            return arrays, lambda: wait_all([world.Iallreduce(in_place, x) for x in arrays]), None

        def run() -> None:
            for x in arrays:
                world.Allreduce(in_place, x)

        return arrays, run, None

    return Library(world.Get_rank(), world.Get_size(), prepare, close=MPI.Finalize)


def join_framework(name: str, framework: str, rank_and_size: Sequence[str]) -> Library:
    """A library for TensorFlow, Keras, JAX or MXNet. Rank and size are of one that does not know them itself."""
    module, class_name = FRAMEWORK_TRAININGS[framework]
    training = importlib.import_module(module)
    library = training.join(name, framework, *(map(int, rank_and_size) if rank_and_size else (0, 1)))

    def start_training(model: Any, batch: int, options: dict[str, Any]) -> Any:
        return getattr(training, class_name)(model, batch, library, **options)

    return Library(library.rank, library.size, start_training=start_training, close=library.close)


def wait_all(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()


class TrainingLoop:
    """A network of PyTorch under training, always with the same batch."""

    def __init__(self, model: Any, batch: int, library: Library, options: dict[str, Any]) -> None:
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
        self._network, self._optimizer = library.distribute(network, optimizer, **options)
        self._backward_ns: list[int] = []
        """How long backward() took, in which gradients are exchanged, in each step so far."""

    def step(self) -> None:
        x, labels = self._batch
        self._optimizer.zero_grad()
        loss: Any = self._loss(self._network(x), labels)
        start = time.perf_counter_ns()
        loss.backward()
        self._backward_ns.append(time.perf_counter_ns() - start)
        self._optimizer.step()

    def time_steps(self, num_steps: int) -> dict[str, list[int]]:
        """Nanoseconds of so many steps, after one that is not timed, and of the calls of backward() in them; and the
        processor time of a step."""
        start_ns = time.process_time_ns()
        took_ns = time_steps(self.step, num_steps)
        cpu_ns = (time.process_time_ns() - start_ns) // (1 + num_steps)
        return {"took_ns": took_ns, "backward_ns": self._backward_ns[-num_steps:], "cpu_ns": [cpu_ns]}

    def checksum(self) -> int:
        """Differs when any bit of the gradients does."""
        gradients = (parameter.grad.contiguous().numpy() for parameter in self._parameters)
        return functools.reduce(lambda checksum, gradient: zlib.crc32(gradient, checksum), gradients, 0)

    def peak_memory_kb(self, sample: Callable[[], int]) -> int:
        """The most memory that this process has during a step, as `sample` tells it whenever a gradient is ready."""
        samples_kb: list[int] = []
        sampled = self._parameters[:: 1 + len(self._parameters) // MAX_MEMORY_SAMPLES]
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _: samples_kb.append(sample())) for parameter in sampled
        ]
        self.step()
        for hook in hooks:
            hook.remove()
        return max(*samples_kb, sample())

    def close(self) -> None:
        if hasattr(self._optimizer, "close"):
            self._optimizer.close()


def sample_memory_kb() -> int:
    """The memory of this process without its files. Of shared memory each process counts its part: a bucket that all
    ranks map is there only once."""
    return sum_kilobytes("/proc/self/smaps_rollup", "Pss_Anon", "Pss_Shmem")


def watch_memory_kb(step: Callable[[], object]) -> int:
    """The most memory that this process has during a step, as a thread sees it from time to time."""
    samples_kb, has_ended = [sample_memory_kb()], threading.Event()

    def watch() -> None:
        while not has_ended.wait(MEMORY_SAMPLE_S):
            samples_kb.append(sample_memory_kb())

    watcher = threading.Thread(target=watch, name="memory")
    watcher.start()
    try:
        step()
    finally:
        has_ended.set()
        watcher.join()
    return max(samples_kb)


def sum_kilobytes(path: str, *fields: str) -> int:
    """The sum of some fields of a file with lines `Name: number kB`; 0 where the kernel has no such file or field."""
    if not Path(path).exists():
        return 0
    values = dict(line.split(":", 1) for line in Path(path).read_text().splitlines() if line.endswith(" kB"))
    return sum(int(values[field].split()[0]) for field in fields if field in values)


def open_pipe(path: Path, flags: int) -> TextIO:
    """Open a pipe without waiting for the other end: it is there already, unless its process has ended."""
    fd = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(fd, True)
    return os.fdopen(fd, "w" if flags == os.O_WRONLY else "r", buffering=1, encoding="ascii")


class CommandLoop:
    """Carries out the commands that come through the pipe, with one library."""

    def __init__(self, library: Library, models: Mapping[str, Any]) -> None:
        self._library = library
        self._models = models
        self._steps: dict[str, Callable[[], object]] = {}
        self._closes: list[Callable[[], object]] = []
        self._training: Any = None
        """A TrainingLoop, or what start_training() of the library has made."""

    def run(self, directory: Path) -> None:
        """Reply to commands until `quit`, the end of the pipe, or the first error, after which a rank is unusable."""
        with (
            open_pipe(directory / f"from-{self._library.rank}", os.O_WRONLY) as replies,
            open_pipe(directory / f"to-{self._library.rank}", os.O_RDONLY) as commands,
        ):
            try:
                replies.write(json.dumps({"size": self._library.size}) + "\n")
                for line in commands:
                    command = json.loads(line)
                    if command["do"] == "quit":
                        break
                    try:
                        reply = self.handle(**command)
                    except Exception:
                        reply = {"error": traceback.format_exc()}
                    replies.write(json.dumps(reply) + "\n")
                    if "error" in reply:
                        break
                self.release()
            except BrokenPipeError:  # nobody is left to read the reply
                sys.exit(1)

    def handle(self, do: str, work: str = "", **arguments: Any) -> dict[str, Any]:
        match do:
            case "prepare_allreduce":
                self._prepare_allreduce(work, **arguments)
            case "prepare_training":
                model = self._models[work]
                start = self._library.start_training or functools.partial(TrainingLoop, library=self._library)
                self._training = start(model, **arguments)
                self._closes.append(self._training.close)
                self._training.step()
                return {"checksum": self._training.checksum()}
            case "time":
                if self._training is not None:
                    return dict(self._training.time_steps(**arguments))
                return {"took_ns": time_steps(self._steps[work], **arguments)}
            case "measure_memory":
                assert self._training is not None, "it is prepared first"
                if isinstance(self._training, TrainingLoop):
                    peak_kb = self._training.peak_memory_kb(sample_memory_kb)
                else:
                    peak_kb = watch_memory_kb(self._training.step)
                return {"memory_kb": peak_kb, "rss_kb": sum_kilobytes("/proc/self/status", "VmHWM")}
            case "release":
                self.release()
        return {}

    def _prepare_allreduce(self, path: str, counts: list[int], repeat: int) -> None:
        """Prepare a step, and check that the first one computes the right sums."""
        gc.disable()
        # NumPy's memory for every library, so that alignment and pages are the same for all.
        assert self._library.prepare is not None
        arrays, step, close = self._library.prepare(path, [np.zeros(num, np.float32) for num in counts * repeat])
        self._steps[path] = step
        if close is not None:
            self._closes.append(close)
        for x in arrays:
            x.fill(self._library.rank + 1)
        step()
        total = self._library.size * (self._library.size + 1) / 2
        for index, x in enumerate(arrays):
            if not (x == total).all():
                raise ArithmeticError(f"array {index} of {path} should be {total} everywhere, it is {x}")
            x.fill(0)  # zeros stay zeros however often they are summed: no infinities, no slow denormal numbers

    def release(self) -> None:
        """Free what was prepared."""
        self._steps.clear()
        self._training = None
        while self._closes:
            self._closes.pop()()
        gc.collect()


def time_steps(step: Callable[[], object], num_steps: int) -> list[int]:
    """Nanoseconds of each of these steps, back to back. One step before them is not timed: in it the ranks wait for the
    last of them."""
    clock = time.perf_counter_ns
    took_ns = []
    step()
    for _ in range(num_steps):
        start = clock()
        step()
        took_ns.append(clock() - start)
    return took_ns


def main(name: str, *rank_and_size: str, directory: Path) -> None:
    # Python has put the directory of this file first on its path. Only these are wanted from there: the names of the
    # other modules may be those of libraries.
    models = importlib.import_module("models").MODELS
    name, _, framework = name.partition(".")
    if framework:
        importlib.import_module(FRAMEWORK_TRAININGS[framework][0])
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    if framework:
        library = join_framework(name, framework, rank_and_size)
    elif name in ("gloo", "ddp", "apart"):
        rank, size = map(int, rank_and_size)
        library = Library(rank, size) if name == "apart" else join_torch(rank, size, directory)
    else:  # rank and size come from the launcher
        join = {"ronde": join_ronde, "lockstep": join_lockstep, "hvd": join_horovod, "mpi": join_mpi}
        library = join[name]()
    CommandLoop(library, models).run(directory)
    library.close()


if __name__ == "__main__":
    main(*sys.argv[1:-1], directory=Path(sys.argv[-1]))
