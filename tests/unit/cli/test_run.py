"""`ronde run`: its flags, and that wrong ones end in one line. What it starts is seen in tests/jobs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ronde.cli.run import parse_arguments
from ronde.launch.config import launch_options, make_launch_config
from tests.unit.cli.commands import ronde


@pytest.mark.parametrize(
    ("arguments", "flags", "command"),
    [
        ("-np 2 python train.py", {"num_ranks": "2"}, ["python", "train.py"]),
        ("-n 2 -- python", {"num_ranks": "2"}, ["python"]),
        ("-np2 python -np3", {"num_ranks": "2"}, ["python", "-np3"]),
        ("-n2 python", {"num_ranks": "2"}, ["python"]),
        ("--num-ranks=2 python -np 9 -- --hosts x", {"num_ranks": "2"}, ["python", "-np", "9", "--", "--hosts", "x"]),
        ("-H a:1,b:2 ls", {"hosts": "a:1,b:2"}, ["ls"]),
        ("-x A=1 -xB=2 --env C ls", {"env": ["A=1", "B=2", "C"]}, ["ls"]),
        ("--no-fold --stall-s 3 ls -l", {"no_fold": True, "stall_s": "3"}, ["ls", "-l"]),
        ("--min-np 2 --cooldown 1 60 ls", {"min_np": "2", "cooldown": ["1", "60"]}, ["ls"]),
        ("--elastic-timeout 9 ls", {"elastic_timeout_s": "9"}, ["ls"]),
        ("-- -strange", {}, ["-strange"]),
        ("", {}, []),
    ],
)
def test_flags_come_before_the_command_and_all_after_it_is_its_own(
    arguments: str, flags: dict[str, Any], command: list[str]
) -> None:
    assert parse_arguments(arguments.split()) == (flags, command)


def test_the_help_shows_every_flag_with_its_meaning() -> None:
    shown = " ".join(ronde("run", "--help").out.split())
    for option in launch_options():
        assert option.flag in shown
        assert option.help.split(".")[0] in shown or "-" in option.help  # a dash may be at the end of a line


HEAVY = ("numpy", "rich", "yaml", "cloudpickle", "ronde.cli.bench")


@pytest.mark.parametrize("arguments", ["-np x", "-np 2 true"], ids=["refused", "run"])
def test_starting_a_job_needs_nothing_heavy(arguments: str) -> None:
    script = f"import sys; from ronde.cli.run import run; run({arguments.split()}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert not set(HEAVY) & set(done.stdout.split())


GUIDE = (Path(__file__).resolve().parents[3] / "docs/guides/launching.md").read_text(encoding="utf-8")


def test_the_guide_shows_commands_that_are_understood() -> None:
    shown = [line.partition("#")[0] for line in GUIDE.splitlines() if line.startswith("ronde run ")]
    assert len(shown) >= 8
    for line in shown:
        flags, command = parse_arguments(shlex.split(line)[2:])
        assert command or "config" in flags, line


def test_the_file_in_the_guide_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(GUIDE.partition("```yaml\n")[2].partition("```")[0])
    job = make_launch_config({"config": str(path)}, (), {}).job  # it works where no variable is set
    assert (job.num_ranks, job.env, job.settings.stall_s) == (2, {"LEARNING_RATE": "0.1"}, 60)
    assert job.command == ("python", "train.py", "--epochs", "10")


def test_flags_that_the_guide_names_exist() -> None:
    known = {flag for option in launch_options() for flag in option.all_flags}
    theirs = {"--epochs", "--help", "--nproc-per-node"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", GUIDE)) - theirs <= known
