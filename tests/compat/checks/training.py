"""The optimizer against one process that sees the whole batch, with every option; and everybody's same beginning."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close as same

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.compression import Compressor
from tests.compat.checks.registry import check, raises

BATCH = 8
STEPS = 3


def model(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        yield (
            torch.randn(BATCH, 6, generator=source, dtype=torch.float64),
            torch.randn(BATCH, 3, generator=source, dtype=torch.float64),
        )


def mine(x: Tensor) -> Tensor:
    share = BATCH // hvd.size()
    return x[hvd.rank() * share : (hvd.rank() + 1) * share]


def backward(net: nn.Module, x: Tensor, y: Tensor) -> None:
    nn.functional.mse_loss(net(x), y).backward()


def learn(net: nn.Module, *, whole: bool = False) -> list[Tensor | None]:
    """A pass over this rank's share of the first batch, or over all of it; the gradients."""
    x, y = next(batches())
    backward(net, x if whole else mine(x), y if whole else mine(y))
    return [None if param.grad is None else param.grad.clone() for param in net.parameters()]


def distributed(net: nn.Module, **options: Any) -> Any:
    return hvd.DistributedOptimizer(sgd(net), named_parameters=net.named_parameters(), **options)


def sgd(net: nn.Module, rate: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)


def alone(rate: float = 0.1) -> list[Tensor]:
    """What one process comes to with the whole batch."""
    net = model()
    optimizer = sgd(net, rate)
    for x, y in batches():
        optimizer.zero_grad()
        backward(net, x, y)
        optimizer.step()
    return list(net.parameters())


def together(rate: float = 0.1, **options: Any) -> list[Tensor]:  # of DistributedOptimizer
    """What all come to with their shares."""
    net = model()
    groups = options.pop("groups_of", None)
    if groups is not None:
        options["groups"] = groups(net)
    optimizer = hvd.DistributedOptimizer(sgd(net, rate), named_parameters=net.named_parameters(), **options)
    for x, y in batches():
        optimizer.zero_grad()
        backward(net, mine(x), mine(y))
        optimizer.step()
    return list(net.parameters())


OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "predivided": {"gradient_predivide_factor": 2.0},
    "two groups": {"groups": 2},
    "groups by hand": {"groups_of": lambda net: [list(net[0].parameters()), [net[2].bias]]},
    "all processes by name": {"process_set": hvd.global_process_set},
}


@check
def options_that_change_how_gradients_travel_change_no_number() -> None:
    expected = alone()
    for name, options in OPTIONS.items():
        ours = together(**options)
        assert all(torch.allclose(one, other, rtol=1e-10) for one, other in zip(ours, expected, strict=True)), name


@check
def a_sum_is_as_many_times_the_mean() -> None:
    same(together(rate=0.1 / hvd.size(), op=hvd.Sum), alone(0.1))


@check
def compressed_gradients_are_nearly_the_same() -> None:
    for one, other in zip(together(compression=hvd.Compression.fp16), alone(), strict=True):
        assert torch.allclose(one, other, rtol=1e-2, atol=1e-3)


@check
def compression_none_is_no_compression() -> None:
    same(together(compression=None), alone())


class Halves(Compressor):
    """Sends each gradient halved and in float32, as somebody's own compressor might."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor / 2).float(), (tensor.dtype, tensor.shape)

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        dtype, shape = ctx
        assert tensor.shape == shape
        return tensor.to(dtype) * 2


class Divides:
    """A compressor that is an object."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor / self._factor).float(), tensor.dtype

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx) * self._factor


