"""Callbacks for model.fit() on many ranks. Every rank has the same ones.

    callbacks = [
        ronde.keras.callbacks.BroadcastInitialState(),
        ronde.keras.callbacks.MetricAverage(),
        ronde.keras.callbacks.LearningRateWarmup(initial_lr=0.1 * ronde.size(), warmup_epochs=3),
        ronde.keras.callbacks.ModelCheckpoint("model.keras"),
    ]

MetricAverage has to stand before those that use metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from ronde.comm import objects
from ronde.comm.collectives import mark_step
from ronde.comm.group import Group
from ronde.comm.world import current_world, resolve_group
from ronde.elastic.state import State
from ronde.keras.optimizer import DistributedBase
from ronde.keras.variables import broadcast_parameters, variables_of
from ronde.text import format_rank_answers
from ronde.training.data_position import DataPosition
from ronde.training.learning_rate import warmup
from ronde.training.metrics import average_metrics


class BroadcastInitialState(keras.callbacks.Callback):
    """Copies the weights of the model and the state of its optimizer from the root to all ranks, at the start of fit().

    A model that is built by its first batch is copied after that batch; then gradients of the first step are averages
    over different models, which is corrected by the copy. Metrics are not copied.

    It also compares the numbers of batches and epochs over all ranks. If they differ, fit() raises ValueError on every
    rank, instead of an operation that waits for a rank that has no more batches.
    """

    def __init__(self, root: int = 0, *, group: Group | None = None) -> None:
        """`root` is a rank of the world."""
        super().__init__()
        self._root = root
        self._group = group
        self._is_done = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Compare, and broadcast if there is something to broadcast yet."""
        members = resolve_group(self._group)
        self._is_done = not members.included
        if self._is_done:
            return
        model = self.model
        if all(compare_numbers(members, self.params, is_built(model))):
            self._broadcast()
        elif isinstance(model.optimizer, DistributedBase):  # before that, the ranks may differ
            model.optimizer.gradient_reduction.compare_after(int(model.steps_per_execution))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Broadcast before the second batch, if the first one has built the model."""
        if keras.backend.backend() == "tensorflow":  # of the others, the optimizer sees every step
            mark_step()
        if batch > 0 and not self._is_done:
            self._broadcast()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Broadcast, if the epoch had one batch."""
        if not self._is_done:
            self._broadcast()

    def _broadcast(self) -> None:
        model = self.model
        optimizer = model.optimizer
        if not optimizer.built:
            with keras.name_scope(optimizer.name):
                optimizer.build(model.trainable_variables)
        variables = [*variables_of(model), *variables_of(optimizer)]
        broadcast_parameters(variables, self._root, group=self._group)
        self._is_done = True


def compare_numbers(members: Group, params: Mapping[str, Any], fact: object = None) -> list[Any]:
    """Raise ValueError on all ranks if their numbers of batches or epochs in fit() differ. Return the fact of each
    rank. Collective."""
    mine = params.get("steps"), params.get("epochs"), fact
    steps, epochs, facts = zip(*objects.allgather(mine, group=members), strict=True)
    for what, counts in (("batches", steps), ("epochs", epochs)):
        if len(set(counts) - {None}) > 1:
            told = format_rank_answers(dict(zip(members.ranks, map(str, counts), strict=True)), ": ")
            raise ValueError(
                f"the ranks have different numbers of {what} in fit(). {told}. Every batch averages gradients over "
                "all ranks, so all need equally many: pass steps_per_epoch=, or shard the data evenly"
            )
    return list(facts)


def is_built(model: Any) -> bool:
    return all(layer.built for layer in model._flatten_layers())


