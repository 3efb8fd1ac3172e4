"""The table of training says who is ahead, and by how much."""

from __future__ import annotations

import msgspec
import pytest

from ronde.cli.bench.table import train_tables
from ronde.cli.bench.train import compare
from tests.unit.cli.test_table import line_with, text_of
from tests.unit.cli.test_train import FIELD

TABLE = train_tables(compare(FIELD), "2 ranks on 2 cores")


def test_ronde_is_held_against_the_best_ddp() -> None:
    line = line_with(TABLE, "ronde  ")
    assert all(words in line for words in ("180.0", "100.0 µs", "10.0 µs", "90%", "1.20 ×"))
    assert "best DDP" in line_with(TABLE, "ddp-view-10MB")
    assert "best DDP" not in line_with(TABLE, "ddp  ")


def test_the_compatibility_package_is_held_against_ronde_too() -> None:
    assert all(words in line_with(TABLE, "hvd  ") for words in ("1.14 ×", "0.95 ×"))


def test_the_network_and_the_machine_are_named() -> None:
    text = "\n".join(text_of(TABLE))
    assert all(words in text for words in ("mlp: 784-512-512-10, batch 64", "2 ranks on 2 cores"))


@pytest.mark.parametrize(
    ("width", "headings"),
    [
        (80, "samples/s step head ciency best DDP ronde MiB RSS"),
        (65, "samples/s step head ciency best DDP ronde"),
        (60, "samples/s step head ciency best DDP"),
        (40, "samples/s best DDP"),
    ],
)
def test_on_a_narrow_terminal_columns_are_left_out_and_none_is_cut(width: int, headings: str) -> None:
    large = {"step_us": 132_120.0, "memory_mb": 1157.2, "rss_mb": 1403.0}
    rows = compare([msgspec.structs.replace(each, samples_per_s=1000 * each.samples_per_s, **large) for each in FIELD])
    lines = text_of(train_tables(rows, width=width), width)
    shown = next(line for line in lines if "samples/s" in line)
    assert shown.split() == headings.split()
    assert len(lines) == len(FIELD) + 6, "a row is a line"
    assert ("132.12 ms" in lines[4], "…" in "".join(lines)) == (width > 40, False)


def test_what_nobody_has_is_no_column() -> None:
    heading = line_with(train_tables(compare(FIELD[:3])), "samples/s")
    assert "RSS" not in heading and "DDP" not in heading


def test_an_overhead_below_zero_is_noise_and_shown_as_it_is() -> None:
    (row,) = compare([record for record in FIELD if record.impl == "ronde"])
    table = train_tables([msgspec.structs.replace(row, overhead_us=-1500.0)])
    assert "-1.50 ms" in line_with(table, "ronde  ")
