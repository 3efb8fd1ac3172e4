"""Checks of trainers, parameters and data, on two ranks."""

from __future__ import annotations

import gc
from typing import Any

import mxnet as mx
import numpy as np
import psutil
import pytest
from mxnet import autograd, gluon

import ronde
import ronde.mxnet as rm
import ronde.ps
from ronde.errors import Mismatch, OutOfSync
from ronde.mxnet.gradients import ThresholdWire
from tests.jobs.mxnet_checks.checks import check, error_of, expect_equal_on_all, runs_in_engine, slow_zeros

NUM_STEPS = 6
X = np.random.default_rng(0).standard_normal((NUM_STEPS, 8, 5)).astype("float32")
Y = np.random.default_rng(1).standard_normal((NUM_STEPS, 8, 2)).astype("float32")


def make_net(seed: int, contexts: list[Any] | None = None, in_units: int = 5) -> Any:
    mx.random.seed(seed)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(7, activation="tanh", in_units=in_units), gluon.nn.Dense(2, in_units=7 if in_units else 0))
    net.initialize(mx.init.Uniform(0.5), ctx=contexts or [mx.cpu()], force_reinit=True)
    return net


def train(net: Any, trainer: Any, *, share: bool, contexts: list[Any] | None = None, batch: int = 8) -> list[Any]:
    """Make some steps, with this rank's half of each batch or with all of it. The parameters at the end."""
    loss_function = gluon.loss.L2Loss()
    rank, size = (ronde.rank(), ronde.size()) if share else (0, 1)
    for x, y in zip(X, Y, strict=True):
        xs = gluon.utils.split_and_load(x[rank::size], contexts or [mx.cpu()])
        ys = gluon.utils.split_and_load(y[rank::size], contexts or [mx.cpu()])
        with autograd.record():
            losses = [loss_function(net(each), wanted) for each, wanted in zip(xs, ys, strict=True)]
        for loss in losses:
            loss.backward()
        trainer.step(batch // size)
    return parameters_of(net)


def parameters_of(net: Any) -> list[Any]:
    found = [[data.asnumpy() for data in each.list_data()] for each in net.collect_params().values()]
    for copies in found:
        assert all(np.array_equal(each, copies[0]) for each in copies), "contexts differ"
    return [copies[0] for copies in found]


def reference(optimizer: str, options: dict[str, Any]) -> list[Any]:
    """What one process learns from whole batches."""
    net = make_net(7)
    return train(net, gluon.Trainer(net.collect_params(), optimizer, options, kvstore=None), share=False)


def expect_close(found: list[Any], wanted: list[Any], tolerance: float = 1e-5) -> None:
    for each, array in zip(found, wanted, strict=True):
        np.testing.assert_allclose(each, array, rtol=tolerance, atol=tolerance)
    expect_equal_on_all(np.concatenate([each.reshape(-1) for each in found]), "the parameters")


@check
def a_trainer_learns_what_one_process_learns_from_whole_batches() -> None:
    for optimizer, options in (("sgd", {"learning_rate": 0.1, "momentum": 0.9}), ("adam", {"learning_rate": 0.01})):
        wanted = reference(optimizer, options)
        for settings in ({}, {"bucket_mb": 0.0001}, {"op": "sum"}, {"predivide": 2.0}, {"overlap": True}):
            net = make_net(7 if ronde.rank() == 0 else 8)
            trainer = rm.DistributedTrainer(net.collect_params(), optimizer, options, **settings)
            trainer.broadcast_parameters()
            expect_close(train(net, trainer, share=True, batch=16 if settings.get("op") == "sum" else 8), wanted)


@check
def trainers_that_are_gone_leave_no_threads_and_no_descriptors() -> None:
    process, counts = psutil.Process(), []
    for _ in range(24):
        parameter = gluon.Parameter("w", shape=(1000,))
        parameter.initialize(mx.init.Zero())
        trainer = rm.DistributedTrainer([parameter], "sgd", {"learning_rate": 1.0})
        for _ in range(2):
            with autograd.record():
                loss = (parameter.data() * (ronde.rank() + 1.0)).sum()
            loss.backward()
            trainer.step(1)
        del trainer
        gc.collect()  # with operations under way
        assert parameter.data().asnumpy().tolist() == [-3.0] * 1000
        counts.append((process.num_threads(), process.num_fds()))
    for first, last in zip(counts[4], counts[-1], strict=True):
        assert last <= first + 4, counts


@check
def gradients_of_all_contexts_count() -> None:
    contexts = [mx.cpu(0), mx.cpu(1)]
    wanted = reference("sgd", {"learning_rate": 0.1})
    net = make_net(7 + ronde.rank(), contexts)
    trainer = rm.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    rm.broadcast_parameters(net)
    expect_close(train(net, trainer, share=True, contexts=contexts), wanted)


@check
def compressed_gradients_train_too() -> None:
    wanted = reference("sgd", {"learning_rate": 0.1})
    for compression in ("fp16", {"type": "fp16"}, {"fp16": True}, None, {"type": "none"}):
        net = make_net(7)
        trainer = rm.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, compression=compression)
        tolerance = 1e-5 if compression in (None, {"type": "none"}) else 3e-3
        expect_close(train(net, trainer, share=True), wanted, tolerance)
    for wrong, words in (
        ("zip", "one of none, fp16, 2bit, got 'zip'"),
        ({"type": "2bit", "bits": 2}, "has no option 'bits'"),
        ({"compressor": "topk"}, "has no option 'compressor'"),
        ({"type": "2bit", "threshold": 0}, "must be a number above 0"),
        ({"type": "2bit", "threshold": "half"}, "must be a number above 0, got 'half'"),
    ):
        with pytest.raises(ValueError, match=words):
            rm.DistributedTrainer(make_net(7).collect_params(), "sgd", compression=wrong)


