"""Modules of TensorFlow: SavedModel, and ONNX by tf2onnx. Models of Keras have a module of their own."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ronde.comm.buffers import Array
from ronde.errors import ModelError
from ronde.serve.export.exporter import ExportOptions, name_outputs
from ronde.text import shorten


class TensorflowModel:
    """A tf.Module that can be called, with its variables."""

    def __init__(
        self, module: Any, options: ExportOptions, example: Mapping[str, Array], facts: dict[str, Any]
    ) -> None:
        self._module = module
        self._names = list(example)
        self._outputs = options.outputs
        self.made_by: dict[str, Any] = {"tensorflow": tf.__version__, **facts}

    def _call(self, *inputs: Any) -> dict[str, Any]:
        return name_outputs(self._module(*inputs), self._outputs)

    def _trace(self, example: Mapping[str, Array]) -> tuple[Any, list[Any]]:
        signature = [tf.TensorSpec((None, *array.shape[1:]), array.dtype, name=name) for name, array in example.items()]
        return tf.function(self._call, input_signature=signature), signature

    def predict(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        returned = self._call(*(tf.constant(inputs[name]) for name in self._names))
        return {name: np.asarray(value) for name, value in returned.items()}

    def write_onnx(self, path: Path, example: Mapping[str, Array]) -> None:
        try:
            import tf2onnx
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("converting a model of TensorFlow needs tf2onnx: pip install tf2onnx") from error
        function, signature = self._trace(example)
        logging.getLogger("tf2onnx").setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            tf2onnx.convert.from_function(function, input_signature=signature, output_path=str(path))

    def write_own(self, path: Path, example: Mapping[str, Array]) -> None:
        function, _ = self._trace(example)
        self._module.ronde_signature = function  # SavedModel keeps what the object holds
        tf.saved_model.save(self._module, str(path), signatures=function)

    def load_own(self, path: Path) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
        loaded = tf.saved_model.load(str(path))
        signature = loaded.signatures["serving_default"]
        names = list(self._output_names())

        def predict(inputs: Mapping[str, Array]) -> dict[str, Array]:
            returned = signature(**{name: tf.constant(inputs[name]) for name in self._names})
            return {name: np.asarray(returned[name]) for name in names or sorted(returned)}

        return predict

    def _output_names(self) -> list[str]:
        structured = self._module.ronde_signature.get_concrete_function().structured_outputs
        return list(structured)


def load(
    options: ExportOptions, made: Any, path: Path, facts: dict[str, Any], example: Mapping[str, Array]
) -> TensorflowModel:
    """The module that the factory returned, with the variables of a tf.train.Checkpoint (its .index file)."""
    if not isinstance(made, tf.Module) or not callable(made):
        raise ValueError(f"{options.model or 'the factory'} has to return a tf.Module that can be called")
    source = TensorflowModel(made, options, example, facts)
    source.predict(example)  # a module may make its variables when it is called first
    prefix = str(path).removesuffix(".index")
    part = options.part or "model"
    try:
        names = {name for name, _ in tf.train.list_variables(prefix)}
        whole = {part: made} if any(name.startswith(f"{part}/") for name in names) else {"root": made}
        tf.train.Checkpoint(**whole).read(prefix).expect_partial().assert_existing_objects_matched()
    except (tf.errors.OpError, AssertionError, ValueError) as error:
        raise ModelError(f"cannot load {path} into {options.model}: {shorten(str(error), 400)}") from None
    return source
