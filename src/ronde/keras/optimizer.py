"""The distributed optimizer of Keras 3, for model.compile() and for training loops of your own.

An optimizer is made distributed in place: it gets a subclass of its own class, of the same name. So it keeps its state,
and a saved model is one that Keras loads without ronde. The subclass averages gradients at the entrance of `apply`:
clipping, weight decay and moving averages see the average.

- With gradient_accumulation_steps, gradients are averaged in the steps that update: the sums of this rank's passes.
- A loss scale is outside of all that: whether gradients are finite is decided by their average, so all ranks skip a
  step or none does. With gradient accumulation, where an average exists only in some steps, the ranks exchange whether
  their gradients are finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from ronde.comm.group import Group
from ronde.comm.world import current_world
from ronde.keras.gradients import CODECS, KerasGradientReduction
from ronde.training.gradients.gradient_settings import GradientSettings
from ronde.types import Op

BACKENDS = ("tensorflow", "torch", "jax")
WRAP_FIRST = (
    "DistributedOptimizer has to be around the loss scale, not inside of it, or ranks could not agree on which steps "
    'are skipped. Call keras.config.set_dtype_policy("mixed_float16") before DistributedOptimizer(optimizer), or write '
    "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
)


def DistributedOptimizer(
    optimizer: Any,
    *,
    op: str | Op = "mean",
    codec: str | None = None,
    group: Group | None = None,
    predivide: float = 1.0,
    bucket_mb: float | None = None,
    sparse_as_dense: bool = False,
    compare_at_step: int | None = None,
) -> Any:  # an optimizer of Keras
    """Return the same optimizer, made to average gradients over all ranks (or over `group`) before it uses them.

    `optimizer` is an optimizer of Keras, or what keras.optimizers.get() makes one of. It keeps its state. Under the
    dtype policy mixed_float16 the result is a LossScaleOptimizer around it, as model.compile() would make it.

    `codec` compresses gradients on the wire: "float16" or "bfloat16". `bucket_mb` and `sparse_as_dense` matter on the
    TensorFlow backend. All ranks must start with the same parameters, or the second step raises OutOfSync; the callback
    BroadcastInitialState sees to it. The other arguments are those of GradientSettings.
    """
    current_world("DistributedOptimizer")  # without one, that is the error to show
    if keras.backend.backend() not in BACKENDS:
        raise NotImplementedError(
            f"ronde.keras is for the backends {', '.join(BACKENDS)}, not {keras.backend.backend()}"
        )
    optimizer = keras.optimizers.get(optimizer)
    if isinstance(optimizer, DistributedApply | DistributedLossScale):
        raise ValueError("the optimizer is distributed already; wrap it once")
    if codec is not None and codec not in CODECS:
        raise ValueError(f"codec must be None or one of {', '.join(CODECS)}, got {codec!r}")
    settings = GradientSettings(
        op=op,
        bucket_mb=bucket_mb,
        predivide=predivide,
        sparse_as_dense=sparse_as_dense,
        compare_at_step=compare_at_step,
    )
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if keras.config.dtype_policy().name == "mixed_float16" and not is_scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")
    return make_distributed(optimizer, (settings, group, codec))


def load_model(
    filepath: Any, *, custom_objects: Any = None, compile: bool = True, safe_mode: bool = True, **distributed: Any
) -> Any:  # a model of Keras
    """Load a model that was saved by model.save(), and make its optimizer distributed. Every rank calls it.

    `distributed` are the arguments of DistributedOptimizer. The optimizer keeps the state that was saved.
    """
    model = keras.saving.load_model(filepath, custom_objects=custom_objects, compile=compile, safe_mode=safe_mode)
    if compile and getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, **distributed)
    return model


ReductionArguments = tuple[GradientSettings, Group | None, str | None]


def make_distributed(optimizer: Any, arguments: ReductionArguments) -> Any:
    """Give an optimizer a subclass of its own class that averages gradients."""
    base = type(optimizer)
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    mixin = DistributedLossScale if is_scaled else DistributedApply
    facts = {"__module__": base.__module__, "__doc__": base.__doc__, "_reduction_arguments": arguments}
    # Not optimizer.__class__ = …: Keras looks at what is set.
    object.__setattr__(optimizer, "__class__", type(base.__name__, (mixin, base), facts))
    if is_scaled:
        optimizer._make_inner_distributed()
    return optimizer


class DistributedBase:
    """What both subclasses have in common. Copies that are made with from_config() are distributed, too."""

    _reduction_arguments: ReductionArguments

    @property
    def gradient_reduction(self) -> KerasGradientReduction:
        """What averages the gradients."""
        found: KerasGradientReduction | None = self.__dict__.get("_gradient_reduction")
        if found is None:
            found = KerasGradientReduction(*self._reduction_arguments)
            object.__setattr__(self, "_gradient_reduction", found)
        return found


class DistributedApply(DistributedBase):
    """What an optimizer's class gets that averages gradients at the entrance of apply()."""

    gradient_accumulation_steps: int | None
    _iterations: Any
    _trainable_variables: list[Any]
    built: bool

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Average the gradients over all ranks, and update the variables."""
        base: Any = super()
        grads = list(grads)
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if len(variables) != len(grads):  # not built, or a mistake that Keras has words for
            base.apply(grads, trainable_variables)
            return
        check_variables(variables)
        with after_backward(grads):
            if self.gradient_accumulation_steps:
                given = [v for v, grad in zip(variables, grads, strict=True) if grad is not None]
                object.__setattr__(self, "_variables_of_pass", given)
            else:
                grads = self.gradient_reduction.reduce(grads, variables)
            base.apply(grads, trainable_variables)

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        """Keras calls it with the gradients that are about to be used: the sums over several passes, if there are."""
        base: Any = super()
        steps = self.gradient_accumulation_steps
        if steps:
            # With JAX it is called in every step. On the other backends only in those that update.
            is_jax = keras.backend.backend() == "jax"
            is_update = (self._iterations + 1) % steps == 0 if is_jax else None
            variables = self.__dict__["_variables_of_pass"]
            grads = self.gradient_reduction.reduce(list(grads), variables, when=is_update)
        return base._clip_gradients(grads)

    def __setattr__(self, name: str, value: Any) -> None:
        # A LossScaleOptimizer does this to the optimizer that it is put around, as compile() does under mixed_float16.
        if name == "loss_scale_factor" and value is None and "_iterations" in self.__dict__:
            raise ValueError(WRAP_FIRST)
        super().__setattr__(name, value)


class DistributedLossScale(DistributedBase):
    """What the class of a loss scale gets: gradients are averaged before it looks whether they are finite."""

    inner_optimizer: Any
    _trainable_variables: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._make_inner_distributed()

    def _make_inner_distributed(self) -> None:
        """With gradient accumulation it is the inner optimizer that knows when and what to average."""
        if isinstance(self.inner_optimizer, DistributedApply):
            raise ValueError(WRAP_FIRST)
        if self.inner_optimizer.gradient_accumulation_steps:
            make_distributed(self.inner_optimizer, self._reduction_arguments)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Average the gradients over all ranks; update the variables if the average is finite."""
        base: Any = super()
        variables = self._trainable_variables if trainable_variables is None else trainable_variables
        base.apply(self._average(grads, variables), trainable_variables)

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> Any:
        """The same with values instead of variables, as JAX needs it; the base class does not call apply()."""
        base: Any = super()
        averages = self._average(grads, self._trainable_variables, trainable_variables)
        return base.stateless_apply(optimizer_variables, averages, trainable_variables)

    def _average(
        self, grads: Sequence[Any], variables: Sequence[Any], values: Sequence[Any] | None = None
    ) -> list[Any]:
        check_variables(variables)
        if self.inner_optimizer.gradient_accumulation_steps or len(grads) != len(variables):
            return list(grads)
        return self.gradient_reduction.reduce(list(grads), list(variables), values=values)

    def check_finite(self, grads: Sequence[Any]) -> Any:
        """Whether the gradients are finite, on all ranks."""
        base: Any = super()
        finite = base.check_finite(grads)
        if self.inner_optimizer.gradient_accumulation_steps:
            finite = self.gradient_reduction.all_true(finite)
        return finite


@contextmanager
def after_backward(grads: Sequence[Any]) -> Iterator[None]:
    """Let what TensorFlow computes in this context wait for the first gradient. Without this, a step that finds no more
    data, as at the end of a dataset whose length is not known, may count an iteration before it fails, on some ranks
    and not on others."""
    if keras.backend.backend() == "tensorflow":
        from ronde.tensorflow.gradients import after_first_gradient

        with after_first_gradient(grads):
            yield
    else:
        yield


def check_variables(variables: Sequence[Any]) -> None:
    overwritten = [variable for variable in variables if getattr(variable, "overwrite_with_gradient", False)]
    if overwritten:
        raise NotImplementedError(
            f"{overwritten[0].path}: the gradients of float8 layers are new scales, which DistributedOptimizer cannot "
            "combine; train these layers with another dtype policy"
        )