@check
def two_bits_of_a_gradient_travel_and_the_rest_is_kept() -> None:
    parameter = gluon.Parameter("w", shape=(4,))
    parameter.initialize(mx.init.Zero())
    compression = {"type": "2bit", "threshold": 0.5}
    trainer = rm.DistributedTrainer([parameter], "sgd", {"learning_rate": 1.0}, compression=compression)
    given = [[0.4, -0.6, 2.0, 0.0], [0.1, -0.5, -0.1, 0.0]][ronde.rank()]
    for wanted in ([0.0, 0.5, -0.25, 0.0], [-0.25, 1.0, -0.5, 0.0]):
        with autograd.record():
            loss = (parameter.data() * mx.nd.array(given)).sum()
        loss.backward()
        trainer.step(1)
        assert parameter.data().asnumpy().tolist() == wanted


@check
def what_two_bits_lose_is_kept_for_the_parameter_that_has_lost_it() -> None:
    options = {"learning_rate": 1.0, "rescale_grad": 1.0}
    optimizer = rm.DistributedOptimizer(mx.optimizer.create("sgd", **options), compression={"type": "2bit"})
    weights = [mx.nd.zeros((2,)), mx.nd.zeros((2,)), mx.nd.zeros((3,))]
    for _ in range(2):
        for index, (weight, value) in enumerate(zip(weights, (0.3, 0.0, 0.3), strict=True)):
            optimizer.update(index, weight, mx.nd.full(weight.shape, value), None)
    assert [each.asnumpy().tolist() for each in weights] == [[-0.5] * 2, [0.0] * 2, [-0.5] * 3]

    parameters = [gluon.Parameter(f"w{index}", shape=(3 - index,)) for index in range(2)]
    for each in parameters:
        each.initialize(mx.init.Zero())
    trainer = rm.DistributedTrainer(parameters, "sgd", {"learning_rate": 1.0}, compression={"type": "2bit"})
    for _ in range(2):
        with autograd.record():
            loss = sum((each.data() * 0.3).sum() for each in parameters)
        loss.backward()
        trainer.step(1)
        parameters[0].grad_req = "null"
    assert parameters[1].data().asnumpy().tolist() == [-0.5] * 2


@check
def a_reduction_that_was_interrupted_loses_nothing() -> None:
    codec = ThresholdWire(0.5)
    for _ in range(3):
        assert codec.encode("w", mx.nd.full((2,), 0.3), 2).asnumpy().tolist() == [0, 0]
        codec.undo("w")
    codec.encode("w", mx.nd.full((2,), 0.3), 2)
    assert codec.encode("w", mx.nd.full((2,), 0.3), 2).asnumpy().tolist() == [1, 1]


