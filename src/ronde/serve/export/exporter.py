"""`ronde export`: a checkpoint becomes a model folder (ronde.serve.model), which is compared with the original.

The factory makes the model, the framework's module loads the weights and converts it, and then both predict the same
inputs, at batches of 1, 2 and 7 samples: a model whose batch axis was frozen by the conversion, whose numbers differ,
or whose samples depend on each other is not exported. The folder is made aside and appears under its name when it is
complete.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from ronde.comm.buffers import Array
from ronde.data.files import UNFINISHED_PREFIX, open_folder
from ronde.data.samples import decode_npy
from ronde.data.shards import INDEX_NAME, read_index
from ronde.errors import ModelError
from ronde.launch.named_functions import load_function
from ronde.serve.model import (
    DTYPES,
    METADATA_NAME,
    MODEL_FILES,
    ImagePreprocessing,
    ModelFolder,
    ModelFormat,
    ModelMetadata,
    OnnxModel,
    TensorInfo,
    load_model_folder,
    write_metadata,
)
from ronde.text import shorten
from ronde.training.checkpoints import FILE_PATTERN, open_latest, open_storage
from ronde.version import __version__

COMPARED_BATCHES = (1, 2, 7)
TRACED_BATCH = 3
"""The model is converted with an example of so many samples: frameworks treat 1 as a constant."""
FRAMEWORKS: tuple[ModelFormat, ...] = ("torch", "keras", "tensorflow", "jax", "mxnet")
RELATIVE_TOLERANCE = 1e-3
FROZEN_WORDS = ("Constraints violated", "specialized", "conflicts between user-specified ranges")
"""How torch.export says that a model does not take any number of samples."""


class ExportOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to export, and how: the section `export` of a job file."""

    checkpoint: str
    """Folder or URL of ronde's checkpoints, or a file of weights: .pt, .pth, .safetensors, .keras, .weights.h5, …"""
    output: str
    """The model folder to make."""
    model: str = ""
    """`module:factory`. It returns the model, without weights. A .keras file needs none."""
    model_options: dict[str, Any] = {}
    """Keyword arguments for the factory."""
    example_input: dict[str, str] | list[str] | str = {}
    """By the name of an input, its dtype and shape, as in float32:1x3x64x64, or a file of NumPy (.npy)."""
    to: Literal["onnx", "own"] = "onnx"
    """ONNX, or the own format of the model's framework."""
    outputs: list[str] | None = None
    """Names of the outputs. By default those that the model gives them, or output, output_1, …"""
    labels: list[str] | str = []
    """Names of the classes: a list, a file with one in each line, or a folder of prepared data."""
    preprocessing: dict[str, ImagePreprocessing] = {}
    """By the name of an input: how images become that input."""
    name: str = ""
    """Of the model. By default the name of the output folder."""
    part: str = ""
    """The part of the checkpoint with the weights. By default `model`, if there is one."""
    step: int | None = None
    """The step of the checkpoint. By default the latest."""
    framework: str = ""
    """torch, keras, tensorflow, jax or mxnet. By default that of what the factory returns."""
    trust: bool = False
    """Load pickles: they may run code."""
    tolerance: float = RELATIVE_TOLERANCE
    """How far outputs may differ from the original, relative to the largest."""


