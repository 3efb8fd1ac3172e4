"""Models of Keras 3: .keras files and weights, and their conversion to ONNX."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from ronde.comm.buffers import Array
from ronde.errors import ModelError
from ronde.serve.export.exporter import ExportOptions, name_outputs
from ronde.text import shorten


class KerasModel:
    """A model with its weights."""

    def __init__(self, model: Any, options: ExportOptions, example: Mapping[str, Array], facts: dict[str, Any]) -> None:
        self._model = model
        self._outputs = options.outputs
        self._names = list(example)
        self._is_dict = _takes_dict(model, example)
        self.made_by: dict[str, Any] = {
            "keras": keras.__version__,
            "backend": keras.backend.backend(),
            **facts,
        }

    def predict(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return _predict(self._model, self._arguments(inputs), self._outputs)

    def _arguments(self, inputs: Mapping[str, Any]) -> Any:
        return _arrange(inputs, self._names, is_dict=self._is_dict)

    def write_onnx(self, path: Path, example: Mapping[str, Array]) -> None:
        needs = {"tensorflow": "tf2onnx", "torch": "onnxscript", "jax": "jax2onnx"}[keras.backend.backend()]
        specs = {
            name: keras.InputSpec(shape=(None, *array.shape[1:]), dtype=array.dtype.name, name=name)
            for name, array in example.items()
        }
        signature = [specs] if self._is_dict else [*specs.values()]
        expected = self.predict(example)
        try:
            with _quiet():
                self._model.export(str(path), format="onnx", verbose=False, input_signature=signature)
        except ImportError as error:
            others = (
                "" if needs != "jax2onnx" else ", or set KERAS_BACKEND to tensorflow or torch, which read the same file"
            )
            raise ModuleNotFoundError(
                f"converting a model of Keras on {keras.backend.backend()} needs {needs}: pip install {needs}{others} "
                f"({shorten(str(error), 200)})"
            ) from error
        # Keras flattens a dict in the order of its sorted keys.
        _rename(path, sorted(self._names) if self._is_dict else self._names, list(expected))

    def write_own(self, path: Path, example: Mapping[str, Array]) -> None:
        self._model.save(path)

    def load_own(self, path: Path) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
        model = keras.saving.load_model(path, compile=False, safe_mode=True)
        return lambda inputs: _predict(model, self._arguments(inputs), self._outputs)


def _arrange(inputs: Mapping[str, Any], names: list[str], *, is_dict: bool) -> Any:
    """What the model is called with: a dict, one array, or a list."""
    if is_dict:
        return dict(inputs)
    arrays = [inputs[name] for name in names]
    return arrays[0] if len(arrays) == 1 else arrays


def _takes_dict(model: Any, example: Mapping[str, Array]) -> bool:
    """Whether the model takes its inputs in a dict: it was built so or, if it does not say, only that succeeds."""
    built = getattr(model, "_inputs_struct", None)
    if built is not None:
        return isinstance(built, Mapping)
    for is_dict in (False, True):
        try:
            model(_arrange(example, list(example), is_dict=is_dict), training=False)
        except KeyError:  # it takes a dict, and a key is missing
            return True
        except Exception:  # whatever a model raises
            continue
        return is_dict
    return False


def _predict(model: Any, arguments: Any, outputs: list[str] | None) -> dict[str, Array]:
    returned = model(arguments, training=False)
    arrays = keras.tree.map_structure(lambda each: np.asarray(keras.ops.convert_to_numpy(each)), returned)
    return name_outputs(arrays, outputs)


def load(
    options: ExportOptions, made: Any, path: Path, facts: dict[str, Any], example: Mapping[str, Array]
) -> KerasModel:
    """The model in a .keras file, or the one that the factory made, with weights of a file. ModelError if they do not
    fit, or if the file would run code, unless it is trusted."""
    try:
        if path.name.endswith(".keras") and made is None:
            model = keras.saving.load_model(path, compile=False, safe_mode=not options.trust)
        elif made is None:
            raise ValueError(f"{path} holds weights only: give model, as in --model mymodels:make_model")
        else:
            model = made
            if not model.built:
                model(_arrange(example, list(example), is_dict=_takes_dict(model, example)), training=False)
            model.load_weights(path)
    except (OSError, RuntimeError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"cannot load {path}: {shorten(str(error), 500)}") from error
    except ValueError as error:
        if made is None and "lambda" in str(error).lower():
            raise ModelError(
                f"{path} holds a function as code, which loading would run: use a layer of your own instead of Lambda, "
                "or trust its source (--trust)"
            ) from None
        raise ModelError(f"cannot load {path}: {shorten(str(error), 500)}") from error
    return KerasModel(model, options, example, facts)


def _rename(path: Path, inputs: list[str], outputs: list[str]) -> None:
    """Give inputs and outputs of a file of ONNX these names: converters choose names such as `Identity:0`."""
    import onnx

    model = onnx.load(path)
    graph = model.graph
    weights = {each.name for each in graph.initializer}
    found = [each for each in graph.input if each.name not in weights]
    names = {each.name: each.name for each in found}
    if {each.name for each in found} != set(inputs):
        if len(found) != len(inputs):
            raise ModelError(
                f"the converted model has the inputs {', '.join(names)}; the example has {', '.join(inputs)}"
            )
        names = {each.name: name for each, name in zip(found, inputs, strict=True)}
    if len(graph.output) != len(outputs):
        raise ModelError(f"the converted model has {len(graph.output)} outputs, and the original {len(outputs)}")
    names |= {each.name: name for each, name in zip(graph.output, outputs, strict=True)}
    taken = {name for node in graph.node for name in (*node.input, *node.output)} - names.keys()
    for each in (*graph.input, *graph.output):
        each.name = names.get(each.name, each.name)
    for node in graph.node:
        for places in (node.input, node.output):
            for index, name in enumerate(places):
                new = names.get(name, name)
                places[index] = f"{name}_inner" if name in taken and name in names.values() else new
    onnx.checker.check_model(model)
    onnx.save(model, path)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the converters' notes about themselves. Their errors are raised."""
    loggers = [logging.getLogger(name) for name in ("tf2onnx", "torch.onnx", "jax2onnx")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
