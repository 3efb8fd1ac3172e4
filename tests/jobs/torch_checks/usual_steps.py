"""The short ways of a usual step, and every way to leave them: gradients are the same, bit by bit, without them."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ronde
from ronde.comm.backends import native_library
from ronde.torch import gradient_buckets
from ronde.training.gradients import reducer
from tests.jobs.torch_checks.checks import assert_same_on_all_ranks, distributed, on

LEAVING_STEP = 2
NUM_STEPS = 4
WIDTH = 6


class ManyParts(nn.Module):
    """Many small parameters, a large one, a head that need not be used, and rows whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.large = nn.Linear(WIDTH, 2000)
        self.head = nn.Linear(2000, 2)
        self.rows = nn.Embedding(8, WIDTH, sparse=True)

    def forward(self, x: Tensor, *, head: bool = True, rows: bool = False, again: bool = False) -> Tensor:
        if rows:
            x = x + self.rows(torch.tensor([1, 1 + ronde.rank()])).sum(0)
        for layer in self.body:
            x = checkpoint(layer, x, use_reentrant=True) if again else layer(x)
        x = self.large(x).tanh()
        return self.head(x) if head else x


class Trainee:
    """A model in training, and what its gradients were."""

    def __init__(self, **settings: Any) -> None:
        self.model: Any = ManyParts().double()
        self.settings = settings
        self.optimizer = distributed(self.model, **settings)
        self.step = 0
        self.checksums: list[int] = []

    def loss(self, **how: bool) -> Any:  # backward() has no types
        source = torch.Generator().manual_seed(100 * self.step + ronde.rank())
        x = torch.randn(4, WIDTH, generator=source, dtype=torch.float64, requires_grad=True)
        return self.model(x, **how).square().mean()

    def note(self) -> None:
        """Keep a checksum of all gradients."""
        found = [parameter.grad for parameter in self.model.parameters()]
        dense = [b"none" if grad is None else grad.detach().to_dense().numpy().tobytes() for grad in found]
        self.checksums.append(zlib.crc32(b"".join(dense)))

    def train(self, **how: bool) -> None:
        """One usual step."""
        self.optimizer.zero_grad()
        self.loss(**how).backward()
        self.note()
        self.optimizer.step()


def leave_parameters_out_on_one_rank(trainee: Trainee) -> None:
    trainee.train(head=ronde.rank() == 0)


def leave_parameters_out_on_all_ranks(trainee: Trainee) -> None:
    trainee.train(head=False)


def have_no_pass_on_one_rank(trainee: Trainee) -> None:
    trainee.optimizer.zero_grad()
    if ronde.rank() == 0:
        trainee.loss().backward()
    trainee.optimizer.synchronize()
    trainee.note()
    trainee.optimizer.step()


def set_gradients_by_hand(trainee: Trainee) -> None:
    trainee.optimizer.zero_grad()
    for number, parameter in enumerate(trainee.model.parameters()):
        if number % 3:
            parameter.grad = torch.full_like(parameter, float(number + ronde.rank()))
    trainee.optimizer.step()
    trainee.note()


def add_to_results(trainee: Trainee) -> None:
    trainee.train()
    trainee.loss().backward()
    trainee.note()
    trainee.optimizer.step()


def go_through_a_graph_twice(trainee: Trainee) -> None:
    trainee.optimizer.zero_grad()
    loss = trainee.loss()
    loss.backward(retain_graph=True)
    trainee.note()
    loss.backward()
    trainee.note()
    trainee.optimizer.step()


def take_gradients_of_gradients(trainee: Trainee) -> None:
    trainee.optimizer.zero_grad()
    loss, parameters = trainee.loss(), list(trainee.model.body.parameters())
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    (loss + sum(grad.square().sum() for grad in first)).backward()
    trainee.note()
    trainee.optimizer.step()


def compute_again(trainee: Trainee) -> None:
    trainee.train(again=True)


