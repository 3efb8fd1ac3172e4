"""A job answers questions about itself, and is found by its name."""

from __future__ import annotations

import json
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ronde.coordinator.queries import OnStacks
from ronde.errors import ProtocolError, RondeError, StartFailed
from ronde.launch.driver.monitor import (
    GoneWorker,
    JobStatus,
    MonitorServer,
    NoSuchJob,
    RankStatus,
    RoundRecord,
    RunningJob,
    find_job,
    make_elastic_status,
    make_job_status,
    make_rank_stacks,
    open_jobs_dir,
    query_stacks,
    query_status,
)
from ronde.net.unix_server import UnixLineServer, query_monitor
from ronde.observe.activity import JobActivity, RankActivity, RankState
from ronde.observe.stacks import RankStack
from ronde.types import Deadline

STATUS = JobStatus(name="demo", size=1, ranks=(RankStatus(rank=0, state="running", cpu=0.5),))


@pytest.fixture
def jobs_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ronde") as made:  # short, as a socket's path must be
        yield Path(made)


def stacks(limit_s: float, on_done: OnStacks) -> None:
    on_done((RankStack(rank=0, line=f"asked for {limit_s:g} s"),))


def serve(name: str, jobs_dir: Path) -> MonitorServer:
    return MonitorServer(name, lambda: STATUS, stacks, jobs_dir=jobs_dir)


def ask(job: RunningJob, text: str) -> dict[str, object]:
    answer: dict[str, object] = json.loads(query_monitor(job.path, text.encode(), Deadline(10.0)))
    return answer


def test_the_answers_are_json_for_every_program(jobs_dir: Path) -> None:
    with serve("demo", jobs_dir):
        job = find_job("demo", jobs_dir)
        assert (query_status(job), query_stacks(job, 3.0)[0].line) == (STATUS, "asked for 3 s")
        status = ask(job, '{"ask": "status"}')
        assert (status["name"], status["ranks"][0]["state"]) == ("demo", "running")  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "not a question"),
        ("\xff", "not a question"),
        ("[]", "not a question"),
        ('{"ask": "key"}', "Invalid enum value 'key'"),
        ('{"ask": "status", "more": 1}', "unknown field `more`"),
    ],
)
def test_what_is_no_question_is_told_so(jobs_dir: Path, text: str, error: str) -> None:
    with serve("demo", jobs_dir):
        assert error in str(ask(find_job("demo", jobs_dir), text)["error"])


@pytest.mark.parametrize(("asked_s", "given_s"), [(-1.0, 0.0), (2.5, 2.5), (1e9, 60.0)])
def test_nobody_makes_a_driver_wait_for_long(jobs_dir: Path, asked_s: float, given_s: float) -> None:
    with serve("demo", jobs_dir):
        answer = ask(find_job("demo", jobs_dir), json.dumps({"ask": "stacks", "limit_s": asked_s}))
        assert answer["ranks"][0]["line"] == f"asked for {given_s:g} s"  # type: ignore[index]


