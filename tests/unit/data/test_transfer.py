"""Uploads and downloads: what arrives is what was sent, whatever fails on the way. Against a real S3 server."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import s3fs
from moto.server import ThreadedMotoServer

from ronde.data import Stream, open_dataset
from ronde.data.files import LocalFolder, open_folder
from ronde.data.shards import INDEX_NAME, DataIndex, read_index
from ronde.data.transfer import MARK_NAME, download, take_share, upload, verify
from ronde.errors import DataError, Mismatch
from tests.commands import PROGRAMS, run_command
from tests.conformance.ranks import run_threads
from tests.limits import PATIENCE_S
from tests.unit.data.made_data import write_shards
from tests.unit.data.test_prepare import contents
from tests.unit.data.test_readers import read_all

pytestmark = [
    pytest.mark.leaves(reason="fsspec keeps the thread of its event loop, and connections"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.slow,
]
KILL_AT = """
import os, signal, sys
from ronde.data import files
count = 0
def die(inner):
    def call(self, name, *rest):
        global count
        count += 1
        if count == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(self, name, *rest)
    return call
files.RemoteFolder.write = die(files.RemoteFolder.write)
files.RemoteFolder.open_range = die(files.RemoteFolder.open_range)
from ronde.cli.main import main
sys.exit(main(sys.argv[2:]))
"""
"""Kills itself at the n-th access to the object store."""


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """An S3 server on loopback: a client of it. Its address is in the environment, as users set it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        try:
            host, port = server.get_host_and_port()
            patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
            patch.setenv("AWS_ACCESS_KEY_ID", "test")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
            patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            client = boto3.client("s3")
            client.create_bucket(Bucket="data")
            yield client
        finally:
            server.stop()


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, DataIndex]:
    return tmp_path / "made", write_shards(tmp_path / "made", [40, 3, 57, 20, 11, 31], num_bytes=500)


def one(body: Any) -> Any:
    return run_threads(1, lambda world: body(world.group))[0]


def keys(s3: Any, prefix: str) -> set[str]:
    found = s3.list_objects_v2(Bucket="data", Prefix=prefix + "/").get("Contents", [])
    return {each["Key"].removeprefix(prefix + "/") for each in found}


def test_data_come_back_from_an_object_store_as_they_were(
    s3: Any, made: tuple[Path, DataIndex], tmp_path: Path
) -> None:
    folder, index = made
    sent = one(lambda group: upload(str(folder), "s3://data/back", group=group))
    assert (sent.num_transferred, sent.num_skipped) == (6, 0)
    assert keys(s3, "back") == {INDEX_NAME, *(shard.name for shard in index.splits["train"])}
    got = one(lambda group: download("s3://data/back", str(tmp_path / "got"), group=group))
    assert got.num_transferred == 6
    assert contents(tmp_path / "got") == contents(folder)
    again = one(lambda group: upload(str(folder), "s3://data/back", group=group))
    assert (again.num_transferred, again.num_skipped) == (0, 6)
    again = one(lambda group: download("s3://data/back", str(tmp_path / "got"), group=group))
    assert (again.num_transferred, again.num_skipped) == (0, 6)
    assert one(lambda group: verify("s3://data/back", group=group)) == []


def test_a_stream_reads_from_an_object_store_through_a_cache(
    s3: Any, made: tuple[Path, DataIndex], tmp_path: Path
) -> None:
    one(lambda group: upload(str(made[0]), "s3://data/stream", group=group))

    def read(group: Any) -> list[int]:
        stream = Stream("s3://data/stream", global_batch=10, cache=tmp_path / "cache", group=group)
        return [number for batch in stream for number in batch["number"].tolist()]

    assert sorted(one(read)) == list(range(162))
    s3.delete_object(Bucket="data", Key="stream/train-00000.shard")
    with pytest.raises(AssertionError, match=r"cannot read s3://data/stream/train-00000.shard"):
        one(lambda group: list(Stream("s3://data/stream", global_batch=10, group=group)))


