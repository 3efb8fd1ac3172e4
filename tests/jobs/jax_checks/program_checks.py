"""Operations in programs of JAX: their order, their memory, loops and branches, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import ronde
import ronde.jax as rj
from ronde.jax.ffi_library import is_native


def values(*arrays: Any) -> list[Any]:
    return [np.asarray(array).tolist() for array in arrays]


def error_of(function: Callable[[], Any]) -> Exception:
    """The error of ronde that a program raises."""
    try:
        found = jax.block_until_ready(function())
    except Exception as error:
        return rj.find_error(error) or error
    raise AssertionError(f"nothing was raised, but {found} returned")


def check_ranks_may_come_to_operations_in_different_orders() -> None:
    """Small arrays and large ones, as they are given and computed before; XLA has one thread. Callbacks to Python,
    which hold a thread, are no part of the promise."""
    if not all(ronde.objects.allgather(is_native())):
        return
    for shape in ((3,), (700, 3)):
        for prepare in (lambda x: x, jnp.sin):

            def first_a(x: Any, y: Any, prepare: Any = prepare) -> Any:
                a = rj.allreduce(prepare(x), name="order a")
                b = rj.allreduce(prepare(y), name="order b")
                return a, b

            def first_b(x: Any, y: Any, prepare: Any = prepare) -> Any:
                b = rj.allreduce(prepare(y), name="order b")
                a = rj.allreduce(prepare(x), name="order a")
                return a, b

            function = jax.jit(first_b if ronde.rank() else first_a)
            x, y = jnp.full(shape, 1.0), jnp.full(shape, 2.0)
            for _ in range(3):
                a, b = function(x, y)
            np.testing.assert_allclose(a, 2 * prepare(x), rtol=1e-6)
            np.testing.assert_allclose(b, 2 * prepare(y), rtol=1e-6)


def check_operations_without_names_are_matched_by_their_place() -> None:
    def compute(x: Any) -> Any:
        return [rj.allreduce(x * (index + 1)) for index in range(20)], rj.allgather(x)

    numbers, rows = jax.jit(compute)(jnp.array([ronde.rank() + 1.0]))
    assert values(*numbers) == [[3.0 * (index + 1)] for index in range(20)]
    assert values(rows) == [[1.0, 2.0]]


def check_a_result_that_nobody_uses_is_waited_for_by_the_other_rank() -> None:
    def compute(x: Any) -> Any:
        total = rj.allreduce(x, name="unused")
        return total if ronde.rank() else x

    assert values(jax.jit(compute)(jnp.ones(2))) == [[2.0, 2.0] if ronde.rank() else [1.0, 1.0]]


def check_inputs_are_left_as_they_are_and_may_be_given_away() -> None:
    def compute(x: Any) -> Any:
        return rj.allreduce(x, name="donated"), x * 10.0

    for donated in ((), (0,)):
        function = jax.jit(compute, donate_argnums=donated)
        for number in range(4):
            x = jnp.full(2000, float(number))
            if not donated:
                kept = x + 0.0
            total, tenfold = function(x)
            assert (np.asarray(total) == 2.0 * number).all() and (np.asarray(tenfold) == 10.0 * number).all()
            if not donated:
                assert (np.asarray(x) == np.asarray(kept)).all()
    chained = jax.jit(lambda x: rj.allreduce(rj.allreduce(x, name="one") + x, name="two"), donate_argnums=0)
    assert values(chained(jnp.ones(3))) == [[6.0] * 3]


def check_loops_and_branches() -> None:
    def scan(x: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (rj.allreduce(carry, op="mean") + 1.0, carry[0]), x, None, length=100)

    total, each = jax.jit(scan)(jnp.zeros(3))
    assert values(total) == [[100.0] * 3] and values(each) == [list(map(float, range(100)))]

    def loop(x: Any) -> Any:
        return jax.lax.while_loop(lambda y: y[0] < 50.0, lambda y: rj.allreduce(y), x)

    assert values(jax.jit(loop)(jnp.ones(2))) == [[64.0] * 2]

    def choose(x: Any, is_wanted: Any) -> Any:
        return jax.lax.cond(is_wanted, lambda y: rj.allreduce(y, name="chosen"), lambda y: y * 5.0, x)

    assert values(*(jax.jit(choose)(jnp.ones(2), flag) for flag in (True, False))) == [[2.0] * 2, [5.0] * 2]
    through = jax.jit(jax.grad(lambda x: scan(x)[0].sum()))
    assert values(through(jnp.ones(2))) == [[1.0, 1.0]]


def check_functions_of_functions() -> None:
    inner = jax.jit(lambda x: rj.allreduce(x))
    outer = jax.jit(lambda x: inner(inner(x)) + rj.allreduce(x))  # the second needs the first
    assert values(outer(jnp.ones(2))) == [[6.0, 6.0]]
    batch = jnp.arange(6.0).reshape(3, 2)
    for function in (jax.vmap(rj.allreduce), jax.jit(jax.vmap(rj.allreduce))):
        assert values(function(batch)) == [(2 * batch).tolist()]
    for function in (jax.vmap(rj.allgather), jax.jit(jax.vmap(rj.allgather))):
        assert values(function(batch)) == [np.concatenate([batch, batch], axis=1).tolist()]
    shares = jax.jit(jax.vmap(rj.reduce_scatter))(batch)
    assert values(shares) == [(2 * batch[:, ronde.rank() :][:, :1]).tolist()]
    rows, received = jax.jit(jax.vmap(lambda x: rj.alltoall(x), out_axes=(0, None)))(batch)
    mine = batch[:, ronde.rank() :][:, :1]
    assert values(rows, received) == [np.concatenate([mine, mine], axis=1).tolist(), [1, 1]]
    checked = jax.jit(jax.grad(lambda x: jax.vmap(rj.allreduce)(x).sum()))
    assert values(checked(batch)) == [np.full((3, 2), 2.0).tolist()]


def check_each_call_of_a_function_has_operations_of_its_own() -> None:
    """Also if one rank has more to compute before the first call, and the other before the second."""
    inner = jax.jit(lambda x: rj.allreduce(x))

    def compute(a: Any, b: Any, before_a: Any, before_b: Any) -> Any:
        a, b = (
            jax.lax.fori_loop(0, num_steps, lambda _, y: jnp.tanh(y @ y) * 0.0 + y, x)
            for x, num_steps in ((a, before_a), (b, before_b))
        )
        return inner(a), inner(b)

    numbers = (1, 50) if ronde.rank() else (50, 1)
    for _ in range(3):
        a, b = jax.jit(compute)(jnp.full((200, 200), 1.0), jnp.full((200, 200), 10.0), *numbers)
        assert (np.asarray(a) == 2.0).all() and (np.asarray(b) == 20.0).all()

    def body(carry: Any, x: Any) -> Any:
        return carry + rj.allreduce(x), None

    def scan_twice(xs: Any, ys: Any) -> Any:
        return jax.lax.scan(body, 0.0, xs)[0], jax.lax.scan(body, 0.0, ys)[0]

    assert values(*jax.jit(scan_twice)(jnp.ones(5), jnp.full(5, 3.0))) == [10.0, 30.0]


def check_several_devices_are_refused() -> None:
    assert jax.local_device_count() == 2
    mesh = Mesh(np.array(jax.devices()), ("d",))
    spec = PartitionSpec("d")
    sharded = jax.jit(jax.shard_map(rj.allreduce, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    with pytest.raises(NotImplementedError, match="program for several devices"):
        sharded(jnp.ones(4))
    with pytest.raises(NotImplementedError, match="program for several devices"):
        jax.pmap(rj.allreduce)(jnp.ones((2, 3)))
    divided = jax.device_put(jnp.ones(4), jax.sharding.NamedSharding(mesh, spec))
    with pytest.raises(NotImplementedError, match="program for several devices"):
        jax.jit(lambda x: rj.allreduce(x))(divided)
    second = jax.device_put(jnp.ones(4), jax.devices()[1])
    assert values(jax.jit(lambda x: rj.allreduce(x, name="second device"))(second)) == [[2.0] * 4]


def check_mistakes_in_programs_are_errors_on_both_ranks() -> None:
    odd = bool(ronde.rank())
    found = error_of(lambda: jax.jit(lambda x: rj.allreduce(x, name="shapes"))(jnp.ones(4 if odd else 3)))
    assert isinstance(found, ronde.Mismatch) and "3" in str(found) and "4" in str(found)
    for kinds in ((jnp.int32, jnp.int32), (jnp.int8, jnp.bfloat16)):  # of one array, and of one in a tree
        trees = [{"a": jnp.ones(2, jnp.float16), "b": jnp.ones(2, kind)} for kind in kinds]
        tree = {"a": jnp.ones(2), "b": trees[ronde.rank()]["b"]} if odd else trees[0]
        found = error_of(lambda tree=tree: jax.jit(lambda x: rj.allreduce(x, name="kinds"))(tree))  # type: ignore[misc]
        assert isinstance(found, ronde.Mismatch) and "dtype" in str(found), repr(found)
    with pytest.raises(TypeError, match="complex64 is not supported"):
        jax.jit(lambda x: rj.allreduce(x))(jnp.ones(2, jnp.complex64))
    with pytest.raises(ValueError, match="tree of arrays is empty"):
        jax.jit(lambda x: rj.allreduce({}))(1.0)
    rematerialized = jax.checkpoint(lambda x: rj.allreduce(x, name="remat").sum())
    with pytest.raises(NotImplementedError, match="Effects not supported"):
        jax.jit(jax.grad(rematerialized))(jnp.ones(2))
    assert values(jax.jit(lambda x: rj.allreduce(x, name="after"))(jnp.ones(1))) == [[2.0]]


def check_a_failed_part_of_a_program_leaves_nothing_behind() -> None:
    """A program that fails between the two parts of an operation does not disturb the next."""

    def fail(_: Any) -> Any:
        raise ValueError("the data are bad")

    def compute(x: Any, is_bad: bool) -> Any:
        total = rj.allreduce(x, name="interrupted")
        if is_bad:
            total = total + jax.pure_callback(fail, jax.ShapeDtypeStruct((), x.dtype), x[0])
        return total

    function = functools.partial(jax.jit(compute, static_argnums=1), jnp.ones(2000))
    for _ in range(3):
        assert isinstance(error_of(lambda: function(True)), Exception)
        assert (np.asarray(function(False)) == 2.0).all()


def check_a_barrier_in_a_program() -> None:
    def compute(x: Any) -> Any:
        rj.barrier(name="in a program")
        return x

    jax.block_until_ready(jax.jit(compute)(1.0))
