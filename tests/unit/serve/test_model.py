"""Model folders: what is in them, what is refused, and what a model says of wrong inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from ronde.errors import ModelError
from ronde.serve.model import METADATA_NAME, external_files, load_model, load_model_folder, write_metadata
from tests.unit.serve.made_models import WEIGHTS, make_graph, write_linear


def test_a_model_predicts_any_number_of_samples(tmp_path: Path) -> None:
    write_linear(tmp_path, labels=("a", "b", "c"))
    model = load_model(tmp_path, threads=2)
    for num_samples in (1, 2, 7):
        x = np.random.default_rng(1).normal(size=(num_samples, 4)).astype(np.float32)
        np.testing.assert_allclose(model.predict({"x": x})["scores"], x @ WEIGHTS, rtol=1e-5)
    assert model.metadata.labels == ("a", "b", "c")
    assert model.metadata.is_batched
    assert model.predict(model.make_example(5))["scores"].shape == (5, 3)


def test_a_file_of_onnx_without_metadata_is_a_model(tmp_path: Path) -> None:
    onnx.save(make_graph(), tmp_path / "linear.onnx")
    model = load_model(tmp_path / "linear.onnx")
    assert model.metadata.name == "linear"
    assert [each.describe() for each in model.metadata.inputs] == ["x: float32 (batch, 4)"]
    assert model.metadata.outputs[0].shape == (None, 3)


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ({}, "the input 'x' is missing"),
        ({"y": np.zeros((1, 4), np.float32)}, "no input 'y'; it has x"),
        ({"x": np.zeros((1, 4))}, "is float64; the model takes x: float32"),
        ({"x": np.zeros((1, 5), np.float32)}, r"has shape \(1, 5\)"),
        ({"x": np.zeros(4, np.float32)}, r"has shape \(4,\)"),
        ({"x": [[1, 2, 3, 4]]}, "is list"),
    ],
)
def test_wrong_inputs_are_named(tmp_path: Path, inputs: dict[str, np.ndarray], problem: str) -> None:
    write_linear(tmp_path)
    with pytest.raises(ValueError, match=problem):
        load_model(tmp_path).predict(inputs)


def cut(path: Path) -> None:
    (path / "model.onnx").write_bytes((path / "model.onnx").read_bytes()[:-9])


def change(path: Path) -> None:
    data = bytearray((path / "model.onnx").read_bytes())
    data[-40] ^= 1
    (path / "model.onnx").write_bytes(data)


def rename_input(path: Path) -> None:
    text = (path / METADATA_NAME).read_text().replace('"name": "x"', '"name": "z"')
    (path / METADATA_NAME).write_text(text)


def name_outside(path: Path) -> None:
    text = (path / METADATA_NAME).read_text().replace('"model.onnx"', '"../model.onnx"')
    (path / METADATA_NAME).write_text(text)


def link_outside(path: Path) -> None:
    (path / "model.onnx").rename(path.parent / "elsewhere.onnx")
    (path / "model.onnx").symlink_to(path.parent / "elsewhere.onnx")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (cut, "is damaged: it has"),
        (change, "SHA-256"),
        (rename_input, "names other inputs than the model has: x: float32"),
        (name_outside, "is refused"),
        (link_outside, "leads out of the folder"),
        (lambda path: (path / "model.onnx").unlink(), "is not there"),
        (lambda path: (path / METADATA_NAME).write_text("{}"), "is damaged or was not written by ronde"),
        (lambda path: (path / METADATA_NAME).unlink() or (path / "model.onnx").unlink(), "is no model"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: Callable[[Path], object], problem: str) -> None:
    folder = tmp_path / "model"
    write_linear(folder)
    damage(folder)
    with pytest.raises(ModelError, match=problem):
        load_model(folder)


@pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "weights.bin"])
def test_weights_outside_of_the_folder_or_unknown_to_it_are_refused(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    metadata = write_linear(folder).metadata
    (tmp_path / "secret").write_bytes(WEIGHTS.tobytes())
    weights = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4, 3])
    weights.data_location = TensorProto.EXTERNAL
    weights.external_data.add(key="location", value=location)
    (folder / "model.onnx").write_bytes(make_graph(weights).SerializeToString())
    assert external_files(folder / "model.onnx") == {location}
    write_metadata(folder, metadata)
    (folder / "weights.bin").write_bytes(WEIGHTS.tobytes())  # after the sums were taken
    with pytest.raises(ModelError, match=r"refused|does not name"):
        load_model_folder(folder)
    if location == "weights.bin":
        write_metadata(folder, metadata)
        assert load_model(folder).predict({"x": np.ones((1, 4), np.float32)})["scores"].shape == (1, 3)