@check
def a_compressor_of_ones_own_sees_every_gradient() -> None:
    for compression in (Halves, Halves(), Divides(4)):
        for one, other in zip(together(compression=compression), alone(), strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@check
def passes_are_added_up_and_travel_with_the_last() -> None:
    net, plain = model(), model()
    optimizer = hvd.DistributedOptimizer(sgd(net), backward_passes_per_step=2)
    for _ in range(2):
        learn(net)
        learn(plain, whole=True)
    optimizer.step()
    sgd(plain).step()
    same(list(net.parameters()), list(plain.parameters()))
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    assert optimizer.backward_passes_per_step == 1


@check
def clipping_between_synchronize_and_step_needs_no_second_round() -> None:
    net = model()
    optimizer = distributed(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learn(net)
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        clipped = [param.grad.clone() for param in net.parameters() if param.grad is not None]
        with optimizer.skip_synchronize():
            optimizer.step()
    same([param.grad for param in net.parameters()], clipped)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.zero_grad()
        learn(net)
        optimizer.synchronize()
        optimizer.step()
    (warning,) = told
    assert "optimizer.step() called without optimizer.skip_synchronize()" in str(warning.message)


@check
def a_step_without_backward_changes_nothing() -> None:
    net = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(2):
        optimizer.step()
        same(list(net.parameters()), list(model().parameters()))
    learn(net)
    optimizer.step()
    optimizer.zero_grad()
    trained = [param.detach().clone() for param in net.parameters()]
    optimizer.step()
    same(list(net.parameters()), trained)


@check
def a_parameter_that_only_some_use_is_averaged_with_zeros() -> None:
    net = model()
    optimizer = hvd.DistributedOptimizer(sgd(net))
    first, _, last, _ = net.parameters()
    if hvd.rank() == 0:
        first.sum().backward()
    else:
        last.sum().backward()
    optimizer.synchronize()
    for weight in (first, last):
        assert weight.grad is not None
        same(weight.grad, torch.full_like(weight.grad, 1 / hvd.size()))


@check
def a_parameter_that_nobody_uses_gets_zeros() -> None:
    for way in ("step", "synchronize", "skip"):
        used, unused, frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))
        frozen.requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, unused, frozen], lr=0.1, weight_decay=0.1))
        used.sum().backward()
        assert [each.grad for each in (unused, frozen)] == [None, None]
        if way != "step":
            optimizer.synchronize()
            assert unused.grad is not None and not unused.grad.any()
        if way == "skip":
            with optimizer.skip_synchronize():
                optimizer.step()
        elif way == "step":
            optimizer.step()
        assert frozen.grad is None and bool((frozen == 1).all())
        if way != "synchronize":
            same(unused.detach(), torch.full((2,), 0.99))
        optimizer.close()


@check
def gradients_may_be_set_to_zero_by_the_model() -> None:
    for options in ({"op": hvd.Sum}, {"backward_passes_per_step": 2}):
        net = model()
        optimizer = distributed(net, **options)
        for _ in range(STEPS):
            net.zero_grad(set_to_none=False)
            for _ in range(optimizer.backward_passes_per_step):
                learn(net)
            optimizer.step()
        optimizer.close()


@check
def a_parameter_may_have_two_names() -> None:
    net = model()
    named = [*net.named_parameters("critic"), *net.named_parameters("actor")]
    optimizer = hvd.DistributedOptimizer(sgd(net), named_parameters=named if hvd.rank() else named[::-1])
    assert sorted(optimizer._parameter_names.values()) == sorted(name for name, _ in net.named_parameters("critic"))
    learn(net)
    same([param.grad for param in net.parameters()], learn(model(), whole=True))
    optimizer.close()


@check
def sparse_gradients_stay_sparse_or_travel_dense() -> None:
    for as_dense in (False, True):
        torch.manual_seed(0)
        embedding = nn.Embedding(6, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SparseAdam(list(embedding.parameters()), lr=0.1), sparse_as_dense=as_dense
        )
        before = embedding.weight.detach().clone()
        embedding(torch.tensor([hvd.rank(), 4])).sum().backward()
        optimizer.step()
        moved = (embedding.weight.detach() - before).abs().sum(1).nonzero().flatten().tolist()
        assert moved == [*range(hvd.size()), 4]


@check
def who_is_not_in_the_process_set_learns_alone() -> None:
    first = hvd.add_process_set([0])
    net = model()
    optimizer = distributed(net, process_set=first)
    own = learn(net)
    optimizer.step()
    same([param.grad for param in net.parameters()], own)
    assert hvd.remove_process_set(first)


