"""Embedding tables: parts, rows of older versions, and training of rows, in ranks that are threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.comm.world import World
from ronde.errors import ProtocolError
from ronde.ps import LAMB, SGD, Adagrad, Adam, EmbeddingTable, NormalRows, ParameterServer, UniformRows
from ronde.ps.commit_log.log_state import Update
from ronde.ps.payloads import pack_arrays, unpack_arrays
from ronde.ps.tables.embedding_table import cut_table, sum_duplicates
from ronde.ps.tables.server import TableReplica, make_header
from tests.conformance.ranks import run_threads

DIM = 5


# --- without ranks ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 200_000), st.integers(1, 64), st.integers(1, 6))
def test_every_row_is_in_one_part_and_parts_are_even(num_rows: int, dim: int, num_servers: int) -> None:
    parts = cut_table(0, EmbeddingTable(num_rows=num_rows, dim=dim), num_servers)
    assert sum(part.num_rows for part in parts) == num_rows
    assert max(part.num_rows for part in parts) - min(part.num_rows for part in parts) <= 1
    for part in parts:
        last = part.number_rows(np.array([part.num_rows - 1]))[0]
        assert part.first <= last < num_rows and last % len(parts) == part.first


def test_a_large_table_is_cut_further_than_there_are_servers() -> None:
    parts = cut_table(0, EmbeddingTable(num_rows=100_000_000, dim=64), 2)
    assert len(parts) == 96 and max(part.num_bytes for part in parts) <= 256 * 1024 * 1024


@pytest.mark.parametrize(
    ("initializer", "deviation"), [(NormalRows(std=0.5, mean=2.0, seed=3), 0.5), (UniformRows(3.0), 3**0.5)]
)
def test_first_values_depend_on_the_row_only_and_have_their_distribution(initializer: Any, deviation: float) -> None:
    values = initializer(np.arange(20_000), 7)
    assert (initializer(np.array([17, 5]), 7) == values[[17, 5]]).all()
    assert abs(values.mean() - getattr(initializer, "mean", 0.0)) < 0.02
    assert abs(values.std() - deviation) < 0.02
    assert len(np.unique(values)) > 0.99 * values.size or isinstance(initializer, NormalRows)
    other = type(initializer)(**{**{name: getattr(initializer, name) for name in initializer.__slots__}, "seed": 9})
    assert abs(np.corrcoef(values.reshape(-1), other(np.arange(20_000), 7).reshape(-1))[0, 1]) < 0.02
    assert abs(np.corrcoef(values[:-1].reshape(-1), values[1:].reshape(-1))[0, 1]) < 0.02


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(-1e3, 1e3))))
def test_gradients_of_one_row_are_added(pairs: list[tuple[int, float]]) -> None:
    rows = np.array([row for row, _ in pairs], np.int64)
    values = np.array([[value] * 2 for _, value in pairs]).reshape(-1, 2)
    unique, total = sum_duplicates(rows, values)
    expected = np.zeros((10, 2))
    np.add.at(expected, rows, values)
    assert (unique == np.unique(rows)).all() and (total == expected[unique]).all()


@given(st.lists(st.tuples(st.sampled_from(["uint8", "uint32", "int64", "float16", "float32"]), st.integers(0, 5))))
def test_arrays_travel_together(kinds: list[tuple[str, int]]) -> None:
    arrays = [np.arange(n).astype(dtype) if n % 2 else np.ones((n, 3), dtype) for dtype, n in kinds]
    for one, other in zip(arrays, unpack_arrays(pack_arrays(arrays)), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and (one == other).all()


@pytest.mark.parametrize("damage", [slice(0, 4), slice(0, 40), slice(0, 0)])
def test_a_damaged_message_is_refused(damage: slice) -> None:
    with pytest.raises(ProtocolError, match="rows of a table"):
        unpack_arrays(pack_arrays([np.arange(9), np.ones((3, 3))])[damage])


PUSHES = st.lists(
    st.tuples(st.lists(st.integers(0, 11), unique=True, min_size=1, max_size=5).map(sorted), st.integers(0, 3)),
    max_size=25,
)


@given(PUSHES, st.booleans())
def test_a_worker_reads_the_rows_of_its_own_version_whatever_others_push(
    pushes: list[tuple[list[int], int]], is_copied: bool
) -> None:
    """Worker 0 reads only now and then; the others push. A copy of the replica has all versions, too."""
    table = EmbeddingTable(num_rows=12, dim=2, dtype="float64", initializer=UniformRows(1.0))
    (part,) = cut_table(0, table, 1)

    def make() -> TableReplica:
        return TableReplica(part, table, SGD(lr=1.0))

    replica, everything = make(), np.arange(12)
    replica.load_copy(pack_arrays([make_header(0, 0), np.zeros(0, np.int64), *[np.zeros((0, 2))] * 2]), 0, {})
    versions = {0: replica.read(0, everything)[0]}
    reads = {0: 0, 1: 0}
    for number, (rows, does_read) in enumerate(pushes, 1):
        replica.stage(1, number, pack_arrays([np.array(rows, np.uint32), np.full((len(rows), 2), float(number))]))
        replica.update(number, Update(number, ((1, number),), 0.0))
        versions[number] = replica.read(number, everything)[0]
        expected = versions[number - 1].copy()
        expected[rows] -= number
        assert (versions[number] == expected).all()
        for worker in range(2):
            if does_read & (worker + 1):
                reads[worker] = number
                replica.remember_read(number, worker, min(reads.values()))
        if is_copied and number % 3 == 0:
            other = make()
            other.load_copy(replica.make_copy(), number, dict(replica.applied))
            replica = other
        for version in reads.values():
            values, found = replica.read(version, everything)
            assert found == version and (values == versions[version]).all()
    assert replica.num_trained == len({row for rows, _ in pushes for row in rows})


def test_rows_of_a_version_that_was_dropped_are_newer_and_say_so() -> None:
    table = EmbeddingTable(num_rows=4, dim=2, initializer=UniformRows(0.0))
    replica = TableReplica(cut_table(0, table, 1)[0], table, SGD(lr=1.0), history_bytes=100)
    replica.load_copy(
        pack_arrays([make_header(0, 0), np.zeros(0, np.int64), *[np.zeros((0, 2), np.float32)] * 2]), 0, {}
    )
    for step in range(1, 11):
        replica.stage(1, step, pack_arrays([np.array([1], np.uint32), np.ones((1, 2), np.float32)]))
        replica.update(step, Update(step, ((1, step),), 0.0))
    assert replica.read(0, np.array([1]))[1] == 10
    values, version = replica.read(9, np.array([1]))
    assert version == 9 and (values == -9).all()


# --- ranks that are threads ------------------------------------------------------------------------------------------


def dense_step(optimizer: Any, weight: Any, states: Any, rows: Any, gradient: Any, step: int) -> None:
    """One step on some rows of a whole table, lazily, as PyTorch's SparseAdam."""
    own = states[:, rows].reshape(len(states), len(rows) * DIM)
    weight[rows] = optimizer.compute(weight[rows].reshape(-1), gradient.reshape(-1), own, step).reshape(-1, DIM)
    states[:, rows] = own.reshape(len(states), len(rows), DIM)


