"""init() and shutdown(), what happens without the second, and objects. A job of one where that is enough."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ronde
from ronde import objects
from ronde.comm import world as world_module
from ronde.net.keys import new_job_key
from ronde.observe.events import Started
from ronde.types import Deadline
from tests.local_job import LocalJob

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
    ],
)
def test_how_a_script_ends_without_shutdown_reaches_the_others(ending: str, codes: list[int], why: str) -> None:
    script = f"""
        import numpy as np, ronde
        ronde.init()
        if ronde.rank() == 1:
            {ending}
        else:
            try:
                ronde.allreduce(np.ones(3), name="x")
            except ronde.PeerLost as error:
                print("error:", error)
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


def test_a_killed_rank_is_noticed_though_its_child_lives() -> None:
    script = """
        import os, signal, time
        import numpy as np, ronde
        ronde.init(start_s=20.0, operation_s=20.0, shutdown_s=1.0)
        if ronde.rank() == 1:
            if os.fork() == 0:
                assert not ronde.is_initialized()
                time.sleep(5)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            ronde.allreduce(np.ones(3))
        except ronde.PeerLost as error:
            print("error:", error, time.monotonic() - began < 4)
        """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    env = {"RONDE_SIZE": "2", "RONDE_KEY": new_job_key(), "RONDE_COORDINATOR": address, "PYTHONPATH": str(ROOT / "src")}
    argv = [sys.executable, "-c", textwrap.dedent(script)]
    with tempfile.TemporaryFile() as output:
        ranks = [subprocess.Popen(argv, env={**env, "RONDE_RANK": rank}, stdout=output, stderr=output) for rank in "01"]
        codes = [rank.wait(40) for rank in ranks]
        output.seek(0)
        said = output.read().decode()
    assert codes == [0, -9], said
    assert "error: rank 0 lost rank 1" in said and "True" in said


def test_objects_come_back_as_they_are() -> None:
    thing = {"a": [1, 2, {3}], "f": (4.5, None)}
    ronde.init()
    assert objects.broadcast(thing) == thing
    assert objects.allgather(thing) == objects.gather(thing) == objects.alltoall([thing]) == [thing]
    with pytest.raises(ValueError, match="root must be a member"):
        objects.gather(1, root=3)
    with pytest.raises(ValueError, match="needs 1 objects, one per member"):
        objects.alltoall([1, 2])
