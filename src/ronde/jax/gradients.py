"""Gradients of JAX, averaged over ranks by a call to the host. Used by ronde.keras, also inside of jax.jit.

One ordered callback carries all gradients of a step. It runs in a thread of JAX while the script may go on, so its
operations have a name: they never take the turn of an operation that the script calls by itself.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax._src import dispatch, effects  # the only place of the tokens, and of what is allowed
from jax._src.callback import OrderedIOEffect
from jax.experimental import io_callback

from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.elastic.training_loop import register_error_finder
from ronde.errors import RondeError

MAX_KEPT_ERRORS = 16
MAX_CHAIN = 16
"""How many exceptions behind an error are looked at."""

_kept_errors: deque[RondeError] = deque(maxlen=MAX_KEPT_ERRORS)


def reduce_gradients(
    gradients: Sequence[Any],
    *,
    group: Group | None,
    options: Mapping[str, Any],
    name: str,
    when: Any = None,
    parameters: Sequence[Any] = (),
    check: Callable[[], None] | None = None,
    is_compared: Callable[[], bool] = lambda: False,
    compare: Callable[[list[Array]], None] = lambda _: None,
) -> list[Any]:
    """Return the gradients, reduced over the members of the group; collective. `options` are those of an allreduce.

    `when` is a boolean of JAX: the gradients are only reduced if it holds, as it must on all members alike.
    `check` is called after each reduction, and may raise. Then `is_compared` is called; when it returns True, `compare`
    gets the parameters.
    """

    def reduce_on_host(*arrays: Any) -> tuple[list[Array], np.bool_]:
        mine = [np.array(each) for each in arrays]
        with keep_errors():
            allreduce_arrays(resolve_group(group), mine, options, name)
            if check is not None:
                check()
        return mine, np.bool_(is_compared())

    def reduce(*gradients: Any) -> list[Any]:
        shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in gradients]
        reduced, due = io_callback(
            reduce_on_host, (shapes, jax.ShapeDtypeStruct((), np.bool_)), *gradients, ordered=True
        )
        if parameters:
            add_comparison = functools.partial(io_callback, compare_on_host, None, ordered=True)
            jax.lax.cond(due, add_comparison, lambda *_: None, *parameters)
        return list(reduced)

    def compare_on_host(*arrays: Any) -> None:
        with keep_errors():
            compare([np.asarray(each) for each in arrays])

    if when is None:
        return reduce(*gradients)
    return list(jax.lax.cond(when, reduce, lambda *gradients: list(gradients), *gradients))


@contextmanager
def keep_errors() -> Iterator[None]:
    """Keep the errors of ronde: JAX turns what a callback raises into an error of its own."""
    try:
        yield
    except RondeError as error:
        _kept_errors.append(error)
        raise


def find_error(error: Exception) -> RondeError | None:
    """Return the error of ronde that has caused an error of JAX; None if it has another cause. The error may have been
    raised while that of JAX was handled: fit() of Keras fails once more when it looks for the results of the step."""
    found: BaseException | None = error
    for _ in range(MAX_CHAIN):
        if isinstance(found, jax.errors.JaxRuntimeError):
            text = str(found)
            kept = next((kept for kept in reversed(_kept_errors) if str(kept) in text), None)
            if kept is not None:
                return kept
        if found is None:
            return None
        found = found.__cause__ or found.__context__
    return None


register_error_finder(find_error)


def forget_failed_callbacks() -> None:
    """Let the next ordered callback run, although one before it has failed. JAX would wait for that one, and raise its
    error again."""
    dispatch.runtime_tokens.clear()


def allreduce_arrays(group: Group, arrays: Sequence[Array], options: Mapping[str, Any], name: str) -> None:
    """Reduce arrays in place. Those of one dtype are one operation, with a name made of this one and the dtype."""
    by_dtype: dict[str, list[Array]] = {}
    for array in arrays:
        by_dtype.setdefault(array.dtype.name, []).append(array)
    for dtype, found in by_dtype.items():
        group.allreduce(found, out=found, name=f"{name}.{dtype}", **options)


# JAX refuses functions with effects that have a gradient of their own, since it might call them more or less often.
# Ours are called in the step of every rank, and in its backward pass.
effects.custom_derivatives_allowed_effects.add_type(OrderedIOEffect)


def call_on_host(function: Callable[[Array], Array], x: Any) -> Any:
    """function(x) for an array on the host, also inside of jit; the result has the shape and dtype of x. Such calls are
    made in the order of the program, also if nobody uses the result. The function may run operations that have a
    name."""

    def call(array: Any) -> Array:
        with keep_errors():
            return function(np.asarray(array))

    return io_callback(call, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True)
