"""One rank that trains. A program of its own, started by train_kits.py: `train_rank.py ROLE DIRECTORY [RANK SIZE]`.

It talks as rank.py does. What it needs of the files beside it, it loads by their paths and not as parts of ronde: the
ranks of DDP must not carry what they do not use, or it would count as their memory.
"""

from __future__ import annotations

import importlib.util
import sys
import time
import zlib
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

__all__ = ["TrainCommandHandler", "TrainingLoop", "kilobytes", "main"]

START_S = 60.0
"""How long the ranks wait for each other at the start."""
LEARNING_RATE = 1e-5
"""So small that the network hardly changes: every step costs the same, and no number runs away."""
MOMENTUM = 0.9

Network = Any
Optimizer = Any
SetupFields = dict[str, Any]
"""`codec`: what gradients are on the wire, or None. For DDP also `view` and `bucket_mb`."""


class _TrainingLibrary(Protocol):
    """A way to train on several ranks."""

    rank: int
    size: int

    def distribute(self, model: Network, optimizer: Optimizer, settings: SetupFields) -> tuple[Network, Optimizer]:
        """Make them average gradients over all ranks. Networks are the same everywhere already."""

    def close(self) -> None:
        """Leave in good order."""


class NoCommunication:
    """Ranks that do not know of each other: nothing is averaged."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def distribute(self, model: Network, optimizer: Optimizer, settings: SetupFields) -> tuple[Network, Optimizer]:
        """Nothing to do."""
        return model, optimizer

    def close(self) -> None:
        """Nothing to do."""


class _RondeTraining:
    """ronde.torch as in its guide."""

    def __init__(self) -> None:
        import ronde
        import ronde.torch

        ronde.init(start_s=START_S)
        self._ronde = ronde
        self.rank = ronde.rank()
        self.size = ronde.size()

    def distribute(self, model: Network, optimizer: Optimizer, settings: SetupFields) -> tuple[Network, Optimizer]:
        """The optimizer is wrapped."""
        named = model.named_parameters()
        wrap = self._ronde.torch.DistributedOptimizer
        return model, wrap(optimizer, named_parameters=named, codec=settings["codec"])

    def close(self) -> None:
        """Leave the round."""
        self._ronde.shutdown()


class BarrierOnly(_RondeTraining):
    """Ranks that only wait for each other before every step of the optimizer."""

    def distribute(self, model: Network, optimizer: Optimizer, settings: SetupFields) -> tuple[Network, Optimizer]:
        """No gradient travels."""
        optimizer.register_step_pre_hook(lambda *_: self._ronde.barrier())
        return model, optimizer


class _HorovodTraining:
    """A Horovod script: the compatibility package over ronde."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        hvd.init()
        self._hvd = hvd
        self.rank = hvd.rank()
        self.size = hvd.size()

    def distribute(self, model: Network, optimizer: Optimizer, settings: SetupFields) -> tuple[Network, Optimizer]:
        """The optimizer is wrapped."""
        compression = {None: self._hvd.Compression.none, "float16": self._hvd.Compression.fp16}[settings["codec"]]
        named = model.named_parameters()
        return model, self._hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)

    def close(self) -> None:
        """Leave the job."""
        self._hvd.shutdown()


