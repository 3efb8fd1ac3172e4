"""init() and shutdown(), what happens without the second, and objects. A job of one where that is enough."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ronde
from ronde import objects
from ronde.comm import world as world_module
from ronde.comm.backends.base import RunningCall
from ronde.comm.channel import Channel
from ronde.comm.control_thread import ControlThread, JoinedRound
from ronde.comm.joining import join_round
from ronde.comm.named_operations import NamedOperations
from ronde.comm.open_channels import OpenChannels
from ronde.comm.world import current_world
from ronde.net.addresses import find_free_ports
from ronde.net.keys import new_job_key
from ronde.observe.events import Started
from ronde.observe.metrics import OperationCounters
from ronde.observe.recorder import Recorder
from ronde.settings import Settings
from ronde.types import Deadline
from tests.limits import PATIENCE_S
from tests.local_job import LocalJob
from tests.unit.thread_limit import no_new_threads

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    ronde.shutdown()


def test_without_init_every_call_says_what_to_do() -> None:
    assert not ronde.is_initialized()
    for call in (ronde.rank, ronde.metrics, lambda: ronde.allreduce(np.ones(1)), lambda: objects.broadcast(1)):
        with pytest.raises(ronde.NotInitialized, match=r"call ronde\.init"):
            call()
    ronde.shutdown()


def test_rounds_may_follow_each_other() -> None:
    for _ in range(2):
        ronde.init()
        ronde.init()
        assert (ronde.rank(), ronde.size(), ronde.local_rank(), ronde.local_size()) == (0, 1, 0, 1)
        assert (ronde.cross_rank(), ronde.cross_size()) == (0, 1)
        assert ronde.allreduce(np.ones(2), name="x").tolist() == [1, 1]
        ronde.shutdown()
        ronde.shutdown()
        assert not ronde.is_initialized()


@pytest.mark.parametrize("hosts_coordinator", [False, True])
def test_a_limit_on_threads_is_a_clear_error_and_leaves_nothing_behind(hosts_coordinator: bool) -> None:
    several: dict[str, Any] = {}
    if hosts_coordinator:
        several = {"size": 2, "rank": 0, "coordinator": f"127.0.0.1:{find_free_ports('127.0.0.1', 1)[0]}"}
        several["key"] = new_job_key()
    with no_new_threads(), pytest.raises(ronde.StartFailed, match=r"could not be started .*ulimit -u"):
        ronde.init(**several)
    assert not ronde.is_initialized()
    ronde.init()
    assert ronde.allreduce(np.ones(2), name="x").tolist() == [1, 1]


def test_what_follows_a_work_needs_a_thread_and_says_so() -> None:
    ronde.init()
    work = ronde.allreduce(np.ones(2), wait=False)
    with no_new_threads(), pytest.raises(ronde.StartFailed, match=r"ronde-callbacks could not be started"):
        work.future()
    assert work.future().result(PATIENCE_S).tolist() == [1, 1]


def operate_in_all_ways() -> None:
    x = np.ones(2)
    works = [ronde.allreduce(x, wait=False) for _ in range(3)]
    works.append(ronde.allreduce(x, name="x", wait=False))
    ronde.plan([ronde.Bucket(3)]).run(0)
    group = ronde.add_group([0])
    for work in works:
        work.wait()
    ronde.allreduce(x, group=group)


@pytest.mark.parametrize(
    ("owner", "method"),
    [  # all of them with a lock, or just before or after one
        (NamedOperations, "_make_request"),
        (NamedOperations, "_release_names"),
        (Channel, "_reap_completed"),
        (RunningCall, "done"),
        (RunningCall, "_complete"),
        (OpenChannels, "error_for"),
        (OpenChannels, "add"),
        (ControlThread, "_enqueue"),
        (Recorder, "record_event"),
        (Recorder, "record_overlap"),
        (OperationCounters, "add"),
    ],
)
def test_a_signal_handler_may_leave_the_round_at_any_moment(
    owner: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes in the middle of the method, in the main thread."""
    came: list[object] = []
    original = getattr(owner, method)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if not came and threading.current_thread() is threading.main_thread() and ronde.is_initialized():
            signal.raise_signal(signal.SIGUSR1)
        return original(*args, **kwargs)

    def handler(*_: object) -> None:
        came.append(ronde.metrics())
        ronde.shutdown()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        ronde.init()
        monkeypatch.setattr(owner, method, interrupted)
        with pytest.raises((ronde.RoundEnded, ronde.NotInitialized)):
            operate_in_all_ways()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert came and not ronde.is_initialized()


