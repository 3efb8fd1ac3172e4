"""Horovod's callbacks for fit(), over those of ronde.keras."""

from __future__ import annotations

from typing import Any

import keras

import ronde.keras
from horovod.tensorflow.util import LocalVariables, contains
from ronde.keras import callbacks as own
from ronde.keras.variables import variables_of


class BroadcastGlobalVariablesCallback(own.BroadcastInitialState):
    """Gives the root's variables to the models and optimizers of all ranks, when training begins or after the first
    batch, which may build the model. `local_variables`, a variable or a list, are left alone."""

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__(root_rank)
        self._local_variables = LocalVariables(local_variables)

    def register_local_var(self, var: Any) -> None:
        """Leave this variable alone."""
        self._local_variables.add(var)

    def _broadcast(self) -> None:
        optimizer = self.model.optimizer
        if not self._local_variables:
            super()._broadcast()
            return
        if not optimizer.built:
            with keras.name_scope(optimizer.name):
                optimizer.build(self.model.trainable_variables)
        found = [each for each in variables_of(self.model) if not contains(self._local_variables, each)]
        slots = [each for each in variables_of(optimizer) if not self._is_local_slot(each)]
        ronde.keras.broadcast_parameters([*found, *slots], self._root, group=self._group)
        self._is_done = True

    def _is_local_slot(self, slot: Any) -> bool:
        """Whether an optimizer's variable belongs to a local one: Keras names it after it, behind its own name. Of
        several variables after which it could be named, it is that with the longest path."""
        name = slot.path.rpartition("/")[2]
        variables = [*self.model.variables, *self._local_variables]
        owners = [each for each in variables if f"{name}_".startswith(f"{_path_of(each).replace('/', '_')}_")]
        return bool(owners) and contains(self._local_variables, max(owners, key=lambda each: len(_path_of(each))))


def _path_of(variable: Any) -> str:
    return str(getattr(variable, "path", variable.name))


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Averages the metrics of every epoch over the ranks, for the callbacks after it."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the metrics by their means; each rank counts the same."""
        if logs:
            logs.update(ronde.keras.average_metrics({name: float(value) for name, value in sorted(logs.items())}))


class LearningRateScheduleCallback(own.LearningRateSchedule):
    """ronde.keras.callbacks.LearningRateSchedule with the metric's name that Horovod used: lr."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the learning rate to the metrics."""
        if logs is not None:
            logs["lr"] = own.learning_rate_of(self.model.optimizer)


class LearningRateWarmupCallback(own.LearningRateWarmup):
    """Raises the learning rate batch by batch from initial_lr / hvd.size() to initial_lr."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        if initial_lr is None:
            raise ValueError("initial_lr is needed: the learning rate after the warm-up")
        super().__init__(initial_lr, warmup_epochs, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the learning rate to the metrics, and show it after the warm-up."""
        lr = own.learning_rate_of(self.model.optimizer)
        if logs is not None:
            logs["lr"] = lr
        if self.verbose > 0 and epoch + 1 >= self.warmup_epochs > epoch:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {lr:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]  # Keras has no types
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
            filepath="best.weights.h5" if save_weights_only else "best.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = None
