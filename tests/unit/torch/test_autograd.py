from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ronde.torch.autograd import Autograd


def test_a_callback_runs_when_all_gradients_are_there_and_may_ask_for_another() -> None:
    autograd = Autograd()
    seen: list[object] = []
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)

    def end() -> None:
        seen.append((first.grad is not None, second.grad is not None, autograd.nested()))
        autograd.at_end(lambda: seen.append("behind"))

    hook: Any = second.register_post_accumulate_grad_hook  # it has no types
    hook(lambda _: autograd.at_end(end))
    loss: Any = (first * 2 + second * 3).sum()
    loss.backward()
    assert seen == [(True, True, False), "behind"]


def test_what_a_callback_raises_backward_raises() -> None:
    autograd = Autograd()
    x = torch.ones(2, requires_grad=True)

    def fail() -> None:
        raise ValueError("no")

    hook: Any = x.register_post_accumulate_grad_hook
    hook(lambda _: autograd.at_end(fail))
    loss: Any = x.sum()
    with pytest.raises(ValueError, match="no"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_pass_inside_of_a_function_is_nested(reentrant: bool) -> None:
    autograd, seen = Autograd(), []
    weight = torch.ones(2, requires_grad=True)
    hook: Any = weight.register_post_accumulate_grad_hook
    hook(lambda _: autograd.at_end(lambda: seen.append(autograd.nested())))
    x = torch.ones(2, requires_grad=True)
    loss: Any = checkpoint(lambda x: x * weight, x, use_reentrant=reentrant).sum()
    loss.backward()
    assert seen == [reentrant]