class TrackState(keras.callbacks.Callback):
    """Keeps an elastic State while fit() runs in ronde.elastic.run(): it ends a step of the State after every batch,
    and commits every `commit_every` batches and at the end of every epoch.

    It counts the batches of data sets of the State (ronde.tensorflow.shard(), ronde.keras.shard()). If the State has a
    value `epoch`, it becomes the number of finished epochs, and a value `batch` the number of finished batches of this
    epoch. It has to be the last of the callbacks: when ranks come or go, fit() is left at its end.
    """

    def __init__(self, state: State, *, commit_every: int | None = 100) -> None:
        """`commit_every`: None commits at the end of an epoch only. In a step of JAX that is interrupted nothing is
        left to go on from but the last commit, so it says how many batches may have to be done again."""
        super().__init__()
        if commit_every is not None and (not isinstance(commit_every, int) or commit_every < 1):
            raise ValueError(f"commit_every must be a whole number from 1, or None, got {commit_every!r}")
        self._state = state
        self._commit_every = commit_every
        self._data = [each for each in state._objects.values() if isinstance(each, DataPosition)]
        self._num_batches = 0  # of this epoch in this call of fit()
        self._first_batch = 0  # the batch of the epoch with which this call of fit() has begun
        self._num_since_commit = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """See to it that all ranks have equally many batches."""
        compare_numbers(resolve_group(None), self.params)
        self._num_since_commit = 0
        self._first_batch = int(getattr(self._state, "batch", 0))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin to count batches."""
        self._num_batches = 0
        for data in self._data:
            data.begin_loop()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Count the steps for those that watch the job."""
        if keras.backend.backend() == "tensorflow":  # of the others, the optimizer sees every step
            mark_step()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """End the step, and commit if it is time to."""
        state, _ = self._state, self.model  # which lets JAX put its values into the variables
        num_new = batch + 1 - self._num_batches
        self._num_batches += num_new
        self._num_since_commit += num_new
        for data in self._data:
            data.hand_out(num_new)
        if not state.has_stepped():
            return  # gradients are accumulated
        if "batch" in state._values.values:
            state.batch = self._first_batch + self._num_batches
        if self._commit_every is not None and self._num_since_commit >= self._commit_every:
            self._num_since_commit = 0
            state.commit()
        else:
            state.end_step()

    def on_test_begin(self, logs: Any = None) -> None:
        """Keep in mind that there are no more batches in this epoch."""
        for data in self._data if self._num_batches else ():
            data.end_data()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Go to the next epoch, and commit."""
        state, _ = self._state, self.model
        for data in self._data:
            data.end_epoch()
        self._first_batch = self._num_batches = self._num_since_commit = 0
        values = state._values.values
        if "epoch" in values:
            state.epoch = epoch + 1
        if "batch" in values:
            state.batch = 0
        state.commit()


class MetricAverage(keras.callbacks.Callback):
    """Averages the metrics of every epoch over all ranks, for the callbacks after it and for the history.

    Ranks with more samples count more: the weights are the numbers of samples in the epoch, and for those of the
    validation data (`val_…`) the numbers of samples in these. With a model that does not use Keras' own loss, all ranks
    count the same.
    """

    def __init__(self, *, group: Group | None = None) -> None:
        super().__init__()
        self._group = group
        self._num_trained: float | None = None
        self._num_validated: float | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Forget what the last epoch has counted."""
        self._num_trained = self._num_validated = None

    def on_test_begin(self, logs: Any = None) -> None:
        """The metrics are about to be reset."""
        self._num_trained = count_samples(self.model)

    def on_test_end(self, logs: Any = None) -> None:
        """Count the samples of the validation data."""
        self._num_validated = count_samples(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the metrics by their means over all ranks."""
        if logs is None or not resolve_group(self._group).included:
            return
        trained = count_samples(self.model) if self._num_trained is None else self._num_trained
        validated = 1.0 if self._num_validated is None else self._num_validated
        numbers = {name: float(value) for name, value in sorted(logs.items()) if is_number(value)}
        counts = {name: validated if name.startswith("val_") else trained for name in numbers}
        logs.update(average_metrics(numbers, count=counts, group=self._group))


def is_number(value: Any) -> bool:
    """Whether a metric is one number: of Python, of NumPy or in a tensor."""
    if isinstance(value, int | float | np.number):
        return True
    return hasattr(value, "dtype") and getattr(value, "shape", None) == () and not isinstance(value, np.bool_)


def count_samples(model: Any) -> float:
    """The number of samples since metrics were reset: what the mean of the loss has counted. 1 if it counts nothing."""
    for metric in model.metrics:
        if metric.name == "loss" and hasattr(metric, "count"):
            return float(keras.ops.convert_to_numpy(metric.count.value)) or 1.0
    return 1.0


class LearningRateSchedule(keras.callbacks.Callback):
    """Sets the learning rate to initial_lr * multiplier in the epochs from start_epoch to before end_epoch.

    `multiplier` is a function of the epoch, or a number m that stands for m ** (epoch - start_epoch). With staircase
    the rate changes at the start of an epoch, else with every batch: then the epoch has a fraction, and the number of
    batches has to be known, from Keras or from steps_per_epoch.

    With momentum_correction the velocities of SGD and RMSprop, which contain the learning rate, are scaled when it
    changes: so a momentum goes on as if the new rate had been there before.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is needed: the learning rate that is multiplied")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._multiplier = multiplier
        self._num_steps = 0
        self._epoch = 0

    def multiplier(self, epoch: float) -> float:
        """What the learning rate is multiplied by."""
        if callable(self._multiplier):
            return self._multiplier(epoch)
        return float(self._multiplier ** (epoch - self.start_epoch))

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out how many batches an epoch has."""
        self._num_steps = self.steps_per_epoch or self.params.get("steps") or 0
        if not self.staircase and not self._num_steps:
            raise ValueError(
                "steps_per_epoch is needed: Keras does not know how many batches an epoch of this data has"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keep the number of the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate, if it is time to."""
        is_over = self.end_epoch is not None and self._epoch >= self.end_epoch
        if self._epoch < self.start_epoch or is_over or (self.staircase and batch > 0):
            return
        epoch = float(self._epoch) if self.staircase else self._epoch + batch / self._num_steps
        set_learning_rate(self.model, self.initial_lr * self.multiplier(epoch), correct=self.momentum_correction)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the learning rate to the metrics."""
        if logs is not None:
            logs["learning_rate"] = learning_rate_of(self.model.optimizer)


class LearningRateWarmup(LearningRateSchedule):
    """Raises the learning rate batch by batch from initial_lr / size to initial_lr, over some epochs.

    `initial_lr` is the rate for all ranks together, such as 0.1 * ronde.size().
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        if not warmup_epochs > 0:
            raise ValueError(f"warmup_epochs must be above 0, got {warmup_epochs!r}")
        super().__init__(
            initial_lr,
            self._rise,
            end_epoch=None,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs = warmup_epochs
        self._is_rising = False  # whether the last rate is still to be set

    def _rise(self, epoch: float) -> float:
        num_steps = round(self.warmup_epochs * self._num_steps)
        rise = warmup(num_steps, start=1.0 / current_world().size)
        return rise(round(epoch * self._num_steps) + 1)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate while the warm-up lasts."""
        epoch = self._epoch + batch / self._num_steps
        if epoch < self.warmup_epochs:
            super().on_train_batch_begin(batch, logs)
            self._is_rising = self.multiplier(epoch) < 1.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Set the last learning rate, if that was not done: with steps_per_execution, Keras tells only of the first and
        the last batch of an execution."""
        if self._is_rising and self._epoch + (batch + 1) / self._num_steps >= self.warmup_epochs:
            self._is_rising = False
            set_learning_rate(self.model, self.initial_lr, correct=self.momentum_correction)


def set_learning_rate(model: Any, lr: float, *, correct: bool) -> None:
    """Set the learning rate of the model's optimizer; `correct`: scale velocities that contain the old one."""
    optimizer = model.optimizer
    old = learning_rate_of(optimizer)
    if lr == old:
        return
    optimizer.learning_rate = lr
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if correct and old > 0 and isinstance(inner, keras.optimizers.SGD | keras.optimizers.RMSprop):
        for velocity in getattr(inner, "momentums", None) or getattr(inner, "_momentums", None) or ():
            if velocity is not None:
                velocity.assign(velocity.value * (lr / old))


def learning_rate_of(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras' ModelCheckpoint, of which only rank 0 writes files. The other ranks wait at their next operation."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save on rank 0, if it is time to."""
        if current_world().rank == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save on rank 0, if it is time to."""
        if current_world().rank == 0:
            super().on_epoch_end(epoch, logs)
