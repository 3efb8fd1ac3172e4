"""Functions of JAX with their parameters: programs of jax.export, and ONNX by jax2onnx where that is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np

from ronde.comm.buffers import Array
from ronde.errors import CheckpointError, ModelError
from ronde.jax.checkpoints import read_tree
from ronde.serve.export.exporter import ExportOptions, name_outputs

PART_NAMES = ("params", "model", "weights")
"""Under which of these keys a checkpoint has the tree, unless it is the tree itself, or it is told."""


class JaxModel:
    """A function `apply(tree, *inputs)` and its tree of parameters."""

    def __init__(
        self, apply: Callable[..., Any], tree: Any, options: ExportOptions, names: list[str], facts: dict[str, Any]
    ) -> None:
        self._call: Callable[..., Any] = lambda *inputs: apply(tree, *inputs)
        self._outputs = options.outputs
        self._names = names
        self.made_by: dict[str, Any] = {"jax": jax.__version__, **facts}

    def predict(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self._name(self._call(*(inputs[name] for name in self._names)))

    def _name(self, returned: Any) -> dict[str, Array]:
        return {name: np.asarray(value) for name, value in name_outputs(returned, self._outputs).items()}

    def write_onnx(self, path: Path, example: Mapping[str, Array]) -> None:
        try:
            import jax2onnx
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "converting a function of JAX to ONNX needs jax2onnx: pip install jax2onnx, or export with --to own"
            ) from error
        expected = self.predict(example)
        jax2onnx.to_onnx(
            self._call,
            inputs=self._describe_inputs(example),
            input_names=self._names,
            output_names=list(expected),
            return_mode="file",
            output_path=str(path),
        )

    def write_own(self, path: Path, example: Mapping[str, Array]) -> None:
        path.write_bytes(jax.export.export(jax.jit(self._call))(*self._describe_inputs(example)).serialize())

    def _describe_inputs(self, example: Mapping[str, Array]) -> list[Any]:
        """Shapes and dtypes, with one symbol for the batch of all inputs."""
        (batch,) = jax.export.symbolic_shape("batch")
        return [jax.ShapeDtypeStruct((batch, *example[name].shape[1:]), example[name].dtype) for name in self._names]

    def load_own(self, path: Path) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
        program = jax.export.deserialize(bytearray(path.read_bytes()))
        return lambda inputs: self._name(program.call(*(inputs[name] for name in self._names)))


def load(
    options: ExportOptions, made: Any, path: Path, facts: dict[str, Any], example: Mapping[str, Array]
) -> JaxModel:
    """The function and the tree that the factory returned, with the arrays of a checkpoint of ronde.jax."""
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise ValueError(
            f"{options.model or 'the factory'} has to return a function and the tree that was saved, as in "
            "`return apply, tree`; the function is called with the tree and the inputs"
        )
    apply, tree = made
    problem = ""
    for part in [options.part] if options.part else ["", *PART_NAMES]:
        try:
            with path.open("rb") as file:
                return JaxModel(apply, read_tree(tree, file, part=part), options, list(example), facts)
        except CheckpointError as error:
            problem = problem or str(error)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{path} is damaged or no checkpoint of ronde.jax: {error}") from None
    advice = (
        "" if options.part else "; if it was saved with other things, say under which key it is, as in --part params"
    )
    raise ModelError(f"the checkpoint {path} does not fit the tree of {options.model}: {problem}{advice}")
