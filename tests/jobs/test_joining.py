"""Real ranks that cannot work together, or not with what they have: each gets an error that says what to do."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from ronde.settings import Settings
from ronde.types import Deadline
from tests.forwarder import Forwarder
from tests.jobs.kit import hosted_by_rank_0, start_ranks
from tests.limits import OPERATION_S, PATIENCE_S

SETTINGS = Settings(stall_s=0.0, start_s=OPERATION_S, operation_s=OPERATION_S)
MIB = 1 << 20


def join_with(
    settings: Sequence[Mapping[str, Any]], limits: Mapping[int, Mapping[str, int]] | None = None
) -> list[dict[str, Any]]:
    """What the ranks of a job report, each of which has settings of its own. By rank, `limits` says how many files it
    may open, and how far it may raise that limit."""
    ranks = range(len(settings))
    with start_ranks("joining", len(settings), settings=SETTINGS) as job:
        for rank in ranks:
            job.send([rank], settings=settings[rank], **(limits or {}).get(rank, {}))
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


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_smallest_slots_give_right_sums(hosts: int) -> None:
    small = {"slot_bytes": 4096, "chunk_bytes": 4096}
    ended = join_with([{**small, "host": f"host-{rank * hosts // 4}"} for rank in range(4)])
    assert [end.get("num_wrong") for end in ended] == [0] * 4, ended


def test_settings_that_concern_one_rank_alone_may_differ() -> None:
    ended = join_with([{"stall_s": 10.0 * rank, "operation_s": OPERATION_S + rank} for rank in range(2)])
    assert [end.get("num_wrong") for end in ended] == [0, 0], ended


# --- too many open files ---------------------------------------------------------------------------------------------


def test_the_limit_of_open_files_is_raised_as_far_as_possible() -> None:
    ended = join_with([{}] * 2, limits={1: {"free_files": 2, "hard_limit": 300}})
    assert [end.get("num_wrong") for end in ended] == [0, 0], ended
    assert ended[1]["limit"] == 300


@pytest.mark.parametrize("limited", [0, 1])
@pytest.mark.parametrize(
    ("free_files", "num_sockets", "coordinator"),
    [(3, 2, "launcher"), (70, 100, "launcher"), (70, 100, "rank 0"), (200, 100, "launcher"), (200, 100, "rank 0")],
)
def test_a_rank_with_too_many_open_files_says_so_and_the_others_name_it(
    free_files: int, num_sockets: int, coordinator: str, limited: int
) -> None:
    """With few free files a rank cannot join; with more, the sockets of a ring are too many: a rank needs a file for
    each that it opens and each that it accepts."""
    common = {"num_sockets": num_sockets, **({} if coordinator == "launcher" else hosted_by_rank_0())}
    settings = [{**common, "host": f"host-{rank}"} for rank in range(2)]
    ended = join_with(settings, limits={limited: {"free_files": free_files, "hard_limit": 0}})
    words = re.search(r"too many open files \((\d+) are open .*limit is (\d+)\).*ulimit -n", ended[limited]["text"])
    assert ended[limited]["error"] == ("StartFailed" if free_files == 3 else "RondeError") and words, ended
    assert int(words[1]) <= int(words[2]) == ended[limited]["limit"], ended
    assert f"rank {limited}" in ended[1 - limited]["text"], ended


# --- a control connection that breaks --------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["to the coordinator", "to the ranks"])
def test_named_operations_whose_messages_get_lost_fail_soon_on_every_rank(direction: str) -> None:
    ranks = range(3)
    settings = SETTINGS.replace(operation_s=3600.0)
    with ExitStack() as opened:
        job = opened.enter_context(start_ranks("joining", len(ranks), settings=settings))
        control = job.coordinator._control
        forwarder = opened.enter_context(Forwarder(control.port))
        control.port = forwarder.port  # ranks that are admitted from now on are sent there
        job.send(ranks, settings={}, pause=True)
        job.receive_all(ranks, "joined")
        forwarder.swallow_to_server = direction == "to the coordinator"
        forwarder.swallow_to_client = not forwarder.swallow_to_server
        job.send(ranks)  # each announces an operation, and waits
        deadline = Deadline(PATIENCE_S)
        while not forwarder.num_swallowed:
            assert not deadline.expired
            time.sleep(0.001)
        forwarder.cut()
        ended = job.receive_all(ranks, "ended")
        assert job.wait() == [0] * len(ranks), job.printed()
    for end in ended.values():
        assert end.get("error") in ("RoundEnded", "PeerLost"), ended
        assert re.search(r"the coordinator broke, and \d+ messages? .*got lost", end["text"]), ended
