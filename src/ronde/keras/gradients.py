"""How the gradients of a Keras optimizer are averaged over ranks, on each of Keras' backends.

torch        after the backward pass, in place, one operation per dtype (ronde.torch.keras_gradients)
jax          one operation per dtype, also inside of jit (ronde.jax.gradients)
tensorflow   buckets in the graph, which travel while the backward pass runs (ronde.tensorflow.gradients)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np

from ronde.comm import objects
from ronde.comm.buffers import Array
from ronde.comm.call import mismatch_error
from ronde.comm.collectives import mark_step
from ronde.comm.group import Group
from ronde.comm.world import current_world, resolve_group
from ronde.keras.variables import checksum_arrays, common_name
from ronde.training.agreement import fingerprint
from ronde.training.gradients.gradient_settings import GradientSettings
from ronde.training.sync_check import checksum_bytes, compare_checksums
from ronde.types import parse_op

CODECS = ("float16", "bfloat16")
FIRST_COMPARED_STEP = 2
"""The first step that is compared, unless a model is broadcast later: one that its first batch builds is broadcast
after that batch, or after all batches of the first call of its training function."""
ADVICE = (
    ". Add ronde.keras.callbacks.BroadcastInitialState() to the callbacks of fit(), or call "
    "ronde.keras.broadcast_parameters(model) before training, on all ranks, or let all of them load the same "
    "checkpoint. If they are meant to differ, compare_at_step=0 or RONDE_COMPARE_AT_STEP=0 turns this off"
)
_num_reductions: WeakKeyDictionary[Group, int] = WeakKeyDictionary()
"""How many optimizers have got a name in each group. A group belongs to one round."""
_agreed_names: WeakKeyDictionary[Group, set[str]] = WeakKeyDictionary()
"""The names that optimizers have brought into the round of each group."""


class KerasGradientReduction:
    """Averages the gradients of one optimizer over the ranks of a group; all of its members call it equally often."""

    def __init__(self, settings: GradientSettings, group: Group | None, codec: str | None) -> None:
        self._settings = settings
        self._group = group
        self._codec = codec
        self._name = ""
        self._is_owner = False  # of the channels on which TensorFlow reduces its gradients
        self._num_steps = 0
        self._step_variable: Any = None  # on TensorFlow, where Python does not run in every step
        self._compared_variables: Sequence[Any] = ()
        self._first_compared_step = FIRST_COMPARED_STEP

    def reset(self) -> None:
        """A new round has begun: count its steps from 0, as those ranks do that have just come."""
        self._num_steps = 0
        if self._step_variable is not None:
            self._step_variable.assign(0)

    @property
    def is_needed(self) -> bool:
        """Whether there are other ranks, or may be: an elastic job can grow."""
        members = resolve_group(self._group)
        return members.included and (members.size > 1 or current_world().settings.elastic)

    def reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        *,
        values: Sequence[Any] | None = None,
        when: Any = None,
    ) -> list[Any]:
        """Return the average of the gradients; None stays None. Collective.

        `values` are those of the variables, if these are not current, as in a stateless call of JAX. `when` is a
        boolean of JAX: gradients are only averaged if it holds, as it must on all ranks alike.
        """
        if keras.backend.backend() == "torch":
            from ronde.torch.keras_gradients import call_outside_of_graphs

            reduced: list[Any] = call_outside_of_graphs(self._reduce_torch, gradients, variables)
            return reduced
        if not self.is_needed:
            return list(gradients)
        if keras.backend.backend() == "jax":
            return self._reduce_jax(gradients, variables, values, when)
        return self._reduce_tensorflow(gradients, variables)

    def all_true(self, flag: Any) -> Any:
        """Whether a boolean tensor is true on all ranks. Collective."""
        if keras.backend.backend() == "torch":
            from ronde.torch.keras_gradients import call_outside_of_graphs

            return call_outside_of_graphs(self._all_true_torch, flag)
        if not self.is_needed:
            return flag
        number: Any = keras.ops.cast(flag, "float32")
        name = f"{self.name}.finite"
        if keras.backend.backend() == "jax":
            from ronde.jax.gradients import reduce_gradients

            (number,) = reduce_gradients([number], group=self._group, options={"op": "min"}, name=name)
        else:
            from ronde.tensorflow.collectives import allreduce

            number = allreduce(number, op="min", group=self._group, name=name)
        return number > 0.5

    @property
    def name(self) -> str:
        """Which optimizer of the group this is, counted when it is first used: the same on all ranks."""
        if not self._name:
            members = resolve_group(self._group)
            taken = _agreed_names.get(members, set())
            while not self._name or self._name in taken:
                number = _num_reductions[members] = _num_reductions.get(members, 0) + 1
                self._name = f"ronde.keras.{number}"
        return self._name

    def agree_on_name(self) -> None:
        """Take the name under which other ranks have used this optimizer, if this one has not. Called in a new round,
        by all of its ranks: one that has just come may use optimizers in another order than the others once did."""
        members = resolve_group(None)
        self._name = next(filter(None, [self._name, *objects.allgather(self._name)]), "")
        _agreed_names.setdefault(members, set()).add(self._name)

    @property
    def _options(self) -> dict[str, Any]:
        """Those of an allreduce. With `predivide` the sum is of smaller numbers, and does not overflow."""
        predivide = self._settings.predivide
        return {"op": parse_op(self._settings.op), "prescale": 1.0 / predivide, "postscale": predivide}

    # --- the backends ----------------------------------------------------------------------------------------------

    def _reduce_torch(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        from ronde.torch.keras_gradients import reduce_gradients
        from ronde.torch.tensors import ReduceOptions

        if not self.is_needed:
            return list(gradients)
        sent = [self._encode(gradient) for gradient in gradients]
        templates = [  # of missing gradients
            variable.value if gradient is not None else self._encode(variable.value)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        options = ReduceOptions(**self._options)
        reduced = reduce_gradients(sent, templates, group=resolve_group(self._group), options=options)
        if self._count_step(is_repeated=False):
            self._compared_variables = variables
            self._compare([keras.ops.convert_to_numpy(variable.value) for variable in variables])
        return self._decode(reduced, variables)

    def _all_true_torch(self, flag: Any) -> Any:
        from ronde.torch.collectives import allreduce

        if not self.is_needed:
            return flag
        return allreduce(keras.ops.cast(flag, "float32"), op="min", group=self._group) > 0.5

    def _reduce_jax(
        self, gradients: Sequence[Any], variables: Sequence[Any], values: Sequence[Any] | None, when: Any
    ) -> list[Any]:
        from ronde.jax.gradients import reduce_gradients

        self._compared_variables = variables
        results = list(gradients)
        indices = [index for index, gradient in enumerate(gradients) if gradient is not None]
        missing = {index: common_name(variables[index]) for index in range(len(gradients)) if index not in indices}
        parameters = [variable.value for variable in variables] if values is None else list(values)
        reduced = reduce_gradients(
            [self._encode(gradients[index]) for index in indices],
            group=self._group,
            options=self._options,
            name=self.name,
            when=when,
            parameters=parameters if self._compare_at_step else (),
            check=functools.partial(self._check_missing, missing) if missing else None,
            is_compared=self._count_step,
            compare=self._compare,
        )
        for index, gradient in zip(indices, reduced, strict=True):
            results[index] = gradient
        return self._decode(results, variables)

    def _check_missing(self, missing: Mapping[int, str]) -> None:
        """Raise Mismatch if other members lack other gradients. Collective for those that lack some: one that lacks
        none has reduced other arrays, which is an error already."""
        members = resolve_group(self._group)
        mine = fingerprint(repr(sorted(missing)).encode()).reshape(1, -1)
        if (members.allgather(mine, name=f"{self.name}.missing") == mine).all():
            return
        told = f"{len(missing)} of the gradients are None: {', '.join(f'{i} {name!r}' for i, name in missing.items())}"
        rows = members.allgather_each(np.frombuffer(told.encode(), np.uint8), f"{self.name}.missing names")
        raise mismatch_error({r: row.tobytes().decode() for r, row in zip(members.ranks, rows, strict=True)})

    def _reduce_tensorflow(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        from ronde.tensorflow.gradients import reduce_gradients
        from ronde.tensorflow.plan_channels import plan_channels

        if not self._is_owner:
            self._is_owner = True
            plan_channels.set_owner(self, self.name)
        if self._compare_at_step:
            self._add_comparison(variables)
        return reduce_gradients(
            gradients, variables, settings=self._settings, group=self._group, name=self.name, codec=self._codec
        )

    def _encode(self, gradient: Any) -> Any:
        """The gradient with 16 bits per number, if that was asked for and it has more. Sums are made with 32 bits."""
        is_wide = gradient is not None and keras.backend.standardize_dtype(gradient.dtype) in ("float32", "float64")
        return keras.ops.cast(gradient, self._codec) if is_wide and self._codec else gradient

    def _decode(self, reduced: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if self._codec is None:
            return list(reduced)
        pairs = zip(reduced, variables, strict=True)
        return [None if each is None else keras.ops.cast(each, variable.dtype) for each, variable in pairs]

    # --- comparing parameters --------------------------------------------------------------------------------------

    @property
    def _compare_at_step(self) -> int:
        """0: never."""
        at_step = self._settings.compare_at_step
        if at_step is None:
            at_step = current_world().settings.compare_at_step
        return max(at_step, self._first_compared_step) if at_step else 0

    def compare_after(self, num_steps: int) -> None:
        """Compare parameters after so many steps at the earliest. Called before the first step."""
        self._first_compared_step = max(self._first_compared_step, num_steps + 1)

    def _count_step(self, is_repeated: bool) -> bool:
        """Count a step, and return whether parameters are compared in it. A program may repeat steps, and run them in
        any order: only the first is counted."""
        mark_step()
        if is_repeated:
            return False
        self._num_steps += 1
        return self._num_steps == self._compare_at_step

    def _compare(self, arrays: Sequence[Array]) -> None:
        compare_parameters(resolve_group(self._group), self.name, self._compared_variables, arrays)

    def _add_comparison(self, variables: Sequence[Any]) -> None:
        """Compare the variables in one of the steps that TensorFlow runs, eagerly or in a graph. The others only
        count."""
        from ronde.tensorflow.gradients import make_counter
        from ronde.tensorflow.graph_operations import add_python_branch

        if self._step_variable is None:
            self._step_variable = make_counter("ronde_steps")
        self._step_variable.assign_add(1)
        is_compared = keras.ops.equal(self._step_variable, self._compare_at_step)
        parameters = [keras.ops.convert_to_tensor(variable) for variable in variables]

        # TensorFlow keeps this function for as long as the process lives, so it must hold neither the variables nor
        # this object, which owns channels.
        names = [SimpleNamespace(name="", path=common_name(variable)) for variable in variables]
        group, name = self._group, self.name

        def compare(*arrays: Any) -> None:
            compare_parameters(resolve_group(group), name, names, arrays)

        if not hasattr(is_compared, "numpy"):
            add_python_branch(is_compared, compare, parameters)
        elif is_compared.numpy():  # eager
            compare(*[parameter.numpy() for parameter in parameters])


def compare_parameters(members: Group, name: str, variables: Sequence[Any], arrays: Sequence[Array]) -> None:
    """Compare the values of variables over all members; OutOfSync names the first that differs. It may run in a thread
    of the framework, so the operation has a name."""
    checksums = checksum_arrays(variables, arrays)
    mine = fingerprint(checksum_bytes(checksums)).reshape(1, -1)
    gathered = members.allgather(mine, name=f"{name}.parameters")
    if not (gathered == gathered[0]).all():
        compare_checksums(members, checksums, advice=ADVICE)
