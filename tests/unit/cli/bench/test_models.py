"""The networks of `ronde bench train` are what they say they are, and every parameter gets a gradient."""

from __future__ import annotations

import math

import pytest

from ronde.cli.bench.models import MODELS, parse_models
from ronde.cli.bench.tensorflow_training import NETWORKS

torch = pytest.importorskip("torch")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.build is not None])
def test_a_network_has_as_many_parameters_as_it_says_and_each_gets_a_gradient(name: str) -> None:
    model = MODELS[name]
    assert model.build is not None and model.make_batch is not None
    network = model.build()
    x, labels = model.make_batch(2)
    loss = torch.nn.functional.cross_entropy(network(x), labels)
    loss.backward()
    assert sum(parameter.numel() for parameter in network.parameters()) == model.num_parameters
    assert math.isfinite(loss.item())
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_networks_are_chosen_by_name_each_once() -> None:
    assert [model.name for model in parse_models("mlp, tiny,mlp")] == ["mlp", "tiny"]


def test_a_framework_trains_the_networks_that_it_has() -> None:
    assert [model.name for model in parse_models(None)] == [
        name for name, model in MODELS.items() if model.build is not None
    ]
    assert [model.name for model in parse_models(None, "mxnet")] == ["mlp", "digits", "vector"]
    assert [model.name for model in parse_models(None, "tensorflow")] == list(NETWORKS)
    with pytest.raises(ValueError, match="no such model for keras: 'resnet'; there are alexnet, mlp, tiny"):
        parse_models("mlp,resnet", "keras")
