"""What the training logic asks of an ML library: FrameworkAdapter and BackwardPass.

A framework's package (ronde.torch and its siblings) implements both. Parameters are known by their index in the list
that describe_parameters() returned last; only the adapter knows what a gradient is and where it lies.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ronde.comm.buffers import Array
from ronde.comm.group import Group


class ParameterInfo(msgspec.Struct, frozen=True):
    """A parameter that trains, as all ranks see it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """The dtype in which its gradient is reduced. A complex number is two numbers of it."""
    count: int
    """How many numbers of that dtype its gradient has."""
    memory_order: str = ""
    """The order of its elements in memory, when it is not row by row."""
    sparse: bool = False
    """Whether its gradient is sparse, as far as this rank has seen."""

    def __str__(self) -> str:
        order = f" ({self.memory_order})" if self.memory_order else ""
        return f"{self.name!r} {self.dtype}{list(self.shape)}{order}"


class GradientKind(enum.IntEnum):
    """What a rank has of a gradient. The maximum over all ranks decides what becomes of it."""

    NONE = 0
    """The parameter was not used."""
    DENSE = 1
    SPARSE = 2
    """It is sparse where a dense one was expected. It is reduced by itself, in this step and in all later ones."""
    NOT_FINITE = 3
    """It has an infinity or a NaN."""


@dataclass(slots=True, eq=False)
class BucketMemory:
    """Where the gradients of one bucket lie: by index of the parameter, flat arrays of ParameterInfo.count elements."""

    arrays: Mapping[int, Array]
    """Memory that may become the gradients that the user sees. What a user has kept of it is not overwritten."""
    spare_arrays: Mapping[int, Array]
    """Memory that no user ever sees, so that it can always be written."""
    uses_spare: bool = False
    """Whether the gradients of this step are in the spare arrays. The adapter sets it when it copies them."""


class FrameworkAdapter(Protocol):
    """The gradients of some parameters of one model."""

    def describe_parameters(self) -> list[ParameterInfo]:
        """The parameters that train now, in an order that is equal on all ranks."""

    def parameters_changed(self, *, all_ready: bool) -> bool:
        """Whether describe_parameters() would list others than it did last. `all_ready`: all that it listed got
        gradients in this pass, so they train still. Called in every step."""

    def bind_buckets(self, buckets: Sequence[BucketMemory], on_ready: Sequence[Callable[..., object]]) -> None:
        """From now on gradients belong into this memory. When the gradient of a parameter is ready, call on_ready of
        its index, with any arguments, in one thread at a time. A gradient without an array stays where it is. Replaces
        what was bound before, and ends watch_new_parameters()."""

    def watch_new_parameters(self, on_gradient: Callable[..., object]) -> None:
        """Call on_gradient for every gradient of a parameter that the last description does not list: one that begins
        to train, or was added. Replaces what was watched before."""

    def copy_to_buckets(self, indices: Sequence[int]) -> dict[int, GradientKind]:
        """Copy these gradients, usually all of one bucket, into its arrays, with zeros where there is none, and make
        the arrays the gradients. If somebody has kept what is in the arrays, copy them into the spare arrays instead.
        Returns the kinds of those that are not DENSE. Called for every bucket in every step."""

    def assign_results(self, indices: Sequence[int], absent: Sequence[int]) -> None:
        """Make the results of these parameters the gradients; copies of them, if they are in spare arrays. `absent` are
        those that had no gradient here."""

    def still_has_result(self, ready_index: int | None) -> bool:
        """Whether the gradient of a parameter still is the result that was assigned last, and not all of them were set
        to zero. Called at the first gradient of a pass, that of `ready_index`, or of a new parameter (None)."""

    def has_unreduced_gradient(self) -> bool:
        """Whether there is a gradient that is not a result. If there was no backward pass, the user has set it."""

    def scale(self, indices: Sequence[int], factor: float) -> None:
        """Multiply the gradients in these arrays by a factor."""

    def take_gradients(self) -> object:
        """Return the gradients of all parameters, and let the parameters have none."""

    def put_back_gradients(self, taken: object, factor: float) -> None:
        """Make gradients that take_gradients() returned, multiplied by a factor, the gradients again."""

    def find_non_finite(self, indices: Sequence[int]) -> list[int]:
        """Return the indices of the gradients, dense or sparse, that have an infinity or a NaN."""

    def checksum_parameters(self, skipped: Container[str]) -> list[tuple[str, int]]:
        """The names and checksums (training/sync_check) of all parameters that the members should have alike, also of
        those that do not train, but for the skipped names."""

    def allreduce_sparse(self, index: int, group: Group, scales: tuple[float, float]) -> None:
        """Make a gradient the sum of all members' sparse ones, with factors before and after the sum. If it has an
        array, that holds the result of the dense ones: add it. Collective, in program order."""

    def close(self) -> None:
        """Call on_ready and on_gradient no more. Gradients stay as they are. Idempotent."""


class BackwardPass(Protocol):
    """The backward pass of a library in which gradients become ready one by one."""

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call this at the end of the running pass. If an error ends the pass, forget it without a call: nobody else
        has a reference to it, and it notices."""

    def is_nested(self, on_resume: Callable[[], None]) -> bool:
        """Whether the pass that is ending runs inside of another one. Then on_resume is called when that one goes
        on."""
