"""`ronde export` with frameworks other than PyTorch: real processes in their environment."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from ronde.serve.model import load_model, load_model_folder
from tests.commands import ROOT, run_command
from tests.jobs.test_readme import blocks
from tests.limits import LONG_S, LONG_TEST_S
from tests.services import needs

PYTHON = str(ROOT / ".venv-tensorflow/bin/python")
RONDE = str(ROOT / ".venv-tensorflow/bin/ronde")
HAS_CONVERTER = any((ROOT / ".venv-tensorflow").glob("lib/python*/site-packages/tf2onnx"))

pytestmark = [
    pytest.mark.timeout(LONG_TEST_S),
    needs("Keras' export", missing="" if HAS_CONVERTER else "no tf2onnx in .venv-tensorflow; `make build` installs it"),
]

MODELS = """
import keras
import numpy as np
import tensorflow as tf


def make():
    return keras.Sequential(
        [keras.Input((4,), name="x"), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)]
    )


def make_dict():
    inputs = {"x": keras.Input((4,), name="x"), "second": keras.Input((2,), name="second")}
    joined = keras.layers.Concatenate()([inputs["x"], inputs["second"]])
    return keras.Model(inputs, {"scores": keras.layers.Dense(3)(joined)})


class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self.w = tf.Variable(tf.zeros((4, 3)))

    def __call__(self, x):
        return tf.nn.softmax(x @ self.w)


if __name__ == "__main__":
    keras.utils.set_random_seed(1)
    model = make()
    model.save("model.keras")
    x = np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4)
    np.save("x.npy", x)
    np.save("y.npy", keras.ops.convert_to_numpy(model(x)))
    model = make_dict()
    model.save_weights("dict.weights.h5")
    np.save("dict_y.npy", keras.ops.convert_to_numpy(model({"x": x, "second": x[:, :2]})["scores"]))
    keras.Sequential([keras.Input((4,), name="x"), keras.layers.Lambda(lambda x: x + 1)]).save("lambda.keras")
    module = Module()
    module.w.assign(np.arange(12, dtype=np.float32).reshape(4, 3) / 10)
    tf.train.Checkpoint(model=module).write("variables")
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    (folder / "models.py").write_text(MODELS)
    made = run_command([PYTHON, "models.py"], cwd=folder, env=environment("tensorflow"), limit_s=LONG_S)
    assert made.returncode == 0, made.stderr
    return folder


def environment(backend: str) -> dict[str, str]:
    return {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(("backend", "is_dict"), [("tensorflow", False), ("torch", True)])
def test_a_model_of_keras_becomes_onnx(project: Path, backend: str, is_dict: bool) -> None:
    """From a whole file, and from weights of a model that takes a dict, in an order other than that of its keys."""
    words = ["model.keras", "--outputs", "scores"]
    if is_dict:
        words = ["dict.weights.h5", "--model", "models:make_dict"]
    words += ["--example-input", "x=float32:1x4"]
    if is_dict:
        words += ["--example-input", "second=float32:1x2"]
    command = [RONDE, "export", *words, "--output", backend]
    done = run_command(command, cwd=project, env=environment(backend), limit_s=LONG_S)
    assert done.returncode == 0, done.stderr
    model = load_model(project / backend)
    assert model.metadata.made_by["backend"] == backend
    x = np.load(project / "x.npy")
    inputs = {"x": x, "second": np.ascontiguousarray(x[:, :2])} if is_dict else {"x": x}
    expected = np.load(project / ("dict_y.npy" if is_dict else "y.npy"))
    np.testing.assert_allclose(model.predict(inputs)["scores"], expected, rtol=1e-4, atol=1e-5)


def test_the_function_of_jax_in_the_guide_is_exported(tmp_path: Path) -> None:
    guide = (ROOT / "docs/guides/export.md").read_text(encoding="utf-8")
    (tmp_path / "jaxmodels.py").write_text(blocks(guide, "python")[1], encoding="utf-8")
    env = {**environment("jax"), "PATH": f"{Path(RONDE).parent}:{os.environ['PATH']}"}
    done = run_command(["bash", "-ec", blocks(guide, "sh")[1]], cwd=tmp_path, env=env, limit_s=LONG_S)
    assert done.returncode == 0, done.stderr
    assert "models/jax: jax, differs from the original by at most 0\n" in done.stdout
    assert load_model_folder(tmp_path / "models/jax").metadata.made_by["step"] == 1


def test_a_module_of_tensorflow_and_what_would_run_code(project: Path) -> None:
    words = [RONDE, "export", "variables.index", "--model", "models:Module", "--to", "own"]
    done = run_command(
        [*words, "--example-input", "x=float32:1x4", "--output", "saved"],
        cwd=project,
        env=environment("tensorflow"),
        limit_s=LONG_S,
    )
    assert done.returncode == 0, done.stderr
    assert load_model_folder(project / "saved").metadata.kind == "tensorflow"
    words = [RONDE, "export", "lambda.keras", "--example-input", "x=float32:1x4", "--output", "lambda"]
    done = run_command(words, cwd=project, env=environment("tensorflow"), limit_s=LONG_S)
    assert done.returncode == 1
    assert "holds a function as code, which loading would run" in done.stderr


MXNET_RONDE = ROOT / ".venv-mxnet/bin/ronde"
MXNET_MODELS = """
import mxnet as mx
from mxnet.gluon import nn


def make():
    net = nn.HybridSequential()
    net.add(nn.Dense(8, activation="relu", in_units=4), nn.BatchNorm(), nn.Dropout(0.5), nn.Dense(3))
    return net


if __name__ == "__main__":
    net = make()
    net.initialize(mx.init.Xavier())
    net(mx.nd.ones((2, 4)))
    net.save_parameters("net.params")
"""


@needs("MXNet's export", missing="" if MXNET_RONDE.exists() else "no .venv-mxnet; `make build` makes it")
def test_a_block_of_mxnet_keeps_its_own_format_and_the_missing_converter_is_named(tmp_path: Path) -> None:
    (tmp_path / "blocks.py").write_text(MXNET_MODELS)
    made = run_command([str(MXNET_RONDE.with_name("python")), "blocks.py"], cwd=tmp_path, limit_s=LONG_S)
    assert made.returncode == 0, made.stderr
    words = [str(MXNET_RONDE), "export", "net.params", "--model", "blocks:make", "--example-input", "x=float32:1x4"]
    done = run_command([*words, "--to", "own", "--output", "own"], cwd=tmp_path, limit_s=LONG_S)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert load_model_folder(tmp_path / "own").metadata.kind == "mxnet"
    done = run_command([*words, "--output", "onnx"], cwd=tmp_path, limit_s=LONG_S)
    assert done.returncode == 1
    assert "MXNet's converter to ONNX is not kept any more; export with --to own" in done.stderr
    assert not (tmp_path / "onnx").exists()
