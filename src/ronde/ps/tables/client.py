"""How a worker reads rows of embedding tables and sends their gradients, and what a checkpoint has of a table.

All rows that a worker uses in a step are of the version of its last read of the other parameters, whenever it asks for
them. What it has asked for is kept until the next read. Used by ParameterServer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ronde.ps.partition import Array
from ronde.ps.payloads import decode_values, pack_arrays, unpack_arrays
from ronde.ps.protocol import OutgoingMessage
from ronde.ps.server import ServerSetup
from ronde.ps.tables.embedding_table import EmbeddingTable, RowCache, TablePart, sum_duplicates
from ronde.ps.tables.server import make_header
from ronde.ps.worker import WorkerCore

logger = logging.getLogger("ronde.ps")


class TableClient:
    """The tables as one worker sees them. Used by one thread at a time."""

    def __init__(
        self,
        setup: ServerSetup,
        worker: WorkerCore,
        lock: threading.Condition,
        *,
        send: Callable[[Iterable[OutgoingMessage]], None],
        wait_until: Callable[[Callable[[], bool], str], None],
    ) -> None:
        """`lock` guards the WorkerCore."""
        self._setup = setup
        self._numbers = {name: number for number, name in enumerate(setup.table_names)}
        self._tables = dict(zip(setup.table_names, setup.tables, strict=True))
        self._worker = worker
        self._lock = lock
        self._send = send
        self._wait_until = wait_until
        self._read_number = 0
        """Of the read that the step uses."""
        self._version = setup.version
        self._caches: dict[str, RowCache] = {}
        """By table, rows of that read."""
        self._prefetches: list[tuple[str, Array, int]] = []
        """Rows that were asked for ahead of a read: table, rows, and number of the request."""
        self.begin_step(0, setup.version)

    def begin_step(self, read_number: int, version: int) -> None:
        """The worker has read the other parameters. Idempotent."""
        if self._caches and read_number == self._read_number:
            return
        self._read_number, self._version = read_number, version
        self._caches = {name: RowCache(table) for name, table in self._tables.items()}

    def read(self, name: str, rows: Array) -> Array:
        """The values of rows, in an array with one more dimension."""
        unique, inverse = np.unique(rows, return_inverse=True)
        self._take_prefetches()
        cache = self._caches[name]
        missing = cache.find_missing(unique)
        if len(missing):
            request = self._request(name, missing, self._read_number)
            cache.add(missing, self._receive(name, missing, request))
        return cache.take(unique)[inverse.reshape(-1)].reshape(*rows.shape, self._tables[name].dim)

    def prefetch(self, name: str, rows: Array) -> None:
        """Ask for rows of the version that the next read has."""
        unique = np.unique(rows)
        self._prefetches.append((name, unique, self._request(name, unique, self._worker.next_read)))

    def cut_push(self, name: str, pushes: Sequence[tuple[Array, Array]]) -> Iterator[tuple[int, Array, Array]]:
        """The gradients of rows by part, those of one row added up: the number of the part, those of the rows within
        it, and the gradients, flattened, in new memory."""
        rows, values = sum_duplicates(
            np.concatenate([each for each, _ in pushes]), np.concatenate([each for _, each in pushes])
        )
        for index, own, is_own in self._find_parts(name, rows):
            yield index, own, values[is_own].reshape(-1)

    def _find_parts(self, name: str, rows: Array) -> Iterator[tuple[int, Array, Array]]:
        """The parts that have some of the rows: the number of the part, those of the rows within it, and where they
        are."""
        for number, part in enumerate(self._setup.table_parts):
            if part.table == self._numbers[name]:
                is_own = rows % part.stride == part.first
                if is_own.any():
                    own = (rows[is_own] // part.stride).astype(np.uint32)
                    yield len(self._setup.parts) + number, own, is_own

    def _request(self, name: str, rows: Array, read: int) -> int:
        by_part = {index: own for index, own, _ in self._find_parts(name, rows)}
        with self._lock:
            request, sends = self._worker.get_rows(read, by_part)
        self._send(sends)
        return request

    def _receive(self, name: str, rows: Array, request: int) -> Array:
        """Wait for rows that were asked for."""
        pending, table = self._worker.row_requests[request], self._tables[name]
        self._wait_until(lambda: not pending.missing, f"a read of {len(rows)} rows of {name}")
        with self._lock:
            del self._worker.row_requests[request]
        if pending.versions - {self._version}:
            logger.warning(
                "rank %d: this step takes so long that the servers have dropped version %d of %s; these rows are newer",
                self._worker.rank,
                self._version,
                name,
            )
        values = np.empty((len(rows), table.dim), table.dtype)
        for index, _, is_own in self._find_parts(name, rows):
            values[is_own] = decode_values(pending.values[index], table.dtype)
        return values

    def _take_prefetches(self) -> None:
        """Keep the rows that were asked for ahead of the last read."""
        waiting: list[tuple[str, Array, int]] = []
        for name, rows, request in self._prefetches:
            read = self._worker.row_requests[request].read
            if read > self._read_number:
                waiting.append((name, rows, request))
            elif read < self._read_number:  # that read was one for a checkpoint, or another step has come between
                with self._lock:
                    del self._worker.row_requests[request]
            else:
                values, cache = self._receive(name, rows, request), self._caches[name]
                is_missing = np.isin(rows, cache.find_missing(rows), assume_unique=True)
                cache.add(rows[is_missing], values[is_missing])
        self._prefetches = waiting


def describe_tables(tables: Mapping[str, EmbeddingTable]) -> tuple[tuple[Any, ...], ...]:
    """What all ranks have to choose alike for tables. Initializers and optimizers are those of the first rank."""
    for name, table in tables.items():
        if not isinstance(table, EmbeddingTable):
            raise TypeError(f"table {name} must be a ronde.ps.EmbeddingTable, got {type(table).__name__}")
    return tuple((name, each.num_rows, each.dim, each.dtype, each.group) for name, each in tables.items())


def check_rows(name: str, table: EmbeddingTable, rows: Array) -> Array:
    """The numbers of rows that a caller means."""
    numbers = np.asarray(rows)
    if not numbers.size:
        return numbers.astype(np.int64)
    if numbers.dtype.kind not in "iu":
        raise TypeError(f"rows of {name} are given by their numbers, got {numbers.dtype}")
    if numbers.min() < 0 or numbers.max() >= table.num_rows:
        raise IndexError(f"rows of {name} are 0 to {table.num_rows - 1}, got {numbers.min()} to {numbers.max()}")
    return numbers.astype(np.int64)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def join_rows(setup: ServerSetup, table: int, parts: Mapping[int, Array]) -> dict[str, Array]:
    """The rows of a table that were trained, sorted, with their values and the states of the optimizer, from the states
    of all parts."""
    num_states, dim, dtype = setup.num_states_of(table), setup.tables[table].dim, setup.tables[table].dtype
    rows, values = [np.zeros(0, np.int64)], [np.zeros((0, dim), dtype)]
    states = [np.zeros((num_states, 0, dim), dtype)]
    for number, part in enumerate(setup.table_parts):
        if part.table == table:
            _, own, own_values, own_states = unpack_arrays(parts[len(setup.parts) + number])
            rows.append(part.number_rows(own))
            values.append(own_values)
            states.append(own_states.reshape(num_states, len(own), dim))
    order = np.argsort(np.concatenate(rows))
    return {
        "rows": np.concatenate(rows)[order],
        "values": np.concatenate(values)[order],
        "states": np.concatenate(states, axis=1)[:, order],
    }


def check_table_states(
    tables: Mapping[str, EmbeddingTable], states: Mapping[str, Mapping[str, Array]]
) -> Mapping[str, Mapping[str, Array]]:
    """The rows by table that a checkpoint has."""
    if states.keys() != tables.keys():
        differ = sorted(states.keys() ^ tables.keys())
        raise ValueError(f"state must have the names of the tables; these differ: {', '.join(differ)}")
    for name, table in tables.items():
        rows, values = states[name]["rows"], states[name]["values"]
        if values.shape[1] != table.dim or rows.max(initial=0) >= table.num_rows:
            raise ValueError(f"state has another table {name}: {table.num_rows} rows of {table.dim} are needed")
    return states


def make_first_rows(setup: ServerSetup, part: TablePart, states: Mapping[str, Mapping[str, Array]]) -> Array:
    """What a replica of a part of a table begins with: its rows of a checkpoint, or none. Rows that were not trained
    are not stored."""
    header, num_states = make_header(setup.version, setup.version), setup.num_states_of(part.table)
    empty = np.zeros((0, part.dim), part.dtype)
    if not states:
        return pack_arrays([header, np.zeros(0, np.int64), empty, empty])
    state = [*states.values()][part.table]
    if len(state["states"]) != num_states:
        raise ValueError(f"state has another optimizer: {len(state['states'])} arrays, {num_states} are needed")
    is_own = state["rows"] % part.stride == part.first
    arrays = [state["values"][is_own], state["states"][:, is_own].reshape(-1, part.dim)]
    return pack_arrays([header, state["rows"][is_own] // part.stride, *(each.astype(part.dtype) for each in arrays)])
