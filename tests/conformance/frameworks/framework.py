"""The seam between the collective cases and a framework. A framework is one module with a class that is a Framework and
a row in MODULES.

A mode is a way in which a framework runs a function of tensors: as it is called, traced, or in the graph of a session.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ronde.comm.buffers import Array
from ronde.types import DType

MODULES = {
    "jax": "jax_framework",
    "mxnet": "mxnet_framework",
    "numpy": "numpy_framework",
    "tensorflow": "tensorflow_framework",
    "torch": "torch_framework",
}
MODES = {
    "jax": ("eager", "jit"),
    "mxnet": ("eager", "asynchronous"),
    "numpy": ("eager",),
    "tensorflow": ("eager", "function", "graph"),
    "torch": ("eager",),
}
WITHOUT_TENSORS = frozenset({"numpy"})
WITHOUT_GRADIENTS = frozenset({"numpy", "mxnet"})
"""Their collectives have none."""


class Value(NamedTuple):
    """The numbers of a tensor. Those of bfloat16 are its bits, as uint16."""

    array: Array
    dtype: DType


def values(*arrays: Array) -> list[Value]:
    """Tensors with the dtypes of the arrays."""
    return [Value(array, DType[array.dtype.name.upper()]) for array in arrays]


class Framework(Protocol):
    """How a framework runs the cases in one mode."""

    collectives: Any
    """The module with allreduce(), allgather() … on tensors of the framework."""
    dtypes: tuple[DType, ...]
    """Those that its tensors can have."""
    fixed_shapes: bool
    """Whether shapes of results have to be known before it runs: then members give equally many rows."""

    def run(self, function: Callable[..., Any], inputs: Sequence[Value]) -> list[Value]:
        """The tensors that a function of tensors returns, in a list or alone."""

    def gradients(self, function: Callable[..., Any], inputs: Sequence[Value]) -> list[Value]:
        """The gradients, for each input, of the sum of all elements of the tensor that the function returns."""

    def second_gradients(self, function: Callable[..., Any], inputs: Sequence[Value]) -> list[Value]:
        """As gradients(), of the sum of all elements of these."""

    def find_error(self, error: Exception) -> Exception:
        """The error of ronde inside of one that run() has raised."""


def load_framework(name: str, mode: str) -> Framework:
    """The framework in one of its modes. Imports it."""
    module = importlib.import_module(f"tests.conformance.frameworks.{MODULES[name]}")
    framework: Framework = module.FRAMEWORKS[mode]()
    return framework
