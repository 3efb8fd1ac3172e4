"""The table of training says who is ahead, and by how much."""

from __future__ import annotations

import msgspec

from ronde.cli.bench.train import compare
from ronde.cli.bench.train_table import train_table
from tests.unit.cli.test_table import line_with, text_of
from tests.unit.cli.test_train import FIELD

TABLE = train_table(compare(FIELD), "2 ranks on 2 cores")


def test_ronde_is_held_against_the_best_ddp() -> None:
    line = line_with(TABLE, "│ ronde ")
    assert all(words in line for words in ("180.0", "100.0 µs", "10.0 µs", "90%", "1.20 ×"))
    assert "best DDP" in line_with(TABLE, "ddp-view-10MB")
    assert "best DDP" not in line_with(TABLE, "│ ddp ")


def test_the_compatibility_package_is_held_against_ronde_too() -> None:
    assert all(words in line_with(TABLE, "│ hvd ") for words in ("1.14 ×", "0.95 ×"))


def test_the_network_and_the_machine_are_named() -> None:
    text = "\n".join(text_of(TABLE))
    assert all(words in text for words in ("mlp", "784-512-512-10", "batch 64", "2 ranks on 2 cores"))


def test_an_overhead_below_zero_is_noise_and_shown_as_it_is() -> None:
    (row,) = compare([record for record in FIELD if record.impl == "ronde"])
    table = train_table([msgspec.structs.replace(row, overhead_us=-1500.0)])
    assert "-1.50 ms" in line_with(table, "│ ronde ")