def test_what_is_to_be_done_when_the_round_is_left_comes_before_its_channels_close() -> None:
    ronde.init()
    world = current_world()
    seen: list[str] = []
    world.call_at_close(lambda: seen.append("over" if world.is_over else "running"))
    assert not seen
    ronde.shutdown()
    world.call_at_close(lambda: seen.append("at once"))
    assert seen == ["running", "at once"]


def test_groups_can_be_given_at_the_start() -> None:
    ronde.init(groups=[[0], [0]])
    assert [group.ranks for group in ronde.groups()] == [(0,), (0,), (0,)]
    ronde.remove_group(ronde.groups()[1])
    assert [group.id for group in ronde.groups()] == [0, 2]
    ronde.shutdown()
    for wrong, words in (({"groups": [[0, 1]]}, "from 0 to 0, got 1"), ({"stall_s": -1}, "stall_s")):
        with pytest.raises(ValueError, match=words):
            ronde.init(**wrong)
        assert not ronde.is_initialized()


def test_all_functions_reach_the_world() -> None:
    ronde.init()
    x = np.arange(4.0)
    for result in (ronde.allreduce(x, op="mean"), ronde.allgather(x), ronde.broadcast(x), ronde.reduce_scatter(x)):
        assert np.array_equal(result, x)
    assert np.array_equal(ronde.alltoall(x)[0], x)
    assert ronde.barrier() is None
    assert ronde.join() == 0
    with ronde.plan([ronde.Bucket(3)]) as plan:
        plan.run(0)
    assert ronde.allreduce(x, group=ronde.add_group([0])).shape == x.shape
    for message in (ronde.send, ronde.receive):
        with pytest.raises(ValueError, match="this very rank"):
            message(x, 0)
    assert ronde.metrics().total.operations > 5
    assert any(isinstance(event, Started) and event.size == 1 for event in ronde.events())


def test_a_timeline_can_come_and_go(tmp_path: Path) -> None:
    ronde.init()
    ronde.start_timeline(tmp_path / "trace.json")
    ronde.allreduce(np.ones(1), name="in it")
    ronde.stop_timeline()
    ronde.allreduce(np.ones(1), name="behind it")
    ronde.stop_timeline()
    with pytest.raises(ValueError, match="cannot be written"):
        ronde.start_timeline(tmp_path / "no" / "trace.json")
    ronde.shutdown()
    trace = (tmp_path / "trace.json").read_text()
    assert "in it" in trace and "behind it" not in trace


@pytest.mark.parametrize(
    ("ending", "codes", "why"),
    [
        ("raise ArithmeticError('the last straw')", [0, 1], "ArithmeticError: the last straw"),
        ("pass", [0, 0], "exited without shutdown"),
        ("threading.Thread(target=await_told).start(); raise ArithmeticError('a', 0)", [0, 1], "ArithmeticError: ('a'"),
    ],
)
def test_how_a_script_ends_without_shutdown_reaches_the_others(
    ending: str, codes: list[int], why: str, tmp_path: Path
) -> None:
    """In the last case the process lives on until the others have heard of the error."""
    script = f"""
        import pathlib, threading, time
        import numpy as np, ronde
        told = pathlib.Path({str(tmp_path / "told")!r})
        def await_told():
            while not told.exists():
                time.sleep(0.01)
        ronde.init()
        if ronde.rank() == 1:
            {ending}
        else:
            try:
                ronde.allreduce(np.ones(3), name="x")
            except ronde.PeerLost as error:
                print("error:", error)
            told.touch()
            ronde.shutdown()
        """
    with tempfile.TemporaryFile() as output:
        argv = [sys.executable, "-W", "error", "-c", textwrap.dedent(script)]
        with LocalJob(argv, 2, env={"PYTHONPATH": str(ROOT / "src")}, outputs=[output] * 2) as job:
            ended = job.wait(Deadline(40))
        output.seek(0)
        said = output.read().decode()
    assert ended == codes, said
    assert "error: rank 0 lost rank 1" in said and why in said.split("error:")[1]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "MemoryError"),
        (KeyError("a"), "KeyError: 'a'"),
        (ValueError("\nshapes differ:\n  (3, 4)\n  (4, 3)"), "ValueError: shapes differ:"),
        (ValueError("x" * 1000), "ValueError: " + "x" * 187 + "…"),
    ],
)
def test_an_error_is_described_in_one_line_as_python_prints_it(error: Exception, line: str) -> None:
    assert world_module._describe_error(error) == line


