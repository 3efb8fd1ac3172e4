"""Hosts as people write them, and which rank runs on which host and CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ronde.launch.placement import (
    Host,
    Placement,
    bind_cpus,
    format_hosts,
    hosts_or_localhost,
    parse_hostfile,
    parse_hosts,
    place_ranks,
    read_hostfile,
)


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
    ],
)
def test_a_list_that_cannot_be_read_says_why(text: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_hosts(text)
    assert words in str(caught.value)


def test_a_hostfile_may_be_written_in_three_ways_with_comments() -> None:
    text = """
    # the old machines
    host1 slots=2

    host2:4   # the new one
    me@host3
    [fe80::7] slots=8
    host1 slots=1
    """
    assert parse_hostfile(text, "hosts") == (Host("host1", 3), Host("host2", 4), Host("me@host3"), Host("fe80::7", 8))


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
def test_a_wrong_line_of_a_hostfile_is_named(line: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_hostfile(f"# first\n{line}\n", "my/hosts")
    assert str(caught.value).startswith("my/hosts, line 2: ")
    assert words in str(caught.value)


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


def test_fewer_ranks_than_slots_are_fine_and_the_last_hosts_stay_free() -> None:
    assert [(placement.host_index, placement.local_size) for placement in place_ranks(TWO, 3)] == [
        (0, 2),
        (0, 2),
        (1, 1),
    ]
    assert place_ranks(TWO, 1) == (Placement(0, TWO[0], 0, 0, 1, 0, 1, 1),)


def test_without_hosts_all_ranks_are_here() -> None:
    assert hosts_or_localhost((), 3) == (Host("localhost", 3),)
    assert [(placement.host_index, placement.local_rank, placement.local_size) for placement in place_ranks((), 2)] == [
        (0, 0, 2),
        (0, 1, 2),
    ]


def test_too_many_ranks_are_an_error_that_says_by_how_much() -> None:
    with pytest.raises(ValueError, match=r"8 ranks, but only 6 slots \(a:2,b:4\): 2 slots short; add hosts"):
        place_ranks(TWO, 8)
    with pytest.raises(ValueError, match=r"2 ranks, but only 1 slot \(a:1\): 1 slot short"):
        place_ranks((Host("a"),), 2)


def test_no_ranks_are_no_job() -> None:
    with pytest.raises(ValueError, match="at least 1 rank, got 0"):
        place_ranks(TWO, 0)


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
