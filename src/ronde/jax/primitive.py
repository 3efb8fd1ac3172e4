"""Operations in programs of JAX: their names, and the primitive that stands for them.

Operations of programs are matched by name, because XLA runs the parts of a program in any order. A name that the caller
does not give is made of the place of the call (file, line, function), of the function that is traced, and of how many
times that place has added an operation to this trace. JAX traces a function once for all of its calls, so a name that
is in the program already gets one more number when the program is lowered.

The primitive has an effect, so it runs also if nobody uses its result. XLA runs it by the handlers of ffi_library,
which block no thread. Where that cannot be used it is an ordered callback to Python, and the callbacks of a program run
one after the other. Outside of programs it is the operation itself: called at once, with ronde's own errors.

The shapes of a program are fixed. So its allgather and alltoall are for members with equally many rows, and these and
its reduce_scatter for the number of members with which it was traced.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax._src import core, effects  # the only place of the current trace, and of what is allowed
from jax._src.callback import OrderedIOEffect, _OrderedIOEffect, emit_python_callback
from jax._src.interpreters.mlir import TokenSet
from jax._src.interpreters.partial_eval import DynamicJaxprTrace
from jax._src.sharding_impls import ShardingContext, SPMDAxisContext
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ronde.comm.buffers import Array
from ronde.comm.call import Memory, even_shares
from ronde.comm.group import Group
from ronde.comm.operations import AllgatherWork
from ronde.comm.world import current_world
from ronde.errors import RondeError
from ronde.jax.ffi_library import FINISH, NUMBER_BYTES, START, OperationDetails, check_shapes, flags, is_native
from ronde.jax.gradient_plans import copy_in, copy_out, gradient_plans, is_planned
from ronde.training.graph_errors import describe_error
from ronde.training.graph_operations import (
    GraphOperation,
    check_equal_rows,
    check_group,
    group_of,
    names_in_python,
    start_by_name,
)

SAME_SHAPE = ("allreduce", "broadcast", "reduce")
"""Kinds of operations whose results are like their operands."""
_PACKAGES = tuple(f"{Path(sys.modules[name].__file__ or '').parent}/" for name in ("ronde", "jax"))
_LIBRARIES = ("/equinox/", "/optax/", "/flax/", "/keras/src/", "<")
"""Files that are not the user's: a name made of a line in them would say nothing."""


def resolve_group(group: Group | None) -> Group:
    """The group, or that of all ranks. In a program, one of an earlier round is an error."""
    if group is not None and find_trace() is not None:
        check_group(group)
    return current_world("an operation of JAX").group if group is None else group


# --- names -----------------------------------------------------------------------------------------------------------

_names: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
"""By trace, how often a name was given."""