def test_a_forked_child_of_a_job_of_one_knows_its_rank_and_may_leave_and_join_by_itself() -> None:
    script = """
        import os, warnings
        import numpy as np, ronde
        warnings.simplefilter("ignore", DeprecationWarning)  # of os.fork(), which is the point here
        ronde.init()
        work = ronde.allreduce(np.ones(2), wait=False)
        if os.fork() == 0:
            print(ronde.rank(), ronde.size(), ronde.is_initialized(), work.wait().tolist())
            for refused in (ronde.init, ronde.barrier, lambda: ronde.allreduce(np.ones(2), name="x")):
                try:
                    refused()
                except ronde.RondeError as error:
                    print(f"is a forked child of process {os.getppid()}," in str(error))
            ronde.shutdown()
            ronde.init()
            print(ronde.allreduce(np.ones(2), name="x").tolist())
        else:
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
            print(ronde.allreduce(np.ones(2), name="x").tolist())
        """
    argv = [sys.executable, "-W", "error", "-c", textwrap.dedent(script)]
    environment = {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0 1 True [1.0, 1.0]", "True", "True", "True", "[1.0, 1.0]", "[1.0, 1.0]"]


def test_objects_come_back_as_they_are() -> None:
    thing = {"a": [1, 2, {3}], "f": (4.5, None)}
    ronde.init()
    assert objects.broadcast(thing) == thing
    assert objects.allgather(thing) == objects.gather(thing) == objects.alltoall([thing]) == [thing]
    with pytest.raises(ValueError, match="root must be a member"):
        objects.gather(1, root=3)
    with pytest.raises(ValueError, match="needs 1 objects, one per member"):
        objects.alltoall([1, 2])


# --- elastic jobs ----------------------------------------------------------------------------------------------------


def test_a_job_of_one_has_no_other_round_to_join() -> None:
    ronde.init()
    world = world_module.current_world()
    assert not (world.can_rejoin or world.is_candidate or world.change_wanted or world.is_over)
    world.finish()
    assert ronde.allreduce(np.ones(1)).tolist() == [1.0]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, True),
        ({"coordinator_hosted": True}, False),
        ({"coordinator_hosted": True, "elastic": True}, True),
        ({"backend": "mpi"}, False),
    ],
)
def test_which_jobs_go_on_after_a_loss(given: dict[str, Any], expected: bool) -> None:
    ronde.init()
    world = world_module.current_world()
    world.joined_round.liveness_fd = 0  # as if the coordinator were another process
    world.settings = world.settings.replace(**given)
    assert world.can_rejoin is expected


def test_a_signal_handler_may_leave_the_job_while_it_waits_for_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def interrupted(*_: object, hosting: ExitStack, **__: object) -> None:
        with hosting:  # as a failed attempt to join does
            ronde.shutdown()

    ronde.init()
    world_module.current_world().joined_round.hosting.callback(closed.append, "the coordinator")
    monkeypatch.setattr(world_module, "join_round", interrupted)
    with pytest.raises(ronde.RoundEnded, match="shutdown"):
        world_module.rejoin()
    assert not ronde.is_initialized() and closed == ["the coordinator"]
    monkeypatch.undo()
    ronde.init()
    assert ronde.size() == 1


def test_a_round_of_a_candidate_has_none_of_the_users_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    def join(settings: Settings, groups: object, round: int) -> JoinedRound:
        joined_round = join_round(settings.replace(rank=0, size=1), (), round)
        joined_round.candidate = (2, 3)
        return joined_round

    monkeypatch.setattr(world_module, "join_round", join)
    ronde.init(rank=2, size=3, groups=[[0, 2]])
    assert (ronde.rank(), ronde.size(), len(ronde.groups())) == (2, 3, 1)
    with pytest.raises(ronde.RondeError, match=r"train inside of ronde\.elastic\.run"):
        ronde.mark_step()
