"""Training with JAX in a measured rank: networks, a jitted training step, and what averages its gradients.

measured_rank.py loads this file by its path, without the ronde around it, as it does with models.py: what a library
does not need must not count as its memory. The networks have the dimensions of those in models.py, with channels last.

Every rank has one device, and XLA one thread.
"""

from __future__ import annotations

import functools
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

IMAGENET_CLASSES = 1000
LEARNING_RATE = 1e-5
"""So small that the network hardly changes: every step costs the same, and no number overflows."""
MOMENTUM = 0.9
START_S = 60.0
"""How long the ranks wait for each other at the start."""

Forward = Callable[[Any, Any], Any]


# --- networks --------------------------------------------------------------------------------------------------------


def make_weights(random: Any, *shape: int) -> dict[str, Any]:
    """Weights of the shape, whose last dimension is that of the outputs, and a bias."""
    import numpy as np

    scale = 1.0 / np.sqrt(np.prod(shape[:-1]))
    weights = random.standard_normal(shape, np.float32) * np.float32(scale)
    return {"w": weights, "b": np.zeros(shape[-1], np.float32)}


def alexnet(random: Any) -> tuple[Any, Forward]:
    """Five convolutions and three dense layers, which hold 96 % of the parameters."""
    import jax
    import jax.numpy as jnp

    kernels = ((11, 3, 64), (5, 64, 192), (3, 192, 384), (3, 384, 256), (3, 256, 256))
    dense = ((256 * 6 * 6, 4096), (4096, 4096), (4096, IMAGENET_CLASSES))
    params = [
        *(make_weights(random, kernel, kernel, num_in, num_out) for kernel, num_in, num_out in kernels),
        *(make_weights(random, *shape) for shape in dense),
    ]

    def forward(params: Any, x: Any) -> Any:
        for index, each in enumerate(params[: len(kernels)]):
            padding = [(2, 2)] * 2 if index == 0 else "SAME"
            stride = 4 if index == 0 else 1
            names = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(x, each["w"], (stride, stride), padding, dimension_numbers=names)
            x = jax.nn.relu(x + each["b"])
            if index in (0, 1, 4):
                window, strides = (1, 3, 3, 1), (1, 2, 2, 1)
                x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, "VALID")
        x = x.reshape(x.shape[0], -1)
        for each in params[len(kernels) : -1]:
            x = jax.nn.relu(x @ each["w"] + each["b"])
        return x @ params[-1]["w"] + params[-1]["b"]

    return params, forward


def mlp(random: Any) -> tuple[Any, Forward]:
    """784-512-512-10: a step takes milliseconds, so every delay is visible."""
    import jax

    params = [make_weights(random, *shape) for shape in pairwise((784, 512, 512, 10))]

    def forward(params: Any, x: Any) -> Any:
        for each in params[:-1]:
            x = jax.nn.relu(x @ each["w"] + each["b"])
        return x @ params[-1]["w"] + params[-1]["b"]

    return params, forward


def tiny(random: Any) -> tuple[Any, Forward]:
    """A thousand parameters of sixteen numbers and next to no arithmetic: what is left is the cost per parameter."""
    import numpy as np

    def forward(params: Any, x: Any) -> Any:
        for scale in params:
            x = x * scale
        return x

    return [np.ones(16, np.float32) for _ in range(1000)], forward


NETWORKS: dict[str, tuple[Callable[[Any], tuple[Any, Forward]], tuple[int, ...], int]] = {
    "alexnet": (alexnet, (224, 224, 3), IMAGENET_CLASSES),
    "mlp": (mlp, (784,), 10),
    "tiny": (tiny, (16,), 16),
}
"""By the names of models.py: parameters and function, the shape of a sample, and the number of classes."""


# --- libraries -------------------------------------------------------------------------------------------------------


@dataclass
class JaxLibrary:
    """What averages the gradients of a training step over ranks. As it is, nothing does."""

    rank: int
    size: int
    reduce: Callable[[Any, str | None], Any] = lambda gradients, codec: gradients
    """Returns the gradients as the optimizer gets them. `codec` is what they are on the wire, or None."""
    mesh: Any = None
    """A mesh of the devices of all ranks, over which JAX divides the batch itself."""
    close: Callable[[], object] = field(default=lambda: None)


