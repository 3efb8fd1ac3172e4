"""How tapes and optimizers reduce gradients: Horovod's arguments, over ronde.tensorflow.reduce_gradients()."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

import ronde.tensorflow
from horovod.common.process_sets import ProcessSet, global_process_set, group_of
from horovod.common.util import split_list
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.errors import tensorflow_errors
from horovod.tensorflow.mpi_ops import OPS, Adasum, Average, Sum, call_site
from horovod.tensorflow.util import _executing_eagerly, contains, tensorflow_variable
from ronde.tensorflow import GradientSettings
from ronde.tensorflow.gradients import variable_names
from ronde.tensorflow.tracing import unique_in_graph


class HorovodGradientReduction:
    """What DistributedGradientTape and DistributedOptimizer have in common."""

    def __init__(
        self,
        *,
        compression: type[Compressor] | Compressor = Compression.none,
        sparse_as_dense: bool = False,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | Sequence[Sequence[Any]] | None = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        self.groups = check_groups(num_groups, groups)
        if op not in (Average, Sum, Adasum):
            raise ValueError(f"gradients are reduced by hvd.Average, hvd.Sum or hvd.Adasum, got op={op!r}")
        if gradient_predivide_factor != 1.0 and op != Average:
            raise ValueError("gradient_predivide_factor needs op=hvd.Average")
        self.settings = GradientSettings(
            op=OPS[op], predivide=float(gradient_predivide_factor), sparse_as_dense=sparse_as_dense
        )
        self.compression = compression
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        self.local_variables: list[Any] = []
        """Variables whose gradients stay on this rank."""

    def register_local(self, variable: Any) -> None:
        if not contains(self.local_variables, variable):
            self.local_variables.append(variable)

    def is_local(self, variable: Any) -> bool:
        return contains(self.local_variables, variable)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], use_generic_names: bool = False) -> list[Any]:
        """The gradients as an optimizer gets them. Collective for the members of the process set."""
        results = list(gradients)
        local = [index for index, variable in enumerate(variables) if self.is_local(variable)]
        shared = [index for index in range(len(variables)) if index not in local]
        if self.process_set.included():
            reduced = self._reduce_shared(
                [gradients[index] for index in shared], [variables[index] for index in shared], use_generic_names
            )
            for index, gradient in zip(shared, reduced, strict=True):
                results[index] = gradient
        if self.scale_local_gradients and local:
            factor = 1.0 / tf.cast(ronde.tensorflow.size_op(group=group_of(self.process_set)), tf.float64)
            for index in local:
                results[index] = scale(results[index], factor)
        return results

    def _reduce_shared(self, gradients: list[Any], variables: list[Any], use_generic_names: bool) -> list[Any]:
        sent, contexts = [], []
        for gradient in gradients:
            if isinstance(gradient, tf.IndexedSlices) and self.settings.sparse_as_dense:
                gradient = tf.convert_to_tensor(gradient)
            if gradient is None or isinstance(gradient, tf.IndexedSlices):
                small, context = gradient, None
            else:
                small, context = self.compression.compress(gradient)
            sent.append(small)
            contexts.append(context)
        named = [SimpleNamespace(name=f"grad_{i}") for i in range(len(variables))] if use_generic_names else variables
        site = call_site()
        with tensorflow_errors():
            reduced = ronde.tensorflow.reduce_gradients(
                sent,
                named,
                settings=self._settings_for(gradients, variables, variable_names(named)),
                group=group_of(self.process_set),
                name=site if _executing_eagerly() else unique_in_graph(f"gradients {site}", is_given=False),
            )
        return [
            each if each is None or isinstance(each, tf.IndexedSlices) else self.compression.decompress(each, context)
            for each, context in zip(reduced, contexts, strict=True)
        ]

    def _settings_for(self, gradients: list[Any], variables: list[Any], names: list[str]) -> GradientSettings:
        """The settings with the names of those that are reduced together."""
        if self.groups is None:
            return self.settings
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        if isinstance(self.groups, int):
            sets = [part for part in split_list(present, min(self.groups, len(present)) or 1) if part]
        else:
            sets = [[i for i in present if contains(group, variables[i])] for group in self.groups]
        settings = self.settings
        return GradientSettings(
            op=settings.op,
            predivide=settings.predivide,
            sparse_as_dense=settings.sparse_as_dense,
            together=[[names[index] for index in part] for part in sets if part],
        )


def check_groups(num_groups: int, groups: int | Sequence[Sequence[Any]] | None) -> int | Sequence[Sequence[Any]] | None:
    """`groups`, or the deprecated num_groups in its place."""
    if num_groups:
        warnings.warn("num_groups is deprecated; use groups", DeprecationWarning, stacklevel=4)
        groups = num_groups if groups is None else groups
    if groups is None or groups == 0:
        return None
    if isinstance(groups, bool) or not (isinstance(groups, list | tuple) or (isinstance(groups, int) and groups > 0)):
        raise ValueError(f"groups must be a number above 0, or a list of lists of variables, got {groups!r}")
    if isinstance(groups, list | tuple):
        members = [variable for group in groups for variable in (group if isinstance(group, list | tuple) else [None])]
        if any(not hasattr(variable, "dtype") for variable in members):
            raise ValueError("groups must be a list of lists of variables")
        identities = [id(tensorflow_variable(variable)) for variable in members]
        if len(set(identities)) < len(identities):
            raise ValueError("groups: a variable can be in one group only")
    return groups


def scale(gradient: Any, factor: Any) -> Any:
    """A gradient times a number."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)
