"""The buckets of one accord on their way: one plan, its encoders, and the news that travels with them. Used by the
Reducer, which decides what starts when.

Order on the plan's channel, equal on all members: the first wires of all buckets; the news; then, for codecs with more
than one wire, the further wires bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ronde.binding.adapter import Parameter, State
from ronde.binding.buckets import GradientBucket
from ronde.binding.codec import Codec, Encoder, Wire
from ronde.binding.gradients import GradientSettings
from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.comm.plan import Bucket, Plan
from ronde.comm.work import Work
from ronde.types import DType, Op, parse_op

__all__ = ["PASSED", "WANTED", "Traffic"]

NUM_FACTS = 2
PASSED = -2
"""Behind the parameters' states: whether somebody had a backward pass."""
WANTED = -1
"""Whether somebody wants another accord."""


class Traffic:
    """Reduces gradients bucket by bucket. What is not started in the background runs in finish(), in this thread."""

    def __init__(
        self,
        group: Group,
        parameters: Sequence[Parameter],
        buckets: Sequence[GradientBucket],
        *,
        settings: GradientSettings,
        num_passes: int,
        codec: Codec | None,
    ) -> None:
        self.buckets = tuple(buckets)
        self.num_passes = num_passes
        """The number of passes that the factors of the plan are for."""
        encoders = [codec.open(bucket, parameters) if codec is not None else None for bucket in self.buckets]
        self._encoders: list[Encoder | None] = encoders
        first: list[Bucket] = []
        further: list[Bucket] = []
        self._wires: list[list[int]] = []
        """By bucket, the numbers of its wires in the plan."""
        scales = settings.scales(num_passes)
        behind = len(self.buckets) + 1
        for number, (bucket, encoder) in enumerate(zip(self.buckets, encoders, strict=True)):
            wanted = _planned(bucket, encoder, parse_op(settings.op), scales)
            first.append(wanted[0])
            self._wires.append([number, *range(behind + len(further), behind + len(further) + len(wanted) - 1)])
            further.extend(wanted[1:])
        news = Bucket(len(parameters) + NUM_FACTS, "uint8", "max", name="news of the gradients")
        self._plan = Plan([*first, news, *further], group)
        self._arrays = [[self._plan.arrays[wire] for wire in wires] for wires in self._wires]
        self._usual = np.full(news.count, State.DENSE, np.uint8)
        self._usual[WANTED] = 0
        self._usual_bytes = self._usual.tobytes()
        self.news = self._plan.arrays[len(first)]
        """One number per parameter and a few facts; after finish() the highest of all members."""
        self.memory: list[Array] = [
            arrays[0] if encoder is None else np.zeros(bucket.count, DType[bucket.dtype.upper()].numpy)
            for bucket, encoder, arrays in zip(self.buckets, encoders, self._arrays, strict=True)
        ]
        """Where the gradients of each bucket lie: on the wire itself, unless a codec stands between."""
        self._works: list[Work | None] = [None] * (len(first) + 1)

    def start(self, number: int) -> None:
        """Send a bucket in the background: its gradients are in place."""
        encoder = self._encoders[number]
        if encoder is not None:
            encoder.encode(0, self.memory[number], self._arrays[number])
        self._works[number] = self._plan.start(number)

    def write_news(self, states: Mapping[int, State], *, passed: bool, wanted: bool) -> None:
        """What this rank has of the gradients: DENSE where nothing else is said."""
        self.news[:] = self._usual
        for index, state in states.items():
            self.news[index] = state
        self.news[PASSED] = passed
        self.news[WANTED] = wanted

    @property
    def no_news(self) -> bool:
        """Whether somebody had each gradient, and nobody has anything else to tell."""
        return self.news.tobytes() == self._usual_bytes

    def start_news(self) -> None:
        """Send the news in the background, behind all buckets."""
        self._works[-1] = self._plan.start(len(self.buckets))

    def finish(self) -> None:
        """Run what was not started, wait for all, and write the gradients."""
        for number, encoder in enumerate(self._encoders):
            if self._works[number] is None and encoder is not None:
                encoder.encode(0, self.memory[number], self._arrays[number])
            self._end(number)
            if encoder is not None and len(self._arrays[number]) == 1:
                encoder.decode(self._arrays[number], self.memory[number])
        self._end(len(self.buckets))
        for number, encoder in enumerate(self._encoders):
            if encoder is not None and len(self._arrays[number]) > 1:
                self._run_further(number, encoder)

    def drain(self) -> None:
        """Wait for what is under way, and forget it."""
        for number, work in enumerate(self._works):
            if work is not None:
                self._end(number)

    def close(self) -> None:
        """Close the channel; the memory stays for as long as somebody looks at it. Idempotent."""
        self._plan.close()

    def _end(self, number: int) -> None:
        work = self._works[number]
        if work is None:
            self._plan.run(number)
        else:
            self._works[number] = None
            work.wait()

    def _run_further(self, number: int, encoder: Encoder) -> None:
        gradients, arrays = self.memory[number], self._arrays[number]
        for wire in range(1, len(arrays)):
            encoder.encode(wire, gradients, arrays)
            self._plan.run(self._wires[number][wire])
        encoder.decode(arrays, gradients)


def _planned(bucket: GradientBucket, encoder: Encoder | None, op: Op, scales: tuple[float, float]) -> list[Bucket]:
    """What the plan has to know of a bucket, wire by wire."""
    wires = (Wire(bucket.count, bucket.dtype),) if encoder is None else encoder.wires
    # Adasum weighs every gradient by itself: it has to know where each begins.
    parts = tuple(span.count for span in bucket.spans) if op is Op.ADASUM else ()
    return [
        Bucket(wire.count, wire.dtype, op, *scales, bucket.name, parts if wire.count == bucket.count else ())
        for wire in wires
    ]
