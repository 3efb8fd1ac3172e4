"""Gradients of JAX, averaged over all ranks: average_gradients() for optax, and value_and_grad(). ronde.keras uses the
same.

All gradients of one dtype are one operation. In one of the first steps the parameters of all ranks are compared,
because ranks that began with different ones would never learn the same: average_gradients() does it if the optimizer
passes the parameters on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax._src import dispatch  # the only place of the tokens
from jax.experimental import io_callback

from ronde.comm.buffers import Array
from ronde.comm.collectives import mark_step
from ronde.comm.group import Group
from ronde.comm.world import World, current_world
from ronde.errors import RondeError
from ronde.jax.collectives import differentiable, flatten_arrays
from ronde.jax.ffi_library import flags
from ronde.jax.gradient_plans import gradient_plans
from ronde.jax.primitive import bind_operation, operation_name, resolve_group
from ronde.training.agreement import fingerprint
from ronde.training.gradients.gradient_settings import GradientSettings
from ronde.training.graph_errors import describe_error
from ronde.training.graph_operations import GraphOperation
from ronde.training.sync_check import checksum, checksum_bytes, compare_checksums
from ronde.types import Op, parse_op

CODECS = ("float16", "bfloat16")
FIRST_COMPARED_STEP = 2
ADVICE = (
    ". Call ronde.jax.broadcast_parameters(params) before training, on all ranks, or let all of them load the same "
    "checkpoint. If they are meant to differ, compare_at_step=0 or RONDE_COMPARE_AT_STEP=0 turns this off"
)


class GradientTransformation(NamedTuple):
    """What optax calls a gradient transformation."""

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


def average_gradients(
    *,
    op: str | Op = "mean",
    codec: str | None = None,
    group: Group | None = None,
    name: str = "gradients",
    predivide: float = 1.0,
    compare_at_step: int | None = None,
) -> GradientTransformation:
    """Return a gradient transformation for optax that averages gradients over all ranks (or over `group`):
    `optax.chain(ronde.jax.average_gradients(), optax.adam(1e-3))`.

    `codec` compresses gradients on the wire: "float16" or "bfloat16". All ranks must start with the same parameters, or
    the second step raises OutOfSync, if `update(gradients, state, params)` gets the parameters. An optimizer that is
    not the only one of its program needs a `name` of its own. The other arguments are those of GradientSettings.
    """
    reduction = TreeReduction(
        GradientSettings(op=op, predivide=predivide, compare_at_step=compare_at_step), group, codec, name
    )

    def update(updates: Any, state: tuple[()], params: Any = None) -> tuple[Any, tuple[()]]:
        return reduction.reduce(updates, params), state

    return GradientTransformation(lambda params: (), update)


def value_and_grad(
    function: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    op: str | Op = "mean",
    codec: str | None = None,
    group: Group | None = None,
    name: str = "gradients",
    predivide: float = 1.0,
    compare_at_step: int | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """As jax.value_and_grad(), with gradients that are averaged over all ranks. The value is this rank's own.

    The arguments by keyword are those of average_gradients(). What the gradients are taken by is compared.
    """
    reduction = TreeReduction(
        GradientSettings(op=op, predivide=predivide, compare_at_step=compare_at_step), group, codec, name
    )
    compute = jax.value_and_grad(function, argnums, has_aux)

    def compute_and_average(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        value, gradients = compute(*args, **kwargs)
        parameters = args[argnums] if isinstance(argnums, int) else tuple(args[each] for each in argnums)
        return value, reduction.reduce(gradients, parameters)

    return compute_and_average


class TreeReduction:
    """Averages trees of gradients over the members of a group; all of them call it equally often."""

    def __init__(self, settings: GradientSettings, group: Group | None, codec: str | None, name: str) -> None:
        if codec is not None and codec not in CODECS:
            raise ValueError(f"codec must be None or one of {', '.join(CODECS)}, got {codec!r}")
        self._settings = settings
        self._group = group
        self._codec = codec
        self._name = name
        self._num_steps = 0
        self._world: World | None = None

    def reduce(self, gradients: Any, parameters: Any = None) -> Any:
        """Return the average. Collective."""
        members = resolve_group(self._group)
        leaves, tree = flatten_arrays(gradients, "gradients")
        if not members.included or (members.size == 1 and not current_world().can_rejoin):
            return gradients
        named: list[tuple[str, Any]] = []
        if parameters is not None and self._compare_at_step:
            paths, _ = jax.tree_util.tree_flatten_with_path(parameters)
            named = [(jax.tree_util.keystr(path), leaf) for path, leaf in paths if isinstance(leaf, jax.Array)]
        names = [name for name, _ in named]
        reduced = reduce_gradients(
            [self._encode(leaf) for leaf in leaves],
            group=self._group,
            options=reduce_options(self._settings),
            name=self._name,
            parameters=[leaf for _, leaf in named],
            is_compared=self._count_step,
            compare=lambda arrays: compare_parameters(resolve_group(self._group), self._name, names, arrays, ADVICE),
        )
        decoded = [each.astype(leaf.dtype) for each, leaf in zip(reduced, leaves, strict=True)]
        return jax.tree.unflatten(tree, decoded)

    def _encode(self, gradient: Any) -> Any:
        """The gradient with 16 bits per number, if that was asked for and it has more. Sums are made with 32 bits."""
        is_wide = gradient.dtype in (jnp.float32, jnp.float64)
        return gradient.astype(self._codec) if is_wide and self._codec else gradient

    @property
    def _compare_at_step(self) -> int:
        """0: never."""
        at_step = self._settings.compare_at_step
        if at_step is None:
            at_step = current_world().settings.compare_at_step
        return max(at_step, FIRST_COMPARED_STEP) if at_step else 0

    def _count_step(self, is_repeated: bool) -> bool:
        """Count a step, and return whether parameters are compared in it. In a new round steps are counted from 0, as
        by those ranks that have just come. Of those that a program repeats only the first is counted: each rank may
        run them in another order."""
        mark_step()
        if is_repeated:
            return False
        world = current_world()
        if world is not self._world:
            self._world, self._num_steps = world, 0
        self._num_steps += 1
        return self._num_steps == self._compare_at_step


def reduce_options(settings: GradientSettings) -> dict[str, Any]:
    """Those of an allreduce. With `predivide` the sum is of smaller numbers, and does not overflow."""
    return {"op": settings.op, "prescale": 1.0 / settings.predivide, "postscale": settings.predivide}


def compare_parameters(members: Group, name: str, names: Sequence[str], arrays: Sequence[Array], advice: str) -> None:
    """Compare parameters over all members; OutOfSync names the first that differs. It may run in a thread of JAX, so
    the operation has a name."""
    checksums = [
        (name, checksum(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))
        for name, array in zip(names, arrays, strict=True)
    ]
    mine = fingerprint(checksum_bytes(checksums)).reshape(1, -1)
    gathered = members.allgather(mine, name=f"{name}.parameters")
    if not (gathered == gathered[0]).all():
        compare_checksums(members, checksums, advice=advice)


def reduce_gradients(
    gradients: Sequence[Any],
    *,
    group: Group | None,
    options: dict[str, Any],
    name: str,
    when: Any = None,
    parameters: Sequence[Any] = (),
    check: Callable[[], None] | None = None,
    is_compared: Callable[[bool], bool] | None = None,
    compare: Callable[[list[Array]], None] = lambda _: None,
) -> list[Any]:
    """Return the gradients, reduced over the members of the group; collective. `options` are those of an allreduce.

    `when` is a boolean of JAX: the gradients are only reduced if it holds, as it must on all members alike.
    `check` is called after each reduction, and may raise. `is_compared`, a method, is called after each reduction, with
    whether a program repeats it, and must not wait; when it returns True, `compare` gets the parameters.
    """
    own_name = operation_name("gradients", name)

    def reduce(*gradients: Any) -> list[Any]:
        factors = {**options, "op": parse_op(options["op"]).name.lower()}
        operation = GraphOperation("allreduce", own_name, resolve_group(group).id, **factors)
        reduced, due = _reduce_by_dtype(gradients, operation, name, is_compared)
        if check is not None:
            _call_on_host(lambda _: check(), reduced[0].reshape(-1)[:1])
        if parameters and due is not None:
            _compare_if(due, compare, parameters)
        return reduced

    if when is None:
        return reduce(*gradients)
    return list(jax.lax.cond(when, reduce, lambda *gradients: list(gradients), *gradients))


def _reduce_by_dtype(
    gradients: Sequence[Any], operation: GraphOperation, name: str, is_compared: Callable[[bool], bool] | None
) -> tuple[list[Any], Any]:
    """One operation for each dtype. The last one has the flag of is_compared(), which is returned."""
    by_dtype: dict[Any, list[int]] = {}
    for index, gradient in enumerate(gradients):
        by_dtype.setdefault(gradient.dtype, []).append(index)
    results, due = list(gradients), None
    for number, indices in enumerate(by_dtype.values(), 1):
        arrays = [gradients[index] for index in indices]
        has_numbers = any(array.size for array in arrays)
        own = msgspec.structs.replace(operation, name=f"{operation.name}.{number}", is_planned=has_numbers)
        if is_compared is not None:
            gradient_plans.add_user(own.name, is_compared.__self__)  # type: ignore[attr-defined]  # a method has it
        if number == len(by_dtype) and is_compared is not None:
            own = msgspec.structs.replace(own, has_flag=True)
            arrays.append(jnp.zeros(1, jnp.uint8))
            *reduced, last = _bind_without_gradient(own, arrays, flags.add(f"{name}.{number}", is_compared))
            due = last[0] > 0
        else:
            reduced = _bind_without_gradient(own, arrays)
        for index, each in zip(indices, reduced, strict=True):
            results[index] = each
    return results, due


def _bind_without_gradient(operation: GraphOperation, arrays: Sequence[Any], flag: str = "") -> list[Any]:
    def backward(_: Sequence[Any]) -> list[Any]:
        raise NotImplementedError("averaged gradients have no gradient of their own; use ronde.jax.allreduce for one")

    if operation.has_flag:
        return bind_operation(operation, [*map(jax.lax.stop_gradient, arrays[:-1]), arrays[-1]], flag=flag)
    return differentiable(lambda *xs: bind_operation(operation, xs), backward, arrays)


def _compare_if(due: Any, compare: Callable[[list[Array]], None], parameters: Sequence[Any]) -> None:
    def compare_arrays(*arrays: Any) -> None:
        _call_on_host(lambda *each: compare([np.asarray(array) for array in each]), *arrays)

    jax.lax.cond(due, compare_arrays, lambda *_: None, *parameters)


def _call_on_host(function: Callable[..., None], *arrays: Any) -> None:
    """Call a function with arrays of the host, also inside of jit. It may run operations that have a name."""

    def call(*arrays: Any) -> None:
        try:
            function(*arrays)
        except (RondeError, ValueError, TypeError) as error:
            raise RuntimeError(describe_error(error)) from error

    io_callback(call, None, *arrays)


def forget_failed_callbacks() -> None:
    """Let the next ordered callback run, although one before it has failed. JAX would wait for that one, and raise its
    error again."""
    dispatch.runtime_tokens.clear()
