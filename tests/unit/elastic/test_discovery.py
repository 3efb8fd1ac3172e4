"""Sources of hosts: a script that prints them, a file that is watched."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from ronde.elastic.discovery import DiscoveryScript, WatchedHostfile
from ronde.errors import StartFailed
from ronde.launch.driver.host_source import HostSource
from ronde.launch.placement import Host
from tests.limits import PATIENCE_S


def make_script(folder: Path, text: str) -> str:
    path = folder / "hosts.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_script_prints_hosts_with_or_without_slots(tmp_path: Path) -> None:
    script = make_script(tmp_path, "echo a; echo b:4; echo; echo '# c'")
    with closing(DiscoveryScript(script, slots_per_host=3)) as source:
        assert source.hosts() == (Host("a", 3), Host("b", 4))


def test_a_script_has_arguments_and_may_name_no_host(tmp_path: Path) -> None:
    path = make_script(tmp_path, 'printf "$1"')
    for argument, hosts in (("a:2\\n", (Host("a", 2),)), ("", ())):
        with closing(DiscoveryScript(f"{path} '{argument}'")) as source:
            assert source.hosts() == hosts


def test_what_a_script_leaves_in_the_background_is_not_waited_for_and_ends_with_the_source(tmp_path: Path) -> None:
    # As the master of ssh's ControlPersist does, it keeps the output of the script open, in a session of its own.
    text = f"setsid sleep 1000 & echo $! > {tmp_path}/pid; echo a"
    source: HostSource = DiscoveryScript(make_script(tmp_path, text), timeout_s=PATIENCE_S)
    assert source.hosts() == (Host("a"),)
    left = psutil.Process(int((tmp_path / "pid").read_text()))
    source.close()
    left.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo no cloud today >&2; exit 3", "exited with code 3: no cloud today"),
        ("echo a:many", "what .* printed, line 1: host a: slots must be a whole number, got 'many'"),
        ("sleep 1000", "did not end within 0.2 s"),
    ],
)
def test_a_script_without_an_answer_says_why(tmp_path: Path, text: str, reason: str) -> None:
    script = make_script(tmp_path, text)
    with closing(DiscoveryScript(script, timeout_s=0.2 if "sleep" in text else PATIENCE_S)) as source:
        with pytest.raises(StartFailed, match=reason):
            source.hosts()


def test_a_script_that_is_not_there_is_named() -> None:
    with closing(DiscoveryScript("/nowhere/hosts.sh --all")) as source:
        with pytest.raises(StartFailed, match=r"/nowhere/hosts.sh cannot be started: No such file"):
            source.hosts()


def test_closing_ends_a_script_that_is_under_way(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    source = DiscoveryScript(make_script(tmp_path, f"touch {begun}; sleep 1000"), timeout_s=PATIENCE_S)
    errors: list[str] = []

    def ask() -> None:
        with pytest.raises(StartFailed) as failed:
            source.hosts()
        errors.append(str(failed.value))

    thread = threading.Thread(target=ask)
    thread.start()
    while not begun.exists():
        thread.join(0.01)
    source.close()
    thread.join(PATIENCE_S)
    assert "killed by signal 9 (SIGKILL)" in errors[0]
    with pytest.raises(StartFailed, match="not asked any more"):
        source.hosts()


def test_a_change_of_a_file_counts_when_it_is_read_twice(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a:2\n")
    source: HostSource = WatchedHostfile(path)
    assert source.hosts() == (Host("a", 2),)
    path.write_text("a:2\nb")
    assert source.hosts() == (Host("a", 2),), "perhaps it is being written"
    path.write_text("a:2\nb:4\n")
    assert source.hosts() == (Host("a", 2),)
    assert source.hosts() == (Host("a", 2), Host("b", 4))


@pytest.mark.parametrize(("text", "reason"), [("", "names no host"), ("a:0\n", "line 1: host a: slots must be")])
def test_a_file_that_cannot_be_used_is_an_error_and_not_a_list_of_no_hosts(
    tmp_path: Path, text: str, reason: str
) -> None:
    path = tmp_path / "hosts"
    path.write_text("a\n")
    source = WatchedHostfile(path)
    source.hosts()
    path.write_text(text)
    assert source.hosts() == (Host("a"),)
    with pytest.raises(StartFailed, match=reason):
        source.hosts()
    path.unlink()
    with pytest.raises(StartFailed, match=r"cannot read the hostfile .*: No such file"):
        source.hosts()
