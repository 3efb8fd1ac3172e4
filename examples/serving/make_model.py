"""Makes a model without training, which says whether a picture is red, green or blue: a stand-in for one that
`ronde export` has made of a checkpoint.

    python examples/serving/make_model.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ronde.serve.model import ModelMetadata, TensorInfo, write_metadata


def make_model(folder: Path, sharpness: float = 10.0) -> None:
    """The scores of a picture are the means of its colours, times the sharpness."""
    folder.mkdir(parents=True, exist_ok=True)
    nodes = [
        helper.make_node("GlobalAveragePool", ["pixels"], ["means"]),
        helper.make_node("Flatten", ["means"], ["flat"]),
        helper.make_node("Mul", ["flat", "sharpness"], ["scores"]),
    ]
    graph = helper.make_graph(
        nodes,
        "colors",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["batch", 3, 32, 32])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(np.array(sharpness, np.float32), "sharpness")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, str(folder / "model.onnx"))
    metadata = ModelMetadata(
        name="colors",
        inputs=(TensorInfo(name="pixels", dtype="float32", shape=(None, 3, 32, 32)),),
        outputs=(TensorInfo(name="scores", dtype="float32", shape=(None, 3)),),
        labels=("red", "green", "blue"),
    )
    write_metadata(folder, metadata)


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