class SourceModel(Protocol):
    """A model in its framework, with weights, ready to predict and to be converted."""

    made_by: dict[str, Any]
    """Versions, and what is known of the checkpoint."""

    def predict(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs by name."""

    def write_onnx(self, path: Path, example: Mapping[str, Array]) -> None:
        """Convert it, with a batch axis of any length."""

    def write_own(self, path: Path, example: Mapping[str, Array]) -> None:
        """Save it in the format of its framework, without the code of its class."""

    def load_own(self, path: Path) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
        """Return a function that predicts with what write_own() has written."""


@dataclass(frozen=True)
class ExportResult:
    """What was exported."""

    folder: ModelFolder
    max_difference: float
    """Between an output and that of the original, relative to the largest output, over all compared batches."""


@contextlib.contextmanager
def open_checkpoint(options: ExportOptions) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A context with the file of the checkpoint on this machine, and what is known about it. ModelError if there is
    none. A folder of ronde's checkpoints has several: the latest valid one, or that of the step."""
    local = Path(options.checkpoint)
    if "://" not in options.checkpoint and (local.is_file() or not local.exists()):
        if not local.exists():
            raise ModelError(f"there is no checkpoint {local}")
        yield local, {"checkpoint": str(local)}
        return
    storage = open_storage(options.checkpoint)
    if not any(map(FILE_PATTERN.fullmatch, storage.names())):
        raise ModelError(
            f"{options.checkpoint} has no checkpoints of ronde; give a folder that has some, or a file of weights"
        )
    with open_latest(storage, options.step) as found:
        if found is None:
            raise ModelError(f"{options.checkpoint} has no complete checkpoint")
        yield found.local_path, {"checkpoint": found.full_path, "step": found.step}


def make_model(options: ExportOptions) -> Any:
    """What the factory returns. ValueError if there is none."""
    if not options.model:
        raise ValueError(
            f"{options.checkpoint} holds weights only: give model, as in --model mymodels:make_model, the function or "
            "class that makes the model"
        )
    factory = load_function(options.model)
    try:
        return factory(**options.model_options)
    except TypeError as error:
        raise ValueError(f"{options.model} with {options.model_options or 'no options'}: {error}") from error


def find_framework(made: Any) -> ModelFormat:
    """The framework of a model, by the modules of its classes. ValueError if it is of none."""
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]):
        return "jax"
    modules = {each.__module__.partition(".")[0] for each in type(made).__mro__}
    for framework in ("keras", "torch", "mxnet", "tensorflow"):  # a model of Keras is one of its backend's, too
        if framework in modules or (framework == "keras" and "tf_keras" in modules):
            return framework
    raise ValueError(
        f"the factory returned a {type(made).__name__}, which is no model of PyTorch, Keras, TensorFlow or MXNet; for "
        "JAX return a function and the tree of its parameters"
    )


# --- example inputs --------------------------------------------------------------------------------------------------


def make_example(given: dict[str, str] | list[str] | str, num_samples: int) -> dict[str, Array]:
    """The example with so many samples, always the same. ValueError if it cannot be read."""
    texts = [given] if isinstance(given, str) else given
    entries = dict(given) if isinstance(given, Mapping) else dict(_split_example(text) for text in texts)
    if not entries:
        raise ValueError("give an example input, as in --example-input image=float32:1x3x64x64")
    return {name: _make_input(name, str(text), num_samples) for name, text in entries.items()}


