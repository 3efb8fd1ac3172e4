"""The command line: commands and flags that do not exist, and wrong values, are named before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import ronde as package
from tests.unit.cli.commands import ronde


def test_version_says_which_ronde_this_is() -> None:
    finished = ronde("version")
    assert finished.exit_code == 0
    assert finished.out.startswith(f"ronde {package.__version__}, Python ")
    assert ronde("--version") == finished


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("rnu", "ronde: no such command: rnu; did you mean run?"),
        ("xyzzy", "ronde: no such command: xyzzy; there are run, top, stack, data, "),
        ("--versio", "ronde: no such flag: --versio; did you mean --version?"),
        ("bench tran", "ronde bench: no such command: tran; did you mean train?"),
        ("top --onec", "ronde top: no such flag: --onec; did you mean --once?"),
        ("stack a b", "ronde stack: unexpected argument: b; `ronde stack --help` shows all"),
        ("stack --limit 100", "ronde stack: argument --limit: must be from 0.1 to 60, got '100'"),
        ("stack --limit x", "ronde stack: argument --limit: must be a number, got 'x'"),
        ("doctor -H a,,b", "ronde doctor: --hosts: there is an empty place between two commas"),
        ("doctor -H a --hostfile x", "ronde doctor: hosts and hostfile exclude each other"),
        ("doctor --ssh-port zero", "ronde doctor: --ssh-port must be a whole number"),
        ("run --stall-s x ls", "ronde run: --stall-s must be a number, got 'x'"),
        ("run --num-rank 2 ls", "ronde run: no such flag: --num-rank; did you mean --num-ranks?"),
        ("run --hosts-fil h ls", "ronde run: no such flag: --hosts-fil; did you mean --hostfile?"),
        ("run --xyzzy=1 ls", "ronde run: no such flag: --xyzzy=1; `ronde run --help` shows all"),
        ("run --key 00 ls", "ronde run: no such flag: --key"),
        ("run -np", "ronde run: argument -np/-n/--num-ranks: expected one argument"),
        ("run -np 2 -n 3 ls", "ronde run: argument -np/-n/--num-ranks: given twice, as '2' and '3'"),
        ("run -np two ls", "ronde run: -np/-n/--num-ranks must be a whole number of at least 1, got 'two'"),
        ("run -n p2 ls", "ronde run: -np/-n/--num-ranks must be a whole number of at least 1, got 'p2'"),
        ("run -np 2", "ronde run: there is no command to run"),
        ("run -H a:1 -np 2 ls", "1 slot short"),
        ("run --output /dev/null/x ls", "/dev/null/x"),
    ],
)
def test_a_mistake_is_one_line_and_ends_with_2(arguments: str, message: str) -> None:
    finished = ronde(*arguments.split())
    assert (finished.exit_code, finished.out) == (2, "")
    # The file of a job has keys without dashes: a value may be named by flag or key.
    assert message.replace("--hosts: ", "") in finished.err.replace("-H/--hosts: ", "")
    assert finished.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("allreduce --sizes 4X", "a size is a multiple of 4 bytes"),
        ("allreduce --paths socket", "no such path: 'socket'; there are array, named, bucket, many"),
        ("allreduce --sizes many --paths array", "nothing to measure"),
        ("allreduce --peers nccl", "no such peer: 'nccl'"),
        ("allreduce --seconds 0", "seconds must be above 0"),
        ("allreduce --repeats 0", "--repeats: must be a whole number of at least 1"),
        ("allreduce -np 0", "-np"),
        ("allreduce --num-ranks x", "-np"),
        ("allreduce --json /no/such/directory/file --peers none", "cannot write the results"),
        ("negotiation --flight 1,x", "--flight must be whole numbers"),
        ("train --models vgg", "no such model for torch: 'vgg'"),
        ("train --codec int8", "codec must be one of none, float16, bfloat16"),
        ("train --peers nccl", "no such peer of torch: 'nccl'"),
        ("train --ddp-buckets x", "--ddp-buckets must be whole numbers"),
        ("train --steps 0", "--steps"),
    ],
)
def test_a_wrong_flag_of_a_benchmark_is_named_before_anything_starts(arguments: str, message: str) -> None:
    finished = ronde("bench", *arguments.split())
    assert finished.exit_code == 2
    assert finished.err.startswith("ronde bench ") and message in finished.err


@pytest.mark.parametrize("command", ["", "bench"])
def test_without_a_command_the_help_is_shown(command: str) -> None:
    finished = ronde(*command.split())
    assert finished.exit_code == 2
    assert finished.err == ronde(*command.split(), "--help").out


def test_help_knows_the_defaults() -> None:
    shown = " ".join(ronde("bench", "allreduce", "--help").out.split())
    assert "or none. Default: all there are." in shown and "Number of ranks. Default: 2." in shown


@pytest.mark.parametrize(
    "command", ["", "run", "top", "stack", "doctor", "version", "bench", "bench allreduce", "bench train"]
)
def test_help_is_shown_where_the_encoding_lacks_characters(command: str) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "ronde.cli.main", *command.split(), "--help"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout.startswith(f"usage: ronde {command}".rstrip()) and "--help" in finished.stdout


def test_a_reader_that_leaves_early_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "ronde.cli.main", "version"]
    finished = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=30, check=False)
    os.close(writer)
    assert (finished.returncode, finished.stderr) == (1, b"")
