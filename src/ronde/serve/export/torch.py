"""Models of PyTorch: their weights, and their conversion to ONNX or to a program of torch.export."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import nn

from ronde.comm.buffers import Array
from ronde.errors import ModelError
from ronde.launch.named_functions import search_working_directory
from ronde.serve.export.exporter import ExportOptions, name_outputs, plain_text
from ronde.text import shorten

PART_NAMES = ("model", "state_dict", "model_state_dict", "module", "net")
"""Under which of these names a checkpoint has the weights, unless it is told."""
WRAPPER_PREFIXES = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before the names of parameters."""
MAIN_ADVICE = (
    "its class is one of the script that has saved it (__main__), and no other program can find it there: save only "
    "the weights, torch.save(model.state_dict(), FILE), put the class into a module, and export with "
    "--model MODULE:CLASS"
)
MAX_INLINE_BYTES = 1 << 30
"""Weights of more bytes than this lie in a file beside model.onnx: a file of ONNX has at most 2 GB."""


CallStyle: TypeAlias = Literal["names", "order", "dict"]


class TorchModel:
    """A module with its weights, in evaluation mode."""

    def __init__(self, module: nn.Module, options: ExportOptions, example: Mapping[str, Array], facts: Any) -> None:
        self._module = module.eval().requires_grad_(False)
        self._outputs = options.outputs
        self._names = list(example)
        self._style = self._find_style(example)
        self.made_by: dict[str, Any] = {"torch": str(torch.__version__), **facts}

    def predict(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        with torch.inference_mode():
            args, kwargs = self._arguments(inputs)
            returned = self._module(*args, **kwargs)
        return {name: value.numpy(force=True) for name, value in name_outputs(returned, self._outputs).items()}

    def _find_style(self, example: Mapping[str, Array]) -> CallStyle:
        """How forward() takes the inputs: by the names of its arguments if they are the same, otherwise in their order
        or, if that fails, all of them in one dict."""
        if _takes_by_name(self._module, self._names):
            return "names"
        styles: tuple[CallStyle, ...] = ("order", "dict")
        for style in styles:
            args, kwargs = self._arguments(example, style)
            try:
                with torch.inference_mode(), _quiet():
                    self._module(*args, **kwargs)
            except KeyError:  # it takes a dict, and a key is missing
                return style
            except Exception:  # whatever a model raises
                continue
            return style
        return "order"  # predict() raises the error of that

    def _arguments(
        self, inputs: Mapping[str, Array], style: CallStyle | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors = {name: torch.from_numpy(np.ascontiguousarray(inputs[name])) for name in self._names}
        match style or self._style:
            case "names":
                return (), tensors
            case "order":
                return tuple(tensors.values()), {}
            case "dict":
                return (tensors,), {}

    def _trace(self, example: Mapping[str, Array]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        args, kwargs = self._arguments(example)
        by_name = {name: {0: torch.export.Dim.DYNAMIC} for name in self._names}
        shapes = {"names": by_name, "order": tuple(by_name.values()), "dict": (by_name,)}
        return args, kwargs, shapes[self._style]

    def write_onnx(self, path: Path, example: Mapping[str, Array]) -> None:
        try:
            import onnxscript  # noqa: F401  # torch.onnx needs it, and would say so in many lines
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "converting to ONNX needs onnx and onnxscript: pip install ronde[export]"
            ) from error
        args, kwargs, shapes = self._trace(example)
        output_names = list(self.predict(example))
        with _quiet():
            program = torch.onnx.export(
                self._module,
                (*args, {}) if self._style == "dict" else args,  # it would take a dict at the end for keywords
                kwargs=kwargs,
                dynamo=True,
                dynamic_shapes=shapes,
                input_names=self._names,
                output_names=output_names,
                verbose=False,
            )
        assert program is not None
        num_bytes = sum(each.nbytes for each in self._module.state_dict().values())
        program.save(str(path), external_data=num_bytes > MAX_INLINE_BYTES)

    def write_own(self, path: Path, example: Mapping[str, Array]) -> None:
        args, kwargs, shapes = self._trace(example)
        with _quiet():
            torch.export.save(torch.export.export(self._module, args, kwargs, dynamic_shapes=shapes), path)

    def load_own(self, path: Path) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
        module = torch.export.load(path).module()

        def predict(inputs: Mapping[str, Array]) -> dict[str, Array]:
            with torch.inference_mode():
                args, kwargs = self._arguments(inputs)
                returned = module(*args, **kwargs)
            return {name: value.numpy(force=True) for name, value in name_outputs(returned, self._outputs).items()}

        return predict


def load(
    options: ExportOptions, made: nn.Module | None, path: Path, facts: dict[str, Any], example: Mapping[str, Array]
) -> TorchModel:
    """The module with the weights of a checkpoint. ModelError if they do not fit, or if the file holds objects that
    would run code, unless it is trusted."""
    contents = _read(path, options)
    if isinstance(contents, nn.Module):  # only a trusted file has one
        return TorchModel(contents, options, example, facts)
    if made is None:
        raise ValueError(f"{path} holds weights only: give model, as in --model mymodels:make_model")
    if not isinstance(made, nn.Module):
        raise ValueError(f"{options.model} returned a {type(made).__name__}, which is no torch.nn.Module")
    weights = find_weights(contents, options.part, str(path))
    try:
        made.load_state_dict(weights)
    except RuntimeError as error:
        raise ModelError(f"the weights of {path} do not fit {options.model}: {plain_text(error)}") from None
    return TorchModel(made, options, example, facts)


def _read(path: Path, options: ExportOptions) -> Any:
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{path} needs safetensors: pip install safetensors") from error
        return load_file(path)
    with path.open("rb") as file:
        if file.read(2)[:1] not in (b"P", b"\x80"):  # a zip file, or a pickle of old versions
            raise ModelError(f"{path} is no checkpoint of PyTorch")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        if not options.trust:
            unsafe = _name_unsafe(path)
            text = f"{path} holds more than weights{unsafe}, and loading it may run code"
            if "__main__." in unsafe:
                raise ModelError(f"{text}; {MAIN_ADVICE}") from None
            raise ModelError(f"{text}: save model.state_dict() instead, or trust its source (--trust)") from None
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise ModelError(f"{path} is damaged or no checkpoint of PyTorch: {shorten(str(error), 300)}") from None
    search_working_directory()  # where the classes of the model are, as for the factory
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # whatever its objects raise
        text = f"cannot load {path}: {type(error).__name__}: {shorten(str(error), 300)}"
        if isinstance(error, AttributeError) and "__main__" in str(error):
            text = f"cannot load {path}: {MAIN_ADVICE}"
        elif isinstance(error, AttributeError | ModuleNotFoundError):
            text += "; the class of the model has to be importable here, or save its weights only and give --model"
        raise ModelError(text) from error


def _name_unsafe(path: Path) -> str:
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except Exception:  # of old files
        return ""
    return f" ({shorten(', '.join(sorted(found)))})"


def find_weights(contents: Any, part: str, where: str) -> dict[str, Any]:
    """The weights in a checkpoint, by the names of parameters: all of it, or a part of it. ModelError if there are
    none."""
    if not isinstance(contents, Mapping):
        raise ModelError(f"{where} holds a {type(contents).__name__}, no weights by name")
    parts = contents["parts"] if isinstance(contents.get("parts"), Mapping) and "step" in contents else contents
    if part:
        if part not in parts:
            raise ModelError(f"{where} has no part {part!r}; it has {', '.join(map(str, parts))}")
        weights = parts[part]
    elif not _are_weights(parts):
        found = [name for name in PART_NAMES if name in parts and _are_weights(parts[name])]
        found = found or [name for name in parts if _are_weights(parts[name])]
        if not found:
            raise ModelError(f"{where} has no weights; it has {shorten(', '.join(map(str, parts)))}")
        weights = parts[found[0]]
    else:
        weights = parts
    if not _are_weights(weights):
        raise ModelError(f"the part {part!r} of {where} holds no weights by name")
    renamed = dict(weights)
    for prefix in WRAPPER_PREFIXES * 2:
        if all(name.startswith(prefix) for name in renamed):
            renamed = {name.removeprefix(prefix): value for name, value in renamed.items()}
    return renamed


def _are_weights(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and any(isinstance(each, torch.Tensor) for each in value.values())
        and all(isinstance(name, str) for name in value)
    )


def _takes_by_name(module: nn.Module, names: list[str]) -> bool:
    """Whether the inputs have the names of arguments of forward(). Otherwise they are given in their order."""
    arguments = inspect.signature(module.forward).parameters
    return all(name in arguments and arguments[name].kind is not inspect.Parameter.POSITIONAL_ONLY for name in names)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's notes about itself. Its errors are raised."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
