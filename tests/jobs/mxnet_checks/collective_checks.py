"""Checks of collectives in MXNet's engine, on two ranks. With operations through Python they are the same."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import re
import threading
from typing import Any

import mxnet as mx
import numpy as np
import pytest

import ronde
import ronde.mxnet as rm
from ronde.errors import Mismatch, RondeError
from tests.jobs.mxnet_checks.checks import check, error_of, expect_equal_on_all, runs_in_engine, slow_zeros
from tests.limits import RANK_S

NUM_OPERATIONS = 1000


@check
def an_operation_waits_for_its_input_and_is_waited_for() -> None:
    for wait in (False, True):
        x = slow_zeros() + (ronde.rank() + 1.0)
        y = rm.allreduce(x, wait=wait)
        z = rm.allreduce(y * 2.0, op="max", out=x, wait=wait)
        assert z is x
        w = rm.broadcast(z + float(ronde.rank()), root=1, wait=wait)
        assert float((w + y).asnumpy().max()) == float((w + y).asnumpy().min()) == 3.0 * 2 + 1 + 3


@check
def a_call_returns_before_the_operation_has_run() -> None:
    if not runs_in_engine():
        return
    for name in (None, "called"):
        if ronde.rank() == 1:  # it calls only when rank 0 has returned
            ronde.objects.broadcast(None)
        result = rm.allreduce(mx.nd.ones((3,)), name=name, wait=False)
        if ronde.rank() == 0:
            ronde.objects.broadcast("called")
        assert result.asnumpy().tolist() == [2.0] * 3


@check
def a_thousand_operations_in_different_orders_are_matched_by_their_names() -> None:
    if not runs_in_engine():
        return
    order = list(range(NUM_OPERATIONS))
    random.Random(ronde.rank()).shuffle(order)
    arrays = {number: mx.nd.full((1 + number % 7,), number + ronde.rank()) for number in order}
    results = {
        number: rm.allreduce(arrays[number], name=f"n{number}", priority=random.randint(-9, 9), wait=False)
        for number in order
    }
    for number, result in results.items():
        assert result.asnumpy().tolist() == [2.0 * number + 1.0] * (1 + number % 7)


@check
def a_thousand_operations_without_names_are_matched_by_their_order() -> None:
    slow = slow_zeros()
    results = []
    for number in range(NUM_OPERATIONS):
        x = mx.nd.full((3,), number)
        if number % 100 == 50 + ronde.rank():  # these are ready later than what follows
            x = x + slow[0][0]
        results.append(rm.allreduce(x, priority=number % 5, wait=False))
    for number, result in enumerate(results):
        assert result.asnumpy().tolist() == [2.0 * number] * 3


@check
def arrays_that_nobody_keeps_stay_until_the_operation_is_over() -> None:
    results = []
    for number in range(200):
        x = mx.nd.full((10_000,), number) + slow_zeros(20)[0][0]
        results.append(rm.allreduce(x, name=f"kept {number % 3}", wait=False) + 1.0)
        rm.allreduce(x, out=x, wait=False)  # whose result nobody wants
        del x
        mx.nd.zeros((10_000,))  # takes memory that is free
    gc.collect()
    for number, result in enumerate(results):
        found = result.asnumpy()
        assert found.min() == found.max() == 2.0 * number + 1.0


@check
def views_of_one_array_can_be_in_one_operation() -> None:
    x = mx.nd.array(np.arange(12.0).reshape(4, 3))
    rm.allreduce([x[0], x[2]], out=[x[0], x[2]], wait=False)
    rm.allreduce(x[1], out=x[3], wait=False)
    wanted = np.arange(12.0).reshape(4, 3)
    wanted[[0, 2]] *= 2
    wanted[3] = 2 * wanted[1]
    assert np.array_equal(x.asnumpy(), wanted)


@check
def arrays_in_the_layout_of_onednn_arrive_in_order() -> None:
    weight = mx.nd.array(np.random.default_rng(0).integers(0, 3, (16, 8, 3, 3)))
    x = mx.nd.array(np.random.default_rng(1).integers(0, 3, (2, 8, 9, 9)))
    wanted = mx.nd.Convolution(x, weight, kernel=(3, 3), num_filter=16, no_bias=True).asnumpy() * 2.0
    for wait in (False, True):
        for in_place in (False, True):
            y = mx.nd.Convolution(x, weight, kernel=(3, 3), num_filter=16, no_bias=True)
            result = rm.allreduce(y, out=y if in_place else None, wait=wait)
            assert np.array_equal(result.asnumpy(), wanted), (wait, in_place)
    y = mx.nd.Convolution(x, weight, kernel=(3, 3), num_filter=16, no_bias=True)
    assert np.array_equal(rm.allgather(y).asnumpy()[2:] * 2.0, wanted)
    for wait in (False, True):
        y = mx.nd.Convolution(x, weight, kernel=(3, 3), num_filter=16, no_bias=True).reshape((-1,))
        assert np.array_equal(rm.allreduce(y, wait=wait).asnumpy(), wanted.reshape(-1)), "a view"


@check
def arrays_of_mx_np_give_arrays_of_mx_np() -> None:
    with mx.util.np_shape(True), mx.util.np_array(True):
        x = mx.np.ones((2, 3))
        for result in (rm.allreduce(x, wait=False), rm.allgather(x), rm.broadcast(x), rm.reduce_scatter(x, wait=False)):
            assert type(result) is type(x)
        assert float(rm.allreduce(mx.np.array(2.0), wait=False)) == 4.0
    assert type(rm.allreduce(mx.nd.ones((2,)), wait=False)) is mx.nd.NDArray


@check
def contexts_of_the_cpu_can_be_mixed() -> None:
    xs = [mx.nd.ones((3,), ctx=mx.cpu(index)) for index in range(3)]
    results = rm.allreduce(xs, wait=False)
    assert [each.context for each in results] == [mx.cpu(0), mx.cpu(1), mx.cpu(2)]
    assert all(each.asnumpy().tolist() == [2.0] * 3 for each in results)


@check
def what_cannot_be_used_is_refused_in_words() -> None:
    sparse = mx.nd.ones((3, 2)).tostype("row_sparse")
    for wait in (False, True):
        with pytest.raises(TypeError, match=r"storage type row_sparse; use x\.tostype"):
            rm.allreduce(sparse, wait=wait)
        with pytest.raises(TypeError, match=r"arrays of MXNet, got a ndarray; use mx\.nd\.array"):
            rm.allreduce(np.ones(3), wait=wait)
        with pytest.raises(TypeError, match=r"arrays of MXNet, got a NoneType"):
            rm.allreduce(None, wait=wait)
        with pytest.raises(ValueError, match=r"out is float32\[3\], but the result is float32\[2\]"):
            rm.allreduce(mx.nd.ones((2,)), out=mx.nd.ones((3,)), wait=wait)


@check
def a_mismatch_is_raised_where_somebody_waits_and_names_both_ranks() -> None:
    for name in (None, "differs"):
        x = mx.nd.ones((3 + ronde.rank(),))
        y = mx.nd.ones((5,))

        def compute(x: Any = x, name: str | None = name) -> Any:
            return rm.allreduce(x, name=name, wait=False) * 2.0

        error = error_of(compute)
        assert isinstance(error, Mismatch) and re.search(r"[(\[]3.*[(\[]4", str(error)), repr(error)
        assert rm.allreduce(y, name=name, wait=False).asnumpy().tolist() == [2.0] * 5


@check
def an_operation_whose_input_has_failed_fails_on_all_ranks() -> None:
    if not runs_in_engine():
        return
    for name in (None, "reads an error"):
        bad = mx.nd.ones((3,))
        if ronde.rank() == 1:  # an operation of this rank only, which fails
            alone = ronde.add_group([1])
            bad = rm.allreduce(mx.nd.ones((2, 3)), group=alone, wait=False)
            bad = mx.nd.Custom(bad, op_type="fails")
        else:
            ronde.add_group([1])
        result = rm.allreduce(bad, name=name, wait=False)
        if ronde.rank() == 1:
            with pytest.raises(mx.MXNetError):
                result.wait_to_read()
        else:
            error = error_of(lambda result=result: result)  # type: ignore[misc]  # of one array
            assert isinstance(error, Mismatch), repr(error)
            assert "an array that it reads holds the error of another operation" in str(error)
        try:
            mx.nd.waitall()
        except mx.MXNetError:
            pass
        ronde.remove_group(next(group for group in ronde.groups() if group.ranks == (1,)))
        assert rm.allreduce(mx.nd.ones((2,)), wait=False).asnumpy().tolist() == [2.0] * 2


class FailingOperator(mx.operator.CustomOp):  # type: ignore[misc]  # MXNet has no types
    def forward(self, is_train: Any, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        raise ValueError("it was meant to fail")


@mx.operator.register("fails")
class FailingOperatorProp(mx.operator.CustomOpProp):  # type: ignore[misc]
    def infer_shape(self, in_shape: Any) -> Any:
        return in_shape, [in_shape[0]], []

    def create_operator(self, ctx: Any, shapes: Any, dtypes: Any) -> Any:
        return FailingOperator()


@check
def threads_of_a_program_may_call_at_the_same_time() -> None:
    found: dict[int, list[float]] = {}

    def work(number: int) -> None:
        for turn in range(20):
            x = mx.nd.full((4,), number + turn)
            found.setdefault(number, []).append(
                float(rm.allreduce(x, name=f"thread {number}", wait=False).asnumpy().sum())
            )

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(RANK_S)
    assert found == {number: [8.0 * (number + turn) for turn in range(20)] for number in range(4)}


@check
def a_fork_waits_for_operations_and_the_child_is_refused() -> None:
    x = slow_zeros() + 1.0
    results = [rm.allreduce(x, wait=False), rm.allreduce(x, name="before the fork", wait=False)]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=use_in_child, args=(queue,))
    child.start()
    assert "is a forked child of process" in queue.get(timeout=RANK_S)
    child.join(RANK_S)
    assert child.exitcode == 0
    assert all(float(each.asnumpy().min()) == 2.0 for each in results)
    assert rm.allreduce(mx.nd.ones((2,)), wait=False).asnumpy().tolist() == [2.0] * 2


def use_in_child(queue: Any) -> None:
    try:
        rm.allreduce(mx.nd.ones((2,)), wait=False)
        queue.put("nothing was raised")
    except RondeError as error:
        queue.put(str(error))
    finally:
        queue.close()
        queue.join_thread()
        os._exit(0)


@check
def operations_in_a_bulk_scope_are_right() -> None:
    with mx.engine.bulk(8):
        x = mx.nd.ones((4,))
        for _ in range(5):
            x = rm.allreduce(x + 1.0, op="mean", wait=False) + 1.0
    assert x.asnumpy().tolist() == [11.0] * 4


@check
def everybody_gets_the_same_bits() -> None:
    mx.random.seed(ronde.rank())
    x = mx.nd.random.normal(shape=(1000,))
    expect_equal_on_all(rm.allreduce(x, op="mean", wait=False), "allreduce")
    expect_equal_on_all(rm.allreduce(x.astype("float16"), op="mean", wait=False), "of float16")