def have_sparse_gradients_on_one_rank(trainee: Trainee) -> None:
    trainee.train(rows=ronde.rank() == 1)


def freeze(trainee: Trainee) -> None:
    for wanted in (False, True):
        trainee.model.body[2].requires_grad_(wanted)
        trainee.train()
        trainee.train()


def freeze_between_forward_and_backward(trainee: Trainee) -> None:
    trainee.optimizer.zero_grad()
    loss = trainee.loss()
    trainee.model.body[1].bias.requires_grad_(False)
    loss.backward()
    trainee.note()
    trainee.optimizer.step()
    trainee.model.body[1].bias.requires_grad_(True)


def change_gradients_in_hooks(trainee: Trainee) -> None:
    weight, other = trainee.model.body[0].weight, trainee.model.body[4].weight
    hooks = [weight.register_hook(lambda grad: 2 * grad), other.register_post_accumulate_grad_hook(double)]
    trainee.train()
    for hook in hooks:
        hook.remove()


def double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 2


def take_a_gradient_away_in_a_hook(trainee: Trainee) -> None:
    hook = trainee.model.body[3].weight.register_post_accumulate_grad_hook(partial(take_away, ronde.rank()))
    trainee.train()
    hook.remove()


def take_away(rank: int, parameter: Tensor) -> None:
    if rank == 1:
        parameter.grad = None


def break_off(trainee: Trainee) -> None:
    def fail(_: Tensor) -> None:
        raise ArithmeticError("in the middle of a pass")

    hook = trainee.model.body[3].weight.register_hook(fail)
    trainee.optimizer.zero_grad()
    with pytest.raises(ArithmeticError):
        trainee.loss().backward()
    hook.remove()
    trainee.train()


def keep_gradients_on_one_rank(trainee: Trainee) -> None:
    trainee.train()
    kept = [parameter.grad for parameter in trainee.model.body.parameters()][ronde.rank() :: 2]
    values = [grad.clone() for grad in kept]
    trainee.step += 100
    trainee.train()
    assert all(map(torch.equal, kept, values))
    trainee.step -= 100


def clear_to_zero(trainee: Trainee) -> None:
    trainee.optimizer.zero_grad(set_to_none=False)
    trainee.loss().backward()
    trainee.note()
    trainee.optimizer.step()


def have_two_passes(trainee: Trainee) -> None:
    trainee.optimizer.passes = 2
    trainee.optimizer.zero_grad()
    for _ in range(2):
        trainee.loss().backward()
    trainee.note()
    trainee.optimizer.step()
    trainee.optimizer.zero_grad()
    trainee.loss().backward()
    trainee.optimizer.step()  # which ends early
    trainee.note()
    trainee.optimizer.passes = 1


def add_parameters(trainee: Trainee) -> None:
    more = nn.Linear(2, 2).double()
    nn.init.ones_(more.weight)
    nn.init.ones_(more.bias)
    trainee.optimizer.add_param_group({"params": list(more.parameters())})
    trainee.model.more = more
    trainee.optimizer.zero_grad()
    more(torch.ones(2, dtype=torch.float64) * ronde.rank()).sum().backward()  # a pass of the new ones alone
    trainee.note()
    trainee.optimizer.step()


def have_another_optimizer_for_a_while(trainee: Trainee) -> None:
    other = nn.Linear(2, 2).double()
    nn.init.ones_(other.weight)
    second = distributed(other, compare_at_step=0, **trainee.settings)
    trainee.train()
    hook = trainee.model.body[3].weight.register_hook(lambda _: second.close())  # in the middle of a pass
    trainee.train()
    hook.remove()


