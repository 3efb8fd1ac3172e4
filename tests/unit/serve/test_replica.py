"""What a replica makes of a batch, the messages it exchanges with the front, and the copies of models."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest

from ronde.comm.buffers import Array
from ronde.errors import ModelError, ProtocolError
from ronde.serve.handler import Handler, load_handler
from ronde.serve.inference_protocol import encode_elements
from ronde.serve.model import TensorInfo, load_model
from ronde.serve.model_store import copy_model, remove_abandoned_copies
from ronde.serve.replica import ServedModel
from ronde.serve.replica_messages import (
    ALIGNMENT,
    BatchDone,
    FrontMessage,
    LoadModel,
    PredictBatch,
    RequestResult,
    encode_frame,
    make_front_assembler,
    make_replica_assembler,
)


def write_model(path: Path, *, batch: Any = "n", factor: float = 2.0, location: str = "") -> Path:
    """y = factor * x, for rows of two numbers."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weight = onnx.numpy_helper.from_array(np.full((1,), factor, np.float32), "factor")
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "factor"], ["y"])],
        "double",
        [helper.make_tensor_value_info("x", kind, [batch, 2])],
        [helper.make_tensor_value_info("y", kind, [batch, 2])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    if location:
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)
    path.write_bytes(model.SerializeToString())
    return path


def make_served(tmp_path: Path, kind: type[Handler] = Handler, **given: Any) -> ServedModel:
    return ServedModel(kind(load_model(write_model(tmp_path / "double.onnx", **given))))


def predict(served: ServedModel, *requests: Array) -> tuple[list[RequestResult], bytes]:
    batch = PredictBatch(
        1, 1, tuple(map(len, requests)), (requests[0].shape[1:],), (tuple(each.nbytes for each in requests),)
    )
    results, buffers = served.predict(batch, memoryview(b"".join(each.tobytes() for each in requests)))
    return results, b"".join(buffers)


def rows(*numbers: float) -> Array:
    return np.array([[number, number] for number in numbers], np.float32)


def test_the_results_of_a_batch_are_those_of_its_requests(tmp_path: Path) -> None:
    served = make_served(tmp_path)
    served.warm_up((1, 8))
    results, data = predict(served, rows(1), rows(2, 3))
    assert [(each.status, each.shapes, each.sizes) for each in results] == [
        (200, ((1, 2),), (8,)),
        (200, ((2, 2),), (16,)),
    ]
    assert np.frombuffer(data, np.float32).tolist() == [2, 2, 4, 4, 6, 6]


class Picky(Handler):
    """Refuses, fails, and predicts nothing when a 3 is in the batch."""

    def preprocess(self, inputs: dict[str, Array]) -> dict[str, Array]:
        if 1 in inputs["x"]:
            raise ValueError("no ones")
        if 2 in inputs["x"]:
            raise KeyError("two")
        return inputs

    def predict(self, inputs: dict[str, Array]) -> dict[str, Array]:
        if 3 in inputs["x"]:
            raise RuntimeError("three")
        return super().predict(inputs)

    def postprocess(self, outputs: dict[str, Array]) -> dict[str, Array]:
        return {} if 8 in outputs["y"] else outputs


def test_each_bad_request_of_a_batch_gets_its_own_error_and_the_others_their_results(tmp_path: Path) -> None:
    results, data = predict(make_served(tmp_path, Picky), rows(5), rows(1), rows(2), rows(3), rows(4), rows(6))
    assert [each.status for each in results] == [200, 400, 500, 500, 500, 200]
    assert results[1].message == "no ones"
    assert all(name in results[index].message for index, name in ((2, "two"), (3, "three"), (4, "'y'")))
    assert np.frombuffer(data, np.float32).tolist() == [10, 10, 12, 12]


class Lengths(Handler):
    """Predicts from the lengths of bytes."""

    inputs = (TensorInfo(name="data", dtype="string", shape=(None,)),)
    outputs = (TensorInfo(name="text", dtype="string", shape=(None,)),)

    def preprocess(self, inputs: dict[str, Array]) -> dict[str, Array]:
        return {"x": np.array([[len(each), 0] for each in inputs["data"]], np.float32)}

    def postprocess(self, outputs: dict[str, Array]) -> dict[str, Array]:
        return {"text": np.array([f"{row[0]:.0f}" for row in outputs["y"]])}


