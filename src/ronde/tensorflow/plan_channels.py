"""The channels on which the gradients of graphs are reduced: one for each plan of buckets, opened by all members when
the plan is first used in a round. Also the errors after which a channel cannot be used any more.

The buckets of a plan are matched by their order alone. So a channel is aborted for all members when a step begins while
another one of its plan is under way in this process, or when the one before has not started all of its buckets.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from ronde.comm.call import hash_signature
from ronde.comm.channel import Channel
from ronde.comm.group import Group
from ronde.comm.world import World, current_world
from ronde.errors import Mismatch, RondeError

MAX_CHANNEL_NAME = 60


class PlanChannels:
    """The channels on which buckets of gradients are reduced, one per plan and round. Safe from any thread.

    A channel has a thread and descriptors, and a program may make any number of optimizers one after the other. So a
    plan can have an owner. When the next channel of a group is opened, its members tell each other which plans have
    lost theirs, and close the channels of those that all of them have told. They cannot do so before: when an owner is
    freed is not the same on all ranks, and a member may still be in the plan's last call.
    """

    def __init__(self) -> None:
        self._channels: dict[str, tuple[World, Channel]] = {}
        self._lock = threading.Lock()
        self._opening: dict[str, threading.Lock] = {}
        self._held: set[str] = set()
        self._num_owners: Counter[str] = Counter()
        """By name, of those that had one."""
        self._gone: deque[str] = deque()
        """The names of owners that are gone and still counted. Without the lock: an owner may be freed at any time,
        also in a thread that has it."""

    def set_owner(self, owner: object, name: str) -> None:
        """The plans of this name are not used any more when its owners are gone: those of reduce_gradients(name=name),
        and of their gradients."""
        with self._lock:
            self._num_owners[name] += 1
        weakref.finalize(owner, self._gone.append, name).atexit = False

    @contextmanager
    def hold(self, plan: str, group: Group) -> Iterator[Channel]:
        """The channel of a plan, for a step whose buckets are reduced in Python. Mismatch if another one holds it."""
        channel = self.open(plan, group)
        with self._lock:
            is_held = plan in self._held
            self._held.add(plan)
        if is_held:
            raise refuse_steps_at_once(group, channel, plan)
        try:
            yield channel
        finally:
            with self._lock:
                self._held.discard(plan)

    def open(self, plan: str, group: Group) -> Channel:
        """The channel of a plan in this round, opened together with the other members if it is not open. Members may
        open those of different plans in any order."""
        with self._lock:
            opening = self._opening.setdefault(plan, threading.Lock())
        with opening:
            channel = self.find(plan)
            if channel is None:
                world = current_world("gradients")
                _ = group.ordered_channel  # raises when nothing can start here
                channel = group.open_plan_channel(0, _channel_name(plan), overlapped=True, number=1)
                with self._lock:
                    self._channels[plan] = (world, channel)
                self._close_unowned(plan, world, group)
            return channel

    def _close_unowned(self, opened: str, world: World, group: Group) -> None:
        """Close what no member uses any more. Collective: called by all members that have opened a channel."""
        unowned = [plan for plan in self._find_unowned(world, group) if plan != opened]  # that is used, after all
        mine = np.frombuffer(msgspec.json.encode(unowned), np.uint8)
        told = group.allgather_each(mine, f"opening of {opened}")
        for plan in set.intersection(*(set(msgspec.json.decode(each.tobytes(), type=list[str])) for each in told)):
            with self._lock:
                found = self._channels.pop(plan, None)  # None if another thread, which opens another one, was faster
                self._opening.pop(plan, None)
            if found is not None:
                group.close_plan_channel(found[1])

    def _find_unowned(self, world: World, group: Group) -> list[str]:
        """The plans of the group that have had owners and have none. Those of earlier rounds are forgotten."""
        with self._lock:
            while self._gone:
                self._num_owners[self._gone.popleft()] -= 1
            unowned: set[str] = set()
            for name in [name for name, number in self._num_owners.items() if not number]:
                found = {plan for plan in self._channels if _has_name(plan, name)}
                old = {plan for plan in found if self._channels[plan][0] is not world}
                for plan in old:
                    del self._channels[plan]
                unowned |= found - old
                if found == old:  # and no other channel will be opened for this name
                    del self._num_owners[name]
        return sorted(each for each in unowned if each.startswith(f"{group.id}."))

    def find(self, plan: str) -> Channel | None:
        """The channel, if it was opened in this round."""
        with self._lock:
            found = self._channels.get(plan)
        return found[1] if found is not None and found[0] is current_world("gradients") else None

    def find_last(self, plan: str) -> Channel | None:
        """The channel of this round or of the one in which the plan was used last."""
        with self._lock:
            found = self._channels.get(plan)
        return None if found is None else found[1]


def _has_name(plan: str, name: str) -> bool:
    """Whether the plan is one of reduce_gradients(name=name), which adds to it where the name occurs several times."""
    own = plan.partition(".")[2]
    return own == name or own.startswith((f"{name}#", f"{name} ", f"{name}."))


def _channel_name(plan: str) -> str:
    """The plan's name as that of a channel: short, and of characters that a file name can have."""
    readable = re.sub(r"[^\w.-]+", "-", plan)[:MAX_CHANNEL_NAME]
    return f"tensorflow.{readable}.{hash_signature(plan) & 0xFFFFFFFF:08x}"


plan_channels = PlanChannels()


def abandoned_error(group: Group, channel: Channel, description: str) -> RondeError:
    """The error for a step that begins before all buckets of the one before were started. The members cannot know what
    the next call on the channel stands for, so all of them lose this rank there."""
    why = (
        f"the training step before was abandoned on rank {channel.members[group.rank or 0]}, when only some of its "
        "gradients were reduced"
    )
    group.abort_plan_channel(channel, why)
    return RondeError(
        f"{description}: {why}; look for the error that ended that step, and end the job or begin a new round after it"
    )


def refuse_steps_at_once(group: Group, channel: Channel, plan: str) -> Mismatch:
    """The error for a step that begins while another one of its plan is under way in this process. Buckets are matched
    by their order, so all members lose this rank on the channel."""
    name = plan.partition(".")[2]
    why = (
        f"rank {channel.members[group.rank or 0]} reduces {name!r} twice at once, so which of the two the other ranks "
        "have to meet is not known; give the two different names (name=), or run them one after the other, in one "
        "thread"
    )
    group.abort_plan_channel(channel, why)
    return Mismatch(why)
