"""The channels on which the gradients of graphs are reduced: one for each plan of buckets, opened by all members when
the plan is first used in a round. Also the errors after which a channel cannot be used any more.

The buckets of a plan are matched by their order alone. So a channel is aborted for all members when a step begins while
another one of its plan is under way in this process, or when the one before has not started all of its buckets.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ronde.comm.call import hash_signature
from ronde.comm.channel import Channel
from ronde.comm.group import Group
from ronde.comm.world import World, current_world
from ronde.errors import Mismatch, RondeError

MAX_CHANNEL_NAME = 60


class PlanChannels:
    """The channels on which buckets of gradients are reduced, one per plan and round. Safe from any thread."""

    def __init__(self) -> None:
        self._channels: dict[str, tuple[World, Channel]] = {}
        self._lock = threading.Lock()
        self._opening: dict[str, threading.Lock] = {}
        self._held: set[str] = set()

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
            return channel

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
