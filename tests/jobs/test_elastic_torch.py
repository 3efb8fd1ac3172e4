"""Training with PyTorch while workers are killed, told to go, and come: every sample counts exactly once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ronde.coordinator.round_planning import ElasticLimits
from ronde.settings import Settings
from ronde.training.sample_sharding import epoch_order
from tests.jobs.kit import ROOT, run, start_ranks
from tests.jobs.scripts.elastic_torch import make_perceptron
from tests.limits import LONG_S, LONG_TEST_S, OPERATION_S
from tests.services import needs

pytestmark = pytest.mark.timeout(LONG_TEST_S)

KILLED = -signal.SIGKILL
LENGTH = 61
needs_mount = needs("a full disk", missing="" if os.geteuid() == 0 else "mounting a file system needs root")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SETTINGS = Settings(operation_s=OPERATION_S, start_s=OPERATION_S, elastic_timeout_s=LONG_S)


def fault(worker: int, at: str, step: int, what: str = "kill") -> dict[str, Any]:
    return {"worker": worker, "at": at, "step": step, "what": what}


def train(
    num_ranks: int,
    faults: list[dict[str, Any]],
    *,
    later: int = 0,
    expected: dict[int, int],
    printed: str = "",
    **options: Any,
) -> dict[int, dict[str, Any]]:
    """Train with these faults, and `later` workers that come when the job is under way. The workers end with the
    expected exit codes, by number, and each that fails has printed this. Returns what those report that end in good
    order."""
    limits = ElasticLimits(start_ranks=num_ranks, timeout_s=SETTINGS.elastic_timeout_s)
    with start_ranks(
        "elastic_torch",
        num_ranks,
        settings=SETTINGS,
        env=ONE_THREAD,
        patience_s=LONG_S,
        limits=limits,
        max_workers=num_ranks + later,
    ) as ranks:
        ranks.send(range(num_ranks), faults=faults, **options)
        for _ in range(later):
            ranks.send([ranks.start_worker()], faults=faults, **options)
        assert dict(enumerate(ranks.wait())) == expected, ranks.printed()
        assert all(printed in ranks.output(number) for number, code in expected.items() if code > 0), ranks.printed()
        preempted = {each["worker"] for each in faults if each["what"] == "terminate"}
        finished = [number for number, code in expected.items() if not code and number not in preempted]
        return ranks.receive_all(finished, "over")


def assert_counted_once(results: dict[int, dict[str, Any]], *, epochs: int = 2) -> None:
    assert results
    for worker, result in results.items():
        for epoch in range(1, epochs + 1):
            found = result.get(f"counts after epoch {epoch}", [epoch])  # a newcomer may not have seen the end of it
            assert found == [epoch], f"worker {worker}: {result}"
        assert result[f"counts after epoch {epochs}"] == [epochs]


@pytest.mark.parametrize("overlap", [True, False])
def test_ranks_that_are_killed_one_after_the_other_lose_no_sample(overlap: bool) -> None:
    """In a backward pass, in an allreduce, and rank 0 behind its optimizer's step."""
    faults = [fault(3, "backward", 3), fault(2, "allreduce", 7, "kill soon"), fault(0, "after step", 14)]
    results = train(
        4, faults, expected={3: KILLED, 2: KILLED, 0: KILLED, 1: 0}, model="counting", overlap=overlap, workers=1
    )
    assert_counted_once(results)
    assert results[1]["sizes"] == [4, 3, 2, 1]


def test_two_ranks_that_are_killed_at_once_lose_no_sample() -> None:
    faults = [fault(1, "allreduce", 5), fault(2, "backward", 5)]
    results = train(4, faults, expected={1: KILLED, 2: KILLED, 0: 0, 3: 0}, model="counting")
    assert_counted_once(results)


def test_a_rank_that_is_killed_in_a_commit_or_while_a_checkpoint_is_written_loses_no_sample(tmp_path: Path) -> None:
    faults = [fault(2, "commit", 4), fault(0, "checkpoint", 8)]
    options: dict[str, Any] = {"checkpoints": str(tmp_path), "save_every": 3, "commit_every": 2}
    results = train(3, faults, expected={2: KILLED, 0: KILLED, 1: 0}, model="counting", **options)
    assert_counted_once(results)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a few checkpoints."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@needs_mount
def test_a_disk_that_is_full_ends_the_job_with_a_clear_error_and_the_checkpoint_before_stays_whole(
    small_disk: Path,
) -> None:
    full = {**fault(0, "checkpoint", 8, "fill disk"), "folder": str(small_disk)}
    options: dict[str, Any] = {"model": "counting", "checkpoints": str(small_disk), "save_every": 3}
    codes = dict.fromkeys(range(3), 1)  # each of them becomes rank 0, which writes
    train(3, [full], expected=codes, printed=f"cannot write the checkpoint {small_disk}", **options)
    (small_disk / "filler").unlink()
    results = train(2, [], expected={0: 0, 1: 0}, **options)
    assert_counted_once(results)
    assert results[0]["steps"] == 2 * 11 - 6


@needs_mount
def test_a_script_may_go_on_without_checkpoints_when_the_disk_is_full(small_disk: Path) -> None:
    full = {**fault(0, "checkpoint", 8, "fill disk"), "folder": str(small_disk)}
    options: dict[str, Any] = {"checkpoints": str(small_disk), "save_every": 3, "commit_every": 2}
    options["without_checkpoints"] = True
    results = train(3, [full], expected=dict.fromkeys(range(3), 0), model="counting", **options)
    assert_counted_once(results)
    assert "No space left on device" in results[0]["not saved"]


