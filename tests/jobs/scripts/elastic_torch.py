"""A worker of tests/jobs/test_elastic_torch.py: trains, and kills itself where the test says."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ronde
from ronde.comm.world import current_world
from ronde.elastic import State, run
from ronde.errors import CheckpointError
from ronde.torch import Checkpoints, DistributedOptimizer, ElasticBatchSampler, broadcast_state
from ronde.training.gradients.reducer import Reducer
from tests.jobs.scripts.control import ControlSocket, until
from tests.limits import LONG_S

WORKER = int(os.environ.get("RONDE_WORKER", "-1"))


class Faults:
    """What happens to this worker: each fault has a place and a step, counted from 0, and happens once."""

    def __init__(self, faults: list[dict[str, Any]]) -> None:
        self._faults = [fault for fault in faults if fault["worker"] == WORKER]
        self.get_step: Callable[[], int] = lambda: 0

    def at(self, place: str) -> None:
        """This worker is at this place now."""
        for fault in list(self._faults):
            if fault["at"] == place and fault["step"] == self.get_step():
                self._faults.remove(fault)
                self._happen(fault)

    def _happen(self, fault: dict[str, Any]) -> None:
        what = fault.get("what", "kill")
        if what == "await change":  # until somebody wants to join
            until(lambda: current_world().change_wanted, "somebody who wants to join")
        elif what == "kill soon":  # somewhere in what comes next
            delay_s = random.Random(os.getpid()).uniform(0.0, 0.003)
            threading.Timer(delay_s, kill).start()
        elif what == "fill disk":
            fill_disk(Path(fault["folder"]))
        elif what == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            kill()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill_disk(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)


def may_die_in_backward(x: Tensor, faults: Faults) -> Tensor:
    """The tensor; in the backward pass a fault may happen."""
    function: Any = _KillingBackward
    result: Tensor = function.apply(x, faults)
    return result


class _KillingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, faults: Faults) -> Tensor:
        ctx.faults = faults
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.faults.at("backward")
        return grads[0], None


class KilledInCommit:
    """An object of the State; while it is copied a fault may happen."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.in_commit = False

    def state_dict(self) -> dict[str, int]:
        if self.in_commit:
            self.faults.at("commit")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def put_faults_into_ronde(faults: Faults) -> None:
    """Faults in the middle of a reduction, and of the transfer of state."""
    reducers: Any = Reducer
    transfers: Any = broadcast_state
    finalize, sync_tensors = reducers.finalize, transfers._sync_tensors

    def finalize_or_die(reducer: Reducer) -> None:
        faults.at("allreduce")
        finalize(reducer)

    def sync_or_die(*arguments: Any) -> None:
        faults.at("sync")
        sync_tensors(*arguments)

    reducers.finalize = finalize_or_die
    transfers._sync_tensors = sync_or_die


