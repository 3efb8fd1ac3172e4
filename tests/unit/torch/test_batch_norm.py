"""SyncBatchNorm of several ranks against BatchNorm of one process with the whole batch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ronde.comm.world import World
from ronde.torch.batch_norm import SyncBatchNorm, convert_sync_batchnorm
from tests.conformance.ranks import run_threads

SHAPES = {"1d": (6, 3), "1d with length": (6, 3, 4), "2d": (6, 3, 4, 5), "3d": (6, 3, 2, 2, 2)}
SPLITS = {"even": (3, 3), "uneven": (5, 1), "none here": (6, 0), "three": (1, 2, 3), "alone": (6,)}
PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def whole_batch(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Numbers far from 0, so that a poor way to compute a variance would show."""
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=random, dtype=torch.float64) * 3 + 20).to(dtype)


def in_one_process(options: dict[str, Any], batches: list[Tensor]) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """The truth: the layer after all batches, its outputs, and the gradients of its inputs."""
    layer = _tilted(PLAIN[batches[0].dim()](batches[0].shape[1], **options, dtype=batches[0].dtype))
    inputs = [batch.clone().requires_grad_() for batch in batches]
    outputs = [layer(x) for x in inputs]
    sum((y.sin() * y).sum() for y in outputs).backward()
    return layer, [y.detach() for y in outputs], [x.grad for x in inputs if x.grad is not None]


def _tilted(layer: Any) -> Any:
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([1.0, 2.0, -0.5]))
            layer.bias.copy_(torch.tensor([0.0, 1.0, 3.0]))
    return layer


def compare(options: dict[str, Any], batches: list[Tensor], split: tuple[int, ...], rtol: float) -> None:
    """Run the same on ranks with parts of the batch, and compare all that can be seen."""
    truth, outputs, gradients = in_one_process(options, batches)

    def body(world: World) -> dict[str, Tensor]:
        layer = _tilted(SyncBatchNorm(3, **options, group=world.group, dtype=batches[0].dtype))
        begin = sum(split[: world.rank])
        mine = slice(begin, begin + split[world.rank])
        inputs = [batch[mine].clone().requires_grad_() for batch in batches]
        ys = [layer(x) for x in inputs]
        sum((y.sin() * y).sum() for y in ys).backward()
        for y, x, output, gradient in zip(ys, inputs, outputs, gradients, strict=True):
            torch.testing.assert_close(y.detach(), output[mine], rtol=rtol, atol=rtol)
            torch.testing.assert_close(x.grad, gradient[mine], rtol=rtol, atol=10 * rtol)
        for name, buffer in truth.named_buffers():
            torch.testing.assert_close(dict(layer.named_buffers())[name], buffer, rtol=rtol, atol=rtol)
        return {name: parameter.grad for name, parameter in layer.named_parameters()}

    grads = run_threads(len(split), body)
    for name, parameter in truth.named_parameters():
        total = torch.stack([each[name] for each in grads]).sum(0)
        torch.testing.assert_close(total, parameter.grad, rtol=rtol, atol=10 * rtol)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_together_do_what_one_process_does_with_the_whole_batch(shape: str, split: str) -> None:
    compare({}, [whole_batch(SHAPES[shape], torch.float64)], SPLITS[split], 1e-9)
    compare({}, [whole_batch(SHAPES[shape], torch.float32)], SPLITS[split], 1e-3)


@pytest.mark.parametrize(
    "options",
    [{"momentum": None}, {"momentum": 0.5}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.1}],
    ids=str,
)
def test_every_option_means_what_it_does_in_torch(options: dict[str, Any]) -> None:
    batches = [whole_batch(SHAPES["2d"], torch.float64, seed) for seed in (1, 2)]
    compare(options, batches, SPLITS["uneven"], 1e-9)


def test_half_precision_input_keeps_its_dtype_and_single_precision_statistics() -> None:
    batch = whole_batch(SHAPES["2d"], torch.bfloat16)
    expected = nn.BatchNorm2d(3)(batch.float())

    def body(world: World) -> None:
        y = SyncBatchNorm(3, group=world.group)(batch[world.rank * 3 : world.rank * 3 + 3])
        assert y.dtype is torch.bfloat16
        torch.testing.assert_close(y.float(), expected[world.rank * 3 : world.rank * 3 + 3], rtol=0.02, atol=0.02)

    run_threads(2, body)


def test_in_eval_mode_nothing_travels() -> None:
    layer = SyncBatchNorm(3).eval()  # there is no round at all
    x = whole_batch(SHAPES["2d"], torch.float32)
    torch.testing.assert_close(layer(x), nn.BatchNorm2d(3).eval()(x))


def test_too_little_data_and_wrong_shapes_are_errors_everywhere() -> None:
    def body(world: World) -> None:
        layer = SyncBatchNorm(3, group=world.group)
        with pytest.raises(ValueError, match="more than 1 value per channel to train, all ranks have 1"):
            layer(torch.ones(1 - world.rank, 3))
        with pytest.raises(ValueError, match=r"3 channels, got a tensor of shape \[2, 4\]"):
            layer(torch.ones(2, 4))
        with pytest.raises(ValueError, match="batch, channels"):
            layer(torch.ones(3))

    run_threads(2, body)


def test_conversion_keeps_parameters_buffers_modes_and_shared_layers() -> None:
    shared = nn.BatchNorm1d(3)
    model: Any = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, momentum=None), nn.Sequential(shared), shared)
    model[1].eval()
    weight, mean = model[1].weight, model[1].running_mean
    frozen = nn.BatchNorm2d(3, affine=False, track_running_stats=False)
    converted: Any = convert_sync_batchnorm(model)
    assert converted is model
    layer = model[1]
    assert type(layer) is SyncBatchNorm and not layer.training and layer.momentum is None
    assert layer.weight is weight and layer.running_mean is mean
    assert model[2][0] is model[3] and type(model[3]) is SyncBatchNorm
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert type(convert_sync_batchnorm(frozen)) is SyncBatchNorm
    assert convert_sync_batchnorm(layer) is layer
    with pytest.raises(ValueError, match="run the model once"):
        convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


def test_a_layer_with_a_group_can_be_copied_and_pickled() -> None:
    def body(world: World) -> None:
        layer = SyncBatchNorm(3, group=world.group)
        assert copy.deepcopy(layer)._layer_group.group is world.group
        assert pickle.loads(pickle.dumps(layer))._layer_group.group is None

    run_threads(1, body)