@pytest.mark.parametrize("optimizer", [SGD(lr=0.25), SGD(lr=0.25, momentum=0.5), Adagrad(lr=0.1), Adam(lr=0.1)])
def test_in_sync_mode_rows_are_trained_with_the_mean_of_all_ranks(optimizer: Any) -> None:
    num_rows, initializer = 40, NormalRows(std=1.0)

    def body(world: World) -> None:
        table = EmbeddingTable(num_rows=num_rows, dim=DIM, dtype="float64", initializer=initializer)
        expected = initializer(np.arange(num_rows), DIM)
        states = np.zeros((optimizer.num_states, num_rows, DIM))
        bias = np.zeros(3)
        with ParameterServer([bias], optimizer, tables={"words": table}, group=world.group) as server:
            for step in range(1, 7):
                by_rank = [np.random.default_rng(10 * step + rank).integers(0, num_rows, 8) for rank in range(3)]
                total = np.zeros((num_rows, DIM))
                for rows in by_rank:
                    np.add.at(total, rows, expected[rows] - 1.0)
                own = by_rank[world.rank]
                values = server.rows("words", own)
                assert np.allclose(values, expected[own], rtol=0, atol=1e-12)
                if step % 2:
                    server.prefetch_rows("words", np.arange(step, num_rows, 2))
                server.stage_rows("words", own[:3], values[:3] - 1.0)
                server.stage_rows("words", own[3:], values[3:] - 1.0)
                server.step([np.ones(3)])
                used = np.unique(np.concatenate(by_rank))
                dense_step(optimizer, expected, states, used, total[used] / 3, step)
            assert np.allclose(server.rows("words", np.arange(num_rows)), expected, rtol=0, atol=1e-12)

    run_threads(3, body)


