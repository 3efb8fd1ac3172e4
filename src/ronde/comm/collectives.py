"""The collectives as functions: each is one line over the method of a group, by default the group of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any

from ronde.comm.group import Group
from ronde.comm.plan import Bucket, Plan
from ronde.comm.world import current_world, refused_to_candidate, resolve_group
from ronde.observe.events import Event
from ronde.observe.metrics import Metrics
from ronde.types import Op


def rank() -> int:
    """Return the number of this process in the job, from 0."""
    return current_world("rank()").rank


def size() -> int:
    """Return the number of ranks in the job."""
    return current_world("size()").size


def local_rank() -> int:
    """Return the number of this rank among the ranks of its host, from 0."""
    return current_world("local_rank()").local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return current_world("local_size()").topology.local_size


def cross_rank() -> int:
    """Return the number of this host among the hosts that have a rank with this local_rank()."""
    return current_world("cross_rank()").topology.cross_rank


def cross_size() -> int:
    """Return how many hosts have a rank with this local_rank()."""
    return current_world("cross_size()").topology.cross_size


def world() -> Group:
    """Return the group of all ranks."""
    return current_world("world()").group


def groups() -> list[Group]:
    """Return all groups: the world first, then those of init(groups=…) and add_group() in order."""
    return current_world("groups()").groups


def add_group(ranks: Iterable[int]) -> Group:
    """Make a group of these ranks and return it. Collective: every rank of the world calls it, with the same ranks."""
    return current_world("add_group()").add_group(ranks)


def remove_group(group: Group) -> None:
    """Remove a group in which no operation is under way. Collective: every rank of the world calls it."""
    current_world("remove_group()").remove_group(group)


def allreduce(
    x: Any,  # an array of any library
    *,
    op: str | Op = "sum",
    out: Any = None,
    group: Group | None = None,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    wait: bool = True,
) -> Any:
    """Return postscale * op(prescale * x) over all members, in a new array or in `out` (which may be x itself).

    op is sum, mean, min, max, product, adasum, or for whole numbers and bool bit_and, bit_or, bit_xor. A list of arrays
    of one dtype travels as a unit and gives a list. With wait=False it returns a Work at once. Without a name, members
    are matched by the order of their calls; with a name the order does not matter.
    """
    members = resolve_group(group)
    return members.allreduce(x, op=op, out=out, name=name, prescale=prescale, postscale=postscale, wait=wait)


def allgather(x: Any, *, group: Group | None = None, name: str | None = None, wait: bool = True) -> Any:
    """Return the arrays of all members, concatenated along the first dimension, in which they may differ.

    A scalar counts as one row. A list gives a list. Without a name, wait=False still waits until every member has
    called, because only then is the size of the result known.
    """
    return resolve_group(group).allgather(x, name=name, wait=wait)


def broadcast(
    x: Any,
    *,
    root: int = 0,
    out: Any = None,
    group: Group | None = None,
    name: str | None = None,
    wait: bool = True,
) -> Any:
    """Return the array of the root, a rank of the world, in a new array or in `out`."""
    return resolve_group(group).broadcast(x, root=root, out=out, name=name, wait=wait)


def reduce_scatter(
    x: Any,
    *,
    op: str | Op = "sum",
    group: Group | None = None,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    wait: bool = True,
) -> Any:
    """Reduce x over all members and return this rank's share of the rows. If the rows cannot be divided evenly, the
    first members get one more. A list of arrays of one dtype travels as a unit and gives a list."""
    members = resolve_group(group)
    return members.reduce_scatter(x, op=op, name=name, prescale=prescale, postscale=postscale, wait=wait)


def alltoall(
    x: Any,
    *,
    splits: Any = None,
    group: Group | None = None,
    name: str | None = None,
    wait: bool = True,
) -> Any:
    """Send splits[i] rows of x to member i (default: equal shares).

    Return the rows that this rank received, in the order of the members, and how many came from each. A list of arrays
    of one dtype with equally many rows travels as a unit; then the rows are a list. Without a name, wait=False still
    waits until every member has called, as in allgather.
    """
    return resolve_group(group).alltoall(x, splits=splits, name=name, wait=wait)


def reduce(
    x: Any,
    *,
    root: int = 0,
    op: str | Op = "sum",
    out: Any = None,
    group: Group | None = None,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    wait: bool = True,
) -> Any:
    """Return postscale * op(prescale * x) over all members on the root, a rank of the world, and None on the others.

    On the root the result is in a new array or in `out`; the other members' `out` is not used. A list of arrays of one
    dtype travels as a unit and gives a list.
    """
    members = resolve_group(group)
    return members.reduce(x, root=root, op=op, out=out, name=name, prescale=prescale, postscale=postscale, wait=wait)


def gather(x: Any, *, root: int = 0, group: Group | None = None, name: str | None = None, wait: bool = True) -> Any:
    """Return the arrays of all members on the root, a rank of the world, concatenated along the first dimension, in
    which they may differ; None on the others.

    Without a name, wait=False still waits until every member has called, as in allgather.
    """
    return resolve_group(group).gather(x, root=root, name=name, wait=wait)


def scatter(
    x: Any,
    *,
    root: int = 0,
    splits: Any = None,
    group: Group | None = None,
    name: str | None = None,
    wait: bool = True,
) -> Any:
    """Share out the rows of the root's array, and return those of this rank: splits[i] rows for member i. By default
    all get equally many, or the first members one more.

    The arrays of the other members only give dtype and the shape of a row. A list of arrays of one dtype with equally
    many rows travels as a unit and gives a list. Without a name, wait=False still waits until every member has called,
    as in allgather.
    """
    return resolve_group(group).scatter(x, root=root, splits=splits, name=name, wait=wait)


def barrier(*, group: Group | None = None, name: str | None = None, wait: bool = True) -> Any:
    """Wait until every member has called barrier()."""
    return resolve_group(group).barrier(name=name, wait=wait)


def join(*, group: Group | None = None) -> int:
    """Contribute zeros to the allreduces of the others until every member has joined; for a rank that has no more data.
    Return the rank that joined last.

    The others can only use operations that zeros do not change: sum, mean (still divided by the number of all members),
    bit_or, bit_xor, and max of unsigned numbers. Anything else is a Mismatch for them.
    """
    current_world("join").finish_operations("join")
    return resolve_group(group).join()


def send(x: Any, to: int, *, tag: int = 0, group: Group | None = None, wait: bool = True) -> Any:
    """Send an array to one member (a rank of the world), which calls receive() with the same tag.

    It returns, or its Work is done, as soon as x may be changed again: the receiver need not be there.
    """
    return resolve_group(group).send(x, to, tag=tag, wait=wait)


def receive(out: Any, source: int | None = None, *, tag: int = 0, group: Group | None = None, wait: bool = True) -> Any:
    """Receive an array from one member (a rank of the world) into `out`, and return `out`. Messages of one member with
    one tag arrive in the order in which they were sent.

    Without a source the message may come from any member; then it returns `out` and the rank that sent it.
    """
    return resolve_group(group).receive(out, source, tag=tag, wait=wait)


def plan(buckets: Sequence[Bucket], *, group: Group | None = None) -> Plan:
    """Agree with the other members on buckets that are reduced in every step."""
    return Plan(buckets, resolve_group(group))


def mark_step() -> None:
    """Count one training step, for the rate in `ronde top`. Ronde's optimizers call it; a loop without them calls it
    once per step."""
    current = current_world("mark_step()")
    if current.is_candidate:
        raise refused_to_candidate("a training step")
    current.recorder.steps += 1


def metrics() -> Metrics:
    """Return counts and times of this rank's operations since init()."""
    return current_world("metrics()").recorder.metrics()


def events() -> list[Event]:
    """Return the latest events of this rank, the oldest first."""
    return current_world("events()").recorder.events()


def start_timeline(path: str | PathLike[str]) -> None:
    """Write a timeline of all ranks from now on, until stop_timeline() or the end of the round. One rank calls it.

    The file is a Chrome trace on the host of the coordinator: where `ronde run` was called, or that of rank 0. Another
    timeline that is being written ends.
    """
    current_world("start_timeline()").start_timeline(path)


def stop_timeline() -> None:
    """Stop the timeline and complete its file. Any one rank calls it."""
    current_world("stop_timeline()").stop_timeline()