class _DdpTraining:
    """PyTorch's DistributedDataParallel over gloo. Ranks meet through a file in the directory."""

    def __init__(self, directory: Path, rank: int, size: int) -> None:
        from torch import distributed

        # Public in its documentation, private to the type checker.
        store = distributed.FileStore(str(directory / "gloo"), size)  # type: ignore[attr-defined]  # PyTorch's types lack it
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=START_S)
        )
        self._distributed = distributed
        self.rank = rank
        self.size = size

    def distribute(self, model: Network, optimizer: Optimizer, settings: SetupFields) -> tuple[Network, Optimizer]:
        """The network is wrapped. With `view` it is told to do no more than ronde does: no copy, no buffers sent."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.nn.parallel import DistributedDataParallel

        view = settings["view"]
        wrapped = DistributedDataParallel(
            model,
            bucket_cap_mb=settings["bucket_mb"],
            gradient_as_bucket_view=view,
            broadcast_buffers=not view,
        )
        if settings["codec"] == "float16":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif settings["codec"] is not None:
            raise ValueError(f"DDP over gloo cannot send {settings['codec']}")
        return wrapped, optimizer

    def close(self) -> None:
        """Leave the process group."""
        self._distributed.destroy_process_group()


class TrainingLoop:
    """A network under training: always the same batch, one step after the other."""

    def __init__(
        self, model: Any, batch: int, trainer: _TrainingLibrary, settings: SetupFields
    ) -> None:  # a Model, of a file loaded by its path
        import torch

        torch.manual_seed(0)
        network = model.build().train()
        optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        self._parameters = list(network.parameters())
        # From here on ranks differ: a wrong average would show.
        torch.manual_seed(1 + trainer.rank)
        self._batch = model.feed(batch)
        self._loss = torch.nn.functional.cross_entropy
        self._network, self._optimizer = trainer.distribute(network, optimizer, settings)

    def step(self) -> int:
        """Train once; nanoseconds that backward() took, in which gradients travel."""
        x, labels = self._batch
        self._optimizer.zero_grad()
        loss: Any = self._loss(self._network(x), labels)
        start = time.perf_counter_ns()
        loss.backward()
        took_ns = time.perf_counter_ns() - start
        self._optimizer.step()
        return took_ns

    def digest(self) -> int:
        """A number that differs when any bit of the gradients does."""
        digest = 0
        for parameter in self._parameters:
            digest = zlib.crc32(parameter.grad.contiguous().numpy(), digest)
        return digest

    def weigh(self) -> int:
        """The most memory that this process holds during a step, in kilobytes: looked at whenever a gradient came."""
        most_kb = 0

        def look(_: object) -> None:
            nonlocal most_kb
            # What is shared counts for each by its part: a bucket that all ranks see is there only once.
            most_kb = max(most_kb, kilobytes(Path("/proc/self/smaps_rollup"), ("Pss_Anon", "Pss_Shmem")))

        # Gradients of a network of very many parameters look alike: a hundred looks are enough.
        some = self._parameters[:: 1 + len(self._parameters) // 100]
        hooks = [parameter.register_post_accumulate_grad_hook(look) for parameter in some]
        try:
            self.step()
        finally:
            for hook in hooks:
                hook.remove()
        look(None)
        return most_kb

    def close(self) -> None:
        """Give back what the optimizer holds of the library."""
        close = getattr(self._optimizer, "close", None)
        if close is not None:
            close()


def kilobytes(path: Path, fields: Iterable[str]) -> int:
    """The sum of some fields of a file that lists `Name: number kB`; 0 where the kernel has no such file or field."""
    if not path.exists():
        return 0
    values = dict(line.split(":", 1) for line in path.read_text().splitlines() if line.endswith(" kB"))
    return sum(int(values[field].split()[0]) for field in fields if field in values)


class TrainCommandHandler:
    """Carries out one command after the other."""

    def __init__(self, trainer: _TrainingLibrary, models: Any) -> None:  # name → Model
        self._trainer = trainer
        self._models = models
        self._training: TrainingLoop | None = None

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do what the command says."""
        if command["do"] == "prepare":
            return self._prepare(command["model"], command["batch"], command["settings"])
        assert self._training is not None, "prepare comes first"
        match command["do"]:
            case "burst":
                return _burst(self._training, command["num"])
            case "weigh":
                memory_kb = self._training.weigh()
                return {"memory_kb": memory_kb, "rss_kb": kilobytes(Path("/proc/self/status"), ("VmHWM",))}
            case other:
                raise ValueError(f"no such command: {other!r}")

    def _prepare(self, model: str, batch: int, settings: SetupFields) -> dict[str, Any]:
        self._training = TrainingLoop(self._models[model], batch, self._trainer, settings)
        self._training.step()
        return {"digest": self._training.digest()}

    def release(self) -> None:
        """Let go of the network."""
        if self._training is not None:
            self._training.close()
            self._training = None


def _burst(training: TrainingLoop, num: int) -> dict[str, Any]:
    """Nanoseconds of each of `num` steps back to back and of their backward passes, after one in which ranks meet."""
    clock = time.perf_counter_ns
    took, backward = [], []
    training.step()
    for _ in range(num):
        start = clock()
        backward.append(training.step())
        took.append(clock() - start)
    return {"took_ns": took, "backward_ns": backward}


def join(role: str, directory: Path, place: list[str]) -> _TrainingLibrary:
    """Start the library; ronde and Horovod know their place from their launcher."""
    import torch

    torch.set_num_threads(1)
    match role:
        case "ronde":
            return _RondeTraining()
        case "lockstep":
            return BarrierOnly()
        case "hvd":
            return _HorovodTraining()
        case "ddp":
            return _DdpTraining(directory, *map(int, place))
        case "apart":
            return NoCommunication(*map(int, place))
        case _:
            raise ValueError(f"no such role: {role!r}")


def beside(name: str) -> ModuleType:
    """A module of this directory, loaded by itself."""
    spec = importlib.util.spec_from_file_location(f"ronde_bench_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None, "a file of our own"
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(arguments: list[str]) -> None:
    """Join, serve, leave."""
    rank, models = beside("allreduce_rank"), beside("cases")
    rank.forget_neighbours()
    role, directory, *place = arguments
    trainer = join(role, Path(directory), place)
    rank.attend(TrainCommandHandler(trainer, models.MODELS), Path(directory), trainer.rank, trainer.size)
    trainer.close()


if __name__ == "__main__":
    main(sys.argv[1:])
