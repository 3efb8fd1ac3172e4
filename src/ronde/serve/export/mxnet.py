"""Blocks of MXNet's Gluon: their own format, a graph and its parameters. No converter of MXNet to ONNX is kept."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mxnet as mx

from ronde.comm.buffers import Array
from ronde.errors import ModelError
from ronde.serve.export.exporter import ExportOptions, name_outputs
from ronde.text import shorten


class MxnetModel:
    """A HybridBlock with its parameters."""

    def __init__(self, block: Any, options: ExportOptions, example: Mapping[str, Array], facts: dict[str, Any]) -> None:
        self._block = block
        self._names = list(example)
        self._outputs = options.outputs
        self.made_by: dict[str, Any] = {"mxnet": mx.__version__, **facts}

    def predict(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self._name(self._block(*(mx.nd.array(inputs[name], dtype=inputs[name].dtype) for name in self._names)))

    def _name(self, returned: Any) -> dict[str, Array]:
        return {name: value.asnumpy() for name, value in name_outputs(returned, self._outputs).items()}

    def write_onnx(self, path: Path, example: Mapping[str, Array]) -> None:
        raise ModelError(
            "MXNet's converter to ONNX is not kept any more; export with --to own, which MXNet itself can load"
        )

    def write_own(self, path: Path, example: Mapping[str, Array]) -> None:
        self._block.hybridize()
        self.predict(example)  # the graph is made by a call
        self._block.export(str(path).removesuffix("-symbol.json"))

    def load_own(self, path: Path) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
        weights = str(path).removesuffix("-symbol.json") + "-0000.params"
        names = ["data"] if len(self._names) == 1 else [f"data{index}" for index in range(len(self._names))]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "Cannot decide type for the following arguments": the call says it
            block = mx.gluon.SymbolBlock.imports(str(path), names, weights)

        def predict(inputs: Mapping[str, Array]) -> dict[str, Array]:
            return self._name(block(*(mx.nd.array(inputs[name], dtype=inputs[name].dtype) for name in self._names)))

        return predict


def load(
    options: ExportOptions, made: Any, path: Path, facts: dict[str, Any], example: Mapping[str, Array]
) -> MxnetModel:
    """The block that the factory returned, with the parameters of a file of save_parameters()."""
    if not isinstance(made, mx.gluon.HybridBlock):
        raise ValueError(f"{options.model or 'the factory'} has to return a HybridBlock of Gluon")
    try:
        made.load_parameters(str(path))
    except (mx.MXNetError, AssertionError, OSError, ValueError) as error:
        raise ModelError(f"cannot load {path} into {options.model}: {shorten(str(error), 400)}") from None
    return MxnetModel(made, options, example, facts)
