"""Commands as trials: their words, and the metric in what they print."""

from __future__ import annotations

import math

import pytest

from ronde.launch.placement import Host
from ronde.search.script_group import MetricReader, make_command
from ronde.search.space import Parameters
from ronde.search.worker_group import place_groups


def test_parameters_stand_where_the_command_names_them_or_are_flags_at_its_end() -> None:
    params: Parameters = {"lr": 1e-05, "layers": 3, "fast": True, "name": "a b"}
    assert make_command(["python", "t.py", "--depth={layers}", "{lr}-{lr}", "{other}"], params) == (
        *("python", "t.py", "--depth=3", "1e-05-1e-05", "{other}"),
        *("--fast", "true", "--name", "a b"),
    )


def test_the_metric_is_found_in_lines_that_come_in_pieces() -> None:
    reader = MetricReader(r"loss[=:] *([-+.\w]+)", "")
    assert reader.feed(b"begin\nloss=2.5 loss=2") == []
    assert reader.feed(b".25\nno\nloss: -1e-3\r\nloss=high\n") == [(0, 2.25), (1, -0.001)]
    (found,) = reader.feed(b"loss=nan\n")
    assert found[0] == 2
    assert math.isnan(found[1])
    reader.feed(b"loss=7")
    assert reader.finish() == [(3, 7.0)]


def test_json_lines_have_a_value_and_perhaps_a_step() -> None:
    reader = MetricReader("", "val")
    lines = b'{"val": 1}\n{"val": 0.5, "step": 10}\n{"other": 3}\n{"val": "x"}\n[1]\n{broken\n{"val": 2, "step": 4}\n'
    assert reader.feed(lines) == [(0, 1.0), (10, 0.5), (11, 2.0)]


def test_exactly_one_way_to_find_the_metric_is_needed() -> None:
    for pattern, key in (("", ""), ("a", "b")):
        with pytest.raises(ValueError, match="a command needs `metric`"):
            MetricReader(pattern, key)
    with pytest.raises(ValueError, match="is no regular expression"):
        MetricReader("(", "")


def test_groups_share_hosts_in_their_order() -> None:
    groups = place_groups((Host("a", 3), Host("b", 3)), 3, 2)
    assert [group.hosts for group in groups] == [(Host("a", 2),), (Host("a", 1), Host("b", 1)), (Host("b", 2),)]
    assert [group.slots for group in groups] == [(0, 1), (2, 0), (1, 2)]
    assert [group.groups_per_host for group in groups] == [2, 3, 2]
    with pytest.raises(ValueError, match="8 ranks, but only 6 slots"):
        place_groups((Host("a", 3), Host("b", 3)), 4, 2)
