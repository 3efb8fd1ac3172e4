"""The optimizers of parameter servers give the numbers of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ronde.ps import LAMB, SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp
from ronde.ps.partition import Part, TensorSlice

SIZE, OTHER = 1000, 37
PART = Part((TensorSlice(0, 0, SIZE), TensorSlice(1, 5, 5 + OTHER)), "float32", 0)
STEPS = 100

CASES: dict[str, tuple[Optimizer, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (
        SGD(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    ),
    "nesterov": (
        SGD(lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ),
    "adam": (Adam(weight_decay=0.01), lambda p: torch.optim.Adam(p, weight_decay=0.01)),
    "adamw": (AdamW(lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01)),
    "adagrad": (Adagrad(lr_decay=0.01), lambda p: torch.optim.Adagrad(p, lr_decay=0.01)),
    "rmsprop": (RMSProp(weight_decay=0.01), lambda p: torch.optim.RMSprop(p, weight_decay=0.01)),
    "rmsprop centered": (
        RMSProp(momentum=0.9, centered=True),
        lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_a_hundred_steps_give_what_pytorch_gives(name: str, dtype: str) -> None:
    optimizer, make_other = CASES[name]
    generator = np.random.default_rng(0)
    start = generator.standard_normal(PART.size).astype(dtype)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    other = make_other([parameter])
    values, states = start, np.zeros((optimizer.num_states, PART.size), dtype)
    for step in range(1, STEPS + 1):
        gradient = generator.standard_normal(PART.size).astype(dtype)
        out = np.empty_like(values) if step % 2 else values
        optimizer.update(PART, values, gradient, states, out, step)
        values = out
        parameter.grad = torch.from_numpy(gradient)
        other.step()
    expected = parameter.detach().numpy()
    limit = 1e-6 if dtype == "float64" else 1e-6 * max(1.0, float(np.abs(expected).max()))
    assert np.abs(values - expected).max() <= limit


def test_a_schedule_and_the_options_of_a_group_are_followed() -> None:
    optimizer = SGD(lr=lambda step: 1.0 / step, weight_decay=0.5, groups={1: {"weight_decay": 0.0}})
    part = Part((TensorSlice(0, 0, 3),), "float64", 1)
    values, gradient, states = np.full(3, 8.0), np.ones(3), np.zeros((0, 3))
    for step in (1, 2, 4):
        optimizer.update(part, values, gradient, states, values, step)
    assert (values == 8.0 - 1.0 - 0.5 - 0.25).all()
    with pytest.raises(ValueError, match="group 2 needs more state"):
        SGD(lr=1.0, groups={2: {"momentum": 0.9}})
    with pytest.raises(TypeError, match="speed"):
        SGD(lr=1.0, groups={2: {"speed": 0.9}})


def test_lamb_scales_each_tensor_by_its_own_norms() -> None:
    optimizer = LAMB(lr=0.1, weight_decay=0.01)
    part = Part((TensorSlice(0, 0, 4), TensorSlice(1, 0, 6)), "float64", 0)
    generator = np.random.default_rng(1)
    values, states = generator.standard_normal(10), np.zeros((2, 10))
    expected, moments = values.copy(), np.zeros((2, 10))
    for step in range(1, 6):
        gradient = generator.standard_normal(10)
        moments[0] = 0.9 * moments[0] + 0.1 * gradient
        moments[1] = 0.999 * moments[1] + 0.001 * gradient**2
        direction = moments[0] / (1 - 0.9**step) / (np.sqrt(moments[1] / (1 - 0.999**step)) + 1e-6) + 0.01 * expected
        for piece in (slice(0, 4), slice(4, 10)):
            trust = np.linalg.norm(expected[piece]) / np.linalg.norm(direction[piece])
            expected[piece] -= 0.1 * trust * direction[piece]
        optimizer.update(part, values, gradient, states, values, step)
    assert np.abs(values - expected).max() < 1e-12
    assert optimizer.needs_whole_tensors and not SGD(lr=1.0).needs_whole_tensors
