"""`hvd.elastic`: training that goes on when processes are lost and hosts come and go, as Horovod promises it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
import tensorflow as tf

from horovod.common.elastic import ObjectState, run_fn
from horovod.tensorflow.errors import internal_errors
from horovod.tensorflow.functions import broadcast_object, broadcast_variables
from horovod.tensorflow.mpi_ops import rank, rejoin
from horovod.tensorflow.util import _executing_eagerly, evaluate, lr_variable

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]

R = TypeVar("R")

reductions: WeakSet[Any] = WeakSet()
"""What averages the gradients of Keras optimizers and counts steps. A new process begins at 0, so all others do."""


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorate a training function whose first argument is a State.

    It is called with the state of rank 0. When processes are lost it is called again with the state of the last commit;
    when hosts have changed, with the state as it is. New processes come in at this call, so nothing collective may be
    done before it.
    """

    @functools.wraps(func)
    def train(state: Any, *args: Any, **kwargs: Any) -> R:
        with internal_errors():
            return func(state, *args, **kwargs)

    def join_next_round() -> None:
        rejoin()
        for reduction in reductions:
            reduction.reset()

    return run_fn(train, join_next_round)


class TensorFlowState(ObjectState):
    """Variables of TensorFlow, and plain values by keyword. Without `variables`, those of the graph."""

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        self.variables = list(tf.compat.v1.global_variables() if variables is None else variables)
        self.session = session
        self._broadcast_op: Any = None
        self._values: list[Any] = []
        super().__init__(broadcast_object, rank, **kwargs)
        self._save_variables()

    def save(self) -> None:
        self._save_variables()
        super().save()

    def restore(self) -> None:
        self._load(self._values)
        super().restore()

    def sync(self) -> None:
        """Take the state of rank 0, and save it."""
        if _executing_eagerly():
            broadcast_variables(self.variables, root_rank=0)
        else:
            if self._broadcast_op is None:
                self._broadcast_op = broadcast_variables(self.variables, root_rank=0)
            self._get_session().run(self._broadcast_op)
        self._save_variables()
        super().sync()

    def _save_variables(self) -> None:
        if _executing_eagerly():
            self._values = [np.array(variable) for variable in self.variables]
        else:
            self._values = self._get_session().run(self.variables)

    def _load(self, values: Sequence[Any]) -> None:
        for variable, value in zip(self.variables, values, strict=True):
            if _executing_eagerly():
                variable.assign(value)
            else:
                variable.load(value, self._get_session())

    def _get_session(self) -> Any:
        session = self.session or tf.compat.v1.get_default_session()
        if session is None:
            raise ValueError("TensorFlowState needs a session in a graph: give session=, or use `with session:`")
        return session


class TensorFlowKerasState(ObjectState):
    """A model of Keras with its optimizer, and plain values by keyword."""

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError(
                "the model must be built before its state can be kept; call it on a batch, or model.build()"
            )
        self.model = model
        self.optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        rate = lr_variable(getattr(self.optimizer, "_learning_rate", None))
        if hasattr(rate, "assign") and not hasattr(self.optimizer, "lr"):
            # Reset callbacks call opt.lr.assign(), as Keras 2 had it. Set past Keras, which would track it once more.
            object.__setattr__(self.optimizer, "lr", rate)
        self._values: list[Any] = []
        super().__init__(broadcast_object, rank, **kwargs)
        self._save_variables()

    @property
    def _variables(self) -> list[Any]:
        optimizer = self.optimizer
        if optimizer is None:
            return list(self.model.variables)
        if hasattr(optimizer, "_create_all_weights"):  # of Keras 2, tf.keras.optimizers.legacy
            optimizer._create_all_weights(self.model.trainable_variables)
        elif not getattr(optimizer, "built", getattr(optimizer, "_built", False)):
            optimizer.build(self.model.trainable_variables)
        found = optimizer.variables
        return [*self.model.variables, *(found() if callable(found) else found)]  # a method there

    def save(self) -> None:
        self._save_variables()
        super().save()

    def restore(self) -> None:
        pairs = list(zip(self._variables, self._values, strict=True))
        if not _executing_eagerly():  # Keras 2, with a session
            tf.compat.v1.keras.backend.batch_set_value(pairs)
        else:
            for variable, value in pairs:
                variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Take the state of rank 0, and save it."""
        for each in (self.optimizer, getattr(self.optimizer, "inner_optimizer", None)):
            reduction = getattr(each, "gradient_reduction", None)  # of Keras 3
            if reduction is not None:
                reduction.agree_on_name()
        evaluate(broadcast_variables(self._variables, root_rank=0))
        self._save_variables()
        super().sync()

    def _save_variables(self) -> None:
        variables = self._variables
        self._values = [np.array(each) for each in variables] if _executing_eagerly() else evaluate(variables)
