"""The collectives on arrays of MXNet, as ronde's own of the same names.

With wait=True (the default) they return when the result is there, and errors are ronde's own. With wait=False they
return at once, as MXNet's own operations do: the engine starts them when their inputs are computed, whatever uses their
results waits for them, and an error is raised there, as an MXNetError in which find_error() finds ronde's. The results
of allgather() and alltoall() have sizes that only the other members know, so these always wait.

Members are matched by name, or without one by the order of their calls: of those with wait=True among themselves, and
of those with wait=False among themselves. MXNet's autograd does not see collectives: to it, results are constants.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ronde.comm.arguments import check_name
from ronde.comm.buffers import array_at
from ronde.comm.call import CallOptions, Memory, Signature, Span, even_shares, get_signature
from ronde.comm.group import Group
from ronde.comm.work import Work
from ronde.comm.world import current_world, resolve_group
from ronde.mxnet.arrays import as_memory, check_array, is_array, new_array, wait_for_arrays
from ronde.mxnet.engine_operations import EngineOperation, OrderedStream, get_engine_thread, streams, submit
from ronde.text import format_ranks
from ronde.types import DType, Op, OperationKind

STREAM = "mxnet"
"""The stream of asynchronous operations without a name."""


def allreduce(
    x: Any,  # an array or a list of arrays
    *,
    op: str | Op = "sum",
    out: Any = None,
    group: Group | None = None,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    priority: int = 0,
    wait: bool = True,
) -> Any:
    """Return postscale * op(prescale * x) over all members, in new arrays or in `out` (which may be x itself).

    op is sum, mean, min, max, product, adasum, or for whole numbers and bool bit_and, bit_or, bit_xor. The arrays of a
    list that have one dtype are one operation. `priority` is that of MXNet's engine: of several operations that are
    ready, the one with the highest starts first.
    """
    members, given_name = resolve_group(group), check_name(name)
    xs, is_list = _as_list(x, "allreduce")
    outs = _as_outs(xs, out, is_list, "allreduce")
    options = CallOptions(op, prescale, postscale)
    by_dtype: dict[DType, list[int]] = {}
    for index, each in enumerate(xs):
        by_dtype.setdefault(check_array(each, "allreduce"), []).append(index)
    for dtype, indices in by_dtype.items():
        part = given_name if len(by_dtype) == 1 or not given_name else f"{given_name}.{dtype.name.lower()}"
        pairs = [(xs[index], outs[index]) for index in indices]
        _start_same_shape(members, OperationKind.ALLREDUCE, dtype, pairs, options, part, priority, wait)
    return outs if is_list else outs[0]


def broadcast(
    x: Any,  # an array or a list of arrays
    *,
    root: int = 0,
    out: Any = None,
    group: Group | None = None,
    name: str | None = None,
    priority: int = 0,
    wait: bool = True,
) -> Any:
    """Return the array of the root, a rank of the world, in a new array or in `out` (which may be x itself). The arrays
    of the other ranks only give shape and dtype. A list gives a list."""
    members, given_name = resolve_group(group), check_name(name)
    xs, is_list = _as_list(x, "broadcast")
    outs = _as_outs(xs, out, is_list, "broadcast")
    for index, (given, taken) in enumerate(zip(xs, outs, strict=True)):
        part = f"{given_name}.{index}" if given_name and is_list else given_name
        dtype = check_array(given, "broadcast")
        options = CallOptions(root=root)
        _start_same_shape(members, OperationKind.BROADCAST, dtype, [(given, taken)], options, part, priority, wait)
    return outs if is_list else outs[0]


def reduce_scatter(
    x: Any,  # an array or a list of arrays
    *,
    op: str | Op = "sum",
    group: Group | None = None,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    priority: int = 0,
    wait: bool = True,
) -> Any:
    """Reduce x over all members and return this rank's share of the rows. If the rows cannot be divided evenly, the
    first members get one more. A list gives a list."""
    members, given_name = resolve_group(group), check_name(name)
    xs, is_list = _as_list(x, "reduce_scatter")
    _ = members.ordered_channel
    results = []
    for index, each in enumerate(xs):
        dtype = check_array(each, "reduce_scatter")
        if not each.ndim:
            raise ValueError("reduce_scatter: a scalar has no rows to share out; reshape it to (1,)")
        shares = even_shares(each.shape[0], members.size)
        result = new_array((shares[members.rank or 0], *each.shape[1:]), dtype, each)
        part = f"{given_name}.{index}" if given_name and is_list else given_name
        _start_reduce_scatter(
            members, dtype, (each, result), CallOptions(op, prescale, postscale), part, priority, wait
        )
        results.append(result)
    return results if is_list else results[0]


def allgather(x: Any, *, group: Group | None = None, name: str | None = None) -> Any:
    """Return the arrays of all members, concatenated along the first dimension, in which they may differ. A scalar
    counts as one row. A list gives a list."""
    members, given_name = resolve_group(group), check_name(name)
    xs, is_list = _as_list(x, "allgather")
    by_dtype: dict[DType, list[int]] = {}
    for index, each in enumerate(xs):
        by_dtype.setdefault(check_array(each, "allgather"), []).append(index)
    wait_for_arrays(xs)
    results: list[Any] = [None] * len(xs)
    for dtype, indices in by_dtype.items():
        part = given_name if len(by_dtype) == 1 or not given_name else f"{given_name}.{dtype.name.lower()}"
        given = [as_memory(xs[index], dtype) for index in indices]
        for index, rows in zip(indices, members.allgather(given, name=part or None), strict=True):
            results[index] = _as_result(rows, dtype, xs[index])
    return results if is_list else results[0]


def alltoall(
    x: Any,
    *,
    splits: Any = None,  # a sequence of whole numbers, or an array of them
    group: Group | None = None,
    name: str | None = None,
) -> tuple[Any, Any]:
    """Send splits[i] rows of x to member i (default: equal shares). Return the rows that this rank received, in the
    order of the members, and how many came from each, as an array of int64."""
    members, given_name = resolve_group(group), check_name(name)
    dtype = check_array(x, "alltoall")
    counts = splits.asnumpy() if is_array(splits) else splits
    wait_for_arrays([x])
    rows, received = members.alltoall(as_memory(x, dtype), splits=counts, name=given_name or None)
    return _as_result(rows, dtype, x), _as_result(np.asarray(received, np.int64), DType.INT64, x)


def barrier(*, group: Group | None = None, name: str | None = None) -> None:
    """Wait until every member has called barrier()."""
    resolve_group(group).barrier(name=name)


def join(*, group: Group | None = None) -> int:
    """Contribute zeros to the allreduces of the others until every member has joined; for a rank that has no more data.
    Return the rank that joined last. What this rank has called before is waited for first."""
    current_world("join").finish_operations("join")
    return resolve_group(group).join()


# --- operations whose results are like their inputs ------------------------------------------------------------------

Pair = tuple[Any, Any]
"""What an operation reads, and what it writes: two arrays, or one and the same."""


def _start_same_shape(
    members: Group,
    kind: OperationKind,
    dtype: DType,
    pairs: Sequence[Pair],
    options: CallOptions,
    name: str,
    priority: int,
    wait: bool,
) -> None:
    _ = members.ordered_channel  # raises when nothing can start here
    peer = -1
    if kind is OperationKind.BROADCAST:
        peer = _index_of_root(members, options.root)
    if wait:
        wait_for_arrays([given for given, _ in pairs])
        wait_for_arrays([taken for _, taken in pairs], written=True)
        _run_by_group(members, kind, _memory(pairs, dtype), options, name, wait=True)
        return
    signature = get_signature(kind, dtype, tuple(tuple(given.shape) for given, _ in pairs), options)
    if name:
        start = functools.partial(_start_named, members, signature, options, name)
        push(members, name, signature, pairs, start, priority)
    else:
        push_ordered(streams.get(members, STREAM), signature, pairs, priority, peer=peer)


def push_ordered(
    stream: OrderedStream, signature: Signature, pairs: Sequence[Pair], priority: int, *, peer: int = -1
) -> None:
    """Start an operation of a stream: in the engine, or, where that cannot be, by waiting for it."""
    counts = [given.size for given, _ in pairs]

    def start(addresses: Sequence[int]) -> Work:
        given, taken = addresses[: len(pairs)], addresses[len(pairs) :]
        spans = tuple(map(Span, given, taken, counts))
        return submit(stream, signature, signature.make_call(spans, None, peer=peer))

    push(stream, "", signature, pairs, start, priority)


def run_ordered(stream: OrderedStream, signature: Signature, arrays: Sequence[Any]) -> None:
    """Run an operation of a stream on these arrays, in place, in the calling thread. Operations of one stream are
    either all run like this or all pushed: otherwise their order would not be that of the calls."""
    wait_for_arrays(arrays)
    wait_for_arrays(arrays, written=True)
    addresses = [as_memory(each, signature.dtype).address for each in arrays]
    spans = tuple(Span(address, address, each.size) for address, each in zip(addresses, arrays, strict=True))
    stream.open_channel().run(signature.make_call(spans, arrays), signature)


def push(
    target: OrderedStream | Group,
    name: str,
    signature: Signature,
    pairs: Sequence[Pair],
    start: Callable[[Sequence[int]], Work],
    priority: int,
    store: Callable[[Any, Sequence[int]], None] | None = None,
) -> None:
    """Give an operation to the engine, of a stream or with the name of a group's; where that cannot be, run it now.
    `start` gets the addresses of all inputs, and then those of all outputs."""
    thread = get_engine_thread()
    if thread is None:
        _run_now(pairs, start, store)
        return
    positions, read, written = _arrange(pairs)

    def start_at(addresses: Sequence[int]) -> Work:
        return start([addresses[position] for position in positions])

    store_at = None
    if store is not None:
        store_found = store

        def store_at(result: Any, addresses: Sequence[int]) -> None:
            store_found(result, [addresses[position] for position in positions])

    operation = EngineOperation(signature.description, start_at, store_at)
    stream = target if isinstance(target, OrderedStream) else (target, name)
    thread.push(operation, stream, read, written, priority)


def _arrange(pairs: Sequence[Pair]) -> tuple[list[int], list[Any], list[Any]]:
    """The arrays that are only read, and those that are written. The positions are those of all inputs, and then of
    all outputs, in the two lists together."""
    read = [given for given, taken in pairs if given is not taken]
    written = [taken for _, taken in pairs]
    outputs = list(range(len(read), len(read) + len(written)))
    next_read = iter(range(len(read)))
    inputs = [
        output if given is taken else next(next_read) for (given, taken), output in zip(pairs, outputs, strict=True)
    ]
    return inputs + outputs, read, written


def _run_now(
    pairs: Sequence[Pair], start: Callable[[Sequence[int]], Work], store: Callable[[Any, Sequence[int]], None] | None
) -> None:
    wait_for_arrays([given for given, _ in pairs])
    wait_for_arrays([taken for _, taken in pairs], written=True)
    arrays = [*(given for given, _ in pairs), *(taken for _, taken in pairs)]
    addresses = [as_memory(each, check_array(each, "an operation")).address for each in arrays]
    result = start(addresses).wait()
    if store is not None:
        store(result, addresses)


def _memory(pairs: Sequence[Pair], dtype: DType) -> tuple[list[Memory], list[Memory]]:
    return [as_memory(given, dtype) for given, _ in pairs], [as_memory(taken, dtype) for _, taken in pairs]


def _start_named(
    members: Group, signature: Signature, options: CallOptions, name: str, addresses: Sequence[int]
) -> Work:
    dtype, shapes = signature.dtype.name.lower(), signature.shapes
    memory = [Memory(address, shape, dtype) for address, shape in zip(addresses, (*shapes, *shapes), strict=True)]
    half = len(shapes)
    work: Work = _run_by_group(members, signature.kind, (memory[:half], memory[half:]), options, name, wait=False)
    return work


def _run_by_group(
    members: Group,
    kind: OperationKind,
    memory: tuple[list[Memory], list[Memory]],
    options: CallOptions,
    name: str,
    *,
    wait: bool,
) -> Any:  # what the group returns
    inputs, outputs = memory
    if kind is OperationKind.BROADCAST:
        return members.broadcast(inputs[0], root=options.root, out=outputs[0], name=name or None, wait=wait)
    scales: dict[str, Any] = {"prescale": options.prescale, "postscale": options.postscale}
    return members.allreduce(inputs, op=options.op, out=outputs, name=name or None, wait=wait, **scales)


def _start_reduce_scatter(
    members: Group, dtype: DType, pair: Pair, options: CallOptions, name: str, priority: int, wait: bool
) -> None:
    given, taken = pair
    scales: dict[str, Any] = {"prescale": options.prescale, "postscale": options.postscale}
    if wait:
        wait_for_arrays([given])
        share = members.reduce_scatter(as_memory(given, dtype), op=options.op, name=name or None, **scales)
        _store(share, [0, as_memory(taken, dtype).address])
        return
    signature = get_signature(OperationKind.REDUCE_SCATTER, dtype, (tuple(given.shape),), options)
    if name:

        def start(addresses: Sequence[int]) -> Work:
            memory = Memory(addresses[0], tuple(given.shape), dtype.name.lower())
            work: Work = members.reduce_scatter(memory, op=options.op, name=name, wait=False, **scales)
            return work

        push(members, name, signature, [pair], start, priority, _store)
        return
    stream, row_size = streams.get(members, STREAM), given.size // given.shape[0] if given.size else 0
    counts = tuple(rows * row_size for rows in even_shares(given.shape[0], members.size))
    num_elements = given.size

    def start_in_order(addresses: Sequence[int]) -> Work:
        span = Span(addresses[0], addresses[1], num_elements)
        return submit(stream, signature, signature.make_call((span,), None, counts=counts))

    push(stream, "", signature, [pair], start_in_order, priority)


def _store(result: Any, addresses: Sequence[int]) -> None:
    """Copy the result of a reduce_scatter to the array at the second address."""
    rows = getattr(result, "bits", result)  # of a Bfloat16View
    if rows.size:
        array_at(addresses[1], rows.size, rows.dtype)[:] = rows.reshape(-1)


# --- arguments and results -------------------------------------------------------------------------------------------


def _as_list(x: Any, what: str) -> tuple[list[Any], bool]:
    if not isinstance(x, list | tuple):
        return [x], False
    if not x:
        raise ValueError(f"{what}: the list of arrays is empty")
    return list(x), True


def _as_outs(xs: Sequence[Any], out: Any, is_list: bool, what: str) -> list[Any]:
    if out is None:
        dtypes = [check_array(each, what) for each in xs]
        return [new_array(each.shape, dtype, each) for each, dtype in zip(xs, dtypes, strict=True)]
    outs = list(out) if is_list and isinstance(out, list | tuple) else [out]
    if len(outs) != len(xs):
        raise ValueError(f"{what}: out has {len(outs)} arrays for {len(xs)}")
    for given, taken in zip(xs, outs, strict=True):
        wanted, found = (check_array(given, what), tuple(given.shape)), (check_array(taken, what), tuple(taken.shape))
        if wanted != found:
            raise ValueError(
                f"{what}: out is {found[0].name.lower()}{list(found[1])}, "
                f"but the result is {wanted[0].name.lower()}{list(wanted[1])}"
            )
    return outs


def _index_of_root(members: Group, root: int) -> int:
    try:
        return members.ranks.index(operator.index(root))
    except (TypeError, ValueError):
        ranks = format_ranks(members.ranks)
        raise ValueError(f"broadcast: root must be a member of group {members.id} ({ranks}), got {root!r}") from None


def _as_result(array: Any, dtype: DType, like: Any) -> Any:
    """A new array of MXNet with these numbers."""
    rows = getattr(array, "bits", array)
    result = new_array(rows.shape, dtype, like)
    if rows.size:
        array_at(as_memory(result, dtype).address, rows.size, rows.dtype)[:] = rows.reshape(-1)
    return result