class Training:
    """What all models have in common. `options` come from the test."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.faults = Faults(options.get("faults", []))
        self.length: int = options.get("length", 61)
        self.num_epochs: int = options.get("epochs", 2)
        self.sampler = ElasticBatchSampler(
            self.length, global_batch=options.get("batch", 6), seed=5, shares=options.get("shares", "equal")
        )
        self.loader: DataLoader[Any] = DataLoader(
            TensorDataset(torch.arange(self.length)),
            batch_sampler=self.sampler,
            num_workers=options.get("workers", 0),
            persistent_workers=options.get("workers", 0) > 0,
        )
        self.killed_in_commit = KilledInCommit(self.faults)
        self.seen: dict[str, Any] = {}
        """What is reported at the end."""
        self.sizes: list[int] = []
        """The sizes of the rounds."""
        self.model: Any  # a module
        self.optimizer: Any
        self.others: dict[str, Any] = {"killed_in_commit": self.killed_in_commit}
        """What else is in the State."""
        self.build()
        self.state = State(sampler=self.sampler, model=self.model, optimizer=self.optimizer, **self.others)
        self.faults.get_step = lambda: self.state.steps
        self.checkpoints: Checkpoints | None = None
        if "checkpoints" in options:
            self.checkpoints = Checkpoints(
                options["checkpoints"], model=self.model, optimizer=self.optimizer, sampler=self.sampler
            )
            self.checkpoints.restore()

    def build(self) -> None:
        raise NotImplementedError

    def loss(self, samples: Tensor) -> Any:
        raise NotImplementedError

    def train(self, state: State) -> None:
        self.sizes.append(ronde.size())
        while self.sampler.epoch < self.num_epochs:
            for (samples,) in self.sampler.track(self.loader):
                self.faults.at("forward")
                self.optimizer.zero_grad()
                loss = self.loss(may_die_in_backward(self.embed(samples), self.faults))
                self.faults.at("before backward")
                loss.backward()
                self.faults.at("before step")
                self.optimizer.step()
                self.faults.at("after step")
                self.after_step()
            self.after_epoch()

    def embed(self, samples: Tensor) -> Tensor:
        raise NotImplementedError

    def after_step(self) -> None:
        every = self.options.get("commit_every", 0)
        if every and (self.state.steps + 1) % every == 0:
            self.killed_in_commit.in_commit = True
            try:
                self.state.commit()
            finally:
                self.killed_in_commit.in_commit = False
        every = self.options.get("save_every", 0)
        if every and self.checkpoints is not None and (self.sampler.consumed // 6) % every == 0:
            try:
                with mock.patch("torch.save", self.killing_save):
                    self.checkpoints.save(self.sampler.epoch * self.length + self.sampler.consumed)
            except CheckpointError as error:
                if not self.options.get("without_checkpoints"):
                    raise
                self.seen["not saved"] = str(error)

    def killing_save(self, contents: Any, file: Any) -> None:
        file.write(b"half of it")
        file.flush()
        self.faults.at("checkpoint")
        file.seek(0)
        torch.serialization.save(contents, file)

    def after_epoch(self) -> None:
        pass


class CountingModel(Training):
    """The gradient of sample i is one at i and zero elsewhere, and it is subtracted: each weight counts how often its
    sample was used."""

    def build(self) -> None:
        self.model = nn.Embedding(self.length, 1)
        with torch.no_grad():
            self.model.weight.zero_()
        self.optimizer = DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=1.0), op="sum", overlap=self.options.get("overlap")
        )

    def embed(self, samples: Tensor) -> Tensor:
        if self.options.get("slow_worker") == WORKER:
            time.sleep(self.options["slow_s"] * len(samples))
        result: Tensor = self.model(samples)
        return result

    def loss(self, samples: Tensor) -> Any:
        return -samples.sum()

    def after_epoch(self) -> None:
        weights = [parameter.flatten() for parameter in self.model.parameters()]
        counts = sorted(set(torch.cat(weights).tolist()))
        self.seen[f"counts after epoch {self.sampler.epoch}"] = counts


class TwiceCountingModel(CountingModel):
    """Two of them, each with its own optimizer, and two batches make a step."""

    def build(self) -> None:
        self.model = nn.ModuleList([nn.Embedding(self.length, 1), nn.Embedding(self.length, 1)])
        optimizers = []
        for half in self.model:
            with torch.no_grad():
                half.weight.zero_()
            plain = torch.optim.SGD(half.parameters(), lr=1.0)
            optimizers.append(DistributedOptimizer(plain, op="sum", passes=2, average_passes=False))
        self.optimizer, self.others["second"] = optimizers

    def train(self, state: State) -> None:
        self.sizes.append(ronde.size())
        optimizers = (self.optimizer, self.others["second"])
        while self.sampler.epoch < self.num_epochs:
            for number, (samples,) in enumerate(self.sampler.track(self.loader)):
                self.faults.at("forward")
                outputs = [may_die_in_backward(half(samples), self.faults) for half in self.model]
                loss: Any = -sum(output.sum() for output in outputs)
                loss.backward()
                if number % 2:
                    self.faults.at("before step")
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
            self.after_epoch()


class Perceptron(Training):
    """A model that learns; the loss over all samples is recorded in every step."""

    def build(self) -> None:
        self.model, self.inputs, self.targets = make_perceptron(self.length)
        plain = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.optimizer = DistributedOptimizer(plain, overlap=self.options.get("overlap"))

    def embed(self, samples: Tensor) -> Tensor:
        self.samples = samples
        result: Tensor = self.model(self.inputs[samples])
        return result

    def loss(self, samples: Tensor) -> Any:
        return nn.functional.mse_loss(samples, self.targets[self.samples])

    def after_step(self) -> None:
        with torch.no_grad():
            loss = nn.functional.mse_loss(self.model(self.inputs), self.targets)
        self.seen[f"{self.sampler.epoch}.{self.sampler.consumed}"] = float(loss)
        super().after_step()


def make_perceptron(length: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A model and its data, alike in every process."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 130), nn.Tanh(), nn.Linear(130, 130), nn.Tanh(), nn.Linear(130, 2)).double()
    inputs = torch.randn(length, 8, generator=generator, dtype=torch.float64)
    return model, inputs, torch.randn(length, 2, generator=generator, dtype=torch.float64)


class BatchNormalized(Training):
    """A model with all that a forward pass changes. At the end of each step it is remembered, and when training goes on
    after a loss it has to be the same."""

    def build(self) -> None:
        torch.manual_seed(2)
        self.model = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))
        self.scaler = self.others["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def train(self, state: State) -> None:
        if self.sizes:
            remembered = self.seen.pop("remembered")
            self.seen["returned"] = [remembered == self.describe(), state.steps]
        self.sizes.append(ronde.size())
        for (samples,) in self.sampler.track(self.loader):
            self.seen["remembered"] = self.describe()
            self.optimizer.zero_grad()
            output = may_die_in_backward(self.model(samples.float().reshape(-1, 1) / self.length), self.faults)
            loss: Any = self.scaler.scale(output.square().mean())
            loss.backward()
            self.faults.at("before step")
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def describe(self) -> Any:
        buffers = {name: buffer.tolist() for name, buffer in self.model.named_buffers()}
        draws = torch.get_rng_state().sum().item()
        scaler = {**self.scaler.state_dict(), "stages": len(self.scaler._per_optimizer_states)}
        return [buffers, draws, scaler, self.sampler.consumed]


MODELS = {
    "counting": CountingModel,
    "counting twice": TwiceCountingModel,
    "perceptron": Perceptron,
    "batch norm": BatchNormalized,
}


def main() -> None:
    torch.set_num_threads(1)
    with ControlSocket(LONG_S) as test:
        options = test.receive()
        ronde.init()
        training = MODELS[options["model"]](options)
        put_faults_into_ronde(training.faults)
        run(training.train, training.state)
        if training.sampler._speed_shares is not None:
            training.seen["shares"] = training.sampler._speed_shares.shares
        test.send(
            "over", worker=WORKER, rank=ronde.rank(), sizes=training.sizes, steps=training.state.steps, **training.seen
        )
        ronde.shutdown()


if __name__ == "__main__":
    main()