def test_who_goes_on_in_the_middle_fetches_less_than_one_block_of_used_samples(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = write_shards(tmp_path / "made", [720], block_samples=12, num_bytes=3000)
    one(lambda group: upload(str(tmp_path / "made"), "s3://data/middle", group=group))
    fetched: list[int] = []
    fetch = s3fs.S3FileSystem._cat_file

    async def count(fs: Any, path: str, **options: Any) -> Any:
        data = await fetch(fs, path, **options)
        fetched.append(len(data) if path.endswith(".shard") else 0)
        return data

    monkeypatch.setattr(s3fs.S3FileSystem, "_cat_file", count)

    def read(group: Any) -> int:
        stream = Stream("s3://data/middle", global_batch=60, group=group)
        stream.load_state_dict({**stream.state_dict(), "consumed": 300})
        return sum(len(batch["number"]) for batch in stream)

    assert one(read) == 420
    block_bytes = max(size for shard in index.splits["train"] for _, size, _ in shard.blocks)
    assert 420 * 3000 < sum(fetched) < 420 * 3000 + block_bytes


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_makes_connections_of_its_own(s3: Any) -> None:
    s3.put_object(Bucket="data", Key="forked/x", Body=b"0123456789")
    folder = open_folder("s3://data/forked")
    assert folder.open_range("x", 0, 3).read(0, 3) == b"012"
    context = multiprocessing.get_context("fork")
    answers, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(folder.open_range("x", 3, 3).read(0, 3)))
    child.start()
    try:
        assert answers.poll(PATIENCE_S)
        assert answers.recv() == b"345"
    finally:
        child.kill()
        child.join(PATIENCE_S)
        child.close()
        answers.close()
        sender.close()


def test_an_error_names_a_file_that_was_given_by_itself_once(s3: Any) -> None:
    s3.put_object(Bucket="data", Key="alone.csv", Body=b'a,b\n1,"2\n')
    with pytest.raises(DataError, match=r"^s3://data/alone.csv ends at byte 9 inside of quotes"):
        open_dataset("s3://data/alone.csv")
    s3.put_object(Bucket="data", Key="alone.csv", Body=b"a,b\n1,2\n3\n")
    with pytest.raises(DataError, match=r"^s3://data/alone.csv: row 2 behind byte 4 has 1 values"):
        read_all(pickle.loads(pickle.dumps(open_dataset("s3://data/alone.csv"))))
    reader = open_dataset("s3://data/alone.csv")
    s3.delete_object(Bucket="data", Key="alone.csv")
    with pytest.raises(DataError, match=r"^cannot read s3://data/alone.csv: FileNotFoundError"):
        reader.open(0)


def test_a_changed_shard_is_sent_again_and_a_former_index_is_not_left(
    s3: Any, made: tuple[Path, DataIndex], tmp_path: Path
) -> None:
    one(lambda group: upload(str(made[0]), "s3://data/changed", group=group))
    index = write_shards(tmp_path / "other", [40, 3, 57, 20, 11, 32], num_bytes=500)
    sent = one(lambda group: upload(str(tmp_path / "other"), "s3://data/changed", group=group))
    assert sent.num_skipped == 5
    one(lambda group: download("s3://data/changed", str(tmp_path / "got"), group=group))
    assert read_index(LocalFolder(tmp_path / "got")) == index
    assert MARK_NAME not in keys(s3, "changed")


def test_damage_on_either_side_is_named(s3: Any, made: tuple[Path, DataIndex], tmp_path: Path) -> None:
    folder, _ = made
    one(lambda group: upload(str(folder), "s3://data/damage", group=group))
    body = (folder / "train-00002.shard").read_bytes()
    s3.put_object(Bucket="data", Key="damage/train-00002.shard", Body=body[:-1] + b"x")
    s3.put_object(Bucket="data", Key="damage/train-00003.shard", Body=body[:100])
    s3.delete_object(Bucket="data", Key="damage/train-00004.shard")
    problems = dict(one(lambda group: verify("s3://data/damage", group=group, pause=no_pause)))
    assert problems["train-00002.shard"] == "it has another checksum"
    assert problems["train-00003.shard"].startswith("it ends at byte 100 of ")
    assert "train-00004.shard" in problems["train-00004.shard"]
    assert len(problems) == 3

    with pytest.raises(AssertionError, match="s3://data/damage/train-0000"):
        one(lambda group: download("s3://data/damage", str(tmp_path / "got"), group=group, pause=no_pause))
    assert not (tmp_path / "got" / INDEX_NAME).exists()
    (folder / "train-00000.shard").write_bytes(b"x" * 10)
    with pytest.raises(AssertionError, match=r"train-00000.shard is not what index.json says"):
        one(lambda group: upload(str(folder), "s3://data/damage2", group=group, pause=no_pause))


def no_pause(seconds: float) -> None:
    pass


def test_a_failed_request_is_made_again(made: tuple[Path, DataIndex], tmp_path: Path, monkeypatch: Any) -> None:
    failures = {"train-00001.shard": 2, "train-00003.shard": 4}
    open_range = LocalFolder.open_range

    def fail_sometimes(folder: LocalFolder, name: str, start: int, num_bytes: int) -> Any:
        if folder.root == made[0] and failures.get(name, 0):
            failures[name] -= 1
            raise DataError("the network is down")
        return open_range(folder, name, start, num_bytes)

    monkeypatch.setattr(LocalFolder, "open_range", fail_sometimes)
    pauses: list[float] = []
    one(lambda group: download(str(made[0]), str(tmp_path / "got"), group=group, pause=pauses.append))
    assert sorted(pauses) == [0.2, 0.2, 0.4, 0.4, 0.8, 1.6]
    assert contents(tmp_path / "got") == contents(made[0])


