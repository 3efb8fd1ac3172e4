"""One rank of tests/compat/test_mxnet.py: Horovod's names for MXNet, and what they do among two ranks."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

import horovod.mxnet as hvd

FOLDER = Path(sys.argv[1])
SIGNATURES = {
    "allreduce": "tensor average name priority prescale_factor postscale_factor process_set op",
    "allreduce_": "tensor average name priority prescale_factor postscale_factor process_set op",
    "grouped_allreduce": "tensors average name priority prescale_factor postscale_factor process_set op",
    "grouped_allreduce_": "tensors average name priority prescale_factor postscale_factor process_set op",
    "allgather": "tensor name priority process_set",
    "grouped_allgather": "tensors name priority process_set",
    "broadcast": "tensor root_rank name priority process_set",
    "broadcast_": "tensor root_rank name priority process_set",
    "alltoall": "tensor splits name priority process_set",
    "reducescatter": "tensor op name priority process_set prescale_factor postscale_factor",
    "grouped_reducescatter": "tensors op name priority process_set prescale_factor postscale_factor",
    "broadcast_parameters": "params root_rank prefix",
    "broadcast_object": "obj root_rank name",
    "allgather_object": "obj name",
    "DistributedOptimizer": "optimizer gradient_predivide_factor num_groups process_set",
    "DistributedTrainer": "params optimizer optimizer_params compression gradient_predivide_factor prefix num_groups "
    "process_set",
}
NUM_NAMES = 50


def check_names() -> None:
    for name, words in SIGNATURES.items():
        assert " ".join(inspect.signature(getattr(hvd, name)).parameters) == words, name
    assert len(hvd.__all__) == len(set(hvd.__all__)) == NUM_NAMES
    assert all(hasattr(hvd, name) for name in hvd.__all__)


def check_operations() -> None:
    rank = hvd.rank()
    x = mx.nd.full((3,), rank + 1.0)
    assert hvd.allreduce(x).asnumpy().tolist() == [1.5] * 3
    assert hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0).asnumpy().tolist() == [6.0] * 3
    assert hvd.allreduce_(x, average=False) is x and x.asnumpy().tolist() == [3.0] * 3
    assert hvd.broadcast(mx.nd.full((2,), rank), 1, priority=3).asnumpy().tolist() == [1.0, 1.0]
    assert hvd.allgather(mx.nd.full((rank + 1, 2), rank)).shape == (3, 2)
    assert [each.shape for each in hvd.grouped_reducescatter([mx.nd.ones((3, 2)), mx.nd.ones((4,))])] == [
        (2 - rank, 2),
        (2,),
    ]
    rows = hvd.alltoall(mx.nd.array([rank, rank]))
    assert rows.asnumpy().tolist() == [0.0, 1.0]
    rows, received = hvd.alltoall(mx.nd.array([rank, rank]), splits=[1, 1])
    assert received.dtype == np.int32 and received.asnumpy().tolist() == [1, 1]
    assert hvd.grouped_allreduce([]) == []
    with pytest.raises(mx.MXNetError, match=r"shape|different"):
        hvd.allreduce(mx.nd.ones((2 + rank,))).wait_to_read()
    with pytest.raises(mx.MXNetError, match="splits"):
        hvd.alltoall(mx.nd.ones((2,)), splits=[5, 5])
    with pytest.raises(AssertionError):
        hvd.allreduce(x, op=hvd.Adasum)
    assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
    assert hvd.allgather_object(rank) == [0, 1]


def train(**options: Any) -> list[float]:
    """The weights after a few steps; Horovod's trainer leaves the sum of gradients in them."""
    mx.random.seed(hvd.rank())
    net = gluon.nn.Dense(1, use_bias=False)
    net.initialize(mx.init.Constant(hvd.rank() + 1.0))
    params = net.collect_params()
    hvd.broadcast_parameters(params, prefix=options.get("prefix"))
    trainer = hvd.DistributedTrainer(params, "sgd", {"learning_rate": 0.5}, **options)
    for _ in range(2):
        with autograd.record():
            loss = net(mx.nd.array([[1.0, 2.0 * hvd.rank()]])).sum()
        loss.backward()
        trainer.step(1)
    assert net.weight.grad().asnumpy().tolist() == [[2.0, 2.0]]
    found: list[float] = net.weight.data().asnumpy()[0].tolist()
    return found


def check_training() -> None:
    for options in (
        {},
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.none, "prefix": "second."},
        {"num_groups": 1},
    ):
        assert train(**options) == [0.0, 0.0], options
    optimizer = mx.optimizer.create("sgd", learning_rate=1.0)
    parameter = gluon.Parameter("w", shape=(1,))
    parameter.initialize()
    with pytest.warns(UserWarning, match="DistributedOptimizer"):
        hvd.DistributedTrainer([parameter], hvd.DistributedOptimizer(optimizer))
    optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=1.0))
    weight, gradient = mx.nd.zeros((2,)), mx.nd.full((2,), hvd.rank())
    optimizer.update(0, weight, gradient, optimizer.create_state(0, weight))
    assert weight.asnumpy().tolist() == [-0.5, -0.5]
    with pytest.raises(ValueError, match="got list"):
        hvd.broadcast_parameters([weight])


hvd.init()
check_names()
check_operations()
check_training()
(FOLDER / f"rank-{hvd.rank()}").write_text("done")
hvd.shutdown()
