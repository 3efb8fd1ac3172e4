"""What horovod.keras and horovod.tensorflow.keras have in common: Horovod's arguments, over ronde.keras."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import ronde.keras
from horovod._keras.keras2 import create_keras2_optimizer, is_keras_2
from horovod.common.exceptions import translate_errors
from horovod.common.process_sets import ProcessSet, global_process_set, group_of
from horovod.common.util import split_list
from horovod.tensorflow.compression import Compressor, FP16Compressor, NoneCompressor
from horovod.tensorflow.elastic import reductions
from horovod.tensorflow.gradients import check_groups
from horovod.tensorflow.mpi_ops import OPS, Average, Sum
from horovod.tensorflow.util import contains, lr_variable
from ronde.keras.gradients import KerasGradientReduction
from ronde.keras.optimizer import DistributedBase

CODECS: dict[Any, str | None] = {NoneCompressor: None, FP16Compressor: "float16"}
IGNORED = ("name", "experimental_aggregate_gradients", "skip_gradients_aggregation")
"""Arguments that apply_gradients() had in Keras 2."""


class CallableList(list[Any]):
    """A list that can also be called, as `optimizer.variables()` was in Keras 2."""

    def __call__(self) -> list[Any]:
        return self


@dataclasses.dataclass(frozen=True)
class HorovodArguments:
    """What Horovod's optimizers have beyond ronde's."""

    compressor: Any
    """A Compressor of the script's own; None otherwise."""
    groups: int | Sequence[Sequence[Any]] | None
    process_set: ProcessSet
    scale_local_gradients: bool
    passes: int
    """How many backward passes are one step."""
    average_passes: bool


class HorovodKerasReduction(KerasGradientReduction):
    """As ronde's, without the gradients of local variables."""

    def __init__(self, reduction_arguments: Any, arguments: HorovodArguments) -> None:
        super().__init__(*reduction_arguments)
        self.local_variables: list[Any] = []
        self._plain_settings = reduction_arguments[0]
        self._arguments = arguments
        reductions.add(self)

    def reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        *,
        values: Sequence[Any] | None = None,
        when: Any = None,
    ) -> list[Any]:
        """The gradients as the optimizer gets them."""
        arguments = self._arguments
        results = list(gradients)
        if arguments.passes > 1 and not arguments.average_passes:  # Keras has divided the sum of the passes
            results = [scale(each, arguments.passes) for each in results]
        local = [index for index, variable in enumerate(variables) if contains(self.local_variables, variable)]
        shared = [index for index in range(len(variables)) if index not in local]
        sent, contexts = self._compress([results[index] for index in shared])
        own = [variables[index] for index in shared]
        self._settings = self._settings_for(sent, own)
        reduced = super().reduce(
            sent, own, values=None if values is None else [values[index] for index in shared], when=when
        )
        for index, gradient, context in zip(shared, reduced, contexts, strict=True):
            restored = gradient if context is None else arguments.compressor.decompress(gradient, context[0])
            results[index] = restored
        if arguments.scale_local_gradients:
            size = group_of(arguments.process_set).size
            for index in local:
                results[index] = scale(results[index], 1.0 / size)
        return results

    def _compress(self, gradients: list[Any]) -> tuple[list[Any], list[Any]]:
        sent: list[Any] = []
        contexts: list[tuple[Any] | None] = []
        for gradient in gradients:
            if self._arguments.compressor is None or gradient is None or hasattr(gradient, "indices"):
                sent.append(gradient)
                contexts.append(None)
            else:
                small, context = self._arguments.compressor.compress(gradient)
                sent.append(small)
                contexts.append((context,))
        return sent, contexts

    def _settings_for(self, gradients: list[Any], variables: list[Any]) -> Any:
        groups = self._arguments.groups
        if groups is None:
            return self._plain_settings
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        if isinstance(groups, int):
            sets = split_list(present, max(1, min(groups, len(present))))
        else:
            sets = [[i for i in present if contains(group, variables[i])] for group in groups]
        from ronde.tensorflow.gradients import variable_names  # only the TensorFlow backend has buckets

        names = variable_names(variables)
        together = [[names[index] for index in part] for part in sets if part]
        return dataclasses.replace(self._plain_settings, together=together)