def test_a_mistake_of_the_driver_is_told_to_who_asked(jobs_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> JobStatus:
        raise KeyError("no such rank")

    with MonitorServer("demo", broken, stacks, jobs_dir=jobs_dir):
        with pytest.raises(RondeError, match=r"job demo: the driver could not answer: KeyError\('no such rank'\)"):
            query_status(find_job("demo", jobs_dir))
        assert query_stacks(find_job("demo", jobs_dir), 3.0)[0].line == "asked for 3 s"


def test_an_answer_of_another_version_is_told(jobs_dir: Path) -> None:
    server = UnixLineServer(jobs_dir / "old.sock", lambda request, reply: reply(b'{"ranks": 5}'))
    with pytest.raises(ProtocolError, match="job old gave no answer of this version"):
        query_status(find_job("old", jobs_dir))
    server.close()


# --- finding jobs -----------------------------------------------------------------------------------------------------


def test_which_jobs_are_running_is_told_when_one_is_not(jobs_dir: Path) -> None:
    with pytest.raises(NoSuchJob, match="no job is running"):
        find_job("", jobs_dir)
    with serve("one", jobs_dir), serve("two", jobs_dir):
        with pytest.raises(NoSuchJob, match=r"no job named 'three' is running .*\(running: one, two;"):
            find_job("three", jobs_dir)
        with pytest.raises(NoSuchJob, match="2 jobs are running, say which: one, two"):
            find_job("", jobs_dir)
    with serve("one", jobs_dir):
        only = find_job("", jobs_dir)
        assert (only.name, only.pid) == ("one", os.getpid())


def test_two_jobs_cannot_have_one_name(jobs_dir: Path) -> None:
    with serve("demo", jobs_dir):
        with pytest.raises(ValueError, match=rf"named 'demo' is running already \(process {os.getpid()}\)"):
            serve("demo", jobs_dir)
        assert find_job("demo", jobs_dir).name == "demo"
    with serve("demo", jobs_dir):
        pass


@pytest.mark.parametrize("name", ["a/b", "..", "-x", "a b", "x" * 65, "ä"])
def test_a_name_that_could_be_a_path_is_refused(jobs_dir: Path, name: str) -> None:
    with pytest.raises(ValueError, match="a job's name is up to 64 letters"):
        serve(name, jobs_dir)


def test_a_path_too_long_for_a_socket_is_told(jobs_dir: Path) -> None:
    deep = jobs_dir / ("d" * 60)
    deep.mkdir()
    with pytest.raises(ValueError, match="too long for a socket's name"):
        serve("x" * 60, deep)


def test_what_a_killed_driver_left_behind_is_removed(jobs_dir: Path) -> None:
    path = jobs_dir / "killed.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(NoSuchJob):
        find_job("", jobs_dir)
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with serve("killed", jobs_dir):
        assert find_job("killed", jobs_dir).name == "killed"


# --- the directory ----------------------------------------------------------------------------------------------------


def test_the_directory_is_below_that_of_the_session_and_private(
    jobs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(jobs_dir))
    made = open_jobs_dir()
    assert made == jobs_dir / "ronde"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert open_jobs_dir() == made


@pytest.mark.parametrize("runtime", ["", "/nowhere/at/all"])
def test_without_a_session_it_is_in_the_temporary_directory(
    jobs_dir: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    monkeypatch.setattr(tempfile, "tempdir", str(jobs_dir))
    assert open_jobs_dir() == jobs_dir / f"ronde-{os.getuid()}"


@pytest.mark.parametrize("problem", ["others can enter it", "it is a link"])
def test_a_directory_that_is_not_the_users_alone_is_refused(
    jobs_dir: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(jobs_dir))
    elsewhere = jobs_dir / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if problem == "it is a link":
        (jobs_dir / "ronde").symlink_to(elsewhere)
    else:
        elsewhere.rename(jobs_dir / "ronde").chmod(0o755)
    with pytest.raises(StartFailed, match="must be a directory of yours that nobody else can enter"):
        open_jobs_dir()


# --- the status of a job --------------------------------------------------------------------------------------------


def test_a_command_with_bytes_that_are_no_text_can_be_shown() -> None:
    status = make_job_status("demo", [os.fsdecode(b"tr\xe9.py")], JobActivity(size=0), {}, 0.0)
    assert msgspec.json.decode(msgspec.json.encode(status))["command"] == ["tr\\udce9.py"]


def test_the_driver_adds_what_it_knows() -> None:
    activity = RankActivity(rank=0, state="running", host="a-0123", pid=7, steps=5, held_up_s=1.5)
    known = RankStatus(rank=0, state="starting", host="a", local_rank=1, cpu=0.9, memory_bytes=100, gpu=0.5)
    status = make_job_status("demo", ["x"], JobActivity(size=1, round=3, slowest=0, ranks=(activity,)), {0: known}, 2)
    assert (status.name, status.command, status.elapsed_s) == ("demo", ("x",), 2)
    assert (status.size, status.round, status.slowest, status.at > 1e9) == (1, 3, 0, True)
    assert status.ranks == (msgspec.structs.replace(known, state="running", pid=7, steps=5, held_up_s=1.5),)
    assert msgspec.json.decode(msgspec.json.encode(status), type=JobStatus) == status


@pytest.mark.parametrize(
    ("state", "pid", "code", "expected", "why"),
    [
        ("starting", 0, None, "starting", "has not been started yet"),
        ("starting", 7, None, "starting", "told"),
        ("running", 7, None, "running", "told"),
        ("left", 7, 0, "left", "exited with code 0"),
        ("left", 7, 3, "lost", "exited with code 3"),
        ("starting", 7, -9, "lost", "killed by signal 9 (SIGKILL)"),
        ("lost", 7, 1, "lost", "told"),
    ],
)
def test_how_a_process_ended_is_known_to_the_driver_alone(
    state: RankState, pid: int, code: int | None, expected: str, why: str
) -> None:
    activity = JobActivity(size=1, ranks=(RankActivity(rank=0, state=state, why="told"),))
    known = RankStatus(rank=0, state="starting", pid=pid, exit_code=code)
    (found,) = make_job_status("demo", ["x"], activity, {0: known}, 2.0).ranks
    assert (found.state, found.why, found.exit_code) == (expected, why, code)


def test_stacks_name_hosts_as_the_user_does() -> None:
    known = RankStatus(rank=0, state="running", host="a", pid=7)
    (stack,) = make_rank_stacks([RankStack(rank=0, host="a-0123", line="x.py:1")], {0: known})
    assert (stack.host, stack.pid, stack.line) == ("a", 7, "x.py:1")


def test_an_elastic_job_shows_its_members_by_rank_and_then_those_that_get_ready() -> None:
    workers = {
        0: RankStatus(rank=0, state="starting", host="a", pid=7, exit_code=-9),
        1: RankStatus(rank=1, state="starting", host="b", pid=8),
        2: RankStatus(rank=2, state="starting", host="a", pid=9),
        3: RankStatus(rank=3, state="starting", host="a"),
    }
    gone = GoneWorker(0, "a", "killed by signal 9 (SIGKILL)")
    rounds = [
        RoundRecord(round=0, elapsed_s=1.0, members=(0, 1), plan="2 ranks"),
        RoundRecord(round=1, elapsed_s=5.0, members=(1,), gone=(gone,), plan="1 rank"),
    ]
    activity = JobActivity(size=1, round=1, ranks=(RankActivity(rank=0, state="running", steps=3),))
    status = make_elastic_status("demo", ["x"], activity, workers, 9.0, rounds=rounds, plan="no change")
    shown = [(each.rank, each.number, each.state, each.steps, each.pid) for each in status.ranks]
    assert shown == [(0, 1, "running", 3, 8), (-1, 2, "starting", 0, 9), (-1, 3, "starting", 0, 0)]
    assert (status.size, status.plan, len(status.rounds)) == (1, "no change", 2)
    assert rounds[1].describe() == "round 1: 1 rank; worker 0 on host a killed by signal 9 (SIGKILL)"
    assert msgspec.json.decode(msgspec.json.encode(status), type=JobStatus) == status