@check
def adasum_combines_steps_and_not_gradients() -> None:
    net, plain = model(), model()
    optimizer = distributed(net, compression=None, op=hvd.Adasum)
    learn(net, whole=True)  # the same on all: Adasum of equal steps is that step
    optimizer.step()
    learn(plain, whole=True)
    sgd(plain).step()
    same(list(net.parameters()), list(plain.parameters()))
    assert (type(optimizer).__name__, type(optimizer).__module__) == ("SGD", "horovod.torch.optimizer")
    assert (optimizer.op, optimizer.process_set) == (hvd.Adasum, hvd.global_process_set)
    assert (optimizer.gradient_predivide_factor, optimizer.sparse_as_dense) == (1.0, False)
    assert [*optimizer._parameter_names.values()] == [name for name, _ in net.named_parameters()]
    assert copies_are_plain(optimizer)
    with raises(ValueError, "wrap it once"):
        hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
    with raises(AssertionError, "skip_synchronize"):
        optimizer.skip_synchronize()
    other = hvd.add_process_set([0])
    with raises(NotImplementedError):
        hvd.DistributedOptimizer(sgd(net), op=hvd.Adasum, process_set=other)
    assert hvd.remove_process_set(other)


def copies_are_plain(optimizer: torch.optim.Optimizer) -> bool:
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    copies = (copy.deepcopy(optimizer), torch.load(file, weights_only=False))
    for each in copies:
        same(list(each.param_groups[0]["params"]), list(optimizer.param_groups[0]["params"]))
        assert len(each.state) == len(optimizer.state)
    return all(type(each) is torch.optim.SGD for each in copies)


@check
def it_stays_an_optimizer_of_its_class() -> None:
    net = model()
    optimizer = distributed(net)
    assert isinstance(optimizer, torch.optim.SGD)
    assert (type(optimizer).__name__, type(optimizer).__module__) == ("SGD", "horovod.torch.optimizer")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    learn(net)
    optimizer.step()
    scheduler.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert type(optimizer).step.__qualname__.startswith("HorovodOptimizer"), "hooks would be called twice"
    assert copies_are_plain(optimizer)


@check
def everybody_begins_with_the_roots_numbers() -> None:
    for kind in ("Adam", "SGD"):
        net = model(seed=hvd.rank())
        options = {"amsgrad": hvd.rank() == 0} if kind == "Adam" else {"momentum": 0.9}
        optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.01 * (1 + hvd.rank()), **options)
        if hvd.rank() == 1:  # the root is the one that has trained
            learn(net, whole=True)
            optimizer.step()
            optimizer.zero_grad()
        hvd.broadcast_parameters(net.state_dict(), root_rank=1)
        hvd.broadcast_parameters(sorted(net.named_parameters()), root_rank=1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        states = hvd.allgather_object([net.state_dict(), optimizer.state_dict()])
        same([*states[0][0].values()], [*states[1][0].values()])
        assert states[0][1]["param_groups"] == states[1][1]["param_groups"]
        assert states[0][1]["state"].keys() == states[1][1]["state"].keys() == set(range(4))
        assert all(param.grad is not None and not param.grad.any() for param in net.parameters())


@check
def objects_travel_too() -> None:
    assert hvd.broadcast_object({"rank": hvd.rank()}, root_rank=1) == {"rank": 1}
    assert hvd.allgather_object(("rank", hvd.rank())) == [("rank", rank) for rank in range(hvd.size())]
    assert hvd.broadcast_object(hvd.rank(), root_rank=1, name="a") == 1
    own = "a" if hvd.rank() == 0 else "b"
    for function in (hvd.broadcast_object, hvd.allgather_object):
        with raises(HorovodInternalError, f"the name of hvd.{function.__name__}: the ranks differ"):
            function(own, name=own)
        with raises(HorovodInternalError, f"the name of hvd.{function.__name__}: the ranks differ"):
            function(own, name=own if hvd.rank() == 0 else None)
    with raises(ValueError, "a dict or a list"):
        hvd.broadcast_parameters((value for value in [torch.ones(1)]), root_rank=0)
    with raises(ValueError, "LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS([torch.ones(1, requires_grad=True)]), root_rank=0)


@check
def batches_are_normalized_over_all_on_a_cpu_too() -> None:
    x, _ = next(batches())
    ours, plain = hvd.SyncBatchNorm(6).double(), nn.BatchNorm1d(6).double()
    same(ours(mine(x)), mine(plain(x)))
    same(ours.running_var, plain.running_var)
    with raises(ValueError):
        ours(torch.ones(6, dtype=torch.float64))


@check
def a_forgotten_broadcast_is_told_in_horovods_words() -> None:
    net = model(seed=hvd.rank())
    optimizer = distributed(net)
    with raises(
        HorovodInternalError, "Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first"
    ):
        learn(net)
    optimizer.zero_grad()
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    learn(net)
    optimizer.step()
    optimizer.close()
