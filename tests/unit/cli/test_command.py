"""The command line: wrong options are named before anything starts."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from ronde.cli.commands import app


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_version_says_which_ronde_this_is() -> None:
    code, output = run("version")
    assert code == 0
    assert output.startswith("ronde ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("allreduce", "--sizes", "4X"), "a size is a multiple of 4 bytes"),
        (("allreduce", "--paths", "socket"), "no such path: 'socket'; there are array, bucket, many"),
        (("allreduce", "--sizes", "many", "--paths", "array"), "nothing to measure"),
        (("allreduce", "--peers", "nccl"), "no such peer: 'nccl'"),
        (("allreduce", "--seconds", "0"), "seconds must be above 0"),
        (("allreduce", "-np", "0"), "-np"),
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
