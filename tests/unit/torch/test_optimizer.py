"""Names of parameters, and PyTorch's conversions for codecs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ronde.comm.buffers import Array
from ronde.torch.optimizer import CODECS, ParameterNames
from ronde.training import compression as codec
from ronde.training.adapter import ParameterInfo
from ronde.training.buckets import GradientBucket, GradientLocation


def groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return optimizer.param_groups


def test_given_names_count_most() -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = ParameterNames(model.named_parameters(), 0).named_parameters(0, groups(optimizer)[0])
    assert [name for name, _ in named] == ["weight", "bias"]
    assert named[0][1] is model.weight


def test_without_them_the_optimizers_own_are_taken() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 3).named_parameters(), lr=0.1)
    assert [name for name, _ in ParameterNames(None, 0).named_parameters(0, groups(optimizer)[0])] == ["weight", "bias"]


def test_at_last_a_place_is_a_name() -> None:
    model = nn.Linear(2, 3)
    parts: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
    optimizer = torch.optim.SGD(parts, lr=0.1)
    names = ParameterNames(None, 0)
    assert [names.named_parameters(number, group)[0][0] for number, group in enumerate(groups(optimizer))] == [
        "group0.param0",
        "group1.param0",
    ]


def test_what_is_added_later_need_not_have_been_named() -> None:
    model = nn.Linear(2, 3)
    names = ParameterNames([("weight", model.weight)], 0)
    assert names.named_parameters(1, {"params": [model.bias]}, added_later=True) == [("group1.param0", model.bias)]
    with pytest.raises(ValueError, match="rank 0: named_parameters lacks parameter 0 of the optimizer's group 1"):
        names.named_parameters(1, {"params": [model.bias]})


def test_no_name_is_used_twice_in_one_optimizer() -> None:
    model = nn.Linear(2, 3)
    names = ParameterNames(None, 5)
    names.reserve(name for name, _ in names.named_parameters(0, {"params": [model.weight], "param_names": ["w"]}))
    with pytest.raises(ValueError, match="rank 5: two parameters of the optimizer are named 'w'"):
        names.named_parameters(1, {"params": [model.bias], "param_names": ["w"]})
    with pytest.raises(ValueError, match="rank 5: two parameters of the optimizer are named 'b'"):
        names.named_parameters(1, {"params": [model.bias, model.weight], "param_names": ["b", "b"]})


@pytest.mark.parametrize(
    ("given", "got"), [(nn.Linear(2, 3), "Linear"), (nn.Sequential(nn.Tanh()), "Tanh"), (3, "int"), ("weight", "w")]
)
def test_what_gives_no_pairs_is_told(given: Any, got: str) -> None:  # what must not be
    with pytest.raises(
        TypeError, match=rf"rank 1: named_parameters must be .*model\.named_parameters\(\).* got {got}$"
    ):
        ParameterNames(given, 1)


@pytest.mark.parametrize("named", [True, False])
def test_a_parameter_without_a_shape_is_told(named: bool) -> None:
    model = nn.LazyLinear(3)
    names = ParameterNames(model.named_parameters() if named else None, 2)
    words = "rank 2: parameter '(weight|group0.param0)' of a lazy module has no shape yet; let the model compute"
    with pytest.raises(ValueError, match=words):
        names.named_parameters(0, {"params": list(model.parameters())})
    model(torch.ones(1, 2))
    assert len(names.named_parameters(0, {"params": list(model.parameters())})) == 2


def wire_of(made: codec.Codec, gradients: Array) -> tuple[Array, Array]:
    """What travels, and what comes back of it."""
    bucket = GradientBucket(gradients.dtype.name, (GradientLocation(0, 0, gradients.size),), "w")
    encoder = made.open(bucket, [ParameterInfo("w", gradients.shape, gradients.dtype.name, gradients.size)])
    assert encoder is not None and encoder.wires == (codec.WireArray(gradients.size, made.name),)
    wires = [np.zeros(gradients.size, "float16" if made.name == "float16" else "uint16")]
    encoder.encode(0, gradients, wires)
    back = np.empty_like(gradients)
    encoder.decode(wires, back)
    return wires[0], back


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_conversions_are_those_of_numpy(name: str, dtype: str) -> None:
    given = np.random.default_rng(0).normal(size=1000).astype(np.float32).astype(dtype)
    given[:4] = [np.inf, -np.inf, 0.0, 1e30]
    ours, theirs = wire_of(CODECS[name], given), wire_of(codec.CODECS[name], given)
    assert np.array_equal(ours[0], theirs[0])
    assert np.array_equal(ours[1], theirs[1])


def test_small_dtypes_travel_as_they_are() -> None:
    bucket = GradientBucket("float16", (GradientLocation(0, 0, 3),), "w")
    assert CODECS["bfloat16"].open(bucket, [ParameterInfo("w", (3,), "float16", 3)]) is None