@check
def signs_of_many_ranks_do_not_overflow() -> None:
    codec = ThresholdWire(0.5)
    for size in (2, 127, 128, 1000):
        wire = codec.encode(size, mx.nd.ones((2,)), size)
        total = np.multiply(wire.asnumpy(), size, dtype=wire.dtype)
        result = mx.nd.zeros((2,))
        codec.decode(size, mx.nd.array(total, dtype=wire.dtype), result, size)
        assert result.asnumpy().tolist() == [0.5 * size] * 2


@check
def parameters_that_only_some_ranks_use_stay_equal() -> None:
    for separately in (False, True):
        parameters = [gluon.Parameter(name, shape=(2,)) for name in ("all", "one", "none")]
        for each in parameters:
            each.initialize(mx.init.One())
        trainer = rm.DistributedTrainer(parameters, "sgd", {"learning_rate": 1.0})

        def step(used: list[Any], trainer: Any = trainer, separately: bool = separately) -> None:
            with autograd.record():
                loss = sum(each.data().sum() for each in used)
            loss.backward()
            if separately:
                trainer.allreduce_grads()
                trainer.update(1, ignore_stale_grad=True)
            else:
                trainer.step(1, ignore_stale_grad=True)

        step(parameters)
        assert [each.data().asnumpy().tolist() for each in parameters] == [[0.0] * 2] * 3
        step(parameters[: 2 - ronde.rank()])
        one = -1.0 if separately else -0.5  # of what was reduced before, the stale gradient is a part
        wanted = [[-1.0] * 2, [one] * 2, [0.0] * 2]
        assert [each.data().asnumpy().tolist() for each in parameters] == wanted


@check
def contexts_of_a_rank_outside_of_the_group_are_summed_too() -> None:
    alone = ronde.add_group([0])
    parameter = gluon.Parameter("w", shape=(1,))
    parameter.initialize(mx.init.Zero(), ctx=[mx.cpu(0), mx.cpu(1)])
    trainer = rm.DistributedTrainer([parameter], "sgd", {"learning_rate": 1.0}, group=alone)
    with autograd.record():
        losses = [each.sum() * factor for each, factor in zip(parameter.list_data(), (1.0, 2.0), strict=True)]
    autograd.backward(losses)
    trainer.step(1)
    assert [each.asscalar() for each in parameter.list_data()] == [-3.0, -3.0]
    ronde.remove_group(alone)


@check
def parameters_without_a_shape_are_broadcast_in_the_first_pass() -> None:
    for named in (False, True):
        net = make_net(ronde.rank(), in_units=0)
        trainer = rm.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        if named:
            rm.broadcast_parameters(net.collect_params(), root=1, name="second ")
        else:
            trainer.broadcast_parameters(1)
        with autograd.record():
            loss = net(mx.nd.array(X[0])).sum()
        expect_equal_on_all(np.concatenate([each.reshape(-1) for each in parameters_of(net)]), "the first values")
        loss.backward()
        trainer.step(1)
        expect_equal_on_all(np.concatenate([each.reshape(-1) for each in parameters_of(net)]), "after a step")


@check
def parameters_without_a_shape_may_be_broadcast_twice() -> None:
    net = make_net(ronde.rank(), in_units=0)
    trainer = rm.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    rm.broadcast_parameters(net)
    trainer.broadcast_parameters()
    net(mx.nd.array(X[0]))
    expect_equal_on_all(np.concatenate([each.reshape(-1) for each in parameters_of(net)]), "the first values")


@check
def parameters_that_differ_are_named() -> None:
    error = error_of(lambda: rm.broadcast_parameters({"a": mx.nd.ones((2 + ronde.rank(),))}))
    assert isinstance(error, Mismatch) and "a float32[2]" in str(error) and "a float32[3]" in str(error)
    with pytest.raises(ValueError, match="got a list"):
        rm.broadcast_parameters([mx.nd.ones((2,))])
    with pytest.raises(ValueError, match="'a' is a int"):
        rm.broadcast_parameters({"a": 1})
    net = make_net(ronde.rank())
    trainer = rm.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    error = error_of(lambda: train(net, trainer, share=True))
    assert isinstance(error, OutOfSync) and "call broadcast_parameters()" in str(error)


