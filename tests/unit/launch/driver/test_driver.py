"""Whole jobs of this machine, driven from the test's own thread."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from ronde.launch.driver.driver import START_FAILED_EXIT_CODE, Driver, JobResult
from ronde.launch.driver.failure_report import StopRequest
from ronde.launch.job import Job
from ronde.launch.placement import Host
from ronde.settings import Settings
from tests.unit.launch.agent.watched_agent import ends
from tests.unit.launch.recording_sink import RecordingSink

STAY = "while :; do sleep 0.05; done"


def job(script: str, num_ranks: int = 2, *, grace_s: float = 10.0, terminate_s: float = 5.0) -> Job:
    """Ranks that run a shell script."""
    return Job(command=("/bin/sh", "-c", script), num_ranks=num_ranks, grace_s=grace_s, terminate_s=terminate_s)


def run(
    script: str, num_ranks: int = 2, *, grace_s: float = 10.0, terminate_s: float = 5.0
) -> tuple[JobResult, RecordingSink]:
    sink = RecordingSink()
    return Driver(job(script, num_ranks, grace_s=grace_s, terminate_s=terminate_s), sink).run(), sink


def test_every_rank_runs_with_its_own_place_and_its_output_is_shown() -> None:
    result, sink = run('echo "$RANK of $WORLD_SIZE at $MASTER_ADDR"', 3)
    assert result == JobResult(0, "", {}, {0: 0, 1: 0, 2: 0})
    assert sink.printed == {rank: f"{rank} of 3 at 127.0.0.1\n".encode() for rank in range(3)}
    assert sorted(sink.exited_ranks) == [0, 1, 2] and not sink.messages


def test_a_failing_rank_is_named_with_its_last_words_and_gives_the_exit_code() -> None:
    result, _ = run('[ "$RANK" = 0 ] || { echo "no such file" >&2; exit 3; }')
    assert (result.exit_code, result.exit_codes) == (3, {0: 0, 1: 3})
    assert result.summary == "rank 1 on host localhost failed first: exited with code 3\n  | no such file"


def test_ctrl_c_ends_all_ranks() -> None:
    result, _ = run(f"trap 'exit 7' INT; [ \"$RANK\" = 1 ] && kill -INT $PPID; {STAY}")
    assert (result.exit_code, result.exit_codes[1]) == (130, 7)
    assert result.exit_codes[0] in (7, -signal.SIGINT)  # it may not have come to its trap yet
    assert result.summary == "interrupted by Ctrl-C"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_comes_twice_at_once_leaves_ranks_the_time_to_save(number: signal.Signals) -> None:
    # The second one comes when the first was heard: the rank sends it when it is told to end.
    again = f"kill -{number.value} $PPID"
    save = f"{again}; echo saving; sleep 0.5; echo saved; exit 7"
    result, sink = run(f"trap '{save}' TERM; {again}; {STAY}", 1)
    assert (result.exit_code, result.exit_codes) == (128 + number, {0: 7})
    said = sink.printed[0].splitlines()  # the shell may also tell that its `sleep` was ended
    assert (b"saving" in said, said[-1], len(sink.messages)) == (True, b"saved", 1), (said, sink.messages)


def test_signals_are_the_callers_again_afterwards() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    run("true", 1)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_stop_from_another_thread_ends_everything() -> None:
    threads: list[threading.Thread] = []

    def stop(rank: int) -> None:
        threads.append(threading.Thread(target=driver.stop, args=["the notebook's cell was stopped"]))
        threads[-1].start()

    driver = Driver(job(f"echo here; {STAY}", 1), RecordingSink(stop))
    result = driver.run()
    for thread in threads:
        thread.join()
    assert (result.exit_code, result.summary) == (143, "the notebook's cell was stopped")


def test_a_job_that_is_stopped_before_it_runs_starts_nothing() -> None:
    driver = Driver(job("true"), RecordingSink())
    driver.stop("changed my mind")
    why = "changed my mind"
    assert driver.run() == JobResult(143, f"{why}, before any rank was started", stop_request=StopRequest(143, why))


def test_it_runs_in_any_thread() -> None:
    results: list[JobResult] = []
    thread = threading.Thread(target=lambda: results.append(run("exit 5", 1)[0]))
    thread.start()
    thread.join()
    assert results[0].exit_code == 5


def test_too_few_slots_are_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="1 slot short"):
        Driver(Job(command=("true",), num_ranks=3, hosts=(Host("localhost", 2),)), RecordingSink())


def test_a_command_that_is_not_there_is_told_once() -> None:
    result = Driver(Job(command=("no-such-command",), num_ranks=3), RecordingSink()).run()
    assert result.exit_code == 127
    assert result.summary.startswith("ranks 0-2 on host localhost could not be started: ")
    assert "no-such-command" in result.summary and "\n" not in result.summary


def test_a_working_directory_that_is_not_there_is_told_before_anything_starts(tmp_path: Path) -> None:
    result = Driver(Job(command=("true",), num_ranks=1, cwd=str(tmp_path / "none")), RecordingSink()).run()
    assert result.exit_code == START_FAILED_EXIT_CODE and not result.exit_codes
    assert result.summary.startswith(f"the host cannot be used:\n  localhost: there is no directory {tmp_path}/none")


# Rank 1 has told its peers why it leaves, and is still busy with its own end when they are gone.
SLOW_TO_END = """
import atexit, os, time
import ronde