def test_a_handler_may_take_bytes_and_return_texts(tmp_path: Path) -> None:
    served = make_served(tmp_path, Lengths)
    parts = [encode_elements([b"\xff" * 3]), encode_elements([b"", b"12345"])]
    batch = PredictBatch(1, 1, (1, 2), ((),), (tuple(map(len, parts)),))
    results, buffers = served.predict(batch, memoryview(b"".join(parts)))
    assert [each.shapes for each in results] == [((1,),), ((2,),)]
    assert b"".join(buffers) == encode_elements([b"6"]) + encode_elements([b"0", b"10"])


def test_a_model_whose_batch_is_fixed_is_served_without_batches(tmp_path: Path) -> None:
    served = make_served(tmp_path, batch=3)
    assert not served.signature.is_batched
    served.warm_up((1, 8))
    batch = PredictBatch(1, 1, (1,), ((3, 2),), ((24,),))
    results, _ = served.predict(batch, memoryview(rows(1, 2, 3).tobytes()))
    assert results[0].shapes == ((3, 2),)


def test_what_is_no_handler_is_named() -> None:
    for name in ("json:dumps", "json:nothing", "no_such_module:Handler", "json"):
        with pytest.raises(ValueError, match=r"json|no_such_module"):
            load_handler(name)
    assert load_handler("") is Handler


# --- messages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1, 7, 64, 100_000])
def test_frames_arrive_whole_however_they_are_cut(piece: int) -> None:
    messages: list[tuple[FrontMessage, list[bytes]]] = [
        (PredictBatch(1, 1, (1, 2), ((3,),), ((12, 24),)), [b"a" * 12, b"b" * 24]),
        (LoadModel(2, "/tmp/x", ("model.onnx",)), []),
        (PredictBatch(2, 1, (1,), ((3,),), ((50_000,),)), [bytes(50_000)]),
    ]
    stream = b"".join(bytes(each) for message, data in messages for each in encode_frame(message, data))
    assembler = make_replica_assembler()
    found = [
        (message, bytes(data))
        for start in range(0, len(stream), piece)
        for message, data in assembler.feed(stream[start : start + piece])
    ]
    assert found == [(message, b"".join(data)) for message, data in messages]
    assert assembler.missing is None


def test_tensors_are_aligned() -> None:
    first, *_ = encode_frame(PredictBatch(1, 1, (1,), ((3,),), ((12,),)), [bytes(12)])
    assert len(first) % ALIGNMENT == 0


@pytest.mark.parametrize(
    "data", [struct.pack("<QQ", 2**40, 0), struct.pack("<QQ", 3, 2**60), struct.pack("<QQ", 48, 0) + b"x" * 48]
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        make_front_assembler().feed(data)


def test_the_front_does_not_take_its_own_messages() -> None:
    frame = b"".join(bytes(each) for each in encode_frame(LoadModel(2, "/tmp/x", ())))
    with pytest.raises(ProtocolError):
        make_front_assembler().feed(frame)
    done = BatchDone(1, 1, (RequestResult(400, "no"),), 0.5)
    assert make_front_assembler().feed(b"".join(map(bytes, encode_frame(done))))[0][0] == done


# --- copies --------------------------------------------------------------------------------------------------------


def test_a_copy_stays_as_it_is_when_the_model_changes(tmp_path: Path) -> None:
    path = write_model(tmp_path / "double.onnx")
    first = copy_model(str(path), 1)
    write_model(path, factor=3.0)
    second = copy_model(str(path), 2)
    try:
        assert first.name == "double" and first.fingerprint != second.fingerprint
        assert load_model(first.path / first.entry).predict({"x": rows(1)})["y"].tolist() == [[2, 2]]
        remove_abandoned_copies()
        assert first.path.exists()
        assert [name for name, _ in second.read_pieces()] == ["double.onnx"]
    finally:
        first.remove()
        second.remove()
    assert not first.path.exists()


def test_the_copy_of_a_service_that_was_killed_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    abandoned = copy_model(str(write_model(tmp_path / "double.onnx")), 1)
    abandoned.lock.close()  # as the kernel does
    remove_abandoned_copies()
    assert not abandoned.path.exists()


def test_weights_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "secret").write_bytes(bytes(4))
    for name in ("../secret", str(tmp_path / "secret"), "link"):
        path = write_model(tmp_path / "inside/double.onnx", location=name)
        (tmp_path / "inside/link").unlink(missing_ok=True)
        (tmp_path / "inside/link").symlink_to(tmp_path / "secret")
        with pytest.raises(ModelError, match=r"refused|no model|name"):
            copy_model(str(path), 1)


def test_there_is_no_model_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model"):
        copy_model(str(tmp_path / "nothing"), 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="is no model"):
        copy_model(str(tmp_path / "empty"), 1)
