"""Gradients, averaged over all ranks: reduce_gradients(), for tapes and optimizers.

Dense gradients travel in buckets. In a graph each bucket is a pair of nodes, start and finish, so that buckets are
reduced while the backward pass goes on. The starts of a graph are chained: every rank submits the buckets of a plan in
one order, on a channel that the plan has for itself, whatever order TensorFlow runs the rest in. What the members have
to agree on travels with every bucket as a hash, so different plans are an error that names them.

A *plan* is the list of buckets of one call of reduce_gradients(), in their order; a *wire* is a gradient in the dtype
in which it travels. A plan is known by its name, and not by what it contains: a function that is traced again, with
another batch size or by one rank only, uses the same channel.

Reductions are counted: an elastic State sees by it whether variables may have changed since the last step end. A step
of a tf.function that fails has run in part: TensorFlow runs nodes in any order, and an optimizer may have changed one
variable while the gradient of another one was on its way. So in a job whose ranks may change, gradients are handed on
only when all of them are reduced and the counter has been raised. If it is as before, no optimizer has begun.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import tensorflow as tf

from ronde.comm.backends.base import RunningCall
from ronde.comm.buffers import address_of
from ronde.comm.call import MAX_DESCRIPTION_BYTES, CallOptions, Signature, Span, get_signature, hash_signature
from ronde.comm.channel import Channel
from ronde.comm.group import Group
from ronde.tensorflow.collectives import DTYPES, allreduce_slices, as_array, as_tensor, differentiable
from ronde.tensorflow.graph_operations import (
    add_python_node,
    get_graph_ops,
    get_world_can_change,
    resolve_group,
    run_independently,
)
from ronde.tensorflow.plan_channels import plan_channels
from ronde.tensorflow.tracing import backward_name, find_call_site, unique_in_graph, without_autograph
from ronde.text import shorten
from ronde.training.gradients.adapter import ParameterInfo
from ronde.training.gradients.gradient_settings import GradientSettings
from ronde.training.gradients.planned_buckets import GradientLayout, PlannedBucket, plan_buckets
from ronde.training.graph_operations import GraphOperation, group_of
from ronde.types import Deadline, DType, Op, OperationKind, parse_op

CODECS = ("none", "float16", "bfloat16")


@without_autograph
def reduce_gradients(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    *,
    settings: GradientSettings | None = None,
    group: Group | None = None,
    name: str = "",
    codec: str | None = None,
) -> list[Any]:
    """Return the gradients, averaged over all members (or as `settings` says), in their order. Collective.

    `gradients` are tensors, tf.IndexedSlices or None, and `variables` what they belong to: variables of TensorFlow or
    of Keras. What is None stays so, and must be None on all ranks. Works eagerly, in tf.function and in graphs of
    sessions. `codec` float16 or bfloat16 sends 16 bits per number. `name` tells apart what is reduced at different
    places of a program; without one, it is the place of the call.
    """
    members, wanted = resolve_group(group), settings or GradientSettings()
    wire = _check_codec(codec)
    if len(gradients) != len(variables):
        raise ValueError(f"reduce_gradients got {len(gradients)} gradients for {len(variables)} variables")
    if members.size == 1 and not get_world_can_change():
        return count_reduction(list(gradients))
    names = variable_names(variables)
    wanted.check_names(names)
    given = zip(gradients, variables, names, strict=True)
    prepared = [_prepare(gradient, variable, each, wanted) for gradient, variable, each in given]
    plan_name = "gradients"  # eagerly it is matched by the order of the calls
    if not tf.executing_eagerly():
        plan_name = unique_in_graph(name or f"gradients {find_call_site()}", is_given=bool(name))
    dense = [i for i, each in enumerate(prepared) if each is not None and not isinstance(each, tf.IndexedSlices)]
    slices = [i for i, each in enumerate(prepared) if isinstance(each, tf.IndexedSlices)]
    results, op = list(prepared), parse_op(wanted.op)
    if slices:
        wanted.sparse_scales(1, members.size)  # raises for adasum
    layout = _describe_layout(prepared, names)
    reduction = DenseReduction(members, plan_name, tuple(names[i] for i in dense), layout, wanted, wire)
    if dense:
        for index, each in zip(dense, _reduce_dense(reduction, [prepared[i] for i in dense]), strict=True):
            results[index] = each
    elif slices:  # they only gather: find out whether the members have the same ones and combine them alike
        with tf.control_dependencies([prepared[index].values for index in slices]):  # which may not be finite
            probe = tf.identity(tf.zeros([1]))
        agreed = _reduce_dense(reduction._replace(names=("agreement",)), [probe])
        for index in slices:
            prepared[index] = _after_agreement(prepared[index], agreed)
    for index in slices:
        options = GraphOperation("allreduce", group=members.id, op=op.name.lower())
        part = None if tf.executing_eagerly() else f"{plan_name}.{index}"
        results[index] = allreduce_slices(members, prepared[index], options, part)
    return count_reduction(results)


def _after_agreement(slices: Any, agreed: Sequence[Any]) -> Any:
    """The slices, which are sent when the members have agreed. In a graph only: eagerly they have by now."""
    if tf.executing_eagerly():
        return slices
    with tf.control_dependencies(list(agreed)):
        return tf.IndexedSlices(tf.identity(slices.values), tf.identity(slices.indices), slices.dense_shape)


def variable_names(variables: Sequence[Any]) -> list[str]:
    """The names of variables of TensorFlow or of Keras, each of them once."""
    names: dict[str, int] = {}
    unique = []
    for variable in variables:
        name = str(getattr(variable, "path", None) or getattr(variable, "name", "variable"))
        number = names[name] = names.get(name, 0) + 1
        unique.append(name if number == 1 else f"{name} ({number})")
    return unique


def _stable_name(name: str) -> str:
    """The layer and the variable of a path, without the numbers that Keras gives to layers: they depend on what else a
    process has built. And a model that was loaded from a file has shorter paths than one that was made."""
    return "/".join(re.sub(r"_\d+(?=/|$)", "", name).split("/")[-2:])


def _check_codec(codec: str | None) -> Any:
    """The dtype in which float32 and float64 travel; None if as they are."""
    if codec is not None and codec not in CODECS:
        raise ValueError(f"codec must be one of {', '.join(CODECS)}, got {codec!r}")
    return None if codec in (None, "none") else tf.as_dtype(codec)


def _prepare(gradient: Any, variable: Any, name: str, settings: GradientSettings) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        if settings.check_finite:
            values = tf.debugging.check_numerics(gradient.values, f"the gradient of {name!r} is not finite")
            with tf.control_dependencies([values]):  # then nothing of it travels
                gradient = tf.IndexedSlices(values, tf.identity(gradient.indices), gradient.dense_shape)
        return tf.convert_to_tensor(gradient) if settings.sparse_as_dense else gradient
    tensor = tf.convert_to_tensor(gradient)
    if tensor.dtype.name not in DTYPES:
        raise TypeError(f"the gradient of {name!r} has dtype {tensor.dtype.name}, which cannot be reduced")
    if settings.check_finite:
        tensor = tf.debugging.check_numerics(tensor, f"the gradient of {name!r} is not finite")
    if not tensor.shape.is_fully_defined():
        tensor = tf.ensure_shape(tensor, variable.shape)
    if not tensor.shape.is_fully_defined():
        raise ValueError(f"the gradient of {name!r} has the shape {tensor.shape}, which is not known in advance")
    return tensor


# --- dense gradients -------------------------------------------------------------------------------------------------


def _describe_layout(gradients: Sequence[Any], names: Sequence[str]) -> GradientLayout:
    kinds = "".join("n" if g is None else "s" if isinstance(g, tf.IndexedSlices) else "d" for g in gradients)
    missing = [name for name, kind in zip(names, kinds, strict=True) if kind == "n"]
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return GradientLayout(kinds, f" without {shorten(missing[0], 30)!r}{more}" if missing else "")


class DenseReduction(NamedTuple):
    """What is to be done with the dense gradients of some variables."""

    members: Group
    plan: str
    names: tuple[str, ...]
    layout: GradientLayout
    settings: GradientSettings
    wire: Any
    """The dtype in which float32 and float64 travel; None if as they are."""


def _reduce_dense(reduction: DenseReduction, gradients: Sequence[Any]) -> list[Any]:
    wires = [_to_wire(gradient, reduction.wire) for gradient in gradients]
    parameters = [
        ParameterInfo(_stable_name(name), tuple(each.shape.as_list()), each.dtype.name, each.shape.num_elements())
        for name, each in zip(reduction.names, wires, strict=True)
    ]
    buckets = plan_buckets(parameters, reduction.names, reduction.plan, reduction.layout, reduction.settings)
    reduced = _reduce_wires(reduction.members, reduction.plan, wires, buckets)
    return [
        each if each.dtype == gradient.dtype else tf.cast(each, gradient.dtype)
        for each, gradient in zip(reduced, gradients, strict=True)
    ]


def _reduce_wires(members: Group, plan: str, wires: list[Any], buckets: Sequence[PlannedBucket]) -> list[Any]:
    """Return the tensors, reduced bucket by bucket and differentiable. Those without elements come back as they are."""
    if not tf.executing_eagerly() and (ops := get_graph_ops()) is not None:
        return _add_bucket_nodes(ops, members, plan, wires, buckets)

    def forward(*wires: Any) -> tuple[list[Any], Any]:
        def backward(*grads: Any) -> list[Any]:
            results = list(grads)
            for number, bucket in enumerate(buckets):
                given = [grads[index] for index in bucket.indices]
                reduced = _reduce_backward(members, f"{plan}.{number}", bucket.signature, given)
                for index, each in zip(bucket.indices, reduced, strict=True):
                    results[index] = each
            return results

        reduce = _reduce_eagerly if tf.executing_eagerly() else _add_python_reduction
        return reduce(members, plan, list(wires), buckets), backward

    return list(differentiable(forward, wires))


def _reduce_backward(members: Group, plan: str, signature: Signature, grads: list[Any]) -> list[Any]:
    """The gradients of a bucket of reduced gradients: reduced in the same way, as a plan of its own."""
    if signature.op not in (Op.SUM, Op.MEAN):
        raise NotImplementedError(
            f"gradients that were reduced with op={signature.op.name.lower()!r} have no gradients themselves; use "
            "op='mean' or 'sum', or compute what needs second derivatives before they are reduced"
        )
    description = f"backward of {signature.description}"
    named = msgspec.structs.replace(
        signature,
        description=shorten(description, MAX_DESCRIPTION_BYTES),
        hash=hash_signature(f"{description} {signature.hash}"),
    )
    bucket = PlannedBucket(tuple(range(len(grads))), named, sum(each.shape.num_elements() for each in grads))
    return _reduce_wires(members, backward_name(plan) or "", grads, [bucket])


def _to_wire(gradient: Any, wire: Any) -> Any:
    is_wide = gradient.dtype in (tf.float32, tf.float64)
    return tf.cast(gradient, wire) if wire is not None and is_wide else gradient


def _reduce_eagerly(members: Group, plan: str, wires: list[Any], buckets: Sequence[PlannedBucket]) -> list[Any]:
    """In program order, on the group's own channel."""
    arrays = _reduce_arrays(members, members.ordered_channel, buckets, [as_array(each) for each in wires])
    return [as_tensor(array, wire) for array, wire in zip(arrays, wires, strict=True)]