@check
def models_that_differ_are_a_mismatch_that_names_the_gradient() -> None:
    parameter = gluon.Parameter("w", shape=(2 + ronde.rank(),))
    parameter.initialize(mx.init.One())
    trainer = rm.DistributedTrainer([parameter], "sgd", {"learning_rate": 0.1}, compare_at_step=0)

    def step() -> Any:
        with autograd.record():
            loss = parameter.data().sum()
        loss.backward()
        trainer.step(1)
        return parameter.data()

    error = error_of(step)
    assert isinstance(error, Mismatch) and "in 'w'[2]" in str(error) and "in 'w'[3]" in str(error), repr(error)


@check
def trainers_with_names_may_step_in_different_orders() -> None:
    if not runs_in_engine():
        return
    nets = [make_net(3), make_net(4)]
    trainers = [
        rm.DistributedTrainer(
            net.collect_params(), "sgd", {"learning_rate": 0.1}, name=f"t{i}", compare_at_step=0, overlap=True
        )
        for i, net in enumerate(nets)
    ]
    for _ in range(3):
        with autograd.record():
            losses = [net(mx.nd.array(X[0][ronde.rank() :: 2])).sum() for net in nets]
        autograd.backward(losses)
        for index in (0, 1) if ronde.rank() == 0 else (1, 0):
            trainers[index].step(4)
    for net in nets:
        expect_equal_on_all(np.concatenate([each.reshape(-1) for each in parameters_of(net)]), "a net")


@check
def a_trainer_of_a_group_reduces_in_it_only() -> None:
    alone = ronde.add_group([1])
    net = make_net(5)
    trainer = rm.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, group=alone)
    found = train(net, trainer, share=False)
    ronde.remove_group(alone)
    other = make_net(5)
    wanted = train(other, gluon.Trainer(other.collect_params(), "sgd", {"learning_rate": 0.1}), share=False)
    expect_close(found, wanted)


@check
def a_module_learns_what_one_process_learns_from_whole_batches() -> None:
    def fit(optimizer: Any, x: Any, y: Any, batch: int) -> Any:
        symbol = mx.sym.LinearRegressionOutput(
            mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc"), mx.sym.var("lin_label"), name="lin"
        )
        data = mx.io.NDArrayIter(x, y, batch, label_name="lin_label")
        module = mx.mod.Module(symbol, label_names=("lin_label",))
        module.bind(data.provide_data, data.provide_label)
        mx.random.seed(1 + ronde.rank())
        module.init_params(mx.init.Uniform(0.1))
        rm.broadcast_parameters(module)
        module.init_optimizer(kvstore=None, optimizer=optimizer)
        for _ in range(3):
            data.reset()
            for each in data:
                module.forward_backward(each)
                module.update()
        arguments, _ = module.get_params()
        return [arguments[name].asnumpy() for name in sorted(arguments)]

    x, y = X.reshape(-1, 5), Y.reshape(-1, 2)
    options = {"learning_rate": 0.1, "momentum": 0.9}
    wanted = fit(mx.optimizer.create("sgd", rescale_grad=1 / 8, **options), x, y, 8)
    mine = (x[ronde.rank() :: 2], y[ronde.rank() :: 2])
    optimizer = rm.DistributedOptimizer(mx.optimizer.create("sgd", rescale_grad=1 / 4, **options))
    expect_close(fit(optimizer, *mine, 4), wanted)
    optimizer.lr = 0.5
    assert optimizer.learning_rate == 0.5
    with pytest.raises(TypeError, match="takes an optimizer of MXNet, got a str"):
        rm.DistributedOptimizer("sgd")


@check
def a_module_on_several_contexts_whose_gradients_nobody_sums_is_refused() -> None:
    optimizer = rm.DistributedOptimizer(mx.optimizer.create("sgd", param_idx2name={0: "w", 1: "w"}))
    with pytest.raises(ValueError, match="'w' on several contexts"):
        optimizer.update(0, mx.nd.ones((2,)), mx.nd.ones((2,)), None)


