"""How ssh is called, and what its end means."""

from __future__ import annotations

import itertools
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ronde.launch.driver.ssh import NO_DIRECTORY_STATUS, NO_PYTHON_STATUS, SshCommand
from ronde.launch.job import SshOptions
from ronde.launch.placement import Host

FIRST_WINS = ("BatchMode=no", "ConnectTimeout=99")


def call(*, ssh: SshOptions | None = None, cwd: str = "/data/my job", python: str = "/opt/python3") -> SshCommand:
    return SshCommand(host=Host("me@node7"), options=ssh or SshOptions(), python=python, cwd=cwd, heartbeat_s=10.0)


def options(words: list[str]) -> list[str]:
    return [word for before, word in itertools.pairwise(words) if before == "-o"]


def test_nothing_is_asked_of_the_user_and_nothing_is_left_to_a_master() -> None:
    words = call().argv()
    assert words[0] == "ssh" and words[-3:-1] == ["--", "me@node7"]
    assert {"BatchMode=yes", "ControlMaster=no", "ServerAliveInterval=3", "ConnectTimeout=20"} <= set(options(words))
    assert "-p" not in words and "-i" not in words


def test_the_user_s_options_win_but_for_questions_that_nobody_could_answer() -> None:
    words = call(ssh=SshOptions(port=2022, identity="/keys/id", options=FIRST_WINS)).argv()
    assert words[words.index("-p") + 1] == "2022" and words[words.index("-i") + 1] == "/keys/id"
    given = options(words)
    assert given.index("BatchMode=yes") < given.index("BatchMode=no")
    assert given.index("ConnectTimeout=99") < given.index("ConnectTimeout=20")


def run_remotely(made: SshCommand) -> int:
    """What a login shell does with the command."""
    done = subprocess.run(["sh", "-c", made.argv()[-1]], stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    return done.returncode


def test_the_remote_command_survives_any_name(tmp_path: Path) -> None:
    odd = tmp_path / 'it\'s a "$HOME" `dir`'
    odd.mkdir()
    python = odd / "python"
    python.write_text(f'#!/bin/sh\nprintf \'%s\\n\' "$PWD" "$@" > {shlex.quote(str(tmp_path / "said"))}\nexit 7\n')
    python.chmod(0o755)
    assert run_remotely(call(cwd=str(odd), python=str(python))) == 7
    # Not in the working directory, whose files `python -m` would import.
    assert (tmp_path / "said").read_text().split() == ["/", "-m", "ronde.launch.agent"]


def test_a_missing_directory_and_a_missing_python_have_a_status_of_their_own(tmp_path: Path) -> None:
    assert run_remotely(call(cwd=str(tmp_path / "none"), python=sys.executable)) == NO_DIRECTORY_STATUS
    assert run_remotely(call(cwd=str(tmp_path), python="no-such-python")) == NO_PYTHON_STATUS


@pytest.mark.parametrize(
    ("status", "said", "kind", "words"),
    [
        (255, "ssh: Could not resolve hostname node7: Name or service not known", "name", "check the spelling"),
        (255, "ssh: connect to host node7 port 22: Connection refused", "refused", "--ssh-port"),
        (255, "ssh: connect to host node7 port 22: Connection timed out", "unreachable", "firewall"),
        (255, "ssh: connect to host node7 port 22: No route to host", "unreachable", "firewall"),
        (255, "me@node7: Permission denied (publickey,password).", "auth", "ssh-copy-id me@node7"),
        (255, "Received disconnect: Too many authentication failures", "auth", "--ssh-identity"),
        (255, "Host key verification failed.", "host key", "known_hosts"),
        (255, "kex_exchange_identification: Connection closed by remote host", "closed", "sshd"),
        (255, "command-line: line 0: Bad configuration option: nonsense", "ssh", "options are wrong"),
        (255, "Timeout, server node7 not responding.", "unreachable", "not responding"),
        (1, "/opt/python3: No module named ronde", "ronde", "install the same version"),
        (1, "ModuleNotFoundError: No module named 'ronde'", "ronde", "install the same version"),
        (1, "ModuleNotFoundError: No module named 'msgspec'", "ronde", "dependencies"),
        (1, '  File "x.py"\nSyntaxError: invalid syntax', "python", "too old"),
        (126, "sh: 1: exec: /opt/python3: Permission denied", "python", "cannot be run"),
        (NO_PYTHON_STATUS, "", "python", "there is no /opt/python3"),
        (NO_DIRECTORY_STATUS, "", "cwd", "there is no directory /data/my job"),
        (-15, "", "ended", "killed by signal 15"),
        (3, "", "ended", "status 3 and said nothing"),
        (3, "one\ntwo\n\n", "ended", "status 3: two"),
    ],
)
def test_the_reason_is_found_in_what_ssh_says(status: int, said: str, kind: str, words: str) -> None:
    trouble = call().make_host_error(status, said)
    assert trouble.kind == kind and words in trouble.reason


def test_the_line_that_tells_is_shown_and_not_the_noise_around_it() -> None:
    said = "Warning: Permanently added 'node7'\nme@node7: Permission denied (publickey).\nbye\n"
    trouble = call().make_host_error(255, said)
    assert trouble.reason.endswith("(me@node7: Permission denied (publickey).)") and trouble.last_line == "bye"


def test_the_words_of_a_program_are_not_taken_for_those_of_ssh() -> None:
    assert call().make_host_error(1, "OSError: Connection refused").kind == "ended"