def join(name: str, framework: str, rank: int, size: int) -> JaxLibrary:
    """Join the ranks of a library. Rank and size are of one that does not know them itself."""
    if name == "apart":
        return JaxLibrary(rank, size)
    if name == "mesh":
        return _join_mesh(rank, size)
    import ronde
    import ronde.jax

    ronde.init(start_s=START_S)
    reduce = _wait_for_all if name == "lockstep" else _average
    return JaxLibrary(ronde.rank(), ronde.size(), reduce, close=ronde.shutdown)


def _average(gradients: Any, codec: str | None) -> Any:
    import ronde.jax

    return ronde.jax.average_gradients(codec=codec).update(gradients, ())[0]


def _wait_for_all(gradients: Any, codec: str | None) -> Any:
    """The gradients of this rank, once all ranks have theirs."""
    import jax

    import ronde.jax

    first = jax.tree.leaves(gradients)[0]
    everyone = ronde.jax.allreduce(first.reshape(-1)[:1])
    return jax.lax.optimization_barrier((gradients, everyone))[0]


def _join_mesh(rank: int, size: int) -> JaxLibrary:
    """JAX's own processes, whose collectives on CPUs are those of gloo. They find each other through the variable
    JAX_COORDINATOR_ADDRESS."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(num_processes=size, process_id=rank)
    return JaxLibrary(rank, size, mesh=Mesh(np.array(jax.devices()), ("data",)), close=jax.distributed.shutdown)


# --- training --------------------------------------------------------------------------------------------------------


class JaxTraining:
    """A network under training, always with the same batch, in a jitted step."""

    def __init__(self, model: Any, batch: int, library: JaxLibrary, *, codec: str | None, loop: str) -> None:
        """`model` is a BenchmarkModel of models.py."""
        import jax
        import numpy as np

        make_network, shape, num_classes = NETWORKS[model.name]
        params, self._forward = make_network(np.random.default_rng(0))
        self._library, self._codec = library, codec
        # From here on ranks have different data: a wrong average would show.
        random = np.random.default_rng(1 + library.rank)
        x = random.standard_normal((batch, *shape), np.float32)
        labels = random.integers(num_classes, size=batch, dtype=np.int32)
        momentum = jax.tree.map(np.zeros_like, params)
        if library.mesh is None:
            put = put_batch = jax.device_put
        else:
            from jax.sharding import NamedSharding, PartitionSpec

            def make_put(spec: Any) -> Callable[[Any], Any]:
                sharding = NamedSharding(library.mesh, spec)
                return lambda tree: jax.tree.map(
                    functools.partial(jax.make_array_from_process_local_data, sharding), tree
                )

            put, put_batch = make_put(PartitionSpec()), make_put(PartitionSpec("data"))
        self._state = put((params, momentum))
        self._batch = put_batch((x, labels))
        self._step = jax.jit(self._train, donate_argnums=0)

    def _train(self, state: Any, batch: Any) -> Any:
        """One step. Over a mesh the loss is the mean over the batches of all ranks, and JAX adds what that needs."""
        import jax
        import jax.numpy as jnp

        params, momentum = state
        x, labels = batch

        def compute_loss(params: Any) -> Any:
            scores = jax.nn.log_softmax(self._forward(params, x))
            return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], axis=1))

        loss, gradients = jax.value_and_grad(compute_loss)(params)
        gradients = self._library.reduce(gradients, self._codec)
        momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, momentum, gradients)
        return (jax.tree.map(lambda p, m: p - LEARNING_RATE * m, params, momentum), momentum), loss

    def time_steps(self, num_steps: int) -> dict[str, list[int]]:
        """Nanoseconds of each of so many steps, back to back, after one that is not timed; and the processor time of a
        step."""
        self.step()
        ends, start_ns = [time.perf_counter_ns()], time.process_time_ns()
        for _ in range(num_steps):
            self.step()
            ends.append(time.perf_counter_ns())
        cpu_ns = (time.process_time_ns() - start_ns) // num_steps
        return {"took_ns": [after - before for before, after in pairwise(ends)], "cpu_ns": [cpu_ns]}

    def step(self) -> None:
        import jax

        self._state, loss = self._step(self._state, self._batch)
        jax.block_until_ready((self._state, loss))

    def checksum(self) -> int:
        """Differs when any bit of the gradients does: after one step, the momentum has all of their bits."""
        import jax
        import numpy as np

        arrays = (np.asarray(leaf.addressable_data(0)) for leaf in jax.tree.leaves(self._state[1]))
        return functools.reduce(lambda checksum, array: zlib.crc32(array.tobytes(), checksum), arrays, 0)

    def close(self) -> None:
        """Nothing is left open."""
