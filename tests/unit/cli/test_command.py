"""The command line: wrong options are named before anything starts."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import ronde
from ronde.cli.commands import app

BENCHES = ("allreduce", "negotiation", "ranks", "train")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    return result.exit_code, " ".join(result.output.split())


def test_version_says_which_ronde_this_is() -> None:
    code, output = run("version")
    assert code == 0
    assert output.startswith(f"ronde {ronde.__version__}, Python ")
    assert run("--version") == (code, output)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("rnu",), "no such command: rnu; did you mean run?"),
        (("xyzzy",), "no such command: xyzzy; there are run, top, stack, bench, doctor, version"),
        (("bench",), "allreduce Sum float32 arrays"),
        (("--versio",), "--version"),
    ],
)
def test_a_command_that_is_not_there_is_told_with_those_that_are(arguments: tuple[str, ...], words: str) -> None:
    code, output = run(*arguments)
    assert code == 2
    assert words in output


@pytest.mark.parametrize("command", ["", "top", "stack", "doctor", "bench", *(f"bench {each}" for each in BENCHES)])
def test_help_is_of_ronde_alone(command: str) -> None:
    code, output = run(*command.split(), "--help")
    assert code == 0
    assert "completion" not in output and "<bool>" not in output


def test_help_knows_the_defaults() -> None:
    assert "or none. Default: all there are." in run("bench", "allreduce", "--help")[1]
    assert "or none. [default: none]" in run("bench", "ranks", "--help")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("allreduce", "--sizes", "4X"), "a size is a multiple of 4 bytes"),
        (("allreduce", "--paths", "socket"), "no such path: 'socket'; there are array, bucket, many"),
        (("allreduce", "--sizes", "many", "--paths", "array"), "nothing to measure"),
        (("allreduce", "--peers", "nccl"), "no such peer: 'nccl'"),
        (("allreduce", "--seconds", "0"), "seconds must be above 0"),
        (("allreduce", "-np", "0"), "-np"),
        (("allreduce", "--num-ranks", "0"), "-np"),
        (("allreduce", "--json", "/no/such/directory/file", "--peers", "none"), "cannot write the results"),
        (("negotiation", "--flight", "1,x"), "--flight must be whole numbers"),
        (("ranks", "--counts", "0"), "--counts must be whole numbers"),
        (("train", "--models", "vgg"), "no such model: 'vgg'"),
        (("train", "--codec", "int8"), "codec must be one of none, float16, bfloat16"),
        (("train", "--peers", "nccl"), "no such peer: 'nccl'"),
        (("train", "--ddp-buckets", "x"), "--ddp-buckets must be whole numbers"),
        (("train", "--steps", "0"), "--steps"),
    ],
)
def test_a_wrong_option_is_named_before_anything_starts(arguments: tuple[str, ...], words: str) -> None:
    code, output = run("bench", *arguments)
    assert code == 2
    assert words in output