@check
def a_rank_may_join_while_its_last_operations_are_in_the_engine() -> None:
    for join in (rm.join, ronde.join):
        pair = ronde.add_group([0, 1])
        parameter = gluon.Parameter("w", shape=(300, 300))
        parameter.initialize(mx.init.Zero())
        trainer = rm.DistributedTrainer([parameter], "sgd", {"learning_rate": 1.0}, group=pair, overlap=True)

        def step(parameter: Any = parameter, trainer: Any = trainer, pair: Any = pair) -> Any:
            with autograd.record():
                loss = (parameter.data() * (slow_zeros() + 1.0)).sum()
            loss.backward()
            trainer.step(1)
            return rm.allreduce(slow_zeros() + 1.0, group=pair, wait=False)

        results = [step() for _ in range(3 - ronde.rank())]  # rank 0 has one more
        assert join(group=pair) == 0
        assert [float(each.asnumpy().max()) for each in results] == [2.0, 2.0, 1.0][: len(results)]
        assert float(parameter.data().asnumpy().min()) == [-2.5, -2.0][ronde.rank()]
        ronde.remove_group(pair)


@check
def sparse_gradients_are_refused() -> None:
    net = gluon.nn.Embedding(5, 3, sparse_grad=True)
    net.initialize()
    with pytest.raises(ValueError, match="sparse_grad=False"):
        rm.DistributedTrainer(net.collect_params(), "sgd")


@check
def metrics_are_those_of_all_samples() -> None:
    metric = mx.metric.CompositeEvalMetric([mx.metric.Accuracy(), mx.metric.Loss()])
    if ronde.rank() == 0:
        metric.metrics[0].update([mx.nd.array([0, 1, 1])], [mx.nd.array([[0.9, 0.1], [0.9, 0.1], [0.2, 0.8]])])
        metric.metrics[1].update(None, [mx.nd.array([4.0])])
    else:
        metric.metrics[0].update([mx.nd.array([0])], [mx.nd.array([[0.9, 0.1]])])
        metric.metrics[1].update(None, [mx.nd.array([1.0, 1.0, 1.0])])
    found = rm.average_metrics(metric)
    assert found == {"accuracy": 0.75, "loss": 1.75}
    values = {"loss": mx.nd.array([float(ronde.rank())])}
    assert rm.average_metrics(values, count=1 + 2 * ronde.rank()) == {"loss": 0.75}


@check
def every_sample_belongs_to_one_rank() -> None:
    data = gluon.data.ArrayDataset(np.arange(10.0))
    sampler = rm.ShardedSampler(data, seed=1, ends="uneven")
    loader = gluon.data.DataLoader(data, batch_size=2, sampler=sampler)
    mine = [float(each) for batch in sampler.track(loader, batch_size=2) for each in batch.asnumpy()]
    assert sorted(each for rank in ronde.objects.allgather(mine) for each in rank) == list(range(10))
    assert sampler.epoch == 1
    batches = rm.ShardedBatches(10, global_batch=4, seed=1, ends="uneven")
    seen: list[int] = []
    while batches.epoch < 2:
        for indices in batches:
            seen += indices.tolist()
            assert batches.num_samples in (4, 2)
    everybody = sorted(each for rank in ronde.objects.allgather(seen) for each in rank)
    assert everybody == sorted([*range(10), *range(10)])


@check
def a_parameter_server_in_sync_mode_trains_as_one_process_with_whole_batches() -> None:
    wanted = reference("sgd", {"learning_rate": 0.1, "momentum": 0.5})
    net = make_net(7 + ronde.rank())  # the parameters of rank 0 count
    trainer = rm.AsyncTrainer(net.collect_params(), ronde.ps.SGD(lr=0.1, momentum=0.5), mode="sync")
    expect_close(train(net, trainer, share=True), wanted)
    trainer.close()


@check
def asynchronous_training_learns_with_every_sample_used_once() -> None:
    net, loss_function, num_used = make_net(7), gluon.loss.L2Loss(), 0
    x, y = X.reshape(-1, 5), X.reshape(-1, 5)[:, :2]
    trainer = rm.AsyncTrainer(net.collect_params(), ronde.ps.SGD(lr=0.1), mode="async")
    for epoch in range(40):
        for indices in trainer.samples(len(x), 8, epoch=epoch):
            with autograd.record():
                loss = loss_function(net(mx.nd.array(x[indices])), mx.nd.array(y[indices]))
            loss.backward()
            trainer.step(len(indices))
            num_used += len(indices)
    ronde.barrier()
    trainer.pull()
    assert loss_function(net(mx.nd.array(x)), mx.nd.array(y)).mean().asscalar() < 0.1
    assert sum(ronde.objects.allgather(num_used)) == 40 * len(x)
    trainer.close()