def find_trace() -> Any:
    """The trace of the program that is being built in this thread; None outside of programs."""
    trace = core.trace_ctx.trace
    while trace is not None and not isinstance(trace, DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace


def operation_name(kind: str, name: str | None) -> str:
    """The name of an operation: the caller's, or in a program one made of the place of the call; empty outside of
    programs, if there is none. A name that is in the program already gets a number, because XLA may run the two in any
    order."""
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(f"name must be a text that is not empty, got {name!r}")
    trace = find_trace()
    if trace is None:
        return name or ""
    if name is None:
        debug_info = getattr(trace.frame, "debug_info", None)
        function = getattr(debug_info, "func_name", "")
        name = f"{kind} {find_call_site()}" + (f" in {function}" if function else "")
    counts = _names.setdefault(trace, Counter())
    number = counts[name]
    counts[name] += 1
    return f"{name}#{number}" if number else name


def backward_name(name: str) -> str:
    """The name of an operation that computes the gradient of the one with this name."""
    return operation_name("", f"{name}.backward") if name else ""


class LoweringCache(dict[Any, Any]):
    """What JAX has lowered of a program, by function, for the next call of that function. Functions with operations are
    not kept: each of their calls is lowered, so that its operations get names of their own."""

    def __setitem__(self, key: Any, value: Any) -> None:
        parts = key if isinstance(key, tuple) else (key,)
        if not any(COLLECTIVE_EFFECT in getattr(part, "effects", ()) for part in parts):
            super().__setitem__(key, value)


def name_in_program(operation: GraphOperation, context: Any) -> GraphOperation:
    """The operation with a name that is not yet in the program that is lowered. Called once for each of its calls."""
    for name in ("lowering_cache", "cached_primitive_lowerings"):
        cache = getattr(context, name)
        if not isinstance(cache, LoweringCache):
            setattr(context, name, LoweringCache(cache))
    # In the cache itself: the contexts of parts of the program have it in common.
    counts = context.cached_primitive_lowerings.setdefault(("ronde", "names"), Counter())
    number = counts[operation.group, operation.name]
    counts[operation.group, operation.name] += 1
    return msgspec.structs.replace(operation, name=f"{operation.name}@{number}") if number else operation


def find_call_site() -> str:
    """Where the user's code has called ronde, as file:line:function."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    found = frame
    while found.f_back is not None and (
        found.f_code.co_filename.startswith(_PACKAGES) or any(part in found.f_code.co_filename for part in _LIBRARIES)
    ):
        found = found.f_back
    code = found.f_code
    return f"{Path(code.co_filename).name}:{found.f_lineno}:{code.co_name}"


# --- the primitive ---------------------------------------------------------------------------------------------------


class CollectiveEffect(effects.Effect):  # type: ignore[misc]  # JAX is not in the environment of the tools
    """What an operation does besides its result: other ranks wait for it."""

    def __str__(self) -> str:
        return "ronde"


COLLECTIVE_EFFECT = CollectiveEffect()
effects.lowerable_effects.add_type(CollectiveEffect)
effects.control_flow_allowed_effects.add_type(CollectiveEffect)
# JAX refuses functions with effects that have a gradient of their own, since it might call them more or less often.
# Ours are called in the step of every rank, and in its backward pass.
effects.custom_derivatives_allowed_effects.add_type(CollectiveEffect)
effects.custom_derivatives_allowed_effects.add_type(OrderedIOEffect)

collective_p = Primitive("ronde")
collective_p.multiple_results = True


class ShapedOperations:
    """Whether programs were traced whose shapes depend on the number of ranks."""

    exist = False


def bind_operation(
    operation: GraphOperation, xs: Sequence[Any], num_rows: int | None = None, flag: str = ""
) -> list[Any]:
    """Run an operation, or add it to the program that is traced. `num_rows` is that of the result of an allgather, if
    it is known; else all members give equally many in a program. `flag` is by what OperationFlags knows its flag."""
    arrays = [each if isinstance(each, jax.Array) else jnp.asarray(each) for each in xs]
    is_traced = find_trace() is not None
    if is_traced and operation.kind not in SAME_SHAPE:
        ShapedOperations.exist = True
    ordered = is_traced and not is_native()
    size = group_of(operation).size
    if operation.kind == "allgather":
        size = xs[0].shape[0] * size if num_rows is None else num_rows
    if is_traced and operation.kind in ("allgather", "alltoall") and num_rows is None:
        operation = msgspec.structs.replace(operation, equal_rows=True)
    found: list[Any] = collective_p.bind(*arrays, operation=operation, size=size, ordered=ordered, flag=flag)
    return found


def _result_shapes(operation: GraphOperation, shapes: Sequence[tuple[int, ...]], size: int) -> list[tuple[int, ...]]:
    """`size` is the number of members, or of the rows of all members in an allgather."""
    if operation.kind in SAME_SHAPE:
        return list(shapes)
    [(num_rows, *rest)] = shapes
    if operation.kind == "allgather":
        return [(size, *rest)]
    if operation.kind == "reduce_scatter":
        return [(even_shares(num_rows, size)[group_of(operation).rank or 0], *rest)]
    assert operation.kind == "alltoall", operation.kind
    return [(num_rows, *rest), (size,)]


def _abstract_eval(*avals: Any, operation: GraphOperation, size: int, ordered: bool, flag: str) -> Any:
    shapes = _result_shapes(operation, [aval.shape for aval in avals], size)
    dtypes = [*(aval.dtype for aval in avals), np.dtype(np.int32)]
    results = [core.ShapedArray(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
    return results, {_OrderedIOEffect if ordered else COLLECTIVE_EFFECT}


def _run_eagerly(*xs: Any, operation: GraphOperation, size: int, ordered: bool, flag: str) -> list[Any]:
    return [_as_jax(array, xs[0]) for array in _run_with_flag(operation, flag, [np.asarray(x) for x in xs])]


def _run_with_flag(operation: GraphOperation, flag: str, arrays: list[Array]) -> list[Array]:
    if not operation.has_flag:
        return run_operation(operation, arrays)
    results = run_operation(operation, arrays[:-1])
    return [*results, np.array([flags.find(flag, operation.name)], arrays[-1].dtype)]


collective_p.def_effectful_abstract_eval(_abstract_eval)
collective_p.def_impl(_run_eagerly)


def run_operation(operation: GraphOperation, arrays: Sequence[Array], splits: Any = None) -> list[Array]:
    """Run an operation on arrays and wait for it. Without a name it is matched by program order."""
    group, kind = group_of(operation), operation.kind
    if is_planned(operation):
        return _run_plan(operation, arrays)
    if operation.name:
        outputs = [np.empty_like(array) for array in arrays] if kind == "reduce" else None
        work = start_by_name(operation, arrays, outputs, splits)
        result = work.wait()
        if outputs is not None:
            is_root = current_world().rank == operation.root
            return outputs if is_root else [np.zeros_like(array) for array in arrays]
        if isinstance(work, AllgatherWork):
            check_equal_rows(operation, work.counts)
    else:
        scales: dict[str, Any] = {"op": operation.op, "prescale": operation.prescale, "postscale": operation.postscale}
        if kind == "allreduce":
            result = group.allreduce(list(arrays), **scales)
        elif kind == "reduce_scatter":
            result = group.reduce_scatter(arrays[0], **scales)
        elif kind == "broadcast":
            result = group.broadcast(arrays[0], root=operation.root)
        elif kind == "reduce":
            reduced = group.reduce(arrays[0], root=operation.root, op=operation.op)
            result = np.zeros_like(arrays[0]) if reduced is None else reduced
        elif kind == "allgather":
            result = group.allgather(arrays[0])
        else:
            result = group.alltoall(arrays[0], splits=splits)
    if kind == "alltoall":
        check_equal_rows(operation, result[1])
        return [result[0], np.asarray(result[1], np.int32)]
    return list(result) if kind == "allreduce" else [result]


def _run_plan(operation: GraphOperation, arrays: Sequence[Array]) -> list[Array]:
    sources = [np.ascontiguousarray(array) for array in arrays]
    plan = gradient_plans.open(operation, [Memory(0, each.shape, each.dtype.name) for each in sources])
    results = [np.empty_like(each) for each in sources]
    with gradient_plans.hold(operation, plan):
        bucket = plan.plan.spare_arrays[0]
        copy_in(sources, bucket)
        plan.plan.run(0, spare=True)
        copy_out(bucket, results)
    return results


def _as_jax(array: Array, like: Any) -> Any:
    device = like.sharding if isinstance(like, jax.Array) and len(like.devices()) == 1 else None
    return jax.device_put(array, device)


# --- in XLA ----------------------------------------------------------------------------------------------------------


def _check_devices(context: Any) -> None:
    """NotImplementedError if XLA would run the operation on several devices of this process, or on parts of an array
    that it divides by itself: each of them would be an operation of this rank, under one name."""
    if isinstance(context, SPMDAxisContext):
        num_local = len(context.mesh.local_devices)
        if num_local <= 1 and (context.mesh.size == 1 or set(context.manual_axes) == set(context.mesh.axis_names)):
            return
    elif isinstance(context, ShardingContext) and context.num_devices == 1:
        return
    raise NotImplementedError(
        "an operation of ronde is in a program for several devices, where each device would run it for itself; combine "
        "the devices of this process first, with jax.lax.psum or by the sharding of a jitted function, and call ronde "
        "in a program for one device; or start one rank per device. With one device in each process, an operation of "
        "ronde can be in jax.shard_map over all axes of the mesh"
    )


def _lower_native(ctx: Any, *operands: Any, operation: GraphOperation, size: int, ordered: bool, flag: str) -> Any:
    if ordered:
        return _lower_python(ctx, *operands, operation=operation, size=size, ordered=ordered, flag=flag)
    _check_devices(ctx.module_context.axis_context)
    operation = name_in_program(operation, ctx.module_context)
    number = core.ShapedArray((NUMBER_BYTES,), np.dtype(np.uint8))
    shapes = () if operation.kind in SAME_SHAPE else tuple(aval.shape for aval in ctx.avals_out)
    start = jax.ffi.ffi_lowering(START, has_side_effect=True)
    started = start(
        ctx.replace(avals_out=[number]),
        *operands,
        operation=operation.encode(),
        details=OperationDetails(shapes, flag).encode(),
    )
    finish = jax.ffi.ffi_lowering(FINISH, has_side_effect=True)
    return finish(ctx.replace(avals_in=[number]), *started)


def _lower_python(ctx: Any, *operands: Any, operation: GraphOperation, size: int, ordered: bool, flag: str) -> Any:
    """A callback to Python, for other devices than CPUs and where the handlers cannot be used."""
    _check_devices(ctx.module_context.axis_context)
    operation = name_in_program(operation, ctx.module_context)
    callback = functools.partial(_call_back, operation, flag, [aval.shape for aval in ctx.avals_out])
    token = ctx.tokens_in.get(_OrderedIOEffect) if ordered else None
    results, token, _ = emit_python_callback(
        ctx,
        callback,
        token,
        list(operands),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=True,
        returns_token=ordered,
        sharding=None,
    )
    if ordered:
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(TokenSet({_OrderedIOEffect: token})))
    return results


def _call_back(
    operation: GraphOperation, flag: str, shapes: Sequence[tuple[int, ...]], *arrays: Any
) -> tuple[Array, ...]:
    try:
        with names_in_python.hold([operation]):
            results = _run_with_flag(operation, flag, [np.asarray(array) for array in arrays])
        check_shapes(operation, results, shapes)
        return tuple(results)
    except (RondeError, ValueError, TypeError) as error:
        raise RuntimeError(describe_error(error)) from error


mlir.register_lowering(collective_p, _lower_python, cacheable=False)
mlir.register_lowering(collective_p, _lower_native, platform="cpu", cacheable=False)


# --- vmap ------------------------------------------------------------------------------------------------------------


def _batch(
    xs: Sequence[Any], dims: Sequence[Any], *, operation: GraphOperation, size: int, ordered: bool, flag: str
) -> Any:
    """One operation for the whole batch. The rows of an allgather and its siblings stay in front."""
    place = 0 if operation.kind in SAME_SHAPE else 1
    moved = [x if dim is None else jnp.moveaxis(x, dim, place) for x, dim in zip(xs, dims, strict=True)]
    results = collective_p.bind(*moved, operation=operation, size=size, ordered=ordered, flag=flag)
    if operation.kind in SAME_SHAPE:
        return results, [dim if dim is None else 0 for dim in dims]
    return results, [1, *[None] * (len(results) - 1)]


batching.primitive_batchers[collective_p] = _batch

_lock = threading.Lock()


def clear_shaped_programs() -> None:
    """Forget the programs whose shapes depend on the number of ranks, when that has changed. JAX can only forget all of
    its programs."""
    with _lock:
        if ShapedOperations.exist:
            ShapedOperations.exist = False
            jax.clear_caches()