def scale(gradient: Any, factor: float) -> Any:
    """A gradient times a number."""
    if gradient is None:
        return None
    if hasattr(gradient, "indices"):
        return type(gradient)(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


class HorovodOptimizer(DistributedBase):
    """What Horovod adds to an optimizer's class, with some names of Keras 2 that scripts use."""

    _HAS_AGGREGATE_GRAD = True
    _horovod_arguments: HorovodArguments
    _iterations: Any
    learning_rate: Any

    @property
    def gradient_reduction(self) -> HorovodKerasReduction:
        """What averages the gradients."""
        found: HorovodKerasReduction | None = self.__dict__.get("_gradient_reduction")
        if found is None:
            found = HorovodKerasReduction(self._reduction_arguments, self._horovod_arguments)
            object.__setattr__(self, "_gradient_reduction", found)
        return found

    def register_local_var(self, var: Any) -> None:
        """Keep the gradients of this variable on their rank."""
        reductions = [self.gradient_reduction]
        inner = getattr(self, "inner_optimizer", None)
        if isinstance(inner, HorovodOptimizer):
            reductions.append(inner.gradient_reduction)
        for reduction in reductions:
            if not contains(reduction.local_variables, var):
                reduction.local_variables.append(var)

    def apply_gradients(self, grads_and_vars: Any, **kwargs: Any) -> Any:
        """As Keras', which averages them. Arguments that only Keras 2 had are accepted."""
        unknown = sorted(set(kwargs).difference(IGNORED))
        if unknown:
            raise TypeError(f"apply_gradients() got an unexpected keyword argument {unknown[0]!r}")
        base: Any = super()
        return base.apply_gradients(grads_and_vars)

    def _allreduce(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        return self.gradient_reduction.reduce(grads, vars)

    @property
    def variables(self) -> CallableList:
        """The variables; also as a call."""
        base: Any = super()
        return CallableList(base.variables)

    @property
    def lr(self) -> Any:
        """The learning rate, as Keras 2 called it: TensorFlow's variable, which `K.set_value(opt.lr, x)` takes. Keras 3
        fails there with a variable of its own."""
        return lr_variable(self.learning_rate)

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value

    @property
    def iterations(self) -> Any:
        """The number of backward passes."""
        return self._iterations


def create_distributed_optimizer(
    keras: Any,
    optimizer: Any,
    name: str | None,
    device_dense: str,
    device_sparse: str,
    compression: type[Compressor] | Compressor,
    sparse_as_dense: bool,
    gradient_predivide_factor: float,
    op: int,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:  # an optimizer of a class made for it
    """The optimizer, made to average gradients over the ranks. `keras` is the module that it is from."""
    if op not in (Average, Sum):
        raise ValueError(f"op of a Keras optimizer is hvd.Average or hvd.Sum, got {op!r}")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor needs op=hvd.Average")
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step must be at least 1, got {backward_passes_per_step}")
    found_groups = check_groups(0, groups)
    if is_keras_2(optimizer):
        return create_keras2_optimizer(
            optimizer,
            name,
            reduction={
                "compression": compression,
                "sparse_as_dense": sparse_as_dense,
                "op": op,
                "gradient_predivide_factor": gradient_predivide_factor,
                "groups": found_groups,
                "process_set": process_set,
                "scale_local_gradients": scale_local_gradients,
            },
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            process_set=process_set,
        )
    is_known = isinstance(compression, type) and compression in CODECS
    arguments = HorovodArguments(
        compressor=None if is_known else compression,
        groups=found_groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
    )
    kind = type(getattr(optimizer, "inner_optimizer", optimizer)).__name__
    if backward_passes_per_step > 1:
        optimizer = _with_passes(optimizer, backward_passes_per_step)
    optimizer.name = name or f"Distributed{kind}"
    with translate_errors():
        distributed = ronde.keras.DistributedOptimizer(
            optimizer,
            op=OPS[op],
            codec=CODECS[compression] if is_known else None,
            group=None if process_set is global_process_set else group_of(process_set),
            predivide=float(gradient_predivide_factor),
            sparse_as_dense=sparse_as_dense,
        )
    return _add_horovods_names(distributed, arguments)


def _with_passes(optimizer: Any, passes: int) -> Any:
    """The optimizer with gradient accumulation; one that has variables already is made again, as by Horovod."""
    if optimizer.built:
        optimizer = type(optimizer).from_config(optimizer.get_config())
    getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps = passes
    return optimizer


def _add_horovods_names(optimizer: Any, arguments: HorovodArguments) -> Any:
    inner = getattr(optimizer, "inner_optimizer", None)
    if isinstance(inner, DistributedBase):
        _add_horovods_names(inner, arguments)
    base = type(optimizer)
    facts = {"__module__": base.__module__, "__doc__": base.__doc__, "_horovod_arguments": arguments}
    if arguments.passes == 1:
        facts["iterations"] = base.iterations
    object.__setattr__(optimizer, "__class__", type(base.__name__, (HorovodOptimizer, base), facts))
    return optimizer
