"""Plans of gradients: an allreduce that is repeated in every step runs on a channel of its own, in memory that the
ranks of a host share.

A plan has one bucket for all arrays of an operation. It is opened when the operation first runs in a round, together
with the other members; ranks may open those of different operations in any order. The native handler copies the
operands straight into the bucket. What runs through Python, and the first step, uses the spare memory of the plan, so
that the two never write to the same.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet

import numpy as np

from ronde.comm.buffers import Array, address_of
from ronde.comm.call import Memory, hash_signature
from ronde.comm.plan import Bucket, Plan
from ronde.comm.world import World, current_world
from ronde.text import shorten
from ronde.training.graph_operations import GraphOperation, group_of, refuse_twice_at_once

MAX_PLANS = 8
"""Of one operation, if the shapes of its arrays change. Then the oldest is closed."""
MAX_SHAPES_TEXT = 200


class BucketUser(Protocol):
    """The native library, which copies operands into buckets."""

    def set_bucket(self, operation: str, address: int, num_bytes: int) -> None: ...

    def is_bucket_used(self, address: int) -> bool: ...


class GradientPlan:
    """A plan in one round."""

    def __init__(self, world: World, plan: Plan, operation: GraphOperation) -> None:
        self.world = world
        self.plan = plan
        self.name = operation.name
        self.group_id = operation.group
        self.operation = operation.encode()
        self.is_native = False
        """Whether the native handler writes into its bucket."""
        self.is_busy = False
        """Whether its bucket is under way. Guarded by the lock of GradientPlans."""


class GradientPlans:
    """The plans of this process. Safe from any thread."""

    def __init__(self) -> None:
        self._plans: dict[tuple[object, ...], GradientPlan] = {}
        self._lock = threading.RLock()  # a signal handler that ends the round may interrupt its owner
        self._opening: dict[str, threading.Lock] = {}
        self._bucket_user: BucketUser | None = None
        self._closed: list[Plan] = []
        """Closed plans in whose buckets an operation may still have its arrays."""
        self._users: dict[str, WeakSet[object]] = {}
        """By the names of operations, the objects in whose programs they are."""

    def add_user(self, name: str, user: object) -> None:
        """Keep the plans of the operation with this name open as long as the object lives, here or on another rank."""
        with self._lock:
            self._users.setdefault(name, WeakSet()).add(user)

    def _agree_on_unused(self, operation: GraphOperation) -> set[str]:
        """The names of operations whose users are gone on all members of the operation's group; collective. When an
        object is collected differs from rank to rank, and a plan that only some members close would be of no use."""
        group = group_of(operation)
        with self._lock:
            names = {each.name for each in self._plans.values() if each.group_id == group.id} - {operation.name}
            unused = {hash_signature(name): name for name in names if self._is_unused(name)}
        mine = np.array(sorted(unused), np.uint64)
        gathered = group.allgather(mine, name=f"{operation.name}.unused").tolist()
        return {name for number, name in unused.items() if gathered.count(number) == group.size}

    def _is_unused(self, name: str) -> bool:
        users = self._users.get(name, self._users.get(name.rpartition("@")[0]))  # of the second one in a program
        return users is not None and not users

    def use_buckets(self, user: BucketUser) -> None:
        """Tell the native library the buckets of operations."""
        self._bucket_user = user

    def find(self, operation: GraphOperation, arrays: Sequence[Memory]) -> GradientPlan | None:
        """The plan of an operation on such arrays, if it was opened in this round."""
        with self._lock:
            found = self._plans.get(_key_of(operation, arrays))
        return found if found is not None and found.world is current_world("gradients") else None

    def open(self, operation: GraphOperation, arrays: Sequence[Memory]) -> GradientPlan:
        """The same, opened together with the other members if it is not open. Mismatch if theirs are other arrays."""
        with self._lock:
            opening = self._opening.setdefault(operation.name, threading.Lock())
        with opening:
            found = self.find(operation, arrays)
            if found is None:
                unused = self._agree_on_unused(operation)
                found = GradientPlan(current_world(), _make_plan(operation, arrays), operation)
                self._add(_key_of(operation, arrays), found, unused)
            return found

    def _add(self, key: tuple[object, ...], added: GradientPlan, unused: set[str]) -> None:
        with self._lock:
            is_first = all(each.world is not added.world for each in self._plans.values())
            same = [key for key, each in self._plans.items() if each.operation == added.operation]
            oldest = set(same[: max(0, len(same) + 1 - MAX_PLANS)])
            dropped = [
                (key, each)
                for key, each in self._plans.items()
                if key in oldest
                or each.world is not added.world
                or (each.group_id == added.group_id and each.name in unused)
            ]
            for old, _ in dropped:
                del self._plans[old]
            self._plans[key] = added
            added.is_native = self._bucket_user is not None
            for each in self._plans.values():
                if each is not added and each.operation == added.operation:
                    each.is_native = False
            bucket, user = added.plan.arrays[0], self._bucket_user
            if user is not None:
                for _, each in dropped:
                    if each.is_native and each.operation != added.operation:
                        user.set_bucket(each.operation, 0, 0)
                user.set_bucket(added.operation, address_of(bucket), bucket.nbytes)
                closed = [*self._closed, *(each.plan for _, each in dropped)]
                self._closed = [plan for plan in closed if user.is_bucket_used(address_of(plan.arrays[0]))]
        if is_first:
            added.world.call_at_close(functools.partial(self._end_round, added.world))
        for _, each in dropped:  # in an earlier round its channel is closed already
            each.plan.close()

    def _end_round(self, world: World) -> None:
        """Use the buckets of a round no more: a rank that was suspended may write to them when all others have gone on
        to the next one."""
        with self._lock:
            for plan in self._plans.values():
                if plan.world is world and plan.is_native and self._bucket_user is not None:
                    plan.is_native = False
                    self._bucket_user.set_bucket(plan.operation, 0, 0)

    @contextmanager
    def hold(self, operation: GraphOperation, plan: GradientPlan) -> Iterator[None]:
        """Take the plan meanwhile. Mismatch if it is taken."""
        self.take(operation, plan)
        try:
            yield
        finally:
            self.release(plan)

    def take(self, operation: GraphOperation, plan: GradientPlan) -> None:
        with self._lock:
            is_taken, plan.is_busy = plan.is_busy, True
        if is_taken:
            raise refuse_twice_at_once(operation)

    def release(self, plan: GradientPlan) -> None:
        with self._lock:
            plan.is_busy = False


gradient_plans = GradientPlans()


def is_planned(operation: GraphOperation) -> bool:
    """Whether an operation runs by a plan: if there is somebody to agree with."""
    group = group_of(operation)
    return operation.is_planned and group.included and group.size > 1


def copy_in(arrays: Sequence[Array], bucket: Array) -> None:
    position = 0
    for array in arrays:
        bucket[position : position + array.size] = array.reshape(-1).view(bucket.dtype)
        position += array.size


def copy_out(bucket: Array, arrays: Sequence[Array]) -> None:
    position = 0
    for array in arrays:
        array.reshape(-1).view(bucket.dtype)[:] = bucket[position : position + array.size]
        position += array.size


def _key_of(operation: GraphOperation, arrays: Sequence[Memory]) -> tuple[object, ...]:
    return (operation.encode(), arrays[0].dtype, *(array.shape for array in arrays))


def _make_plan(operation: GraphOperation, arrays: Sequence[Memory]) -> Plan:
    group = group_of(operation)
    _ = group.ordered_channel  # raises when nothing can start here
    counts = tuple(array.size for array in arrays)
    shapes = ", ".join(str(list(array.shape)) for array in arrays)
    described = f"{operation.name}: {shorten(shapes, MAX_SHAPES_TEXT)} ({hash_signature(shapes) & 0xFFFFFFFF:08x})"
    bucket = Bucket(
        sum(counts),
        arrays[0].dtype,
        op=operation.op,
        prescale=operation.prescale,
        postscale=operation.postscale,
        name=described,
        parts=tuple(count for count in counts if count) if operation.op == "adasum" else (),
    )
    name = f"jax.{hash_signature(operation.name) & 0xFFFFFFFF:08x}"
    return Plan([bucket], group, name=name)
