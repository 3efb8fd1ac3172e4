"""Training with TensorFlow and Keras in a measured rank: networks, training loops, and what averages their gradients.

measured_rank.py loads this file by its path, without the ronde around it, as it does with models.py: what a library
does not need must not count as its memory. The networks have the dimensions of those in models.py, with channels last,
as TensorFlow computes on processors.

Every rank has one thread for the kernels of TensorFlow and one inside of them.
"""

from __future__ import annotations

import functools
import importlib
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

IMAGENET_CLASSES = 1000
LEARNING_RATE = 1e-5
"""So small that the network hardly changes: every step costs the same, and no number overflows."""
MOMENTUM = 0.9
START_S = 60.0
"""How long the ranks wait for each other at the start."""


# --- networks --------------------------------------------------------------------------------------------------------


def alexnet() -> Any:
    """Five convolutions and three dense layers, which hold 96 % of the parameters."""
    from keras import layers

    def convolution(num_out: int, kernel: int) -> Any:
        return layers.Conv2D(num_out, kernel, padding="same", activation="relu")

    return [
        layers.ZeroPadding2D(2),
        layers.Conv2D(64, 11, strides=4, activation="relu"),
        layers.MaxPooling2D(3, 2),
        convolution(192, 5),
        layers.MaxPooling2D(3, 2),
        convolution(384, 3),
        convolution(256, 3),
        convolution(256, 3),
        layers.MaxPooling2D(3, 2),
        layers.Flatten(),
        layers.Dropout(0.5),
        layers.Dense(4096, activation="relu"),
        layers.Dropout(0.5),
        layers.Dense(4096, activation="relu"),
        layers.Dense(IMAGENET_CLASSES),
    ]


def mlp() -> Any:
    """784-512-512-10: a step takes milliseconds, so every delay is visible."""
    from keras import layers

    return [layers.Dense(512, activation="relu"), layers.Dense(512, activation="relu"), layers.Dense(10)]