def linger():
    while os.path.exists(f"/proc/{pids[0]}"):
        time.sleep(0.005)

if os.environ["RANK"] == "1":
    atexit.register(linger)  # before init: so it is called after ronde's own end
ronde.init()
pids = ronde.objects.allgather(os.getpid())
if ronde.rank() == 1:
    raise ValueError("there are no samples")
ronde.barrier()
"""


def test_the_first_to_fail_is_named_though_its_peers_are_gone_before_it() -> None:
    result = Driver(Job(command=(sys.executable, "-c", SLOW_TO_END), num_ranks=3), RecordingSink()).run()
    assert result.exit_code == 1
    assert [*result.exit_codes].index(0) < [*result.exit_codes].index(1)
    assert result.summary.startswith("rank 1 on host localhost failed first: exited with code 1 (ValueError: there are")
    assert result.summary.endswith("  | ValueError: there are no samples\n2 other ranks ended in consequence")


def test_a_rank_that_never_joins_is_named_as_the_one_that_left_too_early() -> None:
    script = "import os, ronde; os.environ['RANK'] == '1' or ronde.init()"
    result = Driver(Job(command=(sys.executable, "-c", script), num_ranks=2), RecordingSink()).run()
    assert (result.exit_code, result.first_failed_rank) == (1, 0)
    left, then = result.summary.splitlines()
    assert left == "rank 1 on host localhost left too early: exited with code 0"
    assert then.startswith("rank 0 then exited with code 1: StartFailed: rank 1 ended before the round began (exited")


def test_the_key_is_on_no_command_line_and_shared_by_all_ranks() -> None:
    result, sink = run('echo $RONDE_KEY; tr "\\0" " " < /proc/$$/cmdline; echo')
    assert result.exit_code == 0
    (key, words), (other_key, _) = (sink.printed[rank].decode().splitlines() for rank in range(2))
    assert len(key) == 64 and key == other_key and key not in words


def test_settings_and_variables_reach_the_ranks() -> None:
    sink = RecordingSink()
    script = Job(
        command=("/bin/sh", "-c", "echo $RONDE_STALL_S $MINE"),
        num_ranks=1,
        env={"MINE": "x"},
        settings=Settings(stall_s=7.5),
    )
    assert Driver(script, sink).run().exit_code == 0
    assert sink.printed == {0: b"7.5 x\n"}


def test_the_end_of_the_job_is_the_end_of_what_its_ranks_started() -> None:
    result, sink = run("sleep 300 & setsid sleep 300 & echo $!", 1)
    assert result.exit_code == 0
    assert ends(int(sink.printed[0]))


class NobodyReads(RecordingSink):
    """A sink whose reader takes nothing."""

    def is_backlogged(self) -> bool:
        return bool(self.printed)


FLOOD_OR_FAIL = 'if [ "$RANK" = 0 ]; then exec yes; fi; read line < {fifo}; exit 3'


@pytest.mark.parametrize("host", ["localhost", "other"])
def test_a_death_is_known_at_once_though_nobody_reads_the_output(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo, ssh = tmp_path / "fifo", tmp_path / "ssh"
    os.mkfifo(fifo)
    ssh.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; exec sh -c "$3"')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    full = threading.Event()
    sink = NobodyReads(lambda rank: full.set())

    def fail_when_output_waits() -> None:
        full.wait()
        time.sleep(0.3)  # the pipes on the way fill up
        fifo.write_text("now\n")

    thread = threading.Thread(target=fail_when_output_waits)
    thread.start()
    script = FLOOD_OR_FAIL.format(fifo=fifo)
    result = Driver(
        Job(command=("/bin/sh", "-c", script), num_ranks=2, hosts=(Host(host, 2),), grace_s=0.0), sink
    ).run()
    thread.join()
    assert (result.exit_code, result.first_failed_rank) == (3, 1)
    assert result.exit_codes == {0: -signal.SIGTERM, 1: 3}
