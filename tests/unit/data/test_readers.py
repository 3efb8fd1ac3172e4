"""The formats: every sample is read, and what is truncated or damaged is named with its offset."""

from __future__ import annotations

import csv
import io
import json
import tarfile
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from ronde.data import open_dataset
from ronde.data.archives import scan_tar
from ronde.data.checksums import masked_crc32c
from ronde.data.files import LocalFolder
from ronde.data.samples import Sample
from ronde.data.shards import INDEX_NAME, BlockReader
from ronde.data.tables import scan_csv
from ronde.errors import DataError
from tests.unit.data.made_data import make_image, plain, write_images, write_shards


def read_all(reader: BlockReader) -> list[Sample]:
    return [
        reader.open(block).read(row) for block, length in enumerate(reader.table.lengths) for row in range(int(length))
    ]


def error_of(path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        read_all(open_dataset(path, **options))
    return str(caught.value)


# --- our shards --------------------------------------------------------------------------------------------------


def test_shards_are_read_with_and_without_their_index(tmp_path: Path) -> None:
    write_shards(tmp_path, [5, 0, 3])
    with_index = read_all(open_dataset(tmp_path))
    assert [sample["number"] for sample in with_index] == list(range(8))
    (tmp_path / INDEX_NAME).unlink()
    assert read_all(open_dataset(tmp_path)) == with_index


def test_every_damaged_byte_of_a_shard_is_found(tmp_path: Path) -> None:
    write_shards(tmp_path, [3], num_bytes=5)
    shard = tmp_path / "train-00000.shard"
    good = shard.read_bytes()
    first_block, footer = 8, good.index(b"\x91\x93")
    for offset in range(first_block, footer):
        shard.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
        assert "is damaged" in error_of(tmp_path)
    (tmp_path / INDEX_NAME).unlink()
    for offset in range(footer, len(good) - 16):
        shard.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
        assert "is damaged" in error_of(tmp_path)


def test_a_truncated_shard_is_named_with_its_offset(tmp_path: Path) -> None:
    write_shards(tmp_path, [3])
    shard = tmp_path / "train-00000.shard"
    shard.write_bytes(shard.read_bytes()[:100])
    assert error_of(tmp_path).startswith(f"{shard} is truncated: it ends at byte 100")
    shard.write_bytes(shard.read_bytes()[:20])
    assert error_of(tmp_path).startswith(f"{shard} is truncated: it ends at byte 20, inside of a block's header")
    (tmp_path / INDEX_NAME).unlink()
    assert "ends at byte 20 " in error_of(tmp_path) or "ends at byte 20," in error_of(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index["splits"]["train"][0].update(name="../x"), "'../x' is refused"),
        (lambda index: index["splits"]["train"][0].update(num_samples=99), "other samples"),
        (lambda index: index["splits"]["train"][0]["blocks"][0].__setitem__(1, 1 << 40), "there is no block"),
        (lambda index: index.update(version=2), "version 2"),
        (lambda index: index.update(splits=[]), "damaged"),
    ],
)
def test_an_index_is_checked(tmp_path: Path, change: Callable[[Any], object], message: str) -> None:
    write_shards(tmp_path, [3])
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    change(index)
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    assert message in error_of(tmp_path)


def test_a_split_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, [3])
    assert "no split 'val'; it has train" in error_of(tmp_path, split="val")


# --- tar ---------------------------------------------------------------------------------------------------------


def write_tar(path: Path, num_samples: int) -> list[Sample]:
    with webdataset.TarWriter(str(path), encoder=False) as writer:
        for number in range(num_samples):
            label = str(number).encode()
            writer.write({"__key__": f"part/é{number:04d}", "png": make_image(), "cls": label, "x.txt": b"t"})
    image = np.full((6, 8, 3), (10, 20, 30), np.uint8).tolist()
    return [{"__key__": f"part/é{n:04d}", "png": image, "cls": n, "x.txt": "t"} for n in range(num_samples)]


def test_tars_of_webdataset_are_read(tmp_path: Path) -> None:
    expected = write_tar(tmp_path / "a.tar", 5)
    write_tar(tmp_path / "b.tar", 3)
    assert [plain(sample) for sample in read_all(open_dataset(tmp_path))] == expected + expected[:3]
    raw = read_all(open_dataset(tmp_path / "b.tar", decode=False))
    assert [sample["cls"] for sample in raw] == [b"0", b"1", b"2"]


