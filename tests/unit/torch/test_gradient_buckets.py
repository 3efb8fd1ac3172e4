"""The end of a backward pass of PyTorch, and functions that torch.compile leaves alone."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ronde.torch.gradient_buckets import TorchBackwardPass, can_count_references, disable_dynamo


def test_a_callback_runs_when_all_gradients_are_there_and_may_ask_for_another() -> None:
    autograd = TorchBackwardPass()
    seen: list[object] = []
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)

    def end() -> None:
        seen.append((first.grad is not None, second.grad is not None, autograd.is_nested(pytest.fail)))
        autograd.on_end(behind)

    def behind() -> None:
        raise ValueError("what a callback raises, backward raises")

    hook: Any = second.register_post_accumulate_grad_hook  # it has no types
    hook(lambda _: autograd.on_end(end))
    loss: Any = (first * 2 + second * 3).sum()
    with pytest.raises(ValueError, match="what a callback raises"):
        loss.backward()
    assert seen == [(True, True, False)]


def test_a_pass_that_fails_has_forgotten_its_callbacks_when_backward_raises() -> None:
    autograd, forgotten = TorchBackwardPass(), []

    class Callback:
        def __call__(self) -> None:
            raise AssertionError("the error came first")

        def __del__(self) -> None:
            forgotten.append(True)

    def fail(_: object) -> None:
        raise ZeroDivisionError

    x = torch.ones(2, requires_grad=True)
    y: Any = x * 2
    y.register_hook(lambda _: autograd.on_end(Callback()))
    x.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert forgotten == [True]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_pass_inside_of_a_function_is_nested_and_may_ask_for_the_end_of_the_one_around_it(
    reentrant: bool, depth: int
) -> None:
    autograd, seen = TorchBackwardPass(), []
    weight = torch.ones(2, requires_grad=True)
    x = torch.ones(2, requires_grad=True)

    def ask() -> None:
        autograd.on_end(end)

    def end() -> None:
        seen.append((autograd.is_nested(ask), x.grad is not None))

    def compute(x: torch.Tensor, depth: int) -> Any:  # a tensor; checkpoint() has no types
        return x * weight if depth == 0 else checkpoint(compute, x, depth - 1, use_reentrant=reentrant)

    hook: Any = weight.register_post_accumulate_grad_hook
    hook(lambda _: ask())
    for _ in range(2):
        x.grad = None
        compute(x, depth).sum().backward()
        assert seen == [(True, False)] * (depth if reentrant else 0) + [(False, True)]
        seen.clear()
    (x * 2).sum().backward()
    assert not seen


def test_a_pass_that_is_compiled_is_told_that_it_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    region = SimpleNamespace(in_compiled_autograd_region=True)
    monkeypatch.setitem(sys.modules, "torch._dynamo.compiled_autograd", region)
    with pytest.raises(RuntimeError, match="compiled autograd"):
        TorchBackwardPass().on_end(pytest.fail)


def test_references_to_gradients_are_counted_only_if_pytorch_has_all_that_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = can_count_references.__wrapped__  # it remembers its answer
    assert count()
    with monkeypatch.context() as patch:
        patch.delattr(torch._C, "_storage_Use_Count")  # as in older versions
        assert not count()
    monkeypatch.setattr(torch._C, "_storage_Use_Count", lambda address: 1)  # it is private, and may change
    assert not count()


seen: list[str] = []


def note(text: str) -> None:
    """What torch.compile would run once, while it looks at the code, if it looked."""
    seen.append(f"{text} {torch.compiler.is_compiling()}")


def hook(_parameter: object) -> None:
    note("hook")


def called() -> None:
    note("called")


disable_dynamo(hook, called)


def test_dynamo_leaves_alone_what_is_called_by_autograd_and_by_what_is_compiled() -> None:
    x = torch.ones(2, requires_grad=True)
    register: Any = x.register_post_accumulate_grad_hook
    register(hook)

    def step() -> None:
        called()
        loss: Any = (x * 2).sum()
        loss.backward()

    compiled: Any = torch.compile(step, backend="eager")
    for _ in range(3):
        compiled()
    torch.compiler.reset()
    assert seen == ["called False", "hook False"] * 3


@pytest.mark.slow
def test_dynamo_is_not_imported_for_it() -> None:
    code = "import sys, ronde.torch; assert 'torch._dynamo' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