def _add_bucket_nodes(
    ops: Any, members: Group, plan: str, wires: list[Any], buckets: Sequence[PlannedBucket]
) -> list[Any]:
    """Two native nodes for each bucket."""
    results, last_start = list(wires), None
    for number, bucket in enumerate(buckets):
        signature = bucket.signature
        with tf.control_dependencies([] if last_start is None else [last_start]):
            started = ops.ronde_start_bucket(
                inputs=[wires[index] for index in bucket.indices],
                operation=GraphOperation("bucket", plan, members.id).encode(),
                plan=f"{members.id}.{plan}",
                bucket=number,
                num_buckets=len(buckets),
                count=bucket.num_elements,
                signature=int(np.uint64(signature.hash).astype(np.int64)),
                description=signature.description,
                op=int(signature.op),
                scales=f"{signature.prescale!r} {signature.postscale!r}",
            )
        last_start = started.run.op
        run_independently(last_start)
        finished = ops.ronde_finish_bucket(inputs=started.outputs, run=started.run)
        run_independently(finished[0].op)
        for index, each in zip(bucket.indices, finished, strict=True):
            results[index] = each
    return results


@tf.RegisterGradient("RondeFinishBucket")  # type: ignore[untyped-decorator]  # TensorFlow has no types
def _reduce_gradients_of_bucket(finish: Any, *grads: Any) -> list[Any]:
    start = finish.inputs[0].op
    operation = msgspec.json.decode(start.get_attr("operation"), type=GraphOperation)
    prescale, postscale = map(float, start.get_attr("scales").split())
    inputs = list(start.inputs)
    given = [tf.zeros_like(x) if grad is None else grad for grad, x in zip(grads, inputs, strict=True)]
    signature = get_signature(
        OperationKind.ALLREDUCE,
        DType[inputs[0].dtype.name.upper()],
        tuple(tuple(x.shape.as_list()) for x in inputs),
        CallOptions(Op(start.get_attr("op")), prescale, postscale),
    )
    forward = msgspec.structs.replace(
        signature,
        label="bucket",
        description=start.get_attr("description").decode(),
        hash=int(np.int64(start.get_attr("signature")).astype(np.uint64)),
    )
    plan = f"{operation.name}.{start.get_attr('bucket')}"
    return [*_reduce_backward(group_of(operation), plan, forward, given), None]


