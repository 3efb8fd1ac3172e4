"""Hosts, places, and what the environment says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod.runner.common.util.env import get_env_rank_and_size
from horovod.runner.common.util.hosts import (
    INVALID_SLOT_INFO,
    HostInfo,
    SlotInfo,
    get_host_assignments,
    parse_host_files,
    parse_hosts,
    parse_hosts_and_slots,
)


def test_hosts_are_names_with_slots() -> None:
    assert parse_hosts("a:2,b-1.c:4") == [HostInfo("a", 2), HostInfo("b-1.c", 4)]
    assert parse_hosts_and_slots("a:2,b:4") == (["a", "b"], {"a": 2, "b": 4})
    with pytest.raises(ValueError, match="name:slots"):
        parse_hosts("a")


def test_a_hostfile_may_have_comments(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\n10.0.0.1 slots=8\n\n10.0.0.2 slots=4  # smaller\n")
    assert parse_host_files(str(path)) == "10.0.0.1:8,10.0.0.2:4"


def test_places_are_filled_host_by_host() -> None:
    places = get_host_assignments(parse_hosts("a:1,b:2"), 3)
    assert places == [
        SlotInfo("a", 0, 0, cross_rank=0, size=3, local_size=1, cross_size=2),
        SlotInfo("b", 1, 0, cross_rank=1, size=3, local_size=2, cross_size=2),
        SlotInfo("b", 2, 1, cross_rank=0, size=3, local_size=2, cross_size=1),
    ]
    assert places[2].to_response_string() == "2,3,1,2,0,1"
    assert INVALID_SLOT_INFO.rank == -1


def test_more_slots_than_wanted_may_stay_empty_and_too_few_are_a_mistake() -> None:
    assert len(get_host_assignments(parse_hosts("a:4"), 1)) == 4
    assert len(get_host_assignments(parse_hosts("a:4"), 1, 2)) == 2
    with pytest.raises(ValueError, match="5 processes were asked for"):
        get_host_assignments(parse_hosts("a:4"), 5)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1)),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "PMI_RANK": "5", "PMI_SIZE": "9"}, (1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, (3, 4)),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4)),
    ],
)
def test_rank_and_size_come_from_whoever_started_us(environ: dict[str, str], expected: tuple[int, int]) -> None:
    assert get_env_rank_and_size(environ) == expected


def test_half_of_the_place_is_a_mistake() -> None:
    with pytest.raises(RuntimeError, match="HOROVOD_SIZE is not"):
        get_env_rank_and_size({"HOROVOD_RANK": "1"})
