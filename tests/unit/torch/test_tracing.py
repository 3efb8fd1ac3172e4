from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from ronde.torch.adapter import disable_dynamo

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
