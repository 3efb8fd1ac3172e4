"""Stream: each sample once however ranks, workers and rounds change; blocks are read by one rank; memory is bounded."""

from __future__ import annotations

import pickle
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from ronde.comm.world import World
from ronde.data import Stream, open_dataset
from ronde.data.order import NUM_STREAMS
from ronde.data.shards import BlockReader, DataIndex, merge_ranges
from ronde.data.stream import BatchLoader, StepPlan, collate_samples
from ronde.data.tables import ParquetReader
from ronde.errors import DataError, Mismatch
from ronde.training.sample_sharding import SamplePosition
from tests.conformance.ranks import run_threads
from tests.unit.data.made_data import CountingFolder, counting_reader, write_shards

NUM_USED = 330


def make_loader(reader: BlockReader, *, num_streams: int = NUM_STREAMS, num_threads: int = 0) -> BatchLoader:
    return BatchLoader(
        reader,
        seed=1,
        shuffle=True,
        num_streams=num_streams,
        transform=lambda sample: sample["number"],
        collate=list,
        num_threads=num_threads,
    )


def make_plan(member: int, shares: tuple[int, ...], *, consumed: int = 0, global_batch: int = 12) -> StepPlan:
    position = SamplePosition(0, consumed)
    return StepPlan(position=position, global_batch=global_batch, ends="pad", member=member, shares=shares)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1200 samples in shards of unequal size, 300 blocks."""
    folder = tmp_path_factory.mktemp("data")
    write_shards(folder, [400, 0, 37, 263, 500], num_bytes=300)
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DataIndex]:
    """1200 samples of 5 KB in 120 blocks."""
    folder = tmp_path_factory.mktemp("large")
    return folder, write_shards(folder, [1200], block_samples=10, num_bytes=5000)


# --- what is read --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_far", [False, True], ids=["local", "far"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_all_ranks_together_read_little_more_than_the_data(data: Path, size: int, is_far: bool) -> None:
    index = write_shards(data / "again", [400, 0, 37, 263, 500], num_bytes=300)
    total, num_read, used = sum(shard.num_bytes for shard in index.splits["train"]), 0, Counter[int]()
    for member in range(size):
        reader, folder = counting_reader(data / "again", index, is_far=is_far)
        for counts, batch in make_loader(reader).load(make_plan(member, (1000,) * size, global_batch=60)):
            used.update(batch if counts[member] else [])
        num_read += folder.num_bytes
    assert used == Counter(range(1200))
    assert num_read <= 1.1 * total


@pytest.mark.parametrize("size", [2, 3, 5])
def test_row_groups_of_parquet_are_read_once_and_footers_once_by_each_rank(tmp_path: Path, size: int) -> None:
    random = np.random.default_rng(0)
    table = pa.table({"number": np.arange(1200), "bytes": [random.bytes(4000) for _ in range(1200)]})
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=10, write_statistics=False)
    total, num_read, used = (tmp_path / "x.parquet").stat().st_size, 0, Counter[int]()
    blocks = open_dataset(tmp_path).table
    for member in range(size):
        folder = CountingFolder(tmp_path, is_far=True)
        reader = ParquetReader(folder, blocks)
        for counts, batch in make_loader(reader).load(make_plan(member, (1000,) * size, global_batch=60)):
            used.update(batch if counts[member] else [])
        num_read += folder.num_bytes
    assert used == Counter(range(1200))
    assert num_read <= 1.1 * total + size * 131_072  # a footer is read with what is before it


@pytest.mark.parametrize("is_far", [False, True], ids=["local", "far"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_who_goes_on_in_the_middle_reads_less_than_one_block_of_used_samples(
    large: tuple[Path, DataIndex], size: int, is_far: bool
) -> None:
    path, index = large
    block_bytes = max(size for shard in index.splits["train"] for _, size, _ in shard.blocks)
    used: list[int] = []
    for _, batch in make_loader(counting_reader(path, index)[0]).load(make_plan(0, (1,), global_batch=15)):
        used += batch
        if len(used) == NUM_USED:
            break
    num_read = num_ranges = 0
    for member in range(size):
        reader, folder = counting_reader(path, index, is_far=is_far)
        plan = make_plan(member, (1000,) * size, consumed=NUM_USED, global_batch=30)
        for counts, batch in make_loader(reader).load(plan):
            used += batch if counts[member] else []
        num_read += folder.num_bytes
        num_ranges += folder.num_ranges
    assert sorted(used) == list(range(1200))
    twice = num_read - (1200 - NUM_USED) * 5000  # with headers, and what a sample has besides its bytes
    assert twice < block_bytes
    assert num_ranges <= 60 + 60 * 6  # a header and five samples of each begun block


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_loop_that_is_left_and_begun_again_in_the_process_fetches_nothing_twice(
    large: tuple[Path, DataIndex], num_threads: int
) -> None:
    path, index = large
    reader, folder = counting_reader(path, index, is_far=True)
    loader = make_loader(reader, num_threads=num_threads)
    used: list[int] = []
    for stop in (330, 360, 720, 1200):
        for _, batch in loader.load(make_plan(0, (1,), consumed=len(used), global_batch=30)):
            used += batch
            if len(used) == stop:
                break
    assert sorted(used) == list(range(1200))
    if not num_threads:  # a thread may have read blocks to their end, ahead of the loop
        assert folder.num_bytes == sum(size for shard in index.splits["train"] for _, size, _ in shard.blocks)
    again = [number for _, batch in loader.load(make_plan(0, (1,), consumed=90, global_batch=30)) for number in batch]
    assert again == used[90:]


def test_a_begun_block_of_small_samples_is_fetched_as_one(tmp_path: Path) -> None:
    index = write_shards(tmp_path, [60_000], block_samples=1000, num_bytes=4)
    reader, folder = counting_reader(tmp_path, index, is_far=True)
    batches = make_loader(reader).load(make_plan(0, (1,), consumed=30_000, global_batch=600))
    for _ in range(3):
        next(batches)
    assert folder.num_ranges == 2 * 60  # the header of each, and all that is left


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=40), st.integers(0, 200))
@settings(deadline=None)
def test_ranges_are_merged_within_what_may_be_fetched_in_vain(pairs: list[tuple[int, int]], gap_bytes: int) -> None:
    edges = np.cumsum(np.array(pairs).ravel())
    starts, ends = edges[::2], edges[1::2]
    merged = merge_ranges(starts, ends, gap_bytes)
    held = [set(range(start, start + length)) for start, length in merged]
    assert sum(len(each) for each in held) == len(set().union(*held))
    wanted = {byte for start, end in zip(starts.tolist(), ends.tolist(), strict=True) for byte in range(start, end)}
    assert wanted <= set().union(*held)
    assert len(set().union(*held) - wanted) <= gap_bytes
    gaps = sorted(start - end for start, end in zip(starts[1:].tolist(), ends[:-1].tolist(), strict=True))
    assert len(merged) == 1 or sum(gaps[: len(gaps) - len(merged) + 2]) > gap_bytes  # no fewer would do


def test_memory_is_bounded_by_the_blocks_in_use_and_not_by_the_data(tmp_path: Path) -> None:
    index = write_shards(tmp_path, [60] * 4, block_samples=2, num_bytes=100_000)
    reader, _ = counting_reader(tmp_path, index, is_far=True)
    loader = make_loader(reader, num_streams=6)
    tracemalloc.start()
    try:
        for _ in loader.load(make_plan(0, (1,), global_batch=4)):
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 24_000_000 == 240 * 100_000
    assert peak < (6 + 4) * 2 * 100_000 + 1_000_000


def test_threads_load_ahead_and_keep_the_order(data: Path) -> None:
    index = write_shards(data / "again", [100, 31], num_bytes=10)
    reader, _ = counting_reader(data / "again", index)
    plain, threaded = (
        [batch for _, batch in make_loader(reader, num_threads=threads).load(make_plan(0, (1, 2)))]
        for threads in (0, 3)
    )
    assert plain == threaded


def test_workers_of_a_loader_share_the_batches_of_a_rank(data: Path) -> None:
    index = write_shards(data / "again", [100, 31], num_bytes=10)
    reader, _ = counting_reader(data / "again", index)
    plan = make_plan(1, (1, 1))
    whole = [batch for _, batch in make_loader(reader).load(plan)]
    for num_workers in (1, 2, 3, 5):
        parts = [make_loader(reader).load(plan, first=worker, stride=num_workers) for worker in range(num_workers)]
        found = [next(parts[step % num_workers])[1] for step in range(len(whole))]
        assert found == whole
        assert all(next(part, None) is None for part in parts)


# --- any change of ranks at any point ------------------------------------------------------------------------------


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 40), st.integers(0, 9)), min_size=1, max_size=6),
    st.sampled_from(["pad", "uneven"]),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
def test_ranks_that_change_at_any_point_use_every_sample_once(
    data: Path, rounds: list[tuple[int, int, int]], ends: str
) -> None:
    reader, _ = counting_reader(data, write_index_once(data))
    loader = make_loader(reader)
    used: Counter[int] = Counter()
    consumed = 0
    for size, global_batch, num_steps in [*rounds, (2, 50, 1000)]:
        position = SamplePosition(0, consumed)
        for member in range(size):
            plan = StepPlan(
                position=position, global_batch=max(size, global_batch), ends=ends, member=member, shares=(1000,) * size
            )
            batches = loader.load(plan)
            for _ in range(min(num_steps, plan.num_steps(loader.num_samples))):
                counts, batch = next(batches)
                used.update(batch if counts[member] else [])
        consumed = min(consumed + num_steps * max(size, global_batch), loader.num_samples)
    assert used == Counter(range(1200))


def write_index_once(data: Path) -> Any:
    from ronde.data.files import LocalFolder
    from ronde.data.shards import read_index

    return read_index(LocalFolder(data))


def test_streams_of_ranks_agree_and_continue_with_another_number_of_ranks(data: Path) -> None:
    def first(world: World) -> tuple[list[int], dict[str, Any]]:
        stream = Stream(data, global_batch=60, seed=3, group=world.group, num_threads=0)
        used = []
        for step, batch in enumerate(stream):
            used += batch["number"].tolist()
            if step == 6:
                break
        return used, stream.state_dict()

    results = run_threads(3, first)
    states = [state for _, state in results]
    assert states[0] == states[1] == states[2]
    assert states[0]["consumed"] == 6 * 60  # the batch in whose body the loop was left does not count
    done = Counter(number for used, _ in results for number in used[: 6 * 20])

    def rest(world: World) -> list[int]:
        stream = Stream(data, global_batch=60, seed=3, group=world.group, num_threads=2)
        stream.load_state_dict(states[0])
        numbers = [number for batch in stream for number in batch["number"].tolist()]
        assert (stream.epoch, stream.consumed) == (1, 0)
        return numbers

    for numbers in run_threads(2, rest):
        done.update(numbers)
    assert done == Counter(range(1200))


def test_a_machine_with_twice_the_share_gets_twice_the_samples(data: Path) -> None:
    def body(world: World) -> int:
        stream = Stream(data, global_batch=30, share=2.0 if world.group.rank == 0 else 1.0, group=world.group)
        return sum(len(batch["number"]) for batch in stream)

    assert run_threads(2, body) == [800, 400]


@pytest.mark.parametrize("lengths", [(50, 3, 20), (1, 90, 1)])
def test_ranks_with_data_of_their_own_use_each_sample_once_and_end_together(
    tmp_path: Path, lengths: tuple[int, ...]
) -> None:
    for rank, length in enumerate(lengths):
        write_shards(tmp_path / str(rank), [length], num_bytes=10)

    def body(world: World) -> tuple[int, Counter[int]]:
        stream = Stream(tmp_path / str(world.group.rank), local=True, global_batch=8, group=world.group)
        used: Counter[int] = Counter()
        num_steps = 0
        for batch in stream:
            used.update(batch["number"].tolist())
            num_steps += 1
        return num_steps, used

    results = run_threads(3, body)
    assert len({num_steps for num_steps, _ in results}) == 1
    for (_, used), length in zip(results, lengths, strict=True):
        assert set(used) == set(range(length))


def test_a_rank_without_data_of_its_own_is_named_on_all(tmp_path: Path) -> None:
    write_shards(tmp_path / "0", [3])
    write_shards(tmp_path / "1", [])

    def body(world: World) -> str:
        with pytest.raises(ValueError, match="rank 1 has no samples") as caught:
            Stream(tmp_path / str(world.group.rank), local=True, global_batch=2, group=world.group)
        return str(caught.value)

    assert len(set(run_threads(2, body))) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, "rank 0 gave seed=0; rank 1 gave seed=1"),
        ({"global_batch": 6}, "rank 0 gave global_batch=4; rank 1 gave global_batch=6"),
        ({"share": 2.0}, "rank 0 gave share=None; rank 1 gave share='a number'"),
        ({"path": "elsewhere"}, "rank 1 gave path='elsewhere'; if each machine has data of its own, give local=True"),
        ({"path": "elsewhere", "local": True}, "rank 0 gave local=False; rank 1 gave local=True"),
    ],
    ids=["seed", "batch", "share", "path", "local"],
)
def test_other_settings_on_a_rank_are_an_error_on_all(data: Path, options: dict[str, Any], message: str) -> None:
    def body(world: World) -> None:
        given = {"path": data, "global_batch": 4, **(options if world.group.rank else {})}
        with pytest.raises(Mismatch) as caught:
            Stream(**given, group=world.group)
        assert message in str(caught.value)

    run_threads(2, body)


def test_data_that_cannot_be_read_are_an_error_on_every_rank(tmp_path: Path) -> None:
    def body(world: World) -> None:
        with pytest.raises(DataError, match="there is no folder"):
            Stream(tmp_path / "none", group=world.group)

    run_threads(2, body)


def test_data_without_samples_are_an_error_and_no_empty_epoch(tmp_path: Path) -> None:
    write_shards(tmp_path, [])

    def body(world: World) -> None:
        with pytest.raises(DataError, match="has no samples in the split 'train'"):
            Stream(tmp_path, split="train", group=world.group)

    run_threads(2, body)


# --- one rank ------------------------------------------------------------------------------------------------------


def one_rank(body: Any) -> Any:
    return run_threads(1, lambda world: body(world.group))[0]


def test_without_a_batch_size_a_stream_gives_samples(data: Path) -> None:
    def body(group: Any) -> None:
        numbers = [sample["number"] for sample in Stream(data, group=group)]
        assert sorted(numbers) == list(range(1200))
        assert numbers != sorted(numbers)

    one_rank(body)


def test_a_new_epoch_has_a_new_order_and_set_epoch_returns_to_it(data: Path) -> None:
    def body(group: Any) -> None:
        stream = Stream(data, global_batch=100, group=group)
        epochs = [[batch["number"].tolist() for batch in stream] for _ in range(2)]
        assert epochs[0] != epochs[1]
        stream.set_epoch(0)
        assert [batch["number"].tolist() for batch in stream] == epochs[0]

    one_rank(body)


def test_a_position_of_other_data_is_refused_in_the_middle_of_an_epoch(data: Path, tmp_path: Path) -> None:
    write_shards(tmp_path, [1200])

    def body(group: Any) -> None:
        stream = Stream(data, global_batch=100, group=group)
        next(iter(stream))
        state = {**stream.state_dict(), "consumed": 100}
        with pytest.raises(ValueError, match="cannot go on in the middle of epoch 0"):
            Stream(tmp_path, global_batch=100, group=group).load_state_dict(state)
        with pytest.raises(ValueError, match="no position of such a sampler or data set: it has no 'consumed'"):
            stream.load_state_dict({"epoch": 3})
        with pytest.raises(ValueError, match="num_streams"):
            Stream(data, global_batch=100, group=group, num_streams=3).load_state_dict(state)

    one_rank(body)


@pytest.mark.parametrize("options", [{"share": 0.0}, {"local": True, "share": 1.0}, {"num_streams": 0}, {"ends": "x"}])
def test_wrong_options_are_refused(data: Path, options: dict[str, Any]) -> None:
    def body(group: Any) -> None:
        with pytest.raises(ValueError, match=r"must be|leave share out"):
            Stream(data, global_batch=4, group=group, **options)

    one_rank(body)


def test_an_error_in_a_thread_reaches_the_loop_and_threads_end(data: Path) -> None:
    def fail(sample: Any) -> None:
        raise KeyError(sample["number"])

    def body(group: Any) -> None:
        with pytest.raises(KeyError):
            list(Stream(data, global_batch=4, group=group, transform=fail, num_threads=3))

    one_rank(body)


def test_a_loader_can_be_sent_to_another_process(data: Path) -> None:
    def body(group: Any) -> None:
        stream = Stream(data, global_batch=100, group=group)
        loader = pickle.loads(pickle.dumps(stream.loader))
        plan = stream.plan()
        found = [batch["number"].tolist() for _, batch in loader.load(plan)]
        assert found == [batch["number"].tolist() for batch in stream]

    one_rank(body)


def test_samples_are_collated_field_by_field() -> None:
    batch = collate_samples([{"x": np.zeros((2,)), "n": 1, "t": "a", "l": np.zeros(n), "p": (1, "b")} for n in (1, 2)])
    assert batch["x"].shape == (2, 2)
    assert batch["n"].tolist() == [1, 1]
    assert batch["t"] == ["a", "a"]
    assert [each.shape for each in batch["l"]] == [(1,), (2,)]
    assert (batch["p"][0].tolist(), batch["p"][1]) == ([1, 1], ["b", "b"])