@pytest.mark.parametrize("mode", ["bounded", "async"])
def test_rows_and_parameters_are_of_one_version_in_every_mode(mode: str) -> None:
    """Each push adds 1 to a parameter and to all rows: whoever reads them in the middle of pushes finds them equal."""

    def body(world: World) -> None:
        tables = {
            name: EmbeddingTable(num_rows=20, dim=2, dtype="float64", initializer=UniformRows(0.0)) for name in "ab"
        }
        with ParameterServer(
            [np.zeros(1)], SGD(lr=1.0), mode=mode, staleness=2, tables=tables, group=world.group
        ) as server:
            for _ in range(30):
                count = server.parameters["0"][0]
                for name in tables:
                    assert (server.rows(name, np.arange(0, 20, 3)) == count).all()
                    assert (server.rows(name, np.arange(20)) == count).all()
                    server.stage_rows(name, np.arange(20), -np.ones((20, 2)))
                server.prefetch_rows("a", np.arange(5))
                server.step([-np.ones(1)])
            world.group.barrier()
            server.pull()
            assert (server.rows("b", np.array([[1, 2], [3, 1]])) == 30 * world.size).all()

    run_threads(3, body)


def test_a_server_of_tables_alone_goes_on_from_a_checkpoint_on_another_number_of_servers() -> None:
    def train(world: World, steps: range, **options: Any) -> tuple[Any, Any]:
        tables = {"big": EmbeddingTable(num_rows=3_000_000, dim=DIM, optimizer=Adagrad(lr=0.5))}
        with ParameterServer({}, SGD(lr=1.0), tables=tables, group=world.group, clip_norm=3.0, **options) as server:
            rows = np.array([7, 2_999_999, 7, 1_234_567 + world.rank])
            for _ in steps:
                server.stage_rows("big", rows, server.rows("big", rows) - 1)
                server.step([])
            return server.state_dict(), server.rows("big", rows)

    def body(world: World) -> None:
        state, _ = train(world, range(4))
        assert state["tables"]["big"]["rows"].tolist() == [7, 1_234_567, 1_234_568, 1_234_569, 2_999_999]
        _, resumed = train(world, range(3), servers=[2], state=state)
        _, whole = train(world, range(7))
        assert (resumed == whole).all()
        with pytest.raises(ValueError, match="state must have the names of the tables; these differ: big"):
            ParameterServer(
                {"w": np.zeros(1)}, SGD(lr=1.0), state={**state, "parameters": {"w": np.zeros(1)}}, group=world.group
            )

    run_threads(3, body)


def test_mistakes_with_tables_are_named() -> None:
    def body(world: World) -> None:
        table = EmbeddingTable(num_rows=10, dim=2)
        with pytest.raises(ValueError, match="LAMB cannot train table t"):
            ParameterServer([np.zeros(3)], LAMB(), tables={"t": table}, group=world.group)
        with pytest.raises(TypeError, match=r"table t must be a ronde.ps.EmbeddingTable, got int"):
            ParameterServer([np.zeros(3)], SGD(lr=1.0), tables={"t": 7}, group=world.group)  # type: ignore[dict-item]
        with ParameterServer([np.zeros(3)], SGD(lr=1.0), tables={"t": table}, group=world.group) as server:
            with pytest.raises(ValueError, match="there is no table 'u'"):
                server.rows("u", np.array([1]))
            with pytest.raises(IndexError, match="rows of t are 0 to 9, got -1 to 10"):
                server.rows("t", np.array([10, -1]))
            with pytest.raises(TypeError, match="given by their numbers, got float64"):
                server.rows("t", np.array([1.0]))
            with pytest.raises(ValueError, match=r"must have the shape \(1, 2\), got \(2,\)"):
                server.stage_rows("t", np.array([1]), np.zeros(2))
            assert server.rows("t", np.array([], int)).shape == (0, 2)
        with pytest.raises(ValueError, match="at least one row"):
            EmbeddingTable(num_rows=0, dim=2)

    run_threads(1, body)