def test_an_index_with_a_name_outside_of_its_folder_writes_nothing(
    made: tuple[Path, DataIndex], tmp_path: Path
) -> None:
    folder, _ = made
    text = (folder / INDEX_NAME).read_text().replace("train-00001.shard", "../evil.shard")
    (folder / INDEX_NAME).write_text(text)
    with pytest.raises(AssertionError, match="is refused"):
        one(lambda group: download(str(folder), str(tmp_path / "got/data"), group=group))
    assert not list(tmp_path.rglob("evil*"))


@pytest.mark.parametrize("transfer", [upload, download])
def test_data_are_not_transferred_onto_themselves(made: tuple[Path, DataIndex], tmp_path: Path, transfer: Any) -> None:
    (tmp_path / "link").symlink_to(made[0])
    with pytest.raises(AssertionError, match="is both the source and the target"):
        one(lambda group: transfer(str(made[0]), str(tmp_path / "link"), group=group))
    assert read_index(LocalFolder(made[0])) == made[1]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_a_transfer(made: tuple[Path, DataIndex], tmp_path: Path, size: int) -> None:
    results = run_threads(size, lambda world: download(str(made[0]), str(tmp_path / "got"), group=world.group))
    assert sum(result.num_transferred for result in results) == 6
    assert max(result.num_transferred for result in results) < 6
    assert contents(tmp_path / "got") == contents(made[0])


def test_other_splits_on_a_rank_are_an_error_on_all(made: tuple[Path, DataIndex], tmp_path: Path) -> None:
    def body(world: Any) -> None:
        with pytest.raises(Mismatch, match=r"rank 0 gave splits=\[\]; rank 1 gave splits=\['train'\]"):
            download(str(made[0]), str(tmp_path / "got"), splits=["train"] * world.group.rank, group=world.group)

    run_threads(2, body)


def test_hosts_get_shares_of_about_equal_size_and_together_everything(made: tuple[Path, DataIndex]) -> None:
    shares = [take_share(made[1], part, 3) for part in range(3)]
    assert sorted(share.num_samples("train") for share in shares) == [51, 54, 57]
    names = [shard.name for share in shares for shard in share.splits["train"]]
    assert sorted(names) == [shard.name for shard in made[1].splits["train"]]


def test_each_hosts_share_trains_with_the_others(made: tuple[Path, DataIndex], tmp_path: Path) -> None:
    # Folders of their own stand for hosts; the first has two ranks.
    places = [tmp_path / "a", tmp_path / "a", tmp_path / "b"]

    def body(world: Any) -> tuple[int, list[int]]:
        place = str(places[world.group.rank])
        download(str(made[0]), place, group=world.group)
        stream = Stream(place, local=True, global_batch=9, group=world.group)
        batches = [batch["number"].tolist() for batch in stream]
        return len(batches), [number for batch in batches for number in batch]

    results = run_threads(3, body)
    assert len({num_steps for num_steps, _ in results}) == 1
    assert {number for _, numbers in results for number in numbers} == set(range(162))
    assert len(read_all(open_dataset(places[0]))) + len(read_all(open_dataset(places[2]))) == 162


@pytest.mark.parametrize("verb", ["upload", "download"])
def test_a_killed_transfer_goes_on_where_it_was(
    s3: Any, made: tuple[Path, DataIndex], tmp_path: Path, verb: str
) -> None:
    url, got = f"s3://data/killed-{verb}", tmp_path / "got"
    if verb == "download":
        one(lambda group: upload(str(made[0]), url, group=group))
    words = [verb, *((str(made[0]), url) if verb == "upload" else (url, str(got))), "--parallel", "1"]
    for number in (3, 5):
        killed = run_command([sys.executable, "-c", KILL_AT, str(number), "data", *words], limit_s=PATIENCE_S)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert INDEX_NAME not in keys(s3, f"killed-{verb}") if verb == "upload" else not (got / INDEX_NAME).exists()
    done = subprocess.run(
        [PROGRAMS / "ronde", "data", *words, "--json"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ,
        check=True,
    )
    assert '"num_skipped":0' not in done.stdout
    assert run_command([PROGRAMS / "ronde", "data", "verify", url], limit_s=PATIENCE_S).returncode == 0
    if verb == "download":
        assert contents(got) == contents(made[0])
