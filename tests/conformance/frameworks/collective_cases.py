"""What collectives on tensors do, whatever the framework: functions that run on all ranks at once, in a job of any size
from two.

A case is written once, against a Framework, with plain asserts. What it gives to Framework.run() is a function of
tensors that uses nothing but collectives, operators and slices, which all frameworks have. An operation of a graph
without a name is matched by the line that adds it, so all ranks add it in one line.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

import ronde
from ronde.comm.buffers import Array
from ronde.types import DType, Op, OperationKind, find_reduction_error
from tests.conformance.frameworks.framework import Framework, Value, values
from tests.conformance.reference_arithmetic import reduce

EXACT_OPS = tuple(op for op in Op if op is not Op.ADASUM)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (3, 0, 2), (2, 3, 4), (65,))
SCALES = (0.5, 4.0)
"""Powers of two, which change no digit."""


@dataclass(frozen=True)
class CollectiveCase:
    """One behaviour."""

    name: str
    body: Callable[[Framework], None]
    for_tensors: bool
    """Whether it is for frameworks with tensors only: there are no lists of arrays of several dtypes."""
    for_gradients: bool = False
    """Whether it is for frameworks whose collectives have gradients."""


CASES: dict[str, CollectiveCase] = {}


def _add(name: str, body: Callable[[Framework], None], for_tensors: bool = False, for_gradients: bool = False) -> None:
    assert name not in CASES, f"{name} is there twice"
    CASES[name] = CollectiveCase(name, body, for_tensors, for_gradients)


def case(body: Callable[[Framework], None]) -> Callable[[Framework], None]:
    """Add a function to the cases."""
    _add(body.__name__, body)
    return body


def tensor_case(body: Callable[[Framework], None]) -> Callable[[Framework], None]:
    """Add a function to the cases of frameworks with tensors."""
    _add(body.__name__, body, for_tensors=True)
    return body


def gradient_case(body: Callable[[Framework], None]) -> Callable[[Framework], None]:
    """Add a function to the cases of frameworks whose collectives have gradients."""
    _add(body.__name__, body, for_tensors=True, for_gradients=True)
    return body


# --- helpers ---------------------------------------------------------------------------------------------------------


def numbers(rank: int, dtype: DType, *shape: int) -> Value:
    """Small whole numbers that every dtype holds exactly, different on every rank."""
    whole = np.asarray(np.random.default_rng(rank).integers(0, 5, shape))
    if dtype is DType.BFLOAT16:
        return Value(np.asarray(whole.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16), dtype)
    return Value(whole.astype(dtype.numpy), dtype)


def by_rank(make: Callable[[int], Value]) -> tuple[Value, list[Array]]:
    """What this rank gives, and what all of them give."""
    return make(ronde.rank()), [make(rank).array for rank in range(ronde.size())]


def expect(found: Value, array: Any, dtype: DType, what: object = "") -> None:
    """These numbers, with this shape and dtype."""
    wanted = np.asarray(array)
    assert found.dtype is dtype, f"{what}: {found.dtype.name} is not {dtype.name}"
    assert found.array.shape == wanted.shape, f"{what}: {found.array.shape} is not {wanted.shape}"
    assert np.array_equal(found.array, wanted), f"{what}: {found.array} is not {wanted}"


@contextmanager
def raises(framework: Framework, kinds: type[Exception] | tuple[type[Exception], ...], match: str) -> Iterator[None]:
    """An error of ronde of one of these kinds, with these words."""
    try:
        yield
    except Exception as error:
        found = framework.find_error(error)
        assert isinstance(found, kinds), f"{found!r} is not {kinds}"
        assert re.search(match, str(found), re.DOTALL), f"{match!r} is not in {found!r}"
    else:
        raise AssertionError(f"nothing was raised, expected was {kinds}")


def uneven(framework: Framework, rank: int) -> int:
    """How many rows more than others a rank gives, where members may differ."""
    return 0 if framework.fixed_shapes else rank


def total_of_ranks() -> int:
    """The sum of all ranks, each plus 1."""
    return ronde.size() * (ronde.size() + 1) // 2


def share_of(num_rows: int, rank: int) -> slice:
    """The rows that reduce_scatter gives to a rank."""
    size = ronde.size()
    counts = [num_rows // size + (each < num_rows % size) for each in range(size)]
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


# --- allreduce -------------------------------------------------------------------------------------------------------


def _allreduce_with(op: Op, framework: Framework) -> None:
    """Every dtype, alone and in lists of all shapes, with and without factors, is what NumPy gives."""
    allreduce = framework.collectives.allreduce
    plans: list[tuple[DType, float, float]] = []
    for dtype in framework.dtypes:
        if not find_reduction_error(OperationKind.ALLREDUCE, dtype, op, scaled=False):
            plans.append((dtype, 1.0, 1.0))
            if dtype.is_float:
                plans.append((dtype, *SCALES))
    inputs = [numbers(ronde.rank(), dtype, *shape) for dtype, _, _ in plans for shape in SHAPES]

    def compute(*xs: Any) -> list[Any]:
        results = []
        for number, (_, prescale, postscale) in enumerate(plans):
            part = list(xs[number * len(SHAPES) : (number + 1) * len(SHAPES)])
            results += allreduce(part, op=op.name.lower(), prescale=prescale, postscale=postscale)
            results.append(allreduce(part[-1], op=op, prescale=prescale, postscale=postscale))
        return results

    found = iter(framework.run(compute, inputs))
    for dtype, prescale, postscale in plans:
        for shape in (*SHAPES, SHAPES[-1]):
            given = [numbers(rank, dtype, *shape).array.reshape(-1) for rank in range(ronde.size())]
            wanted = reduce(given, dtype, op, prescale, postscale).reshape(shape)
            expect(next(found), wanted, dtype, f"{dtype.name} of shape {shape}, times {prescale} and {postscale}")


for _op in EXACT_OPS:
    _add(f"allreduce_with_{_op.name.lower()}", functools.partial(_allreduce_with, _op))


@case
def allreduce_with_adasum(framework: Framework) -> None:
    allreduce, counts = framework.collectives.allreduce, (5, 1000, 1)
    for dtype in (DType.FLOAT32, DType.FLOAT64):
        inputs = [numbers(ronde.rank(), dtype, count) for count in counts]
        for found, count in zip(
            framework.run(lambda *xs: allreduce(list(xs), op="adasum"), inputs), counts, strict=True
        ):
            given = [numbers(rank, dtype, count).array for rank in range(ronde.size())]
            np.testing.assert_allclose(found.array, reduce(given, dtype, Op.ADASUM, 1.0, 1.0), rtol=1e-5)


@tensor_case
def allreduce_of_a_list_of_several_dtypes(framework: Framework) -> None:
    allreduce, rank, total = framework.collectives.allreduce, ronde.rank(), total_of_ranks()
    given = values(np.full(3, rank + 1.0), np.full(2, rank + 1), np.full((2, 2), rank + 1.0), np.full(1, rank > 0))
    for name in (None, "of several"):
        found = framework.run(lambda *xs, name=name: allreduce(list(xs), name=name), given)
        for each, value in zip(found, given, strict=True):
            wanted = np.ones(1, bool) if value.dtype is DType.BOOL else np.full(value.array.shape, total)
            expect(each, wanted, value.dtype)


@case
def factors_have_double_precision(framework: Framework) -> None:
    ops, factor = framework.collectives, 1.0 + 2.0**-40

    def compute(x: Any) -> list[Any]:
        return [
            ops.allreduce(x, op="mean", prescale=factor, postscale=2.0),
            ops.reduce_scatter(x, op="mean", prescale=factor),
        ]

    reduced, share = framework.run(compute, values(np.ones(ronde.size())))
    expect(reduced, [2.0 * factor] * ronde.size(), DType.FLOAT64)
    expect(share, [factor], DType.FLOAT64)


@case
def means_of_whole_numbers_never_wrap(framework: Framework) -> None:
    allreduce = framework.collectives.allreduce
    given = values(np.array([200], np.uint8), np.array([-(2**63), 2**63 - 1, -1 if ronde.rank() else 0]))
    small, large = framework.run(lambda x, y: [allreduce(x, op="mean"), allreduce(y, op="mean")], given)
    expect(small, [200], DType.UINT8)
    expect(large, [-(2**63), 2**63 - 1, 0], DType.INT64)


@case
def reductions_that_mean_nothing_are_refused(framework: Framework) -> None:
    ops = framework.collectives
    refused: list[tuple[DType, Op, float]] = [
        (DType.BOOL, Op.MEAN, 1.0),
        (DType.BOOL, Op.SUM, 2.0),
        (DType.FLOAT32, Op.BIT_AND, 1.0),
        (DType.BFLOAT16, Op.BIT_XOR, 1.0),
        (DType.INT32, Op.BIT_OR, 2.0),
        (DType.INT32, Op.ADASUM, 1.0),
    ]
    for dtype, op, prescale in refused:
        why = find_reduction_error(OperationKind.ALLREDUCE, dtype, op, scaled=prescale != 1.0)
        with raises(framework, ValueError, re.escape(why)):
            framework.run(
                lambda x, op=op, prescale=prescale: ops.allreduce(x, op=op, prescale=prescale),
                [numbers(0, dtype, 3)],
            )
    with raises(framework, ValueError, "adasum is for allreduce"):
        framework.run(lambda x: ops.reduce_scatter(x, op="adasum"), values(np.ones(4)))
    with raises(framework, ValueError, "op must be one of sum, mean, .*got 'average'"):
        framework.run(lambda x: ops.allreduce(x, op="average"), values(np.ones(4)))
    _expect_all_is_well(framework)


@case
def large_tensors_arrive_whole(framework: Framework) -> None:
    count = 700_001
    mine = np.arange(count, dtype=np.float32) % 1000 + ronde.rank()
    (found,) = framework.run(framework.collectives.allreduce, values(mine))
    expect(found, np.arange(count) % 1000 * ronde.size() + total_of_ranks() - ronde.size(), DType.FLOAT32)


@case
def everybody_gets_the_same_bits(framework: Framework) -> None:
    ops = framework.collectives
    mine = np.random.default_rng(ronde.rank()).standard_normal(10_001).astype(np.float32)
    (reduced,) = framework.run(lambda x: ops.allreduce(x, op="mean"), values(mine))
    (gathered,) = framework.run(ops.allgather, values(reduced.array.reshape(1, -1)))
    assert all(np.array_equal(row, reduced.array) for row in gathered.array)


# --- rows and roots --------------------------------------------------------------------------------------------------


@case
def allgather_of_every_dtype_with_uneven_rows(framework: Framework) -> None:
    for least in (0, 1, 1000):
        counts = [uneven(framework, rank) + least for rank in range(ronde.size())]
        inputs = [numbers(ronde.rank(), dtype, counts[ronde.rank()], 2) for dtype in framework.dtypes]
        # A list is one operation only if all have one dtype.
        found = framework.run(lambda *xs: [framework.collectives.allgather(x) for x in xs], inputs)
        for dtype, each in zip(framework.dtypes, found, strict=True):
            parts = [numbers(rank, dtype, count, 2).array for rank, count in enumerate(counts)]
            expect(each, np.concatenate(parts), dtype, (dtype.name, least))


@case
def allgather_of_scalars_lists_and_empty_rows(framework: Framework) -> None:
    allgather, rank, size = framework.collectives.allgather, ronde.rank(), ronde.size()
    counts = [uneven(framework, each) + 1 for each in range(size)]
    given = values(np.array(rank, np.float32), np.full((counts[rank], 2), 1.0), np.full(3, 2.0), np.zeros((2, 0)))

    def compute(scalar: Any, wide: Any, long: Any, empty: Any) -> list[Any]:
        return [allgather(scalar), *allgather([wide, long]), allgather(empty)]

    scalars, wide, long, empty = framework.run(compute, given)
    expect(scalars, np.arange(size), DType.FLOAT32)
    expect(wide, np.ones((sum(counts), 2)), DType.FLOAT64)
    expect(long, np.full(3 * size, 2.0), DType.FLOAT64)
    expect(empty, np.zeros((2 * size, 0)), DType.FLOAT64)


@case
def different_numbers_of_rows_are_refused_where_shapes_are_fixed(framework: Framework) -> None:
    ops, rank, size = framework.collectives, ronde.rank(), ronde.size()
    if not framework.fixed_shapes:
        return
    with raises(
        framework, ValueError, "all members give equally many rows, and these were given: 1 by rank 0, 2 by rank"
    ):
        framework.run(lambda x: ops.allgather(x, name="uneven"), values(np.ones(rank + 1)))
    with raises(framework, ValueError, "all members give equally many rows, and these were given"):
        framework.run(lambda x: ops.alltoall(x, name="exchanged")[0], values(np.ones((rank + 1) * size)))
    _expect_all_is_well(framework)


@case
def broadcast_of_every_dtype_from_every_root(framework: Framework) -> None:
    broadcast = framework.collectives.broadcast
    for root in range(ronde.size()):
        inputs = [numbers(ronde.rank(), dtype, *shape) for dtype in framework.dtypes for shape in ((5, 2), (), (0, 3))]
        found = iter(framework.run(lambda *xs, root=root: [broadcast(x, root=root) for x in xs], inputs))
        for dtype in framework.dtypes:
            for shape in ((5, 2), (), (0, 3)):
                expect(next(found), numbers(root, dtype, *shape).array, dtype, (dtype.name, root, shape))


@tensor_case
def broadcast_of_a_list_gives_a_list(framework: Framework) -> None:
    given = values(np.full(3, float(ronde.rank())), np.full((2, 2), 10.0 * ronde.rank()))
    first, second = framework.run(lambda *xs: framework.collectives.broadcast(list(xs), root=1), given)
    expect(first, np.ones(3), DType.FLOAT64)
    expect(second, np.full((2, 2), 10.0), DType.FLOAT64)


@case
def reduce_scatter_of_every_dtype_with_uneven_rows(framework: Framework) -> None:
    reduce_scatter, size = framework.collectives.reduce_scatter, ronde.size()
    dtypes = [dtype for dtype in framework.dtypes if dtype is not DType.BOOL]
    for num_rows in (0, 1, size, 3 * size + 1):
        inputs = [numbers(ronde.rank(), dtype, num_rows, 2) for dtype in dtypes]
        found = framework.run(lambda *xs: [reduce_scatter(x) for x in xs], inputs)
        for dtype, each in zip(dtypes, found, strict=True):
            given = [numbers(rank, dtype, num_rows, 2).array for rank in range(size)]
            wanted = reduce(given, dtype, Op.SUM, 1.0, 1.0)[share_of(num_rows, ronde.rank())]
            expect(each, wanted, dtype, (dtype.name, num_rows))


@case
def reduce_scatter_with_operations_factors_and_lists(framework: Framework) -> None:
    reduce_scatter, size = framework.collectives.reduce_scatter, ronde.size()

    def compute(x: Any, y: Any) -> list[Any]:
        return [
            reduce_scatter(x, op="mean", prescale=2.0, postscale=4.0),
            reduce_scatter(x, op="max"),
            *reduce_scatter([x, y]),
        ]

    given = values(np.full(2 * size, ronde.rank() + 1.0), np.arange(3.0 * size).reshape(size, 3))
    mean, largest, first, second = framework.run(compute, given)
    np.testing.assert_allclose(mean.array, [8.0 * total_of_ranks() / size] * 2)
    expect(largest, [float(size)] * 2, DType.FLOAT64)
    expect(first, [float(total_of_ranks())] * 2, DType.FLOAT64)
    expect(second, np.arange(3.0 * size).reshape(size, 3)[ronde.rank() :][:1] * size, DType.FLOAT64)


@case
def alltoall_of_every_dtype_in_equal_shares(framework: Framework) -> None:
    size, rank = ronde.size(), ronde.rank()
    inputs = [numbers(rank, dtype, 2 * size, 3) for dtype in framework.dtypes]

    def compute(*xs: Any) -> list[Any]:
        results = []
        for x in xs:
            results += framework.collectives.alltoall(x)
        return results

    found = iter(framework.run(compute, inputs))
    for dtype in framework.dtypes:
        parts = [numbers(other, dtype, 2 * size, 3).array[2 * rank : 2 * rank + 2] for other in range(size)]
        expect(next(found), np.concatenate(parts), dtype, dtype.name)
        assert next(found).array.tolist() == [2] * size


@case
def alltoall_gives_what_splits_say(framework: Framework) -> None:
    alltoall, size, rank = framework.collectives.alltoall, ronde.size(), ronde.rank()
    splits = [(rank + to) % 3 for to in range(size)]
    mine = np.concatenate([np.full(count, 10 * rank + to) for to, count in enumerate(splits)])

    def compute(x: Any, counts: Any) -> list[Any]:
        return [*alltoall(x, splits=splits), *alltoall(x, splits=counts)]

    if framework.fixed_shapes:
        with raises(framework, ValueError, "inside of jit"):
            framework.run(compute, values(mine, np.array(splits)))
        return
    rows, counts, again, counts_again = framework.run(compute, values(mine, np.array(splits)))
    received = [(other + rank) % 3 for other in range(size)]
    expect(rows, [10 * other + rank for other in range(size) for _ in range(received[other])], DType.INT64)
    assert counts.array.tolist() == counts_again.array.tolist() == received
    expect(again, rows.array, DType.INT64)


@case
def alltoall_may_give_nothing(framework: Framework) -> None:
    size, rank = ronde.size(), ronde.rank()
    splits = [0] * (size - 1) + [4 if rank == 0 else 0]
    if framework.fixed_shapes:
        rows, counts = framework.run(lambda x: list(framework.collectives.alltoall(x)), values(np.ones((0, 3))))
        expect(rows, np.ones((0, 3)), DType.FLOAT64)
        assert counts.array.tolist() == [0] * size
        return
    rows, counts = framework.run(
        lambda x: list(framework.collectives.alltoall(x, splits=splits)), values(np.ones((4, 3)))
    )
    expect(rows, np.ones((4 if rank == size - 1 else 0, 3)), DType.FLOAT64)
    assert counts.array.tolist() == ([4] if rank == size - 1 else [0]) + [0] * (size - 1)


@case
def splits_that_cannot_be_are_refused(framework: Framework) -> None:
    alltoall, size = framework.collectives.alltoall, ronde.size()
    for splits, words in (([3] * size, "splits"), ([-1] + [1] * (size - 1), "splits"), ([1] * (size + 1), "splits")):
        with raises(framework, ValueError, words):
            framework.run(lambda x, splits=splits: list(alltoall(x, splits=splits)), values(np.ones(size + 1)))
    with raises(framework, ValueError, "alltoall"):
        framework.run(lambda x: list(alltoall(x)), values(np.ones(size + 1)))
    _expect_all_is_well(framework)


@case
def a_barrier_lets_go_when_all_have_come(framework: Framework) -> None:
    barrier = framework.collectives.barrier

    def compute(x: Any) -> Any:
        barrier()
        barrier(name="by name")
        return x * 2.0

    (found,) = framework.run(compute, values(np.ones(2)))
    expect(found, [2.0, 2.0], DType.FLOAT64)


# --- groups and names ------------------------------------------------------------------------------------------------


@case
def groups_of_some_ranks(framework: Framework) -> None:
    ops, rank, last = framework.collectives, ronde.rank(), ronde.size() - 1
    pair, alone = ronde.add_group([0, last]), ronde.add_group([last])

    def compute(x: Any) -> list[Any]:
        results = []
        if pair.included:
            results += [ops.allreduce(x, group=pair), ops.allgather(x, group=pair, name="pair")]
            results.append(ops.broadcast(x, root=last, group=pair))
        if alone.included:
            results.append(ops.allreduce(x, group=alone))
        return results

    if pair.included:
        reduced, gathered, given, *own = framework.run(compute, values(np.array([rank + 1.0])))
        expect(reduced, [last + 2.0], DType.FLOAT64)
        expect(gathered, [1.0, last + 1.0], DType.FLOAT64)
        expect(given, [last + 1.0], DType.FLOAT64)
        assert [each.array.tolist() for each in own] == ([[last + 1.0]] if rank == last else [])
    if rank == 0:
        with raises(framework, ValueError, rf"rank 0 is not a member of group {alone.id}"):
            framework.run(lambda x: ops.allreduce(x, group=alone), values(np.ones(1)))
    with raises(framework, ValueError, f"root must be a member of group {alone.id}|rank . is not a member"):
        framework.run(lambda x: ops.broadcast(x, root=0, group=alone), values(np.ones(1)))
    for group in (pair, alone):
        ronde.remove_group(group)
    with raises(framework, ValueError, "was removed|which this round does not have|rank . is not a member"):
        framework.run(lambda x: ops.allreduce(x, group=pair), values(np.ones(1)))
    _expect_all_is_well(framework)


@case
def a_name_may_mean_something_else_the_next_time(framework: Framework) -> None:
    ops, size = framework.collectives, ronde.size()
    for _ in range(2):
        for shape in ((3,), (4, 5), ()):
            for kind in (np.float32, np.int64):
                given = values(np.ones(shape, kind))
                (found,) = framework.run(lambda x: ops.allreduce(x, name="changes"), given)
                expect(found, np.full(shape, size, kind), given[0].dtype)
        counts = [uneven(framework, rank) + 1 for rank in range(size)]
        (rows,) = framework.run(lambda x: ops.allgather(x, name="changes"), values(np.ones(counts[ronde.rank()])))
        expect(rows, np.ones(sum(counts)), DType.FLOAT64)


@case
def a_name_that_is_used_twice_means_two_operations(framework: Framework) -> None:
    allreduce = framework.collectives.allreduce

    def compute(x: Any, y: Any) -> list[Any]:
        return [allreduce(x, name="twice"), allreduce(y * 10.0, name="twice"), allreduce(x * 100.0, name="twice")]

    for _ in range(5):
        found = framework.run(compute, values(np.ones(3), np.ones(3)))
        for factor, each in zip((1.0, 10.0, 100.0), found, strict=True):
            expect(each, np.full(3, factor * ronde.size()), DType.FLOAT64)


@case
def names_of_all_kinds(framework: Framework) -> None:
    allreduce = framework.collectives.allreduce
    names = ["with / and : and {braces}", "päckchen ∑", "x" * 300, "a\"quote'"]
    found = framework.run(lambda x: [allreduce(x, name=name) for name in names], values(np.ones(2)))
    for name, each in zip(names, found, strict=True):
        expect(each, np.full(2, ronde.size()), DType.FLOAT64, name)
    for wrong in ("", 7):
        with raises(framework, (TypeError, ValueError), "name must be a text"):
            framework.run(lambda x, wrong=wrong: allreduce(x, name=wrong), values(np.ones(2)))


@case
def a_rank_that_joins_gives_zeros_to_the_others(framework: Framework) -> None:
    allreduce, last = framework.collectives.allreduce, ronde.size() - 1
    join = getattr(framework.collectives, "join", ronde.join)
    for _ in range(2 if ronde.rank() == last else 0):
        (found,) = framework.run(lambda x: allreduce(x, name="joined"), values(np.full(5, 2.0)))
        expect(found, np.full(5, 2.0), DType.FLOAT64)
    assert int(join()) == last
    _expect_all_is_well(framework)


# --- mistakes --------------------------------------------------------------------------------------------------------


def _expect_all_is_well(framework: Framework) -> None:
    """After a mistake, the next operations work."""
    (found,) = framework.run(lambda x: framework.collectives.allreduce(x, name="after"), values(np.ones(2)))
    expect(found, np.full(2, ronde.size()), DType.FLOAT64)


def _expect_mismatch(
    framework: Framework,
    function: Callable[[Any], Any],
    given: Value,
    words: str,
) -> None:
    """The function fails with the same text on every rank, which has these words. Then all is as good as new."""
    text = ""
    try:
        framework.run(function, [given])
    except Exception as error:
        found = framework.find_error(error)
        assert isinstance(found, ronde.Mismatch), repr(found)
        text = str(found)
    assert re.search(words, text, re.DOTALL), f"{words!r} is not in {text!r}"
    assert len(set(ronde.objects.allgather(text))) == 1
    _expect_all_is_well(framework)


def mismatch(words: str) -> Callable[[Callable[..., tuple[Callable[..., Any], Value]]], object]:
    """A case in which the last rank asks for something else. The function is given the collectives and whether this
    rank is the odd one, and returns what to run with a name, and on what."""

    def add(make: Callable[..., tuple[Callable[..., Any], Value]]) -> object:
        def body(framework: Framework) -> None:
            function, given = make(framework.collectives, ronde.rank() == ronde.size() - 1)
            for _ in range(2):  # also when the name is known
                _expect_mismatch(framework, lambda x: function(x, "differs"), given, words)

        _add(f"mismatch_of_{make.__name__}", body)
        return make

    return add


@mismatch(words="3.*4")
def shapes(ops: Any, odd: bool) -> tuple[Callable[..., Any], Value]:
    return lambda x, name: ops.allreduce(x, name=name), values(np.ones(4 if odd else 3))[0]


@mismatch(words="int64.*float32")
def dtypes(ops: Any, odd: bool) -> tuple[Callable[..., Any], Value]:
    return lambda x, name: ops.allreduce(x, name=name), values(np.ones(3, np.float32 if odd else np.int64))[0]


@mismatch(words="min.*max")
def operations(ops: Any, odd: bool) -> tuple[Callable[..., Any], Value]:
    return lambda x, name: ops.allreduce(x, op="max" if odd else "min", name=name), values(np.ones(3))[0]


@mismatch(words=r"0\.5.*2\.0")
def factors(ops: Any, odd: bool) -> tuple[Callable[..., Any], Value]:
    return lambda x, name: ops.allreduce(x, prescale=2.0 if odd else 0.5, name=name), values(np.ones(3))[0]


@mismatch(words="allreduce.*allgather")
def kinds(ops: Any, odd: bool) -> tuple[Callable[..., Any], Value]:
    return lambda x, name: (ops.allgather if odd else ops.allreduce)(x, name=name), values(np.ones(3))[0]


@mismatch(words="0.*1")
def roots(ops: Any, odd: bool) -> tuple[Callable[..., Any], Value]:
    return lambda x, name: ops.broadcast(x, root=int(odd), name=name), values(np.ones(3))[0]


@mismatch(words=r"\*, 3.*\*, 4")
def row_shapes(ops: Any, odd: bool) -> tuple[Callable[..., Any], Value]:
    return lambda x, name: ops.allgather(x, name=name), values(np.ones((2, 3 + odd)))[0]


@mismatch(words=r"\*, 3.*\*, 4")
def exchanged_row_shapes(ops: Any, odd: bool) -> tuple[Callable[..., Any], Value]:
    return lambda x, name: list(ops.alltoall(x, name=name)), values(np.ones((ronde.size(), 3 + odd)))[0]


@mismatch(words="allreduce")
def lengths_of_lists(ops: Any, odd: bool) -> tuple[Callable[..., Any], Value]:
    return lambda x, name: ops.allreduce([x] * (3 if odd else 2), name=name), values(np.ones(3))[0]


@case
def a_mismatch_without_names_is_an_error_too(framework: Framework) -> None:
    allreduce, odd = framework.collectives.allreduce, ronde.rank() == ronde.size() - 1
    for count in (3, 5):
        given = values(np.ones(count + odd))[0]
        _expect_mismatch(framework, lambda x: allreduce(x), given, f"{count}.*{count + 1}")


@case
def wrong_arguments_are_refused(framework: Framework) -> None:
    ops, size, x = framework.collectives, ronde.size(), values(np.ones(3))
    for root in (size, -1):
        with raises(framework, ValueError, f"root must be a member .* got {root}"):
            framework.run(lambda x, root=root: ops.broadcast(x, root=root), x)
    for function in (ops.allreduce, ops.allgather, ops.reduce_scatter):
        with raises(framework, ValueError, "empty|at least one"):
            framework.run(lambda _, function=function: function([]), x)
    _expect_all_is_well(framework)


# --- gradients -------------------------------------------------------------------------------------------------------


def _expect_gradients(
    framework: Framework, function: Callable[..., Any], inputs: Sequence[Array], *wanted: Any
) -> None:
    found = framework.gradients(function, values(*inputs))
    for each, array in zip(found, wanted, strict=True):
        expect(each, np.asarray(array, each.array.dtype), each.dtype)


@gradient_case
def gradient_of_allreduce(framework: Framework) -> None:
    allreduce, size = framework.collectives.allreduce, ronde.size()
    x, weight = np.array([1.0, 2.0, 4.0]), ronde.rank() + 1.0
    total = float(total_of_ranks())
    _expect_gradients(framework, lambda x: allreduce(x) * weight, [x], [total] * 3)
    _expect_gradients(framework, lambda x: allreduce(x, name="g") * weight, [x], [total] * 3)
    scaled = [total * 8.0 / size] * 3
    found = framework.gradients(lambda x: allreduce(x, op="mean", prescale=2.0, postscale=4.0) * weight, values(x))
    np.testing.assert_allclose(found[0].array, scaled)
    for kind in (np.float16, np.float32):
        _expect_gradients(framework, lambda x: allreduce(x) * weight, [x.astype(kind)], [total] * 3)


@gradient_case
def gradient_of_allreduce_of_a_list(framework: Framework) -> None:
    allreduce, weight, total = framework.collectives.allreduce, ronde.rank() + 1.0, float(total_of_ranks())

    def compute(x: Any, y: Any) -> Any:
        first, second = allreduce([x, y])
        return first * weight + second[:2] * (3.0 * weight)

    _expect_gradients(framework, compute, [np.ones(2), np.ones(3)], [total] * 2, [3 * total, 3 * total, 0.0])


@gradient_case
def gradient_of_allgather(framework: Framework) -> None:
    allgather, rank, weight = framework.collectives.allgather, ronde.rank(), ronde.rank() + 1.0
    total = float(total_of_ranks())
    for least in (0, 1, 2):  # rank 0 may give no rows
        mine = np.ones((uneven(framework, rank) + least, 2))
        _expect_gradients(framework, lambda x: allgather(x) * weight, [mine], np.full(mine.shape, total))
    _expect_gradients(framework, lambda x: allgather(x) * weight, [np.ones((2, 2))], np.full((2, 2), total))
    _expect_gradients(framework, lambda x: allgather(x) * weight, [np.array(1.0)], total)


@gradient_case
def gradient_of_broadcast(framework: Framework) -> None:
    broadcast, weight, total = framework.collectives.broadcast, ronde.rank() + 1.0, float(total_of_ranks())
    for root in range(ronde.size()):
        wanted = [total if ronde.rank() == root else 0.0] * 3
        _expect_gradients(framework, lambda x, root=root: broadcast(x, root=root) * weight, [np.ones(3)], wanted)


@gradient_case
def gradient_of_reduce_scatter(framework: Framework) -> None:
    reduce_scatter, size, weight = framework.collectives.reduce_scatter, ronde.size(), ronde.rank() + 1.0
    num_rows = 2 * size + 1
    owners = [rank + 1.0 for rank in range(size) for _ in range(num_rows)[share_of(num_rows, rank)]]
    _expect_gradients(framework, lambda x: reduce_scatter(x) * weight, [np.ones(num_rows)], owners)
    found = framework.gradients(
        lambda x: reduce_scatter(x, op="mean", prescale=4.0, postscale=2.0) * weight, values(np.ones(num_rows))
    )
    np.testing.assert_allclose(found[0].array, np.array(owners) * 8.0 / size)


@gradient_case
def gradient_of_alltoall(framework: Framework) -> None:
    alltoall, size, weight = framework.collectives.alltoall, ronde.size(), ronde.rank() + 1.0
    equal = [to + 1.0 for to in range(size) for _ in range(2)]
    _expect_gradients(framework, lambda x: alltoall(x)[0] * weight, [np.ones(2 * size)], equal)
    if framework.fixed_shapes:
        return
    splits = [(ronde.rank() + to) % 3 for to in range(size)]
    wanted = [to + 1.0 for to, count in enumerate(splits) for _ in range(count)]
    _expect_gradients(framework, lambda x: alltoall(x, splits=splits)[0] * weight, [np.ones(sum(splits))], wanted)


@gradient_case
def gradient_in_a_group(framework: Framework) -> None:
    ops, rank, last = framework.collectives, ronde.rank(), ronde.size() - 1
    pair = ronde.add_group([0, last])
    if pair.included:

        def compute(x: Any) -> Any:
            reduced = ops.allreduce(x, group=pair) * (rank + 1.0)
            return reduced + ops.allgather(x, group=pair)[:1] + ops.broadcast(x, root=last, group=pair)

        total = last + 2.0 + (2.0 if rank == 0 else 0.0) + (2.0 if rank == last else 0.0)
        _expect_gradients(framework, compute, [np.ones(1)], [total])
    ronde.remove_group(pair)


@gradient_case
def gradient_of_a_gradient(framework: Framework) -> None:
    allreduce, size = framework.collectives.allreduce, ronde.size()
    (found,) = framework.second_gradients(lambda x: allreduce(x * x * x), values(np.array([3.0])))
    expect(found, [6.0 * 3.0 * size], DType.FLOAT64)


@gradient_case
def operations_without_a_gradient_say_so(framework: Framework) -> None:
    ops = framework.collectives
    for function in (ops.allreduce, ops.reduce_scatter):
        with raises(framework, NotImplementedError, "with op='max' has no gradient"):
            framework.gradients(lambda x, function=function: function(x, op="max"), values(np.ones(4)))
    _expect_all_is_well(framework)