def tiny() -> Any:
    """A thousand parameters of sixteen numbers and next to no arithmetic: what is left is the cost per parameter."""
    import keras

    class ScaleChain(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
        def build(self, _: Any) -> None:
            self.scales = [self.add_weight(shape=(16,), initializer="ones") for _ in range(1000)]

        def call(self, x: Any) -> Any:
            for scale in self.scales:
                x = x * scale
            return x

    return [ScaleChain()]


NETWORKS: dict[str, tuple[Callable[[], Any], tuple[int, ...], int]] = {
    "alexnet": (alexnet, (224, 224, 3), IMAGENET_CLASSES),
    "mlp": (mlp, (784,), 10),
    "tiny": (tiny, (16,), 16),
}
"""By the names of models.py: the layers, the shape of a sample, and the number of classes."""


# --- libraries -------------------------------------------------------------------------------------------------------


@dataclass
class GradientLibrary:
    """What averages the gradients of a training loop over ranks. As it is, nothing does."""

    rank: int
    size: int
    reduce: Callable[..., Any] = lambda tape, loss, variables, codec: tape.gradient(loss, variables)
    """Returns the gradients as the optimizer gets them. `codec` is what they are on the wire, or None."""
    distribute: Callable[..., Any] = lambda optimizer, codec: optimizer
    """Makes an optimizer of Keras average gradients."""
    make_callbacks: Callable[[], list[Any]] = list
    """Returns the callbacks that fit() gets."""
    strategy: Any = None
    """A strategy of TensorFlow, in which optimizers of Keras sum gradients."""
    close: Callable[[], object] = field(default=lambda: None)


def join(name: str, framework: str, rank: int, size: int) -> GradientLibrary:
    """Join the ranks of a library. Rank and size are of one that does not know them itself."""
    import keras

    if keras.backend.backend() != "tensorflow":
        wrong = f"Keras is measured on its TensorFlow backend, and here it has {keras.backend.backend()}"
        raise RuntimeError(f"{wrong}; set KERAS_BACKEND=tensorflow")
    use_one_thread()
    if name == "apart":
        return GradientLibrary(rank, size)
    if name == "mwms":
        return _join_strategy(rank, size)
    if name == "hvd":
        return _join_horovod(framework)
    import ronde

    ronde.init(start_s=START_S)
    joined = GradientLibrary(ronde.rank(), ronde.size(), close=ronde.shutdown)
    if name == "lockstep":
        joined.reduce = _wait_for_all
    elif framework == "keras":
        joined.distribute, joined.make_callbacks = _distribute_optimizer, _make_callbacks
    else:
        joined.reduce = _reduce_with_tape
    return joined


def use_one_thread() -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def _reduce_with_tape(tape: Any, loss: Any, variables: Sequence[Any], codec: str | None) -> Any:
    import ronde.tensorflow

    return ronde.tensorflow.DistributedGradientTape(tape, codec=codec).gradient(loss, variables)


def _distribute_optimizer(optimizer: Any, codec: str | None) -> Any:
    import ronde.keras

    return ronde.keras.DistributedOptimizer(optimizer, codec=codec)


def _make_callbacks() -> list[Any]:
    from ronde.keras.callbacks import BroadcastInitialState, MetricAverage

    return [BroadcastInitialState(), MetricAverage()]


def _wait_for_all(tape: Any, loss: Any, variables: Sequence[Any], codec: str | None) -> Any:
    """The gradients of this rank, once all ranks have theirs. What the ranks wait in is the shortest operation that a
    graph can have: a bucket of one number."""
    import tensorflow as tf

    import ronde.tensorflow

    gradients = tape.gradient(loss, variables)
    with tf.control_dependencies(gradients):
        number = tf.zeros(())
    everyone = ronde.tensorflow.reduce_gradients([number], variables[:1])
    with tf.control_dependencies(everyone):
        return [tf.identity(gradient) for gradient in gradients]


def _join_horovod(framework: str) -> GradientLibrary:
    """Horovod's interface, as the compatibility package has it over ronde."""
    hvd: Any = importlib.import_module(f"horovod.{framework}")
    hvd.init()

    def compression(codec: str | None) -> Any:
        return hvd.Compression.none if codec is None else hvd.Compression.fp16

    def reduce(tape: Any, loss: Any, variables: Sequence[Any], codec: str | None) -> Any:
        return hvd.DistributedGradientTape(tape, compression=compression(codec)).gradient(loss, variables)

    def distribute(optimizer: Any, codec: str | None) -> Any:
        return hvd.DistributedOptimizer(optimizer, compression=compression(codec))

    joined = GradientLibrary(hvd.rank(), hvd.size(), close=hvd.shutdown)
    if framework == "keras":
        joined.distribute = distribute
    else:
        joined.reduce = reduce
    return joined


def _join_strategy(rank: int, size: int) -> GradientLibrary:
    """TensorFlow's own MultiWorkerMirroredStrategy, with its defaults. It finds the others through TF_CONFIG."""
    import tensorflow as tf

    return GradientLibrary(rank, size, strategy=tf.distribute.MultiWorkerMirroredStrategy())


# --- training --------------------------------------------------------------------------------------------------------


class StepEnd(NamedTuple):
    """When a step has ended."""

    wall_ns: int
    cpu_ns: int
    """What this process has computed by then."""


def read_clocks() -> StepEnd:
    return StepEnd(time.perf_counter_ns(), time.process_time_ns())


class TensorFlowTraining:
    """A network under training, always with the same batch: in a loop of its own around a tf.function, or in fit()."""

    def __init__(self, model: Any, batch: int, library: GradientLibrary, *, codec: str | None, loop: str) -> None:
        """`model` is a BenchmarkModel of models.py. `loop` is "custom" or "fit"."""
        import contextlib

        import keras
        import numpy as np
        import tensorflow as tf

        make_layers, shape, num_classes = NETWORKS[model.name]
        self._library, self._codec = library, codec
        keras.utils.set_random_seed(0)
        with contextlib.nullcontext() if library.strategy is None else library.strategy.scope():
            self._network = keras.Sequential([keras.Input(shape), *make_layers()])
            optimizer = keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
            self.optimizer = library.distribute(optimizer, codec)
            self.optimizer.build(self._network.trainable_variables)
        # From here on ranks have different data: a wrong average would show.
        random = np.random.default_rng(1 + library.rank)
        x = random.standard_normal((batch, *shape), np.float32)
        self._batch = tf.constant(x), tf.constant(random.integers(num_classes, size=batch, dtype=np.int64))
        self._step = tf.function(self._run_strategy if library.strategy is not None else self._train)
        self._is_fit = loop == "fit"
        if self._is_fit:
            self._dataset = tf.data.Dataset.from_tensors(self._batch).repeat()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self._network.compile(self.optimizer, loss=loss)

    def _train(self, x: Any, labels: Any) -> Any:
        """One step, as a function of TensorFlow."""
        import tensorflow as tf

        variables = self._network.trainable_variables
        with tf.GradientTape() as tape:
            outputs = self._network(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs))
            if self._library.strategy is not None:  # it sums gradients
                loss /= self._library.size
        gradients = self._library.reduce(tape, loss, variables, self._codec)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    def _run_strategy(self, x: Any, labels: Any) -> Any:
        return self._library.strategy.run(self._train, args=(x, labels))

    def time_steps(self, num_steps: int) -> dict[str, list[int]]:
        """Nanoseconds of each of so many steps, back to back, after one that is not timed; and the processor time of a
        step."""
        ends = self._fit(1 + num_steps) if self._is_fit else self._run(1 + num_steps)
        cpu_ns = (ends[-1].cpu_ns - ends[0].cpu_ns) // num_steps
        return {"took_ns": [after.wall_ns - before.wall_ns for before, after in pairwise(ends)], "cpu_ns": [cpu_ns]}

    def step(self) -> None:
        if self._is_fit:
            self._fit(1)
        else:
            self._run(1)

    def _run(self, num_steps: int) -> list[StepEnd]:
        """Train, and return when each step has ended."""
        x, labels = self._batch
        ends = []
        for _ in range(num_steps):
            self._step(x, labels)  # on processors it returns when the step is over
            ends.append(read_clocks())
        return ends

    def _fit(self, num_steps: int) -> list[StepEnd]:
        import keras

        ends: list[StepEnd] = []

        class BatchTimer(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                ends.append(read_clocks())

        callbacks = [*self._library.make_callbacks(), BatchTimer()]
        self._network.fit(self._dataset, steps_per_epoch=num_steps, shuffle=False, verbose=0, callbacks=callbacks)
        return ends

    def checksum(self) -> int:
        """Differs when any bit of the gradients does: after one step, the momentum has all of their bits."""
        arrays = (variable.numpy() for variable in self.optimizer.variables)
        return functools.reduce(lambda checksum, array: zlib.crc32(array.tobytes(), checksum), arrays, 0)

    def close(self) -> None:
        """Nothing is left open."""
