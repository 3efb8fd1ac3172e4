"""Hosts as people write them, and which rank runs on which host and CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ronde.launch.placement import Host, bind_cpus, format_hosts, parse_hosts, place_ranks, read_hostfile


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("host1:2,host2:4", (Host("host1", 2), Host("host2", 4))),
        ("host1", (Host("host1", 1),)),
        (" a:1 , b ", (Host("a", 1), Host("b", 1))),
        ("10.0.0.1:8", (Host("10.0.0.1", 8),)),
        ("me@host1:2", (Host("me@host1", 2),)),
        ("[fe80::7]:4", (Host("fe80::7", 4),)),
        ("[::1]", (Host("::1", 1),)),
        ("me@[fe80::7%eth0]:3", (Host("me@fe80::7%eth0", 3),)),
        ("a:1,b:1,a:2", (Host("a", 3), Host("b", 1))),
    ],
)
def test_a_list_of_hosts_is_read(text: str, hosts: tuple[Host, ...]) -> None:
    assert parse_hosts(text) == hosts
    assert parse_hosts(format_hosts(hosts)) == hosts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the list of hosts is empty"),
        (" , ", "the list of hosts is empty"),
        ("a:2,,b:2", "an empty place between two commas"),
        ("a:x", "host a: slots must be a whole number, got 'x'"),
        ("a:", "host a: slots must be a whole number, got ''"),
        ("a:-1", "slots must be a whole number, got '-1'"),
        ("a:0", "host a: slots must be at least 1, got 0"),
        ("fe80::7", "an IPv6 address needs brackets"),
        ("fe80::7:4", "an IPv6 address needs brackets"),
        ("[host]:2", "brackets are for IPv6 addresses"),
        ("[host:1]:2", "brackets are for IPv6 addresses"),
        ("a b:2", "cannot read 'a b:2'"),
        ("@a:2", "cannot read '@a:2'"),
        ("-oProxyCommand=x:1", "does not begin with '-'"),
        ("a\0:1", r"without spaces and control characters that does not begin with '-', got 'a\x00'"),
    ],
)
def test_a_list_that_cannot_be_read_says_why(text: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_hosts(text)
    assert words in str(caught.value)


def test_a_hostfile_may_be_written_in_three_ways_with_comments(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(
        "# the old machines\n host1 slots=2\n\nhost2:4   # the new one\nme@host3\n[fe80::7] slots=8\nhost1 slots=1\n"
    )
    assert read_hostfile(path) == (Host("host1", 3), Host("host2", 4), Host("me@host3"), Host("fe80::7", 8))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("host slots=x", "host host: slots must be a whole number, got 'x'"),
        ("host slots=0", "host host: slots must be at least 1"),
        ("host slots 4", "cannot read 'slots 4' after the host; write `host slots=4`"),
        ("host slots=4 max_slots=8", "cannot read 'slots=4 max_slots=8' after the host"),
        ("host cpus=4", "cannot read 'cpus=4' after the host"),
        ("host:2 slots=4", "slots are given twice"),
        ("fe80::7", "an IPv6 address needs brackets"),
    ],
)
def test_a_wrong_line_of_a_hostfile_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"# first\n{line}\n")
    with pytest.raises(ValueError) as caught:
        read_hostfile(path)
    assert str(caught.value).startswith(f"{path}, line 2: ") and words in str(caught.value)


def test_a_hostfile_that_names_no_host_or_cannot_be_read_is_told(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("# nobody\n")
    binary.write_bytes(b"\xff\xfe\x00")
    for path, words in (
        (empty, "names no host"),
        (binary, "it is not text"),
        (tmp_path, "Is a directory"),
        (tmp_path / "none", "No such file"),
    ):
        with pytest.raises(ValueError) as caught:
            read_hostfile(path)
        assert words in str(caught.value) and str(path) in str(caught.value)


TWO = (Host("a", 2), Host("b", 4))


def test_hosts_are_filled_in_their_order() -> None:
    placements = place_ranks(TWO, 6)
    assert [placement.rank for placement in placements] == list(range(6))
    assert [placement.host_index for placement in placements] == [0, 0, 1, 1, 1, 1]
    assert [placement.local_rank for placement in placements] == [0, 1, 0, 1, 2, 3]
    assert [placement.local_size for placement in placements] == [2, 2, 4, 4, 4, 4]
    assert [placement.cross_rank for placement in placements] == [0, 0, 1, 1, 0, 0]
    assert [placement.cross_size for placement in placements] == [2, 2, 2, 2, 1, 1]
    assert {placement.num_hosts for placement in placements} == {2}


@pytest.mark.parametrize(
    ("hosts", "num_ranks", "places"),
    [
        (TWO, 3, [(0, 0, 2), (0, 1, 2), (1, 0, 1)]),
        (TWO, 1, [(0, 0, 1)]),
        ((), 2, [(0, 0, 2), (0, 1, 2)]),
    ],
    ids=["fewer ranks than slots", "one rank", "no hosts: all are here"],
)
def test_the_last_hosts_stay_free(hosts: tuple[Host, ...], num_ranks: int, places: list[tuple[int, int, int]]) -> None:
    placements = place_ranks(hosts, num_ranks)
    assert [(each.host_index, each.local_rank, each.local_size) for each in placements] == places
    assert {each.num_hosts for each in placements} == {places[-1][0] + 1}


@pytest.mark.parametrize(
    ("hosts", "num_ranks", "words"),
    [
        (TWO, 8, r"8 ranks, but only 6 slots \(a:2,b:4\): 2 slots short; add hosts"),
        ((Host("a"),), 2, r"2 ranks, but only 1 slot \(a:1\): 1 slot short"),
        (TWO, 0, "at least 1 rank, got 0"),
    ],
)
def test_a_number_of_ranks_that_does_not_fit_is_told(hosts: tuple[Host, ...], num_ranks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        place_ranks(hosts, num_ranks)


@pytest.mark.parametrize(
    ("num_cores", "shares"),
    [
        (4, [(0, 1), (2, 3)]),
        (5, [(0, 1, 2), (3, 4)]),
        (7, [(0, 1, 2), (3, 4), (5, 6)]),
        (2, [(0,), (1,)]),
        (2, [(0,), (1,), (0,)]),
        (0, [(), ()]),
    ],
)
def test_cores_are_divided_evenly_and_nobody_goes_without(num_cores: int, shares: list[tuple[int, ...]]) -> None:
    cpus = range(num_cores)
    assert [bind_cpus(cpus, rank, len(shares)) for rank in range(len(shares))] == shares
