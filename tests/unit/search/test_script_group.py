"""Commands as trials: their words, and the metric in what they print."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ronde.launch.placement import Host
from ronde.search.script_group import MetricReader, make_command
from ronde.search.space import Parameters
from ronde.search.trial_output import MAX_REST_BYTES, TrialOutput
from ronde.search.worker_group import place_groups


def test_parameters_stand_where_the_command_names_them_or_are_flags_at_its_end() -> None:
    params: Parameters = {"lr": 1e-05, "layers": 3, "fast": True, "name": "a b"}
    assert make_command(["python", "t.py", "--depth={layers}", "{lr}-{lr}", "{other}"], params) == (
        *("python", "t.py", "--depth=3", "1e-05-1e-05", "{other}"),
        *("--fast", "true", "--name", "a b"),
    )
    hostile: Parameters = {"a": "{b}", "b": "-1e-05", "c": -1e-05}
    assert make_command(["x={a}"], hostile) == ("x={b}", "--b=-1e-05", "--c=-1e-05")


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


def test_a_missing_metric_is_explained(tmp_path: Path) -> None:
    printed = tmp_path / "trial-0000.txt"
    reader = MetricReader(r"loss [\d.]+", "")
    assert reader.explain_missing(printed) == "it has printed nothing, so there is no metric"
    printed.touch()
    reader.feed(b"accuracy 3\n")
    assert reader.explain_missing(printed).endswith(f"compare `metric` with {printed}")
    assert reader.feed(b"loss 0.5\n") == []
    assert reader.explain_missing(printed).startswith("`metric` has found 'loss 0.5', which is no number: put the num")
    reader = MetricReader("", "loss")
    reader.feed(b'{"loss": "high"}\n')
    assert reader.explain_missing(printed) == "'loss' in its JSON lines is no number: 'high'"


def test_lines_without_an_end_are_written_in_pieces_and_a_full_disk_does_not_end_a_trial(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = TrialOutput(tmp_path, "worker-0.txt", num_ranks=2)
    output.rank_started(1)
    output.begin_trial(3)
    for _ in range(3):
        output.write(1, "out", b"x" * MAX_REST_BYTES)
    output.write(1, "out", b"end\n")
    output.close()
    lines = (tmp_path / "output/trial-0003.txt").read_bytes().splitlines()
    assert [len(line) for line in lines] == [2 * MAX_REST_BYTES + 4, MAX_REST_BYTES + 3 + 4]
    Path(tmp_path, "output/trial-0004.txt").symlink_to("/dev/full")
    output.begin_trial(4)
    for _ in range(2):
        output.write(1, "out", b"lost\n")
    output.close()
    assert caplog.text.count("output of trials is lost: No space left on device") == 1


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
