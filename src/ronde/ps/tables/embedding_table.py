"""Embedding tables: parameters of which a step uses few rows. They are on the servers only, cut by rows into parts.

Part i of n parts has the rows i, i + n, i + 2n and so on, so rows that are used often, which tend to be neighbours, are
spread over all servers. A row that was never trained takes no memory: its first values are a pure function of its
number. This module has what workers and servers both know of a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ronde.ps.optimizers import Optimizer
from ronde.ps.partition import MIN_PART_BYTES, Array

RowInitializer: TypeAlias = Callable[[Array, int], Array]
"""The first values of rows: (their numbers, dim) -> an array with one row for each. A pure function: replicas call it,
whenever they need the rows, and have to get the same."""

MAX_TABLE_PART_BYTES = 256 * 1024 * 1024
"""Larger than a part of other parameters, because a message carries only some of its rows."""
MAX_PART_ROWS = 2**32
"""Rows travel with 32 bits for their number within a part."""


def _hash(numbers: Array, seed: int) -> Array:
    """64 random bits for each number: the finalizer of SplitMix64. The same on all machines."""
    with np.errstate(over="ignore"):
        z = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64((seed * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D) % 2**64)
        z ^= z >> np.uint64(30)
        z *= np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(27)
        z *= np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return z


def _number_elements(rows: Array, dim: int) -> Array:
    return rows.astype(np.uint64)[:, None] * np.uint64(dim) + np.arange(dim, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class NormalRows:
    """First values of rows: normal random numbers that depend on nothing but the seed, the row and the column.

    Each is the sum of twelve uniform ones, so it is the same to the bit on all machines, and never more than six
    standard deviations from the mean.
    """

    std: float = 0.01
    mean: float = 0.0
    seed: int = 0

    def __call__(self, rows: Array, dim: int) -> Array:
        total = np.zeros((len(rows), dim), np.uint64)
        elements = _number_elements(rows, dim)
        for number in range(3):
            bits = _hash(elements, 3 * self.seed + number)
            for shift in (0, 16, 32, 48):
                total += (bits >> np.uint64(shift)) & np.uint64(0xFFFF)
        return self.mean + self.std * ((total.astype(np.float64) + 6.0) / 65536.0 - 6.0)


@dataclass(frozen=True, slots=True)
class UniformRows:
    """First values of rows: random numbers from -bound to bound that depend on nothing but the seed, the row and the
    column. With a bound of 0, all are 0."""

    bound: float = 0.05
    seed: int = 0

    def __call__(self, rows: Array, dim: int) -> Array:
        if not self.bound:
            return np.zeros((len(rows), dim))
        bits = _hash(_number_elements(rows, dim), self.seed) >> np.uint64(11)
        return (bits.astype(np.float64) * 2.0**-52 - 1.0) * self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTable:
    """A table of a ParameterServer: num_rows vectors of dim numbers, of which each step uses some.

    `initializer` gives the first values of rows: NormalRows, UniformRows, or a pure function of yours, (numbers of
    rows, dim) -> array. `optimizer` trains the table in place of that of the other parameters. Rows that a step does
    not use are not changed by it, nor are their states: weight decay and momentum act on a row when it is used.
    """

    num_rows: int
    dim: int
    dtype: str = "float32"
    initializer: RowInitializer = NormalRows()
    optimizer: Optimizer | None = None
    group: int = 0
    """Of hyper-parameters, as those of tensors."""

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.dim < 1:
            raise ValueError(f"a table needs at least one row and one column, got {self.num_rows} x {self.dim}")
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f"the dtype of a table must be float32 or float64, got {self.dtype!r}")
        if not callable(self.initializer):
            raise TypeError(f"initializer must be a function of rows and dim, got {type(self.initializer).__name__}")

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.dim * np.dtype(self.dtype).itemsize

    def first_values(self, rows: Array) -> Array:
        """The values of rows that were never trained."""
        values = np.asarray(self.initializer(rows, self.dim))
        if values.shape != (len(rows), self.dim):
            raise ValueError(
                f"the initializer of a table must return {(len(rows), self.dim)} values, got the shape {values.shape}"
            )
        return values.astype(self.dtype)


@dataclass(frozen=True, slots=True)
class TablePart:
    """The rows first, first + stride, first + 2 stride … of a table."""

    table: int
    first: int
    stride: int
    num_rows: int
    """Of this part."""
    dim: int
    dtype: str
    group: int

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.dim * np.dtype(self.dtype).itemsize

    def number_rows(self, own: Array) -> Array:
        """The numbers in the table of rows of this part."""
        return self.first + own.astype(np.int64) * self.stride


def cut_table(index: int, table: EmbeddingTable, num_servers: int) -> tuple[TablePart, ...]:
    """Cut a table into parts: one for each server, or several if they would be too large; one if it is small."""
    num_parts = 1
    if table.num_bytes > MIN_PART_BYTES:
        per_server = math.ceil(table.num_bytes / num_servers / MAX_TABLE_PART_BYTES)
        num_parts = min(num_servers * per_server, table.num_rows)
    if table.num_rows / num_parts > MAX_PART_ROWS:
        num_parts = math.ceil(table.num_rows / MAX_PART_ROWS)
    return tuple(
        TablePart(index, first, num_parts, len(range(first, table.num_rows, num_parts)), table.dim, *_kind(table))
        for first in range(num_parts)
    )


def cut_tables(tables: Mapping[str, EmbeddingTable], optimizer: Optimizer, num_servers: int) -> tuple[TablePart, ...]:
    """Cut all tables into parts. `optimizer` is that of tables that have no other; it must be able to train rows."""
    parts: list[TablePart] = []
    for index, (name, table) in enumerate(tables.items()):
        own = table.optimizer or optimizer
        if own.needs_whole_tensors:
            raise ValueError(
                f"{type(own).__name__} cannot train table {name}, of which a step has some rows; give it another one"
            )
        parts += cut_table(index, table, num_servers)
    return tuple(parts)


def _kind(table: EmbeddingTable) -> tuple[str, int]:
    return table.dtype, table.group


def sum_duplicates(rows: Array, values: Array) -> tuple[Array, Array]:
    """The rows that occur, sorted, and for each the sum of its values, added in their order."""
    unique, inverse = np.unique(rows, return_inverse=True)
    if len(unique) == len(rows):
        return unique, values[np.argsort(rows, kind="stable")]
    order = np.argsort(inverse.reshape(-1), kind="stable")
    starts = np.searchsorted(inverse.reshape(-1)[order], np.arange(len(unique)))
    return unique, np.add.reduceat(values[order], starts, axis=0)


class RowCache:
    """Rows of one table that a worker has read, all of one version."""

    def __init__(self, table: EmbeddingTable) -> None:
        self._rows = np.zeros(0, np.int64)
        """Sorted."""
        self._values = np.zeros((0, table.dim), table.dtype)

    def find_missing(self, rows: Array) -> Array:
        """Those of the rows that are not here."""
        missing: Array = np.setdiff1d(rows, self._rows, assume_unique=True)
        return missing

    def add(self, rows: Array, values: Array) -> None:
        """Add rows that are not here yet."""
        if not len(rows):
            return
        every = np.concatenate([self._rows, rows])
        order = np.argsort(every, kind="stable")
        self._rows, self._values = every[order], np.concatenate([self._values, values])[order]

    def take(self, rows: Array) -> Array:
        """The values of rows that are here, in new memory."""
        values: Array = self._values[np.searchsorted(self._rows, rows)]
        return values