@tf.RegisterGradient("RondeStartBucket")  # type: ignore[untyped-decorator]
def _pass_gradients_of_bucket(start: Any, *grads: Any) -> list[Any]:
    return list(grads[:-1])


def _add_python_reduction(members: Group, plan: str, wires: list[Any], buckets: Sequence[PlannedBucket]) -> list[Any]:
    """One node in Python, which reduces all buckets as the native nodes do."""
    operation = GraphOperation("gradients", plan, members.id)

    def reduce(*arrays: Any) -> list[Any]:
        current = group_of(operation)
        with plan_channels.hold(f"{members.id}.{plan}", current) as channel:
            return _reduce_arrays(current, channel, buckets, arrays)

    return add_python_node(reduce, wires, [each.dtype for each in wires], [each.shape for each in wires])


def _reduce_arrays(
    members: Group, channel: Channel, buckets: Sequence[PlannedBucket], arrays: Sequence[Any]
) -> list[Any]:
    """An array that has no elements is in no bucket."""
    sources = [np.asarray(array, order="C") for array in arrays]
    results = [np.empty_like(source) for source in sources]
    running_calls: list[RunningCall] = []
    for bucket in buckets:
        pairs = [(sources[index], results[index]) for index in bucket.indices]
        spans = tuple(Span(address_of(given), address_of(taken), given.size) for given, taken in pairs)
        call = bucket.signature.make_call(spans, pairs)
        running_calls.append(channel.submit(call, ((bucket.signature, ""),)))
    deadline = Deadline(members.operation_timeout_s)
    for running_call in running_calls:
        running_call.wait(deadline)
    return results


