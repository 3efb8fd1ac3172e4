"""Model averaging: each rank takes steps of its own, and the parameters are brought together every few steps.

It is asynchronous SGD without servers, in two ways. With `allreduce` (local SGD, periodic averaging) all ranks come
together every k steps and take the mean of their parameters. With `gossip` no rank waits for another: every k steps it
takes in what has come meanwhile, and sends a share of itself to one other rank, which is 1, 2, 4 … places on along the
ring, in turn (push-sum; stochastic gradient push).

Push-sum. Each rank has parameters z and a weight w, 1 at first; its mass is w and w * z. It sends z with half of its
weight and keeps the other half. Who gets (z', w') has (w z + w' z') / (w + w') with the weight w + w' from then on. So
the sums of w and of w * z over all ranks, with what is on its way, do not change, whoever is slow and whatever the
order: they give the mean of all. A slow rank is sent more often than it sends, so its weight grows, and its steps count
as much per second as those of others.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ronde.comm import objects
from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.comm.mailbox import MailboxMessage
from ronde.comm.work import Work
from ronde.errors import OperationTimeout, PeerLost
from ronde.types import Deadline

METHODS = ("allreduce", "gossip")
MIN_WEIGHT = 1e-6
"""A rank with less weight sends nothing until it has got some: its neighbours are too slow to take it."""
WAIT_CHECK_S = 0.1
"""How often a wait looks whether its deadline is over, and lets Python run signal handlers."""
WEIGHT = struct.Struct("<d")


class Share(NamedTuple):
    """Parameters, and the weight that they count with."""

    values: Array
    weight: float

    def __add__(self, other: object) -> Share:
        """Both together. The values are new, unless one of the weights is 0."""
        assert isinstance(other, Share)
        weight = self.weight + other.weight
        if not other.weight or not self.weight:
            return Share(self.values if self.weight else other.values, weight)
        part = np.asarray(other.weight / weight, self.values.dtype)
        return Share(self.values + part * (other.values - self.values), weight)

    def split(self) -> tuple[Share, Share]:
        """What is kept and what is sent: the same values, each with half of the weight."""
        half = self.weight / 2
        return Share(self.values, half), Share(self.values, self.weight - half)


def choose_peer(index: int, number: int, size: int) -> int:
    """To whom a member sends its share of this number: 1, 2, 4 … places on along the ring, in turn."""
    hops = 1 << number % max(1, (size - 1).bit_length())
    return (index + hops) % size


class ModelAverager:
    """Brings the parameters of all members of a group together. Made by all members alike; they begin with the
    parameters of the first. The arrays are changed in place, by step() and finish() only."""

    def __init__(self, arrays: Sequence[Array], *, every: int = 8, method: str = "allreduce", group: Group) -> None:
        if every < 1:
            raise ValueError(f"every must be 1 or more, got {every}")
        if method not in METHODS:
            raise ValueError(f"averaging must be one of {', '.join(METHODS)}, got {method!r}")
        self._arrays = list(arrays)
        self._every = every
        self._method = method
        self._group = group
        assert group.rank is not None
        self._index = group.rank
        self._dtype = np.result_type(np.float32, *self._arrays)
        self.num_steps = 0
        self.weight = 1.0
        """Of this rank's parameters; always 1 with allreduce."""
        self._num_shares = 0
        self._sent = [0] * group.size
        """By member, how many shares were sent to it."""
        self._received = [0] * group.size
        self._under_way: Work | None = None
        """The last share that was sent, if it may still be on its way."""
        self._inbox = Share(np.zeros(0, self._dtype), 0.0)
        self._changed = threading.Condition()
        """Guards the inbox and what was received; the thread of the mailbox adds to both."""
        self._write(group.broadcast(self._read(), root=group.ranks[0]))
        self._mailbox = group.open_mailbox(self._on_share) if method == "gossip" else None

    def step(self) -> bool:
        """Called after each step of this rank. Return whether it was one in which parameters were brought together.
        With allreduce that is collective, so all ranks take the same number of steps."""
        self.num_steps += 1
        if self.num_steps % self._every:
            return False
        if self._mailbox is None:
            self._write(self._group.allreduce(self._read(), op="mean"))
        else:
            own = self._take_inbox(Share(self._read(), self.weight))
            if own.weight >= MIN_WEIGHT and (self._under_way is None or self._under_way.done()):
                own = self._send_share(own)
            self.weight = own.weight
            self._write(own.values)
        return True

    def finish(self) -> None:
        """Give all ranks the mean of all, with everything in it that was sent. Collective, and idempotent until the
        next step. Ranks may have taken different numbers of steps if they gossip."""
        own = Share(self._read(), self.weight)
        if self._mailbox is not None:
            if self._under_way is not None:
                self._under_way.wait()
            sent = objects.allgather(self._sent, group=self._group)
            self._wait_for([row[self._index] for row in sent])
            own = self._take_inbox(own)
        total = self._group.allreduce(np.append(own.values.astype(np.float64) * own.weight, own.weight))
        self.weight = 1.0
        self._write(total[:-1] / total[-1])

    def close(self) -> None:
        """Take no more shares. Idempotent."""
        if self._mailbox is not None:
            self._mailbox.close()

    # --- gossip ----------------------------------------------------------------------------------------------------

    def _send_share(self, own: Share) -> Share:
        """Send half to the next peer; what is kept. All of it, if the peer is gone."""
        assert self._mailbox is not None
        peer = choose_peer(self._index, self._num_shares, self._group.size)
        self._num_shares += 1
        if peer == self._index:
            return own
        kept, sent = own.split()
        try:
            self._under_way = self._mailbox.post(
                self._group.ranks[peer], WEIGHT.pack(sent.weight), sent.values.copy(), wait=False
            )
        except PeerLost:
            return own
        self._sent[peer] += 1
        return kept

    def _take_inbox(self, own: Share) -> Share:
        with self._changed:
            inbox, self._inbox = self._inbox, Share(self._inbox.values[:0], 0.0)
        return own + inbox

    def _wait_for(self, expected: Sequence[int]) -> None:
        """Wait for all shares that were sent to this rank."""
        deadline = Deadline(self._group.operation_timeout_s)
        with self._changed:
            while any(got < wanted for got, wanted in zip(self._received, expected, strict=True)):
                if deadline.expired:
                    raise OperationTimeout(f"rank {self._group.ranks[self._index]} did not get all shares in time")
                self._changed.wait(WAIT_CHECK_S)

    def _on_share(self, message: MailboxMessage) -> None:
        # In the thread of the mailbox.
        (weight,) = WEIGHT.unpack(message.header)
        with self._changed:
            self._inbox = self._inbox + Share(message.payload, weight)
            self._received[self._group.ranks.index(message.source)] += 1
            self._changed.notify_all()

    # --- the parameters --------------------------------------------------------------------------------------------

    def _read(self) -> Array:
        """All parameters, one behind the other, in new memory."""
        flat = [np.zeros(0, self._dtype), *(array.reshape(-1) for array in self._arrays)]
        return np.concatenate(flat, dtype=self._dtype, casting="unsafe")

    def _write(self, values: Array) -> None:
        start = 0
        for array in self._arrays:
            array[...] = values[start : start + array.size].reshape(array.shape)
            start += array.size
