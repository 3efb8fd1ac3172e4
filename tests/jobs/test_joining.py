"""Real ranks that cannot work together, or not with what they have: each gets an error that says what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ronde.settings import Settings
from tests.jobs.kit import hosted_by_rank_0, start_ranks
from tests.limits import OPERATION_S

SETTINGS = Settings(stall_s=0.0, start_s=OPERATION_S, operation_s=OPERATION_S)
MIB = 1 << 20


def join_with(settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the ranks of a job report, each of which has settings of its own."""
    ranks = range(len(settings))
    with start_ranks("joining", len(settings), settings=SETTINGS) as job:
        for rank in ranks:
            job.send([rank], settings=settings[rank])
        ended = job.receive_all(ranks, "ended")
        assert job.wait() == [0] * len(settings), job.printed()
    return [ended[rank] for rank in ranks]


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("coordinator", ["launcher", "rank 0"])
@pytest.mark.parametrize(
    ("name", "here", "there"),
    [
        ("slot_bytes", 4 * MIB, 8 * MIB),
        ("chunk_bytes", 256 << 10, 512 << 10),
        ("algorithm", "", "ring"),
        ("num_sockets", 2, 3),
    ],
)
def test_a_setting_of_the_data_plane_that_differs_is_named_on_every_rank(
    name: str, here: object, there: object, coordinator: str, hosts: int
) -> None:
    common = {} if coordinator == "launcher" else hosted_by_rank_0()
    ended = join_with(
        [{**common, "host": f"host-{rank * hosts // 4}", name: here if rank < 2 else there} for rank in range(4)]
    )
    for rank, end in enumerate(ended):
        assert end.get("error") == "StartFailed", (rank, end)
        assert f"ranks disagree on {name}: " in end["text"], (rank, end)
        assert f"gave {here or 'empty'}" in end["text"] and f"gave {there}" in end["text"], (rank, end)
        assert f"RONDE_{name.upper()}" in end["text"], (rank, end)


def test_settings_that_concern_one_rank_alone_may_differ() -> None:
    ended = join_with([{"stall_s": 10.0 * rank, "operation_s": OPERATION_S + rank} for rank in range(2)])
    assert [end.get("num_wrong") for end in ended] == [0, 0], ended