def _split_example(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    return (name, value) if equals else ("input", text)


def _make_input(name: str, text: str, num_samples: int) -> Array:
    if text.endswith(".npy"):
        try:
            stored = decode_npy(Path(text).read_bytes())
        except OSError as error:
            raise ValueError(f"example input {name}: cannot read {text}: {error.strerror}") from None
        if not stored.ndim or not len(stored):
            raise ValueError(f"example input {name}: {text} must hold at least one sample along its first axis")
        return np.take(stored, np.arange(num_samples) % len(stored), axis=0)
    dtype, colon, lengths = text.rpartition(":")
    dtype = dtype if colon else "float32"
    if dtype not in DTYPES or dtype == "string" or not re.fullmatch(r"\d+(x\d+)*", lengths):
        raise ValueError(
            f"example input {name}={text!r} must be a dtype and a shape with the batch first, as in float32:1x3x64x64, "
            f"or a file.npy; dtypes are {', '.join(each for each in DTYPES if each != 'string')}"
        )
    shape = (num_samples, *map(int, lengths.split("x")[1:]))
    if math.prod(shape) > 1 << 28 or 0 in shape:
        raise ValueError(f"example input {name}={text!r}: a shape of {math.prod(shape)} numbers cannot be used")
    random = np.random.default_rng(len(name))
    if dtype.startswith("float"):
        return random.standard_normal(shape).astype(dtype)
    return random.integers(0, 2, shape).astype(dtype)  # 0 and 1 are in any vocabulary


# --- export ----------------------------------------------------------------------------------------------------------


def export_model(options: ExportOptions, *, on_progress: Callable[[str], object] = lambda text: None) -> ExportResult:
    """Export a model as the options say, and return its folder. ModelError or ValueError if that is not possible."""
    output = Path(options.output)
    if "://" in options.output:
        raise ValueError(f"{options.output}: export into a folder of this machine, and copy it from there")
    if output.exists() and not (output / METADATA_NAME).is_file() and any(output.iterdir()):
        raise ValueError(f"{output} is there already and no model; choose another output folder")
    example = make_example(options.example_input, TRACED_BATCH)
    labels = read_labels(options.labels)
    unknown = [name for name in options.preprocessing if name not in example]
    if unknown:
        raise ValueError(f"preprocessing: there is no input {unknown[0]!r}; there are {', '.join(example)}")
    framework, source = _load_source(options, example)
    try:
        source.predict(example)
    except Exception as error:  # of the framework
        inputs = ", ".join(f"{name} {array.shape}" for name, array in example.items())
        raise ModelError(
            f"{options.model or options.checkpoint} does not take the example input ({inputs}): "
            f"{type(error).__name__}: {plain_text(error)}; give each input that it takes with an --example-input of "
            "its own, under the name of the argument or of the key in a dict, or in their order"
        ) from error
    expected = {size: _predict_original(options, source, size) for size in COMPARED_BATCHES}
    _check_independence(options, source, expected[max(COMPARED_BATCHES)])
    outputs = next(iter(expected.values()))
    twice = [name for name in outputs if name in example]
    if twice:
        raise ValueError(f"the output {twice[0]!r} has the name of an input; name the outputs, as in --outputs scores")
    kind: ModelFormat = "onnx" if options.to == "onnx" else framework
    on_progress(f"converting a model of {framework} to {'ONNX' if kind == 'onnx' else 'its own format'}")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{UNFINISHED_PREFIX}{output.name}-", dir=output.parent) as made:
        root = Path(made)
        path = root / MODEL_FILES[kind]
        write = source.write_onnx if kind == "onnx" else source.write_own
        with _as_model_error(options, f"{framework} cannot convert the model"):
            write(path, example)
        metadata = ModelMetadata(
            name=options.name or output.absolute().name,
            kind=kind,
            framework=framework,
            inputs=tuple(describe_array(name, array) for name, array in example.items()),
            outputs=tuple(describe_array(name, array) for name, array in outputs.items()),
            labels=labels,
            preprocessing=options.preprocessing,
            made_by={"ronde": __version__, "model": options.model, **source.made_by},
        )
        if kind == "onnx":
            metadata = _take_names(root, metadata, path)
        _check_labels(metadata)
        folder = write_metadata(root, metadata)
        predict = OnnxModel(load_model_folder(root, verify=False)).predict if kind == "onnx" else source.load_own(path)
        on_progress(f"comparing it at batches of {', '.join(map(str, COMPARED_BATCHES))}")
        difference = max(_compare(options, expected[size], predict, size) for size in COMPARED_BATCHES)
        Path(made).chmod(0o755)
        _publish(root, output)
    return ExportResult(
        ModelFolder(output, folder.metadata, output / MODEL_FILES[kind], folder.fingerprint), difference
    )


def _load_source(options: ExportOptions, example: Mapping[str, Array]) -> tuple[ModelFormat, SourceModel]:
    made = make_model(options) if options.model else None
    if options.framework and options.framework not in FRAMEWORKS:
        raise ValueError(f"framework must be one of {', '.join(FRAMEWORKS)}, got {options.framework!r}")
    framework: Any = options.framework
    if not framework:
        if made is None:
            framework = "keras" if options.checkpoint.endswith((".keras", ".h5")) else "torch"
        else:
            framework = find_framework(made)
    try:
        load = importlib.import_module(f"ronde.serve.export.{framework}").load
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"exporting a model of {framework} needs {error.name}: it is not installed") from None
    with open_checkpoint(options) as (path, facts):
        source: SourceModel = load(options, made, path, facts, dict(example))
    return framework, source


