"""The seam between the training logic and an ML library: what a Reducer asks of it, in a dozen methods.

A binding (ronde.torch and its siblings) writes one Adapter. Parameters are known by their index in the list that
describe() gave last; what a gradient is, and where it lies, only the adapter knows.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from ronde.comm.buffers import Array
from ronde.comm.group import Group

__all__ = ["BackwardPass", "FrameworkAdapter", "GradientKind", "ParameterInfo"]


class ParameterInfo(msgspec.Struct, frozen=True):
    """One parameter that trains, as all ranks see it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of the type of its numbers on the wire; a complex one counts as two numbers."""
    count: int
    """How many of these numbers."""
    memory_order: str = ""
    """How they lie in memory, when not row by row."""
    sparse: bool = False
    """Whether its gradient is sparse, as far as this rank has seen."""

    def __str__(self) -> str:
        """As it stands in errors."""
        order = f" ({self.memory_order})" if self.memory_order else ""
        return f"{self.name!r} {self.dtype}{list(self.shape)}{order}"


class GradientKind(enum.IntEnum):
    """What a rank has of a gradient. Among ranks the highest counts."""

    NONE = 0
    """The parameter was not used."""
    DENSE = 1
    SPARSE = 2
    """Where a dense one was expected: it travels by itself, and from then on always."""
    NOT_FINITE = 3
    """It has an infinity, or something that is not a number."""


class FrameworkAdapter(Protocol):
    """The gradients of some parameters of one model."""

    def describe_parameters(self) -> list[ParameterInfo]:
        """What trains now, in an order that is equal on all ranks. It makes the indices of all other methods."""

    def parameters_changed(self) -> bool:
        """Whether describe() would list other parameters than it did. Asked in every step: it must be quick."""

    def bind_buckets(self, bucket_views: Mapping[int, Array], on_ready: Callable[[int], object]) -> None:
        """From now on gradients belong into this memory, flat as Parameter.count says; call ready(index) for each that
        has come. Replaces what was bound before; what is not in `memory` stays where it is."""

    def watch_new_parameters(self, on_gradient: Callable[[], object]) -> None:
        """Call this for every gradient of a parameter that is in no description yet: one that begins to train, or was
        added. Replaces what was watched before; bind() ends it."""

    def copy_to_buckets(self, indices: Sequence[int]) -> dict[int, GradientKind]:
        """Put these gradients where they belong, zeros where there is none. Tells of those that are not DENSE."""

    def assign_results(self, indices: Sequence[int], absent: Sequence[int]) -> None:
        """Their memory holds the result: make it their gradients. `absent` are those that had none here."""

    def still_has_result(self, ready_index: int | None) -> bool:
        """Whether a parameter still has the gradient that was delivered last. To that of `came`, which called ready(),
        another one may have been added; None: a stray one came."""

    def has_unreduced_gradient(self) -> bool:
        """Whether there is a gradient that was not delivered: when there was no pass, somebody has set it."""

    def scale(self, indices: Sequence[int], factor: float) -> None:
        """Multiply what was collected."""

    def find_non_finite(self, indices: Sequence[int]) -> list[int]:
        """Those of what was collected, sparse ones too, that have an infinity, or something that is not a number."""

    def allreduce_sparse(self, index: int, group: Group, scales: tuple[float, float]) -> None:
        """Make a gradient the sum of all members' sparse ones, with factors before and behind the sum. If it has a
        place, that holds the result of those that were dense: add it. Collective, in program order."""

    def close(self) -> None:
        """Call ready() no more. Gradients stay as they are. Idempotent."""


class BackwardPass(Protocol):
    """The library's backward pass, for those where gradients come one by one."""

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call this when the pass that is running has come to its end."""

    def is_nested(self, on_resume: Callable[[], None]) -> bool:
        """Whether the pass that is ending runs inside of another one. Then call this when that one goes on."""
