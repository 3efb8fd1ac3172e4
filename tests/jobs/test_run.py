"""`ronde run` as its users see it: the exit code, the summary, every way to end it, what is wrong with a request, and
what can be learned of a running job. Whatever happens, nothing is left behind: see RondeRun."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ronde.launch.driver.driver import SIGNAL_REPEAT_S
from ronde.types import Deadline
from tests.commands import run_command
from tests.jobs.kit import RONDE, RondeRun, ask, run, script
from tests.limits import PATIENCE_S, SECONDS_S

# --- how it ends ---------------------------------------------------------------------------------------------------

BOOM = ["Traceback (most recent call last):", "RuntimeError: boom"]


@pytest.mark.parametrize(
    ("how", "code", "reason", "last_words"),
    [
        ("raise", 1, "exited with code 1 (RuntimeError: boom)", BOOM),
        ("late", 1, "exited with code 1 (RuntimeError: boom)", BOOM),
        ("kill", 137, "killed by signal 9 (SIGKILL)", []),
        ("crash", 139, "killed by signal 11 (SIGSEGV)", ["Fatal Python error: Segmentation fault", "in string_at"]),
        ("3", 3, "exited with code 3 (exited without shutdown)", []),
    ],
)
def test_the_first_that_failed_is_named_with_its_last_words_and_not_its_peers(
    how: str, code: int, reason: str, last_words: list[str]
) -> None:
    done = run("-np", "3", *script("ronde_run", "end", how))
    assert (done.code, done.out) == (code, ""), done
    first, *shown, last = done.summary
    assert first == f"rank 1 on host localhost failed first: {reason}"
    assert last == "2 other ranks ended in consequence"
    assert all(line.startswith("  | ") for line in shown)
    for line in last_words:
        assert any(line in each for each in shown), shown
    assert bool(shown) == bool(last_words)
    assert not any("PeerLost" in line for line in shown)
    assert "PeerLost: rank 2 lost rank 1 during all" in done.err, "it is on the screen, under its number"


def test_a_rank_that_leaves_the_others_alone_is_named_though_its_code_is_0() -> None:
    done = run("-np", "2", *script("ronde_run", "end", "0"))
    assert done.code == 1
    left, then = done.summary
    assert left == "rank 1 on host localhost left too early: exited with code 0 (exited without shutdown)"
    assert then.startswith("rank 0 then exited with code 1: PeerLost: rank 0 lost rank 1 during allreduce")


GOES_ON = """
import logging, os, sys
try:
    open("/nowhere/cache")
except OSError:
    logging.exception("no cache")
print("loss is nan", file=sys.stderr, flush=True)
print("giving up", flush=True)
os.kill(os.getpid(), 9) if sys.argv[1] == "kill" else sys.exit(7)
"""


@pytest.mark.parametrize(("how", "code"), [("kill", 137), ("exit", 7)])
def test_an_error_that_a_rank_has_got_over_is_not_shown_as_the_reason(how: str, code: int) -> None:
    done = run("-np", "1", sys.executable, "-c", GOES_ON, how)
    assert done.code == code
    _, heading, *_, loss, other_heading, end = done.summary
    assert (heading, other_heading) == ("  | last lines of standard error:", "  | last lines of standard output:")
    assert (loss, end) == ("  | loss is nan", "  | giving up")


def test_a_rank_that_ends_well_before_others_is_no_failure() -> None:
    done = run("-np", "3", "sh", "-c", "test $RANK = 0 || sleep 0.2; echo $RANK")
    assert (done.code, done.err, sorted(done.out.splitlines())) == (0, "", ["[0] 0", "[1] 1", "[2] 2"])


def test_who_does_not_end_after_a_failure_is_told_and_then_killed(tmp_path: Path) -> None:
    fails = f"until test -e {tmp_path}/1 -a -e {tmp_path}/2; do sleep 0.05; done; exit 4"  # when the others are deaf
    stays = f"exec {sys.executable} -m tests.jobs.scripts.ronde_run stay deaf {tmp_path}"
    staying = f"if test $RANK = 0; then {fails}; fi; {stays}"
    done = run("-np", "3", "--grace", "1.5", "--terminate", "0.1", "sh", "-c", staying)
    assert done.code == 4
    assert done.err.splitlines() == [
        "[ronde] ending ranks 1, 2, still running 1.5 s after the first failure",
        "[ronde] killing ranks 1, 2",
        "rank 0 on host localhost failed first: exited with code 4",
        "2 other ranks ended in consequence",
    ]


@pytest.mark.parametrize(
    ("manner", "numbers", "code", "why"),
    [
        ("polite", [signal.SIGINT], 130, "interrupted by Ctrl-C"),
        ("deaf", [signal.SIGINT], 130, "interrupted by Ctrl-C"),
        ("deaf", [signal.SIGINT, signal.SIGINT], 130, "interrupted by Ctrl-C"),
        ("polite", [signal.SIGTERM], 143, "ended by SIGTERM"),
        ("deaf", [signal.SIGTERM, signal.SIGTERM], 143, "ended by SIGTERM"),
        ("polite", [signal.SIGHUP], 129, "ended by SIGHUP: the terminal was closed"),
    ],
)
def test_a_signal_ends_all_ranks_and_their_children(
    manner: str, numbers: list[signal.Signals], code: int, why: str
) -> None:
    with RondeRun("-np", "2", "--no-fold", *script("ronde_run", "stay", manner)) as job:
        job.read_lines(2)
        before = time.monotonic()
        for index, number in enumerate(numbers):
            if index:
                time.sleep(SIGNAL_REPEAT_S[number])  # what comes sooner is no second request
            job.signal(number)
            if manner == "deaf":
                job.read_errors_until("[ronde] ")
        done = job.result()
        assert time.monotonic() - before < SECONDS_S
    assert (done.code, done.summary) == (code, [why])


SAVES = """
import signal, sys, time