@contextlib.contextmanager
def _as_model_error(options: ExportOptions, what: str) -> Iterator[None]:
    try:
        yield
    except (ModelError, ModuleNotFoundError):
        raise
    except Exception as error:  # converters raise errors of any class
        inner: BaseException = error
        while inner.__cause__ is not None:  # torch.onnx wraps what was wrong in advice of many lines
            inner = inner.__cause__
        text = plain_text(inner)
        if any(words in text for words in FROZEN_WORDS):
            raise frozen_batch(options, text) from error
        raise ModelError(f"{what} {options.model or options.checkpoint}: {type(inner).__name__}: {text}") from error


def plain_text(error: object) -> str:
    """The message of an error in one line, without colours."""
    return shorten(" ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split()), 600)


def frozen_batch(options: ExportOptions, text: str) -> ModelError:
    return ModelError(
        f"the batch axis of {options.model or options.checkpoint} is frozen: it does not take any number of samples; "
        "look for a constant batch size in its code, as in x.reshape(8, -1), and use x.shape[0] or -1 "
        f"({shorten(text, 300)})"
    )


def _take_names(root: Path, metadata: ModelMetadata, path: Path) -> ModelMetadata:
    """The metadata with names and shapes as the file of ONNX has them. ModelError if its batch axis is frozen."""
    bare = load_model_folder(path, verify=False).metadata
    for noun, ours, found in (
        ("inputs", metadata.inputs, bare.inputs),
        ("outputs", metadata.outputs, bare.outputs),
    ):
        if len(ours) != len(found):
            raise ModelError(f"the converted model has {len(found)} {noun}, and the original {len(ours)}: {found}")
        for each in found:
            if each.shape and each.shape[0] is not None and noun == "inputs":
                raise ModelError(
                    f"the batch axis of {each.name!r} is frozen: the converted model takes {each.describe()}; look for "
                    "a constant batch size in the model's code, and use x.shape[0] or -1"
                )
    outputs = tuple(
        msgspec.structs.replace(ours, dtype=found.dtype, name=found.name)
        for ours, found in zip(metadata.outputs, bare.outputs, strict=True)
    )
    inputs = {each.name: each for each in metadata.inputs}
    if inputs.keys() != {each.name for each in bare.inputs}:
        names = ", ".join(each.name for each in bare.inputs)
        raise ModelError(f"the converted model has the inputs {names}; name the example inputs like them")
    ordered = tuple(msgspec.structs.replace(inputs[each.name], dtype=each.dtype) for each in bare.inputs)
    return msgspec.structs.replace(metadata, inputs=ordered, outputs=outputs)


def _predict_original(options: ExportOptions, source: SourceModel, num_samples: int) -> dict[str, Array]:
    """What the original says of a batch. ModelError if it does not take one of so many samples."""
    try:
        outputs = source.predict(make_example(options.example_input, num_samples))
    except Exception as error:  # of the framework
        raise frozen_batch(options, f"the model itself, at a batch of {num_samples}: {plain_text(error)}") from error
    for name, array in outputs.items():
        if array.shape[:1] != (num_samples,):
            raise frozen_batch(options, f"{name!r} has shape {array.shape} at a batch of {num_samples}")
    return outputs


def _compare(
    options: ExportOptions,
    expected: Mapping[str, Array],
    predict: Callable[[Mapping[str, Array]], dict[str, Array]],
    num_samples: int,
) -> float:
    """The largest difference of an output, relative to the largest output. ModelError if it is too large, or if the
    exported model does not take so many samples."""
    try:
        found = predict(make_example(options.example_input, num_samples))
    except Exception as error:  # of the framework, or of ONNX Runtime
        raise frozen_batch(options, f"converted, at a batch of {num_samples}: {plain_text(error)}") from error
    largest = 0.0
    for (name, wanted), given in zip(expected.items(), found.values(), strict=True):
        if given.shape != wanted.shape:
            raise frozen_batch(
                options,
                f"{name!r} has shape {given.shape} at a batch of {num_samples}, and {wanted.shape} in the original",
            )
        difference = _difference(wanted, given)
        if not difference <= options.tolerance:  # also NaN
            raise ModelError(
                f"the exported model differs from the original: {name!r} by {difference:.2g} of the largest output, at "
                f"a batch of {num_samples}; allowed is a tolerance of {options.tolerance:g}"
            )
        largest = max(largest, difference)
    return largest


def _difference(wanted: Array, given: Array) -> float:
    """The largest difference, relative to the largest number; of what are no floats, the share that differs."""
    if not wanted.size:
        return 0.0
    if wanted.dtype.kind not in "fc":
        return float(np.mean(given != wanted))
    scale = max(1e-6, float(np.max(np.abs(wanted))))
    return float(np.max(np.abs(given.astype(np.float64) - wanted.astype(np.float64)))) / scale


def _check_independence(options: ExportOptions, source: SourceModel, together: Mapping[str, Array]) -> None:
    """ModelError if the original says something else of a sample alone than of the same one in the largest batch:
    samples of strangers are predicted together."""
    example = make_example(options.example_input, max(COMPARED_BATCHES))
    alone = source.predict({name: array[-1:] for name, array in example.items()})
    for name, wanted in together.items():
        difference = _difference(wanted[-1:], alone[name]) if alone[name].shape == wanted[-1:].shape else math.inf
        if not difference <= options.tolerance:
            raise ModelError(
                f"what {options.model or options.checkpoint} says of a sample depends on the other samples of its "
                f"batch, or is random: {name!r} differs by {difference:.2g} of the largest output; look for batch "
                "normalization or dropout in training mode, and for a mean over the first axis"
            )


def _publish(root: Path, output: Path) -> None:
    """Let the finished folder appear under its name, in place of an older model."""
    replaced = output.with_name(f"{UNFINISHED_PREFIX}{output.name}-replaced-{os.getpid()}")
    if output.exists():
        output.rename(replaced)
    root.rename(output)
    root.mkdir()  # for the TemporaryDirectory, which removes it
    shutil.rmtree(replaced, ignore_errors=True)


def describe_array(name: str, array: Array) -> TensorInfo:
    """The first axis is that of the batch, of any length."""
    dtype = "string" if array.dtype.kind in "OSU" else array.dtype.name
    if dtype not in DTYPES:
        raise ModelError(f"{name!r} is of dtype {array.dtype}; a model takes and returns {', '.join(DTYPES)}")
    if not array.ndim:
        raise ModelError(f"{name!r} is a single number; inputs and outputs have a batch as their first axis")
    return TensorInfo(name=name, dtype=dtype, shape=(None, *array.shape[1:]))


def read_labels(given: list[str] | str) -> tuple[str, ...]:
    """The names of the classes: as given, the lines of a file, or the classes of prepared data."""
    if not isinstance(given, str):
        return tuple(given)
    path = Path(given)
    if path.is_file():
        with io.StringIO(path.read_text(encoding="utf-8")) as lines:
            return tuple(line.strip() for line in lines if line.strip())
    if "://" in given or (path / INDEX_NAME).is_file():
        return read_index(open_folder(given)).classes
    raise ValueError(f"labels: there is no file {given}, and no prepared data with {INDEX_NAME}")


def _check_labels(metadata: ModelMetadata) -> None:
    width = metadata.outputs[0].shape[-1]
    if metadata.labels and width not in (None, len(metadata.labels)):
        raise ValueError(
            f"there are {len(metadata.labels)} labels, but {metadata.outputs[0].describe()} has {width} values for a "
            "sample"
        )


def name_outputs(returned: Any, wanted: Sequence[str] | None) -> dict[str, Any]:
    """The outputs of a model by name: those of a dict, or `wanted`, or output, output_1, …"""
    if isinstance(returned, Mapping):
        values, names = list(returned.values()), [str(name) for name in returned]
    else:
        values = list(returned) if isinstance(returned, list | tuple) else [returned]
        names = [f"output_{number}" if number else "output" for number in range(len(values))]
    names = list(wanted) if wanted is not None else names
    if len(names) != len(values):
        raise ValueError(f"the model has {len(values)} outputs, but outputs names {len(names)}: {', '.join(names)}")
    return dict(zip(names, values, strict=True))
