"""Server processes of `ronde run --servers`: killed and replaced, beside workers that are, and no sample is lost."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from ronde.cli.run import parse_arguments
from ronde.errors import CheckpointError
from ronde.launch.config import make_launch_config
from ronde.launch.server_processes import place_servers
from ronde.ps import load_checkpoint
from tests.commands import run_command
from tests.jobs.kit import ROOT, RondeRun, SshHosts, ask, needs_hosts, run, script
from tests.limits import LONG_S, promised_s
from tests.services import needs

TENSORFLOW = ROOT / ".venv-tensorflow/bin/python"

FIRST = 1_000_000


def servers_of(job: RondeRun) -> list[psutil.Process]:
    """The server processes that run, the oldest first."""
    found = [each for each in job.processes() if "ronde.ps.server_process" in " ".join(each.cmdline())]
    return sorted(found, key=lambda process: process.create_time())


def train(folder: Path, *options: str) -> list[str]:
    """The command of a worker."""
    return script("server_processes", "--folder", str(folder), *options)


def read_until(job: RondeRun, text: str) -> str:
    """The lines on standard output, up to the first that holds the text."""
    seen = ""
    while text not in seen:
        seen += job.read_lines()[0] + "\n"
    return seen


def check_exact(output: str, num_workers: int, limit_s: float) -> None:
    assert output.count("exact: True") == num_workers and "exact: False" not in output, output
    assert max(map(float, re.findall(r"longest step ([\d.]+) s", output))) < limit_s, output


def test_killed_server_processes_are_replaced_one_after_the_other(tmp_path: Path) -> None:
    """In a job whose number of ranks is fixed. Workers wait for a second at most, and `ronde top` shows the servers."""
    command = ["-np", "2", "--servers", "2", "--no-fold", "--name", "servers", *train(tmp_path)]
    with RondeRun(*command) as job:
        seen = "".join(read_until(job, "servers") for _ in range(2))
        assert seen.count(f"of 2, servers ({FIRST}, {FIRST + 1})") == 2, seen
        status = json.loads(ask("top", "servers", "--json").out)
        assert [each["name"] for each in status["ranks"]] == ["", "", "server 0", "server 1"], status
        servers_of(job)[0].send_signal(signal.SIGKILL)
        seen = read_until(job, f"servers ({FIRST + 1}, {FIRST + 2})")
        servers_of(job)[0].send_signal(signal.SIGKILL)  # its parts are on the new one
        result = job.result(LONG_S)
    assert result.code == 0, result
    check_exact(seen + result.out, 2, promised_s(1.0))
    for index in (0, 1):
        assert f"server {index} on host localhost killed by signal 9 (SIGKILL); another one is started" in result.err


@pytest.mark.parametrize("victim", [0, 1])
def test_a_server_process_that_was_stopped_is_refused_when_it_wakes_and_comes_back_as_another_one(
    tmp_path: Path, victim: int
) -> None:
    """The first is the sequencer. Both are primaries of parts; the other one goes on alone within a second after it
    was missed for one, and has a backup again when the first has waked."""
    options = ["--stopped", "--suspect-s", str(promised_s(1.0)), "--mode", ["async", "bounded"][victim]]
    with RondeRun("-np", "2", "--servers", "2", "--no-fold", *train(tmp_path, *options)) as job:
        seen = "".join(read_until(job, "servers") for _ in range(2))
        assert seen.count(f"of 2, servers ({FIRST}, {FIRST + 1})") == 2, seen
        stopped = servers_of(job)[victim]
        stopped.suspend()
        seen += "".join(read_until(job, f"servers ({FIRST + 1 - victim},)") for _ in range(2))
        stopped.resume()
        result = job.result(LONG_S)
    assert result.code == 0, result
    check_exact(seen + result.out, 2, 2 * promised_s(1.0))


def test_workers_and_servers_that_are_killed_are_replaced_while_others_train(tmp_path: Path) -> None:
    """In an elastic job. What is started in the place of a lost worker trains with the others."""
    options = ["-np", "2", "--min-np", "1", "--servers", "2", "--no-fold"]
    with RondeRun(*options, *train(tmp_path, "--mode", "bounded", "--dies")) as job:
        seen = read_until(job, "worker 2 is rank")
        servers_of(job)[0].send_signal(signal.SIGKILL)
        seen += read_until(job, f"servers ({FIRST + 1}, {FIRST + 2})")
        servers_of(job)[0].send_signal(signal.SIGKILL)
        result = job.result(LONG_S)
    assert result.code == 0, result
    assert "worker 1 is lost" in result.err, result.err
    check_exact(seen + result.out, 2, promised_s(2.0))


@pytest.mark.parametrize("mode", ["sync", "dynamic", "async"])
def test_no_sample_is_lost_or_used_twice_when_processes_are_killed_at_random_moments(mode: str) -> None:
    """Also when both ranks with which the job began have been killed. 100 kills take some minutes."""
    command = [sys.executable, "benchmarks/parameter_server_kills.py", "--kills", "4", "--mode", mode]
    done = run_command(command, limit_s=LONG_S)
    assert done.returncode == 0 and "exact: True" in done.stdout, done.stdout + done.stderr


def test_a_checkpoint_that_servers_have_written_is_restored_on_another_number_of_servers(tmp_path: Path) -> None:
    options = ["--epochs", "1", "--checkpoint", str(tmp_path / "checkpoints")]
    for num_servers, num_times in ((2, 1), (3, 2)):
        done = run("-np", "2", "--servers", str(num_servers), *train(tmp_path, *options), limit_s=LONG_S)
        assert done.code == 0, done
        assert f"saved version {60 * num_times}, each sample {num_times} times: True" in done.out, done
    folders = sorted((tmp_path / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["version-000000000060", "version-000000000120"]
    assert len([*folders[0].glob("part-*.npy")]) > 1
    first = min(folders[1].glob("part-*.npy"))
    first.write_bytes(first.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="is damaged"):
        load_checkpoint(tmp_path / "checkpoints")
    (folders[1] / "manifest.json").unlink()  # as if the save had not ended
    assert load_checkpoint(tmp_path / "checkpoints")["version"] == 60


@needs_hosts
def test_servers_on_a_host_of_their_own_are_started_and_replaced_over_ssh(hosts: SshHosts, tmp_path: Path) -> None:
    a, b, _ = hosts.addresses
    with hosts.start("-H", f"{a}:2,{b}:2+servers", "--no-fold", *train(tmp_path)) as job:
        seen = "".join(read_until(job, f"of 2, servers ({FIRST}, {FIRST + 1})") for _ in range(2))
        for index in (0, 1):
            found = [each for each in hosts.processes(1) if "ronde.ps.server_process" in " ".join(each.cmdline())]
            assert len(found) == 2
            min(found, key=lambda process: process.create_time()).kill()
            seen += read_until(job, f"servers ({FIRST + 1 + index}, {FIRST + 2 + index})")
        result = job.result(LONG_S)
    assert result.code == 0, result
    assert f"server 0 on host {b} killed by signal 9 (SIGKILL)" in result.err, result.err
    check_exact(seen + result.out, 2, promised_s(1.0))


@needs("TensorFlow", missing="" if TENSORFLOW.exists() else "no .venv-tensorflow; `make build` makes it")
def test_a_script_of_tensorflows_parameter_server_strategy_runs_unchanged() -> None:
    """It is started in every role, and the job is over when the chief has ended: the others serve for ever."""
    command = script("tensorflow_parameter_server", python=TENSORFLOW)
    done = run("-np", "2", "--servers", "2", "--tf-config", *command, limit_s=LONG_S)
    assert done.code == 0, done
    for index in (0, 1):
        assert f"12.0 updates on /job:ps/replica:0/task:{index}/" in done.out, done


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--servers", "none"], "servers must be a whole number of at least 1, or in-ranks; got 'none'"),
        (
            ["--servers", "3", "-H", "localhost:2,localhost:1+servers"],
            "3 servers, but the hosts that are kept for them",
        ),
        (["--servers", "in-ranks", "-H", "localhost:2,ps1:1+servers"], "give --servers, too"),
        (["--servers", "1", "--tf-config", "-np", "1"], "needs a chief (rank 0) and at least one worker"),
        (["--servers", "1", "--min-np", "1", "-H", "localhost:1,ps1:1+servers"], "whose number of ranks is fixed"),
        (["--servers", "1", "--dmlc"], "servers and dmlc exclude each other"),
    ],
)
def test_what_cannot_be_is_refused(options: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        make_launch_config(*parse_arguments([*options, "python"]), environ={})


def test_hosts_can_be_kept_for_servers() -> None:
    job = make_launch_config(*parse_arguments(["-H", "a:2,b:2+servers,c:1,a:1+servers", "python"]), environ={}).job
    assert (job.num_ranks, job.num_servers) == (3, 3)
    assert [host.name for host in job.used_hosts] == ["a", "c", "b"]
    assert [placement.host.name for placement in job.placements] == ["a", "a", "c"]
    assert place_servers(job) == (2, 2, 0)
