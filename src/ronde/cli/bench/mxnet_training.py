"""Training with gluon of MXNet in a measured rank: networks, the training loop, and what averages its gradients.

measured_rank.py loads this file by its path, as it does with tensorflow_training.py. The peer is MXNet's own kvstore
`dist_sync`, whose servers keep the parameters and update them: its ranks are started with `ronde run --dmlc`, and in
its scheduler and servers `import mxnet` does not return.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LEARNING_RATE = 1e-5
"""So small that the network hardly changes: every step costs the same, and no number overflows."""
MOMENTUM = 0.9
START_S = 60.0
"""How long the ranks wait for each other at the start."""
VECTOR_SIZE = 1 << 20


def mlp() -> Any:
    """784-512-512-10: a step takes milliseconds, so every delay is visible."""
    return _dense(784, 512, 512, 10)


def digits() -> Any:
    """64-256-10, as in examples/mxnet/digits.py."""
    return _dense(64, 256, 10)


def _dense(*sizes: int) -> Any:
    from mxnet import gluon

    net = gluon.nn.HybridSequential()
    for num_in, num_out in itertools.pairwise(sizes[:-1]):
        net.add(gluon.nn.Dense(num_out, activation="relu", in_units=num_in))
    net.add(gluon.nn.Dense(sizes[-1], in_units=sizes[-2]))
    return net


def vector() -> Any:
    """One parameter of 4 MB and next to no arithmetic: what is left is to send it."""
    from mxnet import gluon

    class VectorScale(gluon.nn.HybridBlock):  # type: ignore[misc]  # MXNet has no types
        def __init__(self) -> None:
            super().__init__()
            with self.name_scope():
                self.weight = self.params.get("weight", shape=(1, VECTOR_SIZE), init="ones")

        def hybrid_forward(self, F: Any, x: Any, weight: Any) -> Any:  # gluon gives it by this name
            return F.broadcast_mul(x, F.slice_axis(weight, axis=1, begin=0, end=16))

    return VectorScale()


NETWORKS: dict[str, tuple[Callable[[], Any], tuple[int, ...], int]] = {
    "mlp": (mlp, (784,), 10),
    "digits": (digits, (64,), 10),
    "vector": (vector, (16,), 16),
}
"""By the names of models.py: the network, the shape of a sample, and the number of classes."""


@dataclass
class TrainerLibrary:
    """What averages the gradients of a training loop over ranks. As it is, nothing does."""

    rank: int
    size: int
    make_trainer: Callable[..., Any]
    """Returns the trainer of a network. `codec` is what gradients are on the wire, or None."""
    num_batches: int = 1
    """By how many batches the trainer divides the sum of gradients that it makes."""
    before_step: Callable[[], object] = field(default=lambda: None)
    close: Callable[[], object] = field(default=lambda: None)


def join(name: str, framework: str, rank: int, size: int) -> TrainerLibrary:
    """Join the ranks of a library. Rank and size are of one that does not know them itself."""
    import mxnet as mx

    def make_plain_trainer(network: Any, codec: str | None) -> Any:
        return mx.gluon.Trainer(network.collect_params(), _make_optimizer(), kvstore=None)

    if name == "apart":
        return TrainerLibrary(rank, size, make_plain_trainer)
    if name == "kvstore":
        return _join_kvstore()
    if name == "hvd":
        return _join_horovod()
    import ronde

    ronde.init(start_s=START_S)
    joined = TrainerLibrary(ronde.rank(), ronde.size(), make_plain_trainer, close=ronde.shutdown)
    if name == "lockstep":
        joined.before_step = _wait_for_all
    else:
        joined.make_trainer = _make_distributed_trainer
    return joined


def _make_optimizer() -> Any:
    import mxnet as mx

    return mx.optimizer.create("sgd", learning_rate=LEARNING_RATE, momentum=MOMENTUM)


def _make_distributed_trainer(network: Any, codec: str | None) -> Any:
    import ronde.mxnet

    compression = None if codec is None else "fp16"
    return ronde.mxnet.DistributedTrainer(network.collect_params(), _make_optimizer(), compression=compression)


def _wait_for_all() -> None:
    """Wait for the backward pass, and then for those of all ranks, in an allreduce of one number."""
    import mxnet as mx

    import ronde.mxnet

    mx.nd.waitall()
    ronde.mxnet.allreduce(mx.nd.zeros((1,)))


def _join_kvstore() -> TrainerLibrary:
    """MXNet's own `dist_sync`. It finds the others through DMLC_* variables."""
    import mxnet as mx

    kvstore = mx.kv.create("dist_sync")

    def make_trainer(network: Any, codec: str | None) -> Any:
        return mx.gluon.Trainer(network.collect_params(), _make_optimizer(), kvstore=kvstore)

    return TrainerLibrary(kvstore.rank, kvstore.num_workers, make_trainer, kvstore.num_workers)


def _join_horovod() -> TrainerLibrary:
    """Horovod's interface, as the compatibility package has it over ronde."""
    hvd: Any = importlib.import_module("horovod.mxnet")
    hvd.init()

    def make_trainer(network: Any, codec: str | None) -> Any:
        compression = hvd.Compression.none if codec is None else hvd.Compression.fp16
        return hvd.DistributedTrainer(network.collect_params(), _make_optimizer(), compression=compression)

    return TrainerLibrary(hvd.rank(), hvd.size(), make_trainer, close=hvd.shutdown)


class GluonTraining:
    """A network under training, always with the same batch."""

    def __init__(self, model: Any, batch: int, library: TrainerLibrary, *, codec: str | None, loop: str) -> None:
        """`model` is a BenchmarkModel of models.py."""
        import mxnet as mx
        import numpy as np

        make_network, shape, num_classes = NETWORKS[model.name]
        mx.random.seed(0)
        self._network = make_network()
        self._network.initialize(mx.init.Xavier())
        self._network.hybridize()
        self._library = library
        self._trainer = library.make_trainer(self._network, codec)
        self._loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
        # From here on ranks have different data: a wrong average would show.
        random = np.random.default_rng(1 + library.rank)
        self._x = mx.nd.array(random.standard_normal((batch, *shape), np.float32))
        self._labels = mx.nd.array(random.integers(num_classes, size=batch))
        self._num_samples = batch * library.num_batches
        self.step()

    def step(self) -> None:
        """One step; returns when MXNet's engine has done all of it."""
        import mxnet as mx

        with mx.autograd.record():
            loss = self._loss(self._network(self._x), self._labels)
        loss.backward()
        self._library.before_step()
        self._trainer.step(self._num_samples)
        mx.nd.waitall()

    def time_steps(self, num_steps: int) -> dict[str, list[int]]:
        """Nanoseconds of each of so many steps, back to back, after one that is not timed; and the processor time of a
        step."""
        self.step()
        start_ns, took_ns = time.process_time_ns(), []
        for _ in range(num_steps):
            began_ns = time.perf_counter_ns()
            self.step()
            took_ns.append(time.perf_counter_ns() - began_ns)
        return {"took_ns": took_ns, "cpu_ns": [(time.process_time_ns() - start_ns) // num_steps]}

    def checksum(self) -> int:
        """Differs when any bit of the parameters does."""
        arrays = (each.data().asnumpy() for each in self._network.collect_params().values())
        return functools.reduce(lambda checksum, array: zlib.crc32(array.tobytes(), checksum), arrays, 0)

    def close(self) -> None:
        """Nothing is left open."""
