"""Who trains: what is there, in the ways that were asked for."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from ronde.cli.bench.peers import TrainingSetup, find_kits, parse_codec
from ronde.errors import RondeError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that seem to be there."""
    names = {"torch", "horovod"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in names else None)
    return names


WITHOUT_TRAFFIC = ["alone", "apart", "lockstep"]


def names(*arguments: Any) -> list[str]:  # those of find_kits
    return [kit.name for kit in find_kits(*arguments).kits]


@pytest.mark.usefixtures("installed")
def test_ddp_takes_part_as_it_comes_and_at_its_best() -> None:
    found = find_kits(4, None, None, (10, 100, 10))
    ours = ["ronde", "hvd"]
    assert [kit.name for kit in found.kits] == [
        *WITHOUT_TRAFFIC,
        *ours,
        "ddp",
        "ddp-view",
        "ddp-view-10MB",
        "ddp-view-100MB",
    ]
    assert [kit.size for kit in found.kits] == [1, *[4] * 8]
    assert found.kits[-2].settings == TrainingSetup(view=True, bucket_mb=10)
    assert found.notes == ()


@pytest.mark.usefixtures("installed")
def test_only_those_that_communicate_must_agree() -> None:
    found = find_kits(2, None, None, ())
    assert [kit.name for kit in found.kits if not kit.communicates] == WITHOUT_TRAFFIC


@pytest.mark.usefixtures("installed")
def test_peers_can_be_picked() -> None:
    assert names(2, None, "none", (10,)) == [*WITHOUT_TRAFFIC, "ronde"]
    assert names(2, None, "hvd", (10,)) == [*WITHOUT_TRAFFIC, "ronde", "hvd"]
    assert names(2, None, "ddp", ()) == [*WITHOUT_TRAFFIC, "ronde", "ddp", "ddp-view"]


@pytest.mark.usefixtures("installed")
def test_peers_without_bfloat16_send_as_many_bits_another_way() -> None:
    found = find_kits(2, "bfloat16", None, ())
    codecs = {kit.name: kit.settings.codec for kit in found.kits}
    both = {"ronde": "bfloat16", "hvd": "float16", "ddp": "float16", "ddp-view": "float16"}
    assert codecs == {**dict.fromkeys(WITHOUT_TRAFFIC), **both}
    assert "the others send float16" in found.notes[0]


def test_a_missing_compatibility_package_is_noted_or_an_error_when_asked_for(installed: set[str]) -> None:
    installed.remove("horovod")
    assert find_kits(2, None, None, ()).notes[0].startswith("hvd is left out: ronde-horovod is not installed")
    with pytest.raises(ValueError, match="pip install ronde-horovod"):
        find_kits(2, None, "hvd", ())


def test_without_pytorch_there_is_nothing_to_train_with(installed: set[str]) -> None:
    installed.remove("torch")
    with pytest.raises(RondeError, match=r"pip install 'ronde\[torch\]'"):
        find_kits(2, None, None, ())


@pytest.mark.usefixtures("installed")
def test_a_peer_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="no such peer: 'nccl'; there are ddp, hvd, none"):
        find_kits(2, None, "ddp,nccl", ())


def test_a_codec_is_one_of_three() -> None:
    assert [parse_codec(text) for text in ("none", "float16", "bfloat16")] == [None, "float16", "bfloat16"]
    with pytest.raises(ValueError, match="codec must be one of none, float16, bfloat16, got 'int8'"):
        parse_codec("int8")
