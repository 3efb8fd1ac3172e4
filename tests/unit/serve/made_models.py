"""Small models for tests, made without a framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ronde.serve.model import ImagePreprocessing, ModelFolder, ModelMetadata, TensorInfo, write_metadata

WEIGHTS = np.arange(12, dtype=np.float32).reshape(4, 3) / 10


def make_graph(weights: Any = None) -> Any:
    """scores = x @ WEIGHTS, for any number of samples."""
    initializer = numpy_helper.from_array(WEIGHTS, "w") if weights is None else weights
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["scores"])],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 3])],
        [initializer],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def write_linear(folder: Path, *, labels: tuple[str, ...] = ()) -> ModelFolder:
    """A model folder with make_graph()."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(make_graph(), folder / "model.onnx")
    metadata = ModelMetadata(
        name="linear",
        inputs=(TensorInfo(name="x", dtype="float32", shape=(None, 4)),),
        outputs=(TensorInfo(name="scores", dtype="float32", shape=(None, 3)),),
        labels=labels,
    )
    return write_metadata(folder, metadata)


def write_image_mean(folder: Path) -> ModelFolder:
    """A model whose score is the mean of an image of 4 by 4 pixels, scaled to 0 to 1."""
    folder.mkdir(parents=True, exist_ok=True)
    graph = helper.make_graph(
        [helper.make_node("ReduceMean", ["image", "axes"], ["mean"], keepdims=0)],
        "mean",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 4, 4])],
        [helper.make_tensor_value_info("mean", TensorProto.FLOAT, ["batch"])],
        [numpy_helper.from_array(np.array([1, 2, 3], np.int64), "axes")],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), folder / "model.onnx"
    )
    metadata = ModelMetadata(
        name="mean",
        inputs=(TensorInfo(name="image", dtype="float32", shape=(None, 3, 4, 4)),),
        outputs=(TensorInfo(name="mean", dtype="float32", shape=(None,)),),
        preprocessing={"image": ImagePreprocessing(height=4, width=4)},
    )
    return write_metadata(folder, metadata)