def test_a_newcomer_gets_the_state_and_a_rank_that_is_told_to_go_finishes_its_step() -> None:
    faults = [
        *[fault(number, "forward", 3, "await change") for number in range(3)],
        fault(0, "before backward", 8, "terminate"),
        fault(1, "forward", 12, "kill soon"),
    ]
    results = train(3, faults, later=1, expected={0: 0, 1: KILLED, 2: 0, 3: 0}, model="counting")
    assert_counted_once(results)
    assert results[2]["sizes"] == [3, 4, 3, 2]
    assert results[3]["sizes"] == [4, 3, 2]


def test_several_optimizers_and_passes_survive_a_kill() -> None:
    """Two batches make a step, and two optimizers have a half of the model each."""
    faults = [fault(3, "backward", 3), fault(1, "allreduce", 5, "kill soon"), fault(0, "before step", 7)]
    results = train(
        4, faults, expected={3: KILLED, 1: KILLED, 0: KILLED, 2: 0}, model="counting twice", batch=5, length=60
    )
    assert_counted_once(results)


def test_a_slow_rank_gets_a_smaller_part_and_every_sample_still_counts_once() -> None:
    options: dict[str, Any] = {
        "model": "counting",
        "length": 900,
        "batch": 20,
        "epochs": 1,
        "shares": "speed",
        "slow_s": 0.004,
    }
    results = train(2, [], expected={0: 0, 1: 0}, slow_worker=1, **options)
    assert_counted_once(results, epochs=1)
    assert results[0]["shares"] == results[1]["shares"]
    fast, slow = results[0]["shares"]
    assert slow < fast


@pytest.mark.parametrize("victim", ["giver", "taker"])
def test_a_rank_that_is_killed_while_state_is_transferred_loses_no_sample(victim: str) -> None:
    """The newcomer is worker 3. What it takes comes from the others, which have made 4 steps by then."""
    number = 1 if victim == "giver" else 3
    faults = [fault(each, "forward", 3, "await change") for each in range(3)]
    faults.append(fault(number, "sync", 0 if victim == "taker" else 4))
    survivors = dict.fromkeys({0, 1, 2, 3} - {number}, 0)
    results = train(3, faults, later=1, expected={number: KILLED, **survivors}, model="counting")
    assert_counted_once(results)


def test_the_loss_curve_is_that_of_an_undisturbed_run() -> None:
    """Kills, and a newcomer that gets its state from three ranks, and is the last one at the end."""
    faults = [
        fault(2, "allreduce", 3, "kill soon"),
        *[fault(number, "forward", 6, "await change") for number in (0, 1, 3)],
        fault(0, "backward", 9),
        fault(1, "after step", 15),
        fault(3, "before backward", 18),
    ]
    expected = {2: KILLED, 0: KILLED, 1: KILLED, 3: KILLED, 4: 0}
    results = train(4, faults, later=1, expected=expected, model="perceptron")
    losses = undisturbed_losses()
    found = {key: value for key, value in results[4].items() if key in losses}
    assert len(found) >= len(losses) - 8
    assert results[4]["sizes"] == [4, 3, 2, 1]
    for key, loss in found.items():
        assert loss == pytest.approx(losses[key], rel=1e-7), key


def undisturbed_losses() -> dict[str, float]:
    """The loss after each step of one process that has never heard of ranks."""
    model, inputs, targets = make_perceptron(LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: dict[str, float] = {}
    for epoch in range(2):
        order = torch.from_numpy(epoch_order(LENGTH, epoch=epoch, seed=5, shuffle=True))
        for start in range(0, LENGTH, 6):
            samples = order[start : start + 6]
            optimizer.zero_grad()
            loss: Any = nn.functional.mse_loss(model(inputs[samples]), targets[samples])
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                losses[f"{epoch}.{min(start + 6, LENGTH)}"] = float(nn.functional.mse_loss(model(inputs), targets))
    return losses


@pytest.mark.parametrize(("at", "num_finished"), [("backward", 4), ("before step", 5)])
def test_what_a_forward_pass_changes_returns_to_the_end_of_the_last_step(at: str, num_finished: int) -> None:
    """A rank that is killed behind the reduction has given its gradients, so the step counts."""
    options: dict[str, Any] = {"model": "batch norm", "length": 96, "batch": 12, "epochs": 1}
    results = train(3, [fault(1, at, 4)], expected={1: KILLED, 0: 0, 2: 0}, **options)
    for result in results.values():
        assert result["sizes"] == [3, 2]
        returned, steps = result["returned"]
        assert returned, result
        assert steps == num_finished


def test_a_job_that_has_died_goes_on_from_its_checkpoint_with_another_number_of_ranks(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": "counting", "checkpoints": str(tmp_path), "save_every": 3}
    train(
        3, [fault(number, "before step", 8) for number in range(3)], expected=dict.fromkeys(range(3), KILLED), **options
    )
    results = train(2, [], expected={0: 0, 1: 0}, **options)
    assert_counted_once(results)
    assert results[0]["steps"] == 2 * 11 - 6


def test_the_example_survives_the_kill_that_its_readme_shows() -> None:
    words = "-np 3 --min-np 1 python examples/elastic/digits.py --kill-at 40"
    assert f"`ronde run {words}`" in (ROOT / "examples/README.md").read_text()
    result = run(*words.replace("python", sys.executable).split(), "--epochs", "6", env=ONE_THREAD, limit_s=LONG_S)
    assert result.code == 0, result
    found = re.search(r"test accuracy ([\d.]+)% after (\d+) steps; ranks: 3 2( 3)?\b", result.out)
    assert found, result
    assert float(found[1]) > 90
    assert int(found[2]) == 6 * 16