# --- counting reductions ----------------------------------------------------------------------------------------------


COUNTER_NAME = "ronde_reductions"


class _Counter:
    num_eager = 0
    is_in_functions = False
    """Whether there is a counter for functions, in which Python does not run in every step."""


_counter = _Counter()
_lock = threading.Lock()


def count_reductions() -> int:
    """How many times gradients were reduced in this process."""
    if not _counter.is_in_functions:
        return _counter.num_eager
    with tf.init_scope():
        return _counter.num_eager + int(tf.raw_ops.ReadVariableOp(resource=_find_counter(), dtype=tf.int64))


def count_reduction(gradients: list[Any]) -> list[Any]:
    """Count one more reduction when these gradients, its results, are there, and return them. In graphs of sessions
    nothing is counted."""
    if tf.executing_eagerly():
        _counter.num_eager += 1
        return gradients
    graph = tf.compat.v1.get_default_graph()
    if not graph.building_function or tf.distribute.has_strategy() or not _is_in_eager_program():
        return gradients
    _prepare_counter()
    if not get_world_can_change():
        _add_one()
        return gradients
    tensors = [each for gradient in gradients for each in _tensors_of(gradient)]
    with tf.control_dependencies(tensors):
        counted = _add_one()
    with tf.control_dependencies([counted]):
        return [_identity(gradient) for gradient in gradients]


def _add_one() -> Any:
    return tf.raw_ops.AssignAddVariableOp(resource=_find_counter(), value=tf.constant(1, tf.int64))


def _find_counter() -> Any:
    """The counter of functions, found by its name when a function runs: one that was handed to the function would keep
    it from being saved, because the user's module does not have it."""
    with tf.device("CPU:0"):
        return tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=COUNTER_NAME)


def _prepare_counter() -> None:
    with _lock, tf.init_scope():
        if not _counter.is_in_functions:
            tf.raw_ops.AssignVariableOp(resource=_find_counter(), value=tf.constant(0, tf.int64))
            _counter.is_in_functions = True


def after_first_gradient(gradients: Sequence[Any]) -> Any:
    """A context in which nodes wait for the gradient that a backward pass computes first: that of the last variable."""
    found = next((each for each in reversed(gradients) if each is not None), None)
    return tf.control_dependencies(_tensors_of(found))


def _is_in_eager_program() -> bool:
    """Whether the function that is built is called by Python, and not in the graph of a session."""
    with tf.init_scope():
        return bool(tf.executing_eagerly())


def make_counter(name: str) -> Any:
    """A variable that counts from 0, also if a function is being traced.

    It is made in a thread of its own: a function notices variables that are made in the thread in which it is traced,
    is traced once more because of them, and refuses them if it was traced before.
    """
    made: list[Any] = []

    def make() -> None:
        with tf.device("CPU:0"):
            made.append(tf.Variable(0, dtype=tf.int64, trainable=False, name=name))

    thread = threading.Thread(target=make, name="ronde-tensorflow-counter", daemon=True)
    thread.start()
    thread.join()
    return made[0]


def _tensors_of(gradient: Any) -> list[Any]:
    if gradient is None:
        return []
    return [gradient.values, gradient.indices] if isinstance(gradient, tf.IndexedSlices) else [gradient]


def _identity(gradient: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(gradient.values), tf.identity(gradient.indices), gradient.dense_shape)
    return tf.identity(gradient)