def save(*_):
    print("saving", flush=True)
    time.sleep(1.0)
    print("saved", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_the_command_timeout_leaves_ranks_the_time_to_save(tmp_path: Path) -> None:
    """It sends SIGTERM twice: to its command, and to the group of both."""
    script = tmp_path / "train.py"
    script.write_text(SAVES)
    with subprocess.Popen(
        ["timeout", "--verbose", "1000", RONDE, "run", "-np", "2", "--no-fold", sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as timeout:
        try:
            assert timeout.stdout is not None
            for _ in range(2):
                assert timeout.stdout.readline().endswith("ready\n")
            timeout.send_signal(signal.SIGTERM)  # which it passes on as it does its own
            out, err = timeout.communicate(timeout=PATIENCE_S)
        finally:
            timeout.kill()
    assert sorted(out.splitlines()) == [f"[{rank}] {word}" for rank in range(2) for word in ("saved", "saving")], err
    assert "killing" not in err


def test_a_killed_driver_takes_all_with_it_and_the_next_job_may_have_its_name() -> None:
    with RondeRun("-np", "2", "--no-fold", "--name", "killed", *script("ronde_run", "stay", "deaf")) as job:
        job.read_lines(2)
        job.signal(signal.SIGKILL)
        job.result()
    assert run("-np", "1", "--name", "killed", "true").code == 0


def test_ctrl_c_is_heard_before_there_are_ranks(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    os.mkfifo(hosts)
    with RondeRun("--hostfile", str(hosts), "true") as job, hosts.open("w"):  # open: it is being read
        job.signal(signal.SIGINT)
        assert job.result() == (130, "", "")


# --- readers that go away, or stop ---------------------------------------------------------------------------------

CHATTER = ("sh", "-c", "while echo something; do :; done")


def test_a_reader_that_leaves_ends_the_job() -> None:
    with RondeRun("-np", "2", *CHATTER) as job:
        job.read_lines()
        assert job.driver.stdout is not None
        job.driver.stdout.close()
        assert job.driver.stderr is not None
        assert (job.driver.wait(PATIENCE_S), job.driver.stderr.read()) == (141, b""), "as any program before `| head`"


def test_output_that_cannot_be_written_ends_the_job_and_says_why() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [RONDE, "run", "-np", "2", *CHATTER], stdout=full, stderr=subprocess.PIPE, timeout=PATIENCE_S, check=False
        )
    assert done.returncode == 1
    assert done.stderr.decode().endswith("cannot write to standard output: [Errno 28] No space left on device\n")


@pytest.mark.parametrize(("number", "code", "merged"), [(signal.SIGINT, 130, True), (signal.SIGTERM, 143, False)])
def test_a_reader_that_stops_does_not_keep_the_job_from_ending(number: signal.Signals, code: int, merged: bool) -> None:
    with RondeRun("-np", "2", "--no-fold", *CHATTER, merged=merged) as job:
        job.read_lines()
        await_silence(job)
        job.signal(number)
        assert job.driver.wait(SECONDS_S) == code


def await_silence(job: RondeRun) -> None:
    """Until nobody reads from anybody: every rank waits for the driver, and the driver for us."""
    deadline = Deadline(PATIENCE_S)
    before, num_equal = -1.0, 0
    while num_equal < 3:  # on a busy machine, once may only mean that none of them had its turn
        assert not deadline.expired
        now = sum(sum(each.cpu_times()[:2]) for each in job.processes())
        num_equal = num_equal + 1 if now == before else 0
        before = now
        time.sleep(0.2)


# --- requests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        ("-np 2", 2, "there is no command to run"),
        ("-np 2 --outptu x true", 2, "no such flag: --outptu; did you mean --output?"),
        ("-np x true", 2, "--num-ranks must be a whole number of at least 1, got 'x'"),
        ("-np 5 -H localhost:2 true", 2, "5 ranks, but only 2 slots (localhost:2): 3 slots short"),
        ("--debug 2 -np 2 true", 2, "--debug 2: there are only ranks 0 to 1"),
        ("--hostfile /nowhere/hosts true", 2, "cannot read the hostfile /nowhere/hosts: No such file or directory"),
        ("--config /nowhere/job.yaml true", 2, "cannot read /nowhere/job.yaml: No such file or directory"),
        ("--output /proc/logs true", 2, "cannot make the output file /proc/logs: No such file or directory"),
        ("--cwd /nowhere true", 1, "there is no directory /nowhere; every rank starts there"),
        ("-np 2 no-such-command", 127, "ranks 0, 1 on host localhost could not be started: there is no command"),
        ("-np 2 /etc/passwd", 126, "'/etc/passwd' may not be executed on host"),
    ],
)
def test_a_request_that_cannot_be_met_says_why(words: str, code: int, reason: str) -> None:
    done = run(*words.split())
    assert (done.code, done.out) == (code, "")
    assert reason in done.err and "Traceback" not in done.err


@pytest.mark.parametrize(("closed", "out"), [(">&-", ""), ("2>&-", "[0] out\n"), ("<&- >&- 2>&-", "")])
def test_a_closed_stream_leads_nowhere_and_changes_nothing_else(closed: str, out: str) -> None:
    words = [RONDE, "run", "sh", "-c", "echo out; echo err >&2; exit 3"]
    done = run_command(["sh", "-c", f'exec "$@" {closed}', "sh", *words])
    assert (done.returncode, done.stdout) == (3, out), done.stderr
    assert "Traceback" not in done.stderr


def test_a_job_in_a_file_with_hosts_in_another(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# this machine alone\n\nlocalhost slots=3  # three\n")
    (tmp_path / "job.yaml").write_text(
        f"""
        hostfile: {tmp_path}/hosts
        num_ranks: 2
        env: {{COLOUR: blue}}
        cwd: {tmp_path}
        no_fold: true
        command: sh -c 'echo $RANK of $WORLD_SIZE in $PWD is $COLOUR'
        """
    )
    done = run("--config", str(tmp_path / "job.yaml"))
    assert (done.code, done.err) == (0, "")
    assert sorted(done.out.splitlines()) == [f"[{rank}] {rank} of 2 in {tmp_path} is blue" for rank in range(2)]
    stronger = run("--config", str(tmp_path / "job.yaml"), "-np", "3", "-x", "COLOUR=red", "--", "printenv", "COLOUR")
    assert sorted(stronger.out.splitlines()) == [f"[{rank}] red" for rank in range(3)]


def test_ports_and_places_that_others_have_are_in_nobodys_way() -> None:
    """A job's ports are found free by the system; what an outer job left in the environment does not count."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        outer = {"RONDE_RANK": "7", "RONDE_SIZE": "9", "RONDE_KEY": "00" * 32, "RONDE_COORDINATOR": f"127.0.0.1:{port}"}
        program = "import ronde; ronde.init(); print(ronde.rank(), ronde.size()); ronde.shutdown()"
        env = {**outer, "MASTER_PORT": port}
        done = run("-np", "2", sys.executable, "-c", program, env=env)
        assert (done.code, sorted(done.out.splitlines())) == (0, ["[0] 0 2", "[1] 1 2"]), done.err
        assert port not in run("-np", "1", "printenv", "MASTER_PORT", env=env).out


# --- while it runs -------------------------------------------------------------------------------------------------

SLOW = 2


def is_known(status: dict[str, Any]) -> bool:
    """ControlledRanks and agents tell about once per second."""
    return status["slowest"] is not None and all(rank["memory_bytes"] is not None for rank in status["ranks"])


def test_a_running_job_tells_who_is_slow_and_where_everybody_is() -> None:
    name = f"watched-{os.getpid()}"
    with RondeRun("-np", "3", "--no-fold", "--name", name, *script("ronde_run", "step", str(SLOW))) as job:
        assert job.read_lines(3) == [f"[{rank}] begun" for rank in range(3)]
        taken = run("-np", "1", "--name", name, "true")
        assert taken.code == 2 and f"a job named {name!r} is running already" in taken.err
        deadline = Deadline(PATIENCE_S)
        while not is_known(status := json.loads(ask("top", name, "--json").out)):
            assert not deadline.expired, status
        assert status["slowest"] == SLOW, status
        ranks = status["ranks"]
        assert [rank["state"] for rank in ranks] == ["running"] * 3
        assert {rank["pid"] for rank in ranks} <= {process.pid for process in job.processes()}
        slow, *others = sorted(ranks, key=lambda rank: rank["rank"] != SLOW)
        assert all(rank["waiting"] > slow["waiting"] and rank["held_up_s"] < slow["held_up_s"] for rank in others)
        assert all(0 < rank["memory_bytes"] < 1 << 33 for rank in ranks)
        shown = ask("top", name, "--once")
        assert shown.code == 0 and f"▶ {SLOW}" in shown.out, shown
        stacks = json.loads(ask("stack", name, "--json").out)["ranks"]
        assert [each["rank"] for each in stacks] == [0, 1, 2] and all(
            "ronde_run.py" in each["stack"] for each in stacks
        )
        job.signal(signal.SIGINT)
        assert job.result().code == 130
    gone = ask("top", name)
    assert gone.code == 2 and f"no job named {name!r} is running" in gone.err
