"""The callbacks for fit() of Keras 2, as tf-keras has it. Those for Keras 3 are in horovod._keras.callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

import horovod.tensorflow as hvd
import ronde.tensorflow
from horovod.tensorflow.util import LocalVariables, contains, evaluate
from ronde.comm.world import resolve_group
from ronde.keras.callbacks import compare_numbers
from ronde.training.learning_rate import warmup

Callback: Any = tf.keras.callbacks.Callback


class BroadcastGlobalVariablesCallback(Callback):  # type: ignore[misc]  # TensorFlow has no types
    """Gives the root's variables to the models and optimizers of all ranks after the first batch. `local_variables`, a
    variable or a list, are left alone. If the ranks have different numbers of batches, fit() raises ValueError."""

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local_variables = LocalVariables(local_variables)

    def register_local_var(self, var: Any) -> None:
        """Leave this variable alone."""
        self._local_variables.add(var)

    def on_train_begin(self, logs: Any = None) -> None:
        """Compare the numbers of batches and epochs, before a rank waits for one that has no more of them."""
        compare_numbers(resolve_group(None), self.params)

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast once; the first batch has made all variables."""
        if self.broadcast_done:
            return
        shared = [each for each in self.model.variables if not contains(self._local_variables, each)]
        found = self.model.optimizer.variables
        for variables in (shared, list(found() if callable(found) else found)):
            evaluate(hvd.broadcast_variables(variables, self.root_rank))
        self.broadcast_done = True


class MetricAverageCallback(Callback):  # type: ignore[misc]  # TensorFlow has no types
    """Averages the metrics of every epoch over the ranks, for the callbacks after it."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the metrics by their means; each rank counts the same."""
        if logs:
            logs.update(ronde.tensorflow.average_metrics({name: float(value) for name, value in sorted(logs.items())}))


class LearningRateScheduleCallback(Callback):  # type: ignore[misc]  # TensorFlow has no types
    """Sets the learning rate to initial_lr * multiplier in the epochs from start_epoch to before end_epoch."""

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
        self._epoch = 0
        self._momentum: Any = None

    def multiplier(self, epoch: float) -> float:
        """What the learning rate is multiplied by."""
        if callable(self._multiplier):
            return self._multiplier(epoch)
        return float(self._multiplier ** (epoch - self.start_epoch))

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out how many batches an epoch has."""
        self.steps_per_epoch = self.steps_per_epoch or self.params.get("steps")
        samples, batch_size = self.params.get("samples"), self.params.get("batch_size")
        if not self.steps_per_epoch and samples and batch_size:  # of a graph
            self.steps_per_epoch = -(-samples // batch_size)
        if not self.staircase and not self.steps_per_epoch:
            raise ValueError(
                "steps_per_epoch is needed: Keras does not know how many batches an epoch of this data has"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keep the number of the epoch."""
        self._epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate, if it is time to."""
        is_over = self.end_epoch is not None and self._epoch >= self.end_epoch
        if self._epoch < self.start_epoch or is_over or (self.staircase and batch > 0):
            return
        epoch = self._epoch if self.staircase else self._epoch + batch / (self.steps_per_epoch or 1)
        optimizer = self.model.optimizer
        old, new = get_number(optimizer.learning_rate), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        momentum = getattr(optimizer, "momentum", None)
        if self.momentum_correction and momentum is not None and old > 0:
            self._momentum = get_number(momentum)
            set_number(optimizer, "momentum", self._momentum * new / old)

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Return to the momentum that was before."""
        if self._momentum is not None:
            set_number(self.model.optimizer, "momentum", self._momentum)
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the learning rate to the metrics."""
        if logs is not None:
            logs["lr"] = get_number(self.model.optimizer.learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate batch by batch from initial_lr / hvd.size() to initial_lr."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(initial_lr, self._rise, 0, None, False, momentum_correction, steps_per_epoch)
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose
        self._is_rising = False  # whether the last rate is still to be set

    def _rise(self, epoch: float) -> float:
        steps = self.steps_per_epoch or 1
        return warmup(round(self.warmup_epochs * steps), start=1.0 / hvd.size())(round(epoch * steps) + 1)

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate while the warm-up lasts."""
        epoch = self._epoch + batch / (self.steps_per_epoch or 1)
        if epoch < self.warmup_epochs:
            super().on_batch_begin(batch, logs)
            self._is_rising = self.multiplier(epoch) < 1.0

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Set the last learning rate, if that was not done: with steps_per_execution, Keras does not tell of every
        batch."""
        super().on_batch_end(batch, logs)
        if self._is_rising and self._epoch + (batch + 1) / (self.steps_per_epoch or 1) >= self.warmup_epochs:
            self._is_rising = False
            self.model.optimizer.learning_rate = self.initial_lr

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the learning rate to the metrics, and show it after the warm-up."""
        super().on_epoch_end(epoch, logs)
        if self.verbose > 0 and epoch + 1 >= self.warmup_epochs > epoch:
            lr = get_number(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {lr:g}.")


def get_number(value: Any) -> float:
    return float(tf.keras.backend.get_value(value))


def set_number(optimizer: Any, name: str, value: float) -> None:
    """Set a hyperparameter, which is a variable or a number."""
    found = getattr(optimizer, name)
    if hasattr(found, "assign"):
        tf.keras.backend.set_value(found, value)
    else:
        setattr(optimizer, name, value)


class BestModelCheckpoint(tf.keras.callbacks.ModelCheckpoint):  # type: ignore[misc]  # TensorFlow has no types
    """Keras' ModelCheckpoint of the best model. Its `filepath` is set later, by what runs the training."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        super().__init__(
            filepath="best",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = None
