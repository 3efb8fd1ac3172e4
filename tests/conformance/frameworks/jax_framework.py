"""ronde.jax, for the collective cases: outside of jit, and inside of it. XLA has one thread, with which mistakes in
the order of operations are seen at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ronde.jax
from ronde.types import DType
from tests.conformance.frameworks.framework import Value

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_platforms", "cpu")


class EagerFramework:
    """Functions are called with arrays."""

    collectives = ronde.jax
    dtypes = tuple(DType)
    fixed_shapes = False

    def run(self, function: Callable[..., Any], inputs: Sequence[Value]) -> list[Value]:
        found = self.evaluate(function, [jnp.asarray(_as_array(x)) for x in inputs])
        return [_as_value(each) for each in jax.tree.leaves(found)]

    def gradients(self, function: Callable[..., Any], inputs: Sequence[Value]) -> list[Value]:
        return self.run(lambda *xs: _gradients(function, xs), inputs)

    def second_gradients(self, function: Callable[..., Any], inputs: Sequence[Value]) -> list[Value]:
        return self.run(
            lambda *xs: _gradients(lambda *ys: sum(y.sum() for y in _gradients(function, ys)), xs),
            inputs,
        )

    def find_error(self, error: Exception) -> Exception:
        return ronde.jax.find_error(error) or error

    def evaluate(self, function: Callable[..., Any], arrays: list[Any]) -> Any:
        """What the function returns for these arrays."""
        return jax.block_until_ready(function(*arrays))


class JitFramework(EagerFramework):
    """Functions are traced and compiled, and called twice."""

    fixed_shapes = True

    def evaluate(self, function: Callable[..., Any], arrays: list[Any]) -> Any:
        compiled = jax.jit(function)
        jax.block_until_ready(compiled(*arrays))
        return jax.block_until_ready(compiled(*arrays))


def _gradients(function: Callable[..., Any], xs: Sequence[Any]) -> Any:
    return jax.grad(lambda *ys: function(*ys).sum(), argnums=tuple(range(len(xs))))(*xs)


def _as_array(value: Value) -> Any:
    return value.array.view(jnp.bfloat16) if value.dtype is DType.BFLOAT16 else value.array


def _as_value(result: Any) -> Value:
    array = np.asarray(result)
    dtype = DType[array.dtype.name.upper()]
    return Value(array.view(np.uint16) if dtype is DType.BFLOAT16 else array, dtype)


FRAMEWORKS = {"eager": EagerFramework, "jit": JitFramework}