def test_blocks_of_a_tar_begin_where_samples_do(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", 20)
    folder = LocalFolder(tmp_path)
    blocks = scan_tar(folder, folder.list_files()[0], block_bytes=1 << 13)
    assert sum(length for _, _, length in blocks) == 20
    assert len(blocks) > 5
    assert all(start + size == following for (start, size, _), (following, _, _) in pairwise(blocks))


def test_a_tar_is_truncated_at_every_record_and_says_where(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", 2)
    whole = (tmp_path / "a.tar").read_bytes()
    end = len(whole.rstrip(b"\0"))
    for length in range(512, end, 256):
        (tmp_path / "a.tar").write_bytes(whole[:length])
        message = error_of(tmp_path)
        assert f"{tmp_path}/a.tar is truncated" in message
        assert "byte " in message


def make_member(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, link: str = "") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, link
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_a_tar_are_refused(tmp_path: Path, kind: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(make_member("x.txt", kind, link="/etc/passwd") + bytes(10240))
    assert "holds the link or device 'x.txt' at byte 0: refused" in error_of(tmp_path)


def test_a_member_with_an_evil_name_is_only_a_key(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.tar").write_bytes(make_member("../../evil.txt", size=3) + b"abc".ljust(512, b"\0") + bytes(1024))
    assert read_all(open_dataset(tmp_path / "in")) == [{"__key__": "../../evil", "txt": "abc"}]
    assert [path.name for path in tmp_path.rglob("*")] == ["in", "a.tar"]


def test_a_member_that_claims_to_be_huge_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(make_member("x.bin", size=1 << 40) + bytes(10240))
    assert "too large" in error_of(tmp_path)


def test_a_pickle_in_a_tar_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(make_member("x.pkl", size=3) + b"abc".ljust(512, b"\0") + bytes(1024))
    assert f"{tmp_path}/a.tar: x.pkl at byte 512: a member 'pkl' is refused" in error_of(tmp_path)


@pytest.mark.parametrize("data", [b"", b"nonsense" * 100, zlib.compress(bytes(20000))])
def test_what_is_no_tar_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(data)
    assert f"{tmp_path}/a.tar is truncated" in error_of(tmp_path)


# --- TFRecord ----------------------------------------------------------------------------------------------------

# A record that TensorFlow 2.21 has written, of an Example with bytes, several bytes, int64, floats and nothing.
RECORD = bytes.fromhex(
    "6d000000000000003d4de6710a6b0a090a05656d70747912000a110a05696d61676512080a060a046a7065670a1e0a056c6162656c12151a13"
    "0a1107feffffffffffffffff018080808080200a120a056e616d657312090a070a01610a0262630a170a0777656967687473120c120a0a0800"
    "00003f0000a0bf823992db"
)


def make_record(data: bytes) -> bytes:
    head = len(data).to_bytes(8, "little")
    return head + masked_crc32c(head).to_bytes(4, "little") + data + masked_crc32c(data).to_bytes(4, "little")


def test_records_of_tensorflow_are_read(tmp_path: Path) -> None:
    (tmp_path / "x.tfrecord").write_bytes(RECORD * 3)
    samples = [plain(sample) for sample in read_all(open_dataset(tmp_path))]
    expected = {"image": b"jpeg", "label": [7, -2, 1 << 40], "names": [b"a", b"bc"], "weights": [0.5, -1.25]}
    assert [sample.pop("__key__") for sample in samples] == [f"x.tfrecord:{n * len(RECORD)}" for n in range(3)]
    assert samples == [expected] * 3
    assert make_record(RECORD[12:-4]) == RECORD


def test_every_damaged_or_missing_byte_of_a_record_is_found_with_its_offset(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    good = make_record(b"abc") + make_record(b"defg")
    second = len(make_record(b"abc"))
    for offset in range(second, len(good)):
        path.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
        assert f"at byte {second}" in error_of(tmp_path, decode=False)
        if offset > second:
            path.write_bytes(good[:offset])
            assert f"is truncated: it ends at byte {offset}" in error_of(tmp_path, decode=False)


@given(st.binary(max_size=60))
@settings(deadline=None)
def test_a_record_that_is_no_example_is_refused_or_read_but_never_crashes(data: bytes) -> None:
    from ronde.data.archives import parse_example

    try:
        parse_example(data)
    except DataError:
        pass


# --- CSV ---------------------------------------------------------------------------------------------------------

CELLS = st.text(st.sampled_from('ab,"\n\ré '), max_size=6)


@given(st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=30), st.sampled_from(["\n", "\r\n"]), st.integers(1, 40))
@settings(deadline=None)
def test_csv_is_cut_where_rows_end(rows: Sequence[tuple[str, str]], newline: str, block_bytes: int) -> None:
    import tempfile

    text = io.StringIO()
    csv.writer(text, lineterminator=newline, quoting=csv.QUOTE_ALL).writerows([("a", "b\nc"), *rows])
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "x.csv")
        path.write_bytes(b"\xef\xbb\xbf" + text.getvalue().encode())
        found = [(sample["a"], sample["b\nc"]) for sample in read_all(open_dataset(path))]
        assert found == [tuple(row) for row in rows]
        folder = LocalFolder(path)
        blocks = scan_csv(folder, folder.list_files()[0], block_bytes=block_bytes)
        assert sum(length for _, _, length in blocks) == len(rows)


def test_csv_with_blank_lines_and_without_a_last_newline(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n\n1,2\n\r\n\n3,4")
    assert [(sample["a"], sample["b"]) for sample in read_all(open_dataset(tmp_path))] == [("1", "2"), ("3", "4")]


def test_csv_mistakes_are_named_with_their_offset(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('a,b\n1,2\n3,"4\n')
    assert error_of(path).startswith(f"{path} ends at byte 13 inside of quotes, in the row that begins at byte 8: ")
    path.write_text("a,b\n1,2\n3\n")
    assert error_of(path) == f"{path}: row 2 behind byte 4 has 1 values, but there are 2 columns"
    path.write_bytes(b"a,b\n1,\xff\n")
    assert "behind byte 4: byte 2 is no UTF-8" in error_of(path)
    path.write_text("a,a\n1,2\n")
    assert "the first row must name the columns, each once" in error_of(path)


# --- Parquet -----------------------------------------------------------------------------------------------------


def test_row_groups_of_parquet_are_blocks(tmp_path: Path) -> None:
    table = pa.table({"x": list(range(10)), "y": [str(n) for n in range(10)]})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=4)
    reader = open_dataset(tmp_path)
    assert reader.table.lengths.tolist() == [4, 4, 2]
    assert [(sample["x"], sample["y"]) for sample in read_all(reader)] == [(n, str(n)) for n in range(10)]


@pytest.mark.parametrize("length", [0, 3, 10, 100, 300])
def test_a_truncated_parquet_is_named_with_its_offset(tmp_path: Path, length: int) -> None:
    pq.write_table(pa.table({"x": list(range(100))}), tmp_path / "x.parquet")
    data = (tmp_path / "x.parquet").read_bytes()
    (tmp_path / "x.parquet").write_bytes(data[:length])
    message = error_of(tmp_path)
    assert message.startswith(f"{tmp_path}/x.parquet is truncated, damaged or no Parquet: it ends at byte {length} ")


# --- image folders, and what is none of these ----------------------------------------------------------------------


def test_image_folders_have_labels_in_the_order_of_their_names(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"cat": 2, "ant": 1})
    write_images(tmp_path / "val", {"cat": 1})
    reader = open_dataset(tmp_path, split="train")
    assert reader.classes == ("ant", "cat")
    found = [(sample["__key__"], sample["label"], sample["class"]) for sample in read_all(reader)]
    assert found == [("train/ant/000.png", 0, "ant"), ("train/cat/000.png", 1, "cat"), ("train/cat/001.png", 1, "cat")]
    assert read_all(reader)[0]["image"].shape == (6, 8, 3)


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 1})
    (tmp_path / "cat/000.png").write_bytes(make_image()[:45])
    assert error_of(tmp_path).startswith(f"{tmp_path}/cat/000.png: cannot decode an image of 45 bytes")


def test_data_of_no_or_several_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.doc").write_text("x")
    assert "has no data" in error_of(tmp_path)
    (tmp_path / "x.csv").write_text("a\n1\n")
    (tmp_path / "y.tfrecord").write_bytes(RECORD)
    assert "several formats (csv, tfrecord); pass format=" in error_of(tmp_path)
    assert len(read_all(open_dataset(tmp_path, format="csv"))) == 1
