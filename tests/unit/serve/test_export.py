"""Export of models of PyTorch: formats, checkpoints, what is refused, and what a wrong model is told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import ronde
import ronde.torch
from ronde.errors import ModelError
from ronde.serve.export import ExportOptions, export_model
from ronde.serve.export.exporter import make_example, read_labels
from ronde.serve.export.torch import find_weights
from ronde.serve.model import ImagePreprocessing, load_model, load_model_folder
from tests.commands import output_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.leaves(reason="torch.onnx shows progress bars, whose thread stays"),
]

MODELS = '''
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.hidden = nn.Linear(4, 8)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(8, classes)

    def forward(self, x):
        return self.last(self.drop(self.hidden(x).relu()))


class Frozen(Net):
    def forward(self, x):
        return self.last(self.hidden(x).reshape(3, 8))


class Mixing(Net):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class TakesDict(Net):
    def forward(self, batch):
        return {"scores": super().forward(batch["x"] + batch["shift"])}


class Converted(Net):
    """Takes any batch itself, but a conversion would fix the branch that it has seen."""

    def forward(self, x):
        return self.last(self.hidden(x).relu() if x.shape[0] > 2 else self.hidden(x))
'''


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "exported_models.py").write_text(MODELS)
    sys.modules.pop("exported_models", None)
    from exported_models import Net  # type: ignore[import-not-found]  # written just now

    torch.manual_seed(1)
    torch.save(Net().state_dict(), "weights.pt")
    yield ExportOptions(
        checkpoint="weights.pt", output="model", model="exported_models:Net", example_input={"x": "float32:1x4"}
    )
    sys.modules.pop("exported_models", None)


def reference(x: np.ndarray) -> np.ndarray:
    import exported_models

    net = exported_models.Net().eval()
    net.load_state_dict(torch.load("weights.pt", weights_only=True))
    with torch.no_grad():
        answer: np.ndarray = net(torch.from_numpy(x)).numpy()
    return answer


def test_a_model_of_onnx_predicts_as_the_original_and_knows_its_labels(options: ExportOptions, tmp_path: Path) -> None:
    Path("labels.txt").write_text("ant\nbee\n\ncat\n")
    image = ImagePreprocessing(height=2, width=2)
    result = export_model(
        msgspec.structs.replace(options, outputs=["scores"], labels="labels.txt", preprocessing={"x": image})
    )
    assert result.max_difference < 1e-5
    model = load_model("model")
    assert model.metadata.labels == ("ant", "bee", "cat")
    assert model.metadata.preprocessing == {"x": image}
    assert [each.describe() for each in (*model.metadata.inputs, *model.metadata.outputs)] == [
        "x: float32 (batch, 4)",
        "scores: float32 (batch, 3)",
    ]
    x = np.random.default_rng(1).normal(size=(9, 4)).astype(np.float32)
    np.testing.assert_allclose(model.predict({"x": x})["scores"], reference(x), rtol=1e-4, atol=1e-5)
    export_model(msgspec.structs.replace(options, outputs=["other"]))  # replaces it
    assert load_model_folder("model").metadata.outputs[0].name == "other"
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(".")} == set()


@pytest.mark.parametrize("to", ["onnx", "own"])
def test_a_model_may_take_its_inputs_in_a_dict(options: ExportOptions, to: str) -> None:
    inputs = {"shift": "float32:1x1", "x": "float32:1x4"}
    taking = msgspec.structs.replace(options, model="exported_models:TakesDict", example_input=inputs, to=to)
    assert export_model(taking).max_difference < 1e-5
    if to == "onnx":
        x = np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)
        found = load_model("model").predict({"x": x, "shift": np.full((2, 1), 0.5, np.float32)})["scores"]
        np.testing.assert_allclose(found, reference(x + np.float32(0.5)), rtol=1e-4, atol=1e-5)
        with pytest.raises(ModelError, match="KeyError: 'shift'; give each input"):
            export_model(msgspec.structs.replace(taking, example_input={"x": "float32:1x4"}))


def test_the_own_format_is_compared_too_and_predict_says_that_it_cannot_run_it(options: ExportOptions) -> None:
    result = export_model(msgspec.structs.replace(options, to="own"))
    assert (result.folder.metadata.kind, result.folder.model_path.name) == ("torch", "model.pt2")
    with pytest.raises(ModelError, match="export it with --to onnx"):
        load_model("model")


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("Frozen", r"the batch axis of exported_models:Frozen is frozen.*x.shape\[0\]"),
        ("Converted", r"is frozen|depends on the other samples of its batch"),
        ("Mixing", r"depends on the other samples of its batch, or is random: 'output' differs"),
    ],
)
def test_a_frozen_batch_axis_fails_and_so_do_samples_that_depend_on_each_other(
    options: ExportOptions, model: str, problem: str
) -> None:
    with pytest.raises(ModelError, match=problem):
        export_model(msgspec.structs.replace(options, model=f"exported_models:{model}"))
    assert not Path("model").exists()


def test_checkpoints_of_ronde_are_found_by_step(options: ExportOptions) -> None:
    import exported_models

    net = exported_models.Net()
    ronde.init()
    checkpoints = ronde.torch.Checkpoints("run", model=net, optimizer=torch.optim.SGD(net.parameters(), 0.1))
    checkpoints.save(7)
    net.load_state_dict(torch.load("weights.pt", weights_only=True))
    checkpoints.save(8)
    ronde.shutdown()
    result = export_model(msgspec.structs.replace(options, checkpoint="run"))
    assert result.folder.metadata.made_by["step"] == 8
    x = np.ones((2, 4), np.float32)
    np.testing.assert_allclose(load_model("model").predict({"x": x})["output"], reference(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="no checkpoint of step 9"):
        export_model(msgspec.structs.replace(options, checkpoint="run", step=9))


def test_a_pickled_model_is_loaded_only_if_it_is_trusted(options: ExportOptions) -> None:
    import exported_models

    torch.save(exported_models.Net(), "whole.pt")
    whole = msgspec.structs.replace(options, checkpoint="whole.pt", model="", to="own")
    with pytest.raises(ModelError, match=r"holds more than weights \(.*Net.*may run code"):
        export_model(whole)
    assert export_model(msgspec.structs.replace(whole, trust=True)).max_difference == 0
    code = "import torch; from exported_models import Net; Net.__module__ = '__main__'; torch.save(Net(), 'main.pt')"
    output_of([sys.executable, "-c", code], cwd=Path.cwd())
    for trust in (False, True):
        with pytest.raises(ModelError, match=r"__main__\), and no other program can find it.*--model MODULE:CLASS"):
            export_model(msgspec.structs.replace(whole, checkpoint="main.pt", trust=trust))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_options": {"classes": 4}}, "do not fit exported_models:Net: .*size mismatch"),
        ({"model": ""}, "holds weights only: give model"),
        ({"model": "exported_models:Nets"}, "exported_models.py has no Nets"),
        ({"checkpoint": "nothing.pt"}, "there is no checkpoint nothing.pt"),
        ({"checkpoint": "exported_models.py"}, "is no checkpoint of PyTorch"),
        ({"example_input": {"x": "float32:1x5"}}, "does not take the example input"),
        ({"example_input": {}}, "give an example input"),
        ({"labels": ["a", "b"]}, "there are 2 labels, but output: float32"),
        ({"part": "teacher"}, "has no part 'teacher'"),
        ({"outputs": ["x"]}, "has the name of an input"),
    ],
)
def test_mistakes_are_named(options: ExportOptions, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises((ValueError, ModelError), match=problem):
        export_model(msgspec.structs.replace(options, to="own", **changes))
    assert not Path("model").exists()


def test_weights_are_found_under_the_usual_names() -> None:
    weights = {"a.weight": torch.zeros(2)}
    for contents in (
        weights,
        {"model": weights, "epoch": 3},
        {"state_dict": {"module.a.weight": weights["a.weight"]}},
        {"step": 3, "extras": {}, "parts": {"optimizer": {"state": {}}, "model": weights}},
        {"model": {"_orig_mod.module.a.weight": weights["a.weight"]}},
    ):
        assert list(find_weights(contents, "", "file")) == ["a.weight"]
    with pytest.raises(ModelError, match="has no weights; it has epoch"):
        find_weights({"epoch": 3}, "", "file")


def test_examples_have_any_number_of_samples(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(6, dtype=np.int64).reshape(3, 2))
    example = make_example([f"ids={tmp_path / 'x.npy'}", "image=float16:1x3x8x8"], 7)
    assert (example["ids"].shape, example["image"].shape) == ((7, 2), (7, 3, 8, 8))
    assert example["image"].dtype == np.float16
    assert example["ids"][3].tolist() == [0, 1]
    for wrong in ("x=float32", "x=float32:1x0", "x=complex64:1x3", "x=nothing.npy"):
        with pytest.raises(ValueError, match="example input x"):
            make_example(wrong, 1)
    with pytest.raises(ValueError, match="there is no file"):
        read_labels("nothing")