WAYS: tuple[Callable[[Trainee], None], ...] = (
    Trainee.train,
    leave_parameters_out_on_one_rank,
    leave_parameters_out_on_all_ranks,
    have_no_pass_on_one_rank,
    set_gradients_by_hand,
    add_to_results,
    go_through_a_graph_twice,
    take_gradients_of_gradients,
    compute_again,
    have_sparse_gradients_on_one_rank,
    freeze,
    freeze_between_forward_and_backward,
    change_gradients_in_hooks,
    take_a_gradient_away_in_a_hook,
    break_off,
    keep_gradients_on_one_rank,
    clear_to_zero,
    have_two_passes,
    add_parameters,
    have_another_optimizer_for_a_while,
)


@contextmanager
def short_ways(*, extension: bool, asks_for_flags: bool, num_copied: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not extension:
            patch.setattr(reducer, "make_ready_counter", lambda **_: None)
        if not asks_for_flags:
            patch.setattr(reducer, "MAX_ASKING_PREDIVIDE", 0.0)
        patch.setattr(gradient_buckets, "NUM_COPIED_TOGETHER", num_copied)
        yield


def run(way: Callable[[Trainee], None], **settings: Any) -> list[int]:
    """What the gradients were when the step in the middle is made this way, and what the parameters are at the end."""
    trainee = Trainee(**settings)
    for trainee.step in range(NUM_STEPS):
        (way if trainee.step == LEAVING_STEP else Trainee.train)(trainee)
    trainee.optimizer.close()
    numbers = b"".join(parameter.detach().numpy().tobytes() for parameter in trainee.model.parameters())
    checksums = [*trainee.checksums, zlib.crc32(numbers)]
    assert_same_on_all_ranks([torch.tensor(checksums)])
    return checksums


@on("2 ranks", "2 hosts")
def every_way_to_leave_the_usual_step_gives_the_same_bits_as_the_long_way() -> None:
    overlapped = {"overlap": True, "bucket_mb": 0.001}
    cases: tuple[tuple[bool, dict[str, Any]], ...] = ((True, {}), (True, overlapped), (False, overlapped))
    for way in WAYS:
        with short_ways(extension=False, asks_for_flags=False, num_copied=1000):
            expected = run(way)
        for extension, settings in cases:
            with short_ways(extension=extension, asks_for_flags=True, num_copied=4):
                assert run(way, **settings) == expected, f"{way.__name__} with {settings}"


@on("2 ranks")
def a_usual_step_is_one_call_of_the_data_plane_unless_a_rank_needs_the_flags() -> None:
    trainee = Trainee()
    for trainee.step in range(2):
        trainee.train()
    before = ronde.metrics().total.operations
    trainee.loss().backward()  # no rank uses the rows
    assert ronde.metrics().total.operations == before + 2
    trainee.optimizer.close()
    model = nn.Linear(2, 2).double()
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    assert count_in_a_step(model, lambda: ronde.metrics().total.operations) == 1


@on("2 ranks")
def a_usual_step_makes_as_many_python_calls_for_many_parameters_as_for_few() -> None:
    num_calls: list[int] = []
    for num_parameters in (10, 120):
        model = nn.ParameterList(torch.ones(2, dtype=torch.float64) for _ in range(num_parameters))
        calls: list[str] = []

        def on_event(frame: FrameType, event: str, _: object, calls: list[str] = calls) -> None:
            if event == "call" and frame.f_globals["__name__"].startswith(("ronde.torch", "ronde.training")):
                calls.append(frame.f_code.co_name)

        sys.setprofile(on_event)
        try:
            num_calls.append(count_in_a_step(model, partial(len, calls)))
        finally:
            sys.setprofile(None)
    if native_library.hot_calls is not None:
        assert num_calls[0] == num_calls[1] < 120, num_calls


def count_in_a_step(model: Any, count: Callable[[], int]) -> int:
    """How much larger the count is after one step, in which nothing is unusual."""
    optimizer, before = distributed(model), 0
    for _ in range(4):
        before = count()
        optimizer.zero_grad()
        loss: Any = torch.stack([parameter.sum() for parameter in model.parameters()]).sum()
        loss.backward()
        optimizer.step()
    difference = count() - before
    optimizer.close()
    return difference
