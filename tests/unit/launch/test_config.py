"""From flags, environment and file to a job."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ronde.coordinator.round_planning import ElasticLimits
from ronde.errors import StartFailed
from ronde.launch.config import (
    HostOptions,
    LaunchConfig,
    host_flags,
    launch_options,
    make_launch_config,
    read_config,
    read_section,
)
from ronde.launch.job import SshOptions
from ronde.launch.placement import Host
from ronde.settings import ASSIGNED_BY_LAUNCHER, Settings, describe_settings

COMMAND = ("python", "train.py")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "job.yaml"


def ask(environ: dict[str, str] | None = None, **flags: object) -> LaunchConfig:
    return make_launch_config(flags, COMMAND, environ or {})


def test_nothing_but_a_command_is_one_rank_here_or_one_for_each_slot() -> None:
    job = ask().job
    assert (job.command, job.num_ranks, job.hosts, job.settings) == (COMMAND, 1, (), Settings())
    assert ask(hosts="a:2,b:4").job.num_ranks == 6, "all slots are used"
    assert (job.cwd, job.env, job.bind, job.debug_rank, job.ssh) == (str(Path.cwd()), {}, "none", None, SshOptions())


def test_every_flag_reaches_its_place() -> None:
    request = ask(
        {"HERE": "yes"},
        **{"num_ranks": "2", "hosts": "me@a:2", "ssh_port": "2222", "ssh_identity": "id", "ssh_option": ["A=b", "C=d"]},
        **{"ssh_start_s": "3", "python": "/p", "env": ["X=1=2", "HERE", "E="], "cwd": "/tmp", "output": "logs"},
        **{"no_fold": True, "timestamps": True, "no_color": True, "tf_config": True, "bind": "core", "debug": "1"},
        **{"name": "mine", "grace": "1.5", "terminate": "0", "stall_s": "5", "timeline": "t.json"},
    )
    job = request.job
    assert (job.hosts, job.num_ranks, job.python, job.cwd) == ((Host("me@a", 2),), 2, "/p", "/tmp")
    assert job.ssh == SshOptions(port=2222, identity="id", options=("A=b", "C=d"), start_s=3.0)
    assert job.env == {"X": "1=2", "HERE": "yes", "E": ""}
    assert (job.tf_config, job.bind, job.debug_rank, job.name) == (True, "core", 1, "mine")
    assert (job.grace_s, job.terminate_s) == (1.5, 0.0)
    assert job.settings == Settings(stall_s=5.0, timeline="t.json")
    assert (request.output_dir, request.fold, request.timestamps, request.color) == ("logs", False, True, False)
    assert not request.top and ask(top=True).top


def test_every_setting_that_a_user_may_choose_is_an_option() -> None:
    names = {option.name for option in launch_options() if option.kind == "setting"}
    assert names == {setting.name for setting in describe_settings()} - set(ASSIGNED_BY_LAUNCHER)
    assert "key" not in names, "a secret has no place on a command line"


def test_the_defaults_that_are_shown_are_those_of_a_job() -> None:
    texts = {option.name: option.help for option in launch_options()}
    job = ask().job
    for name, value in {"ssh_start_s": job.ssh.start_s, "grace": job.grace_s, "terminate": job.terminate_s}.items():
        assert texts[name].endswith(f"Default: {value:g}.")


def test_colours_are_left_out_where_the_environment_says_so() -> None:
    assert ask().color
    assert not ask({"NO_COLOR": "1"}).color
    assert not ask({"TERM": "dumb"}).color


def test_flags_are_stronger_than_the_environment_and_that_than_the_file(path: Path) -> None:
    path.write_text("num_ranks: 3\nstall_s: 1\nheartbeat_s: 2\nstart_s: 3\ngrace: 4\n")
    environ = {"RONDE_HEARTBEAT_S": "20", "RONDE_START_S": "30"}
    job = ask(environ, config=str(path), start_s="300", grace="5").job
    assert (job.num_ranks, job.grace_s) == (3, 5.0)
    assert (job.settings.stall_s, job.settings.heartbeat_s, job.settings.start_s) == (1, 20, 300)


def test_what_may_be_given_many_times_is_added_to_that_of_the_file(path: Path) -> None:
    path.write_text("env: {A: 1, B: 1}\nssh_option: [A=1, B=1]\n")
    job = ask(config=str(path), env=["B=2", "C=2"], ssh_option=["B=2"]).job
    assert job.env == {"A": "1", "B": "2", "C": "2"}
    assert job.ssh.options == ("B=2", "A=1", "B=1"), "ssh takes the first"


def test_a_file_may_describe_the_whole_job(path: Path) -> None:
    path.write_text(
        "hosts: {a: 2, b: 4}\nenv: {A: 1, B: true, HERE: }\nssh_option: A=b\ntf_config: yes\nbind: none\n"
        "fusion_bytes: 0\nname: 7\ncommand: python 'my train.py' -v\ncwd:\n"
    )
    job = make_launch_config({"config": str(path)}, (), {"HERE": "yes"}).job
    assert (job.hosts, job.num_ranks) == ((Host("a", 2), Host("b", 4)), 6)
    assert job.env == {"A": "1", "B": "1", "HERE": "yes"}
    assert (job.ssh.options, job.tf_config, job.settings.fusion_bytes, job.name) == (("A=b",), True, 0, "7")
    assert job.command == ("python", "my train.py", "-v")
    assert make_launch_config({"config": str(path)}, COMMAND, {"HERE": ""}).job.command == COMMAND


@pytest.mark.parametrize(
    "text", ["hosts: 'a:2,[::1]:4'", "hosts: [a:2, '[::1]:4']", "hosts:\n  a: 2\n  ::1: 4", "hosts: [a: 2, '[::1]': 4]"]
)
def test_hosts_in_a_file_are_written_in_several_ways(path: Path, text: str) -> None:
    path.write_text(text)
    assert ask(config=str(path)).job.hosts == (Host("a", 2), Host("::1", 4))


def test_a_key_may_be_taken_from_elsewhere_and_said_anew(path: Path) -> None:
    path.write_text("env: &base {A: 1, B: 1}\nhosts: {<<: {a: 1}, a: 2}\n")
    assert ask(config=str(path)).job.hosts == (Host("a", 2),)


def test_hosts_of_the_command_line_replace_those_of_the_file(path: Path) -> None:
    hostfile = path.with_name("hosts")
    hostfile.write_text("c slots=8\n")
    path.write_text(f"hostfile: {hostfile}\n")
    assert ask(config=str(path)).job.hosts == (Host("c", 8),)
    assert ask(config=str(path), hosts="d:1").job.hosts == (Host("d", 1),)


@pytest.mark.parametrize(
    ("file", "flags", "expected"),
    [
        ("", {}, None),
        ("", {"tf_config": True}, True),
        ("", {"no_tf_config": True}, False),
        ("tf_config: no", {}, False),
        ("no_tf_config: yes", {}, False),
        ("no_tf_config: no", {}, None),
        ("no_tf_config: yes", {"tf_config": True}, True),
        ("tf_config: yes", {"no_tf_config": True}, False),
        ("{no_tf_config: yes, min_np: 1}", {}, False),
    ],
)
def test_a_tf_config_is_left_to_the_job_unless_flags_or_the_file_say_otherwise(
    path: Path, file: str, flags: dict[str, Any], expected: bool | None
) -> None:
    path.write_text(file)
    assert ask(config=str(path), **flags).job.tf_config is expected


def test_an_outer_job_does_not_disturb() -> None:
    assert ask({"RONDE_RANK": "3", "RONDE_KEY": "nonsense"}).job.settings == Settings()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"num_ranks": "x"}, "-np/-n/--num-ranks must be a whole number of at least 1, got 'x'"),
        ({"num_ranks": "0"}, "--num-ranks must be a whole number of at least 1, got 0"),
        ({"hosts": "a", "hostfile": "b"}, "hosts and hostfile exclude each other"),
        ({"tf_config": True, "no_tf_config": True}, "tf_config and no_tf_config exclude each other"),
        ({"bind": "socket"}, "--bind must be none or core, got 'socket'"),
        ({"debug": "0", "top": True}, "--debug and --top both want the terminal"),
        ({"debug": "-1"}, "--debug must be a whole number of at least 0"),
        ({"grace": "soon"}, "--grace must be a number of seconds of at least 0, got 'soon'"),
        ({"terminate": "inf"}, "--terminate must be a number of seconds"),
        ({"env": ["GONE"]}, "-x GONE: there is no such variable here"),
        ({"env": ["=1"]}, "a variable is NAME=VALUE"),
        ({"name": ""}, "--name must be a text, got ''"),
        ({"stall_s": "x"}, "--stall-s must be a number, got 'x'"),
        ({"backend": "smoke"}, "backend must be native or mpi, got 'smoke'"),
    ],
)
def test_a_wrong_flag_is_named(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        make_launch_config(flags, COMMAND, {})
    assert words in str(caught.value)


def test_a_working_directory_that_was_deleted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for where in ({}, {"cwd": "below"}):
        with pytest.raises(StartFailed, match="the working directory does not exist any more"):
            make_launch_config(where, COMMAND, {})
    assert ask(cwd="/tmp").job.cwd == "/tmp"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_rank: 4", "line 1: unknown key 'num_rank'; did you mean 'num_ranks'?"),
        ("xyzzy: 4", "unknown key 'xyzzy'; `ronde run --help` shows all flags"),
        ("key: 00", "key is not to be chosen: `ronde run` gives it to every rank"),
        ("num_ranks: true", "num_ranks must be a whole number of at least 1, got True"),
        ("no_fold: 3", "no_fold must be true or false, got 3"),
        ("name: [a]", "name must be a text, got ['a']"),
        ("stall_s: [1]", "stall_s must be one value, got [1]"),
        ("grace: true", "grace must be a number of seconds"),
        ("command: 3", "command must be a text or a list of words, got 3"),
        ("command: echo 'x", 'command: No closing quotation in "echo \'x"'),
        ("command: [echo, [x]]", "command: a word must be one value, got ['x']"),
        ("hosts: {a: }", "hosts: host a: slots must be one value, got nothing"),
        ("hosts: {a:2: 3}", "hosts: 'a:2:3': an IPv6 address needs brackets"),
        ("env: {C: [1, 2]}", "env: C must be one value, got [1, 2]"),
        ("name: a\nnum_ranks: 1\nname: b", ", line 3: the key 'name' is there twice"),
        ("env:\n  A: 1\n  A: 2", ", line 3: the key 'A' is there twice"),
        ("search:\n  space: {x: {low: 1, high: 2, low: 3}}", ", line 2: the key 'low' is there twice"),
        ("name: 2020-99-99", "is no YAML: month must be in 1..12"),
        ("- a\n- b", "must hold keys and values, as in `num_ranks: 4`, got a list"),
    ],
)
def test_a_wrong_file_is_named_with_the_key(path: Path, text: str, words: str) -> None:
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_config(str(path))
    assert words in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_only_a_workflow_fills_in_is_not_started(path: Path) -> None:
    path.write_text("run:\n  command: python train.py {best.lr}")
    with pytest.raises(ValueError, match="which `ronde workflow` replaces by what the search has found"):
        make_launch_config({"config": str(path)}, (), {})
    assert make_launch_config({"config": str(path)}, COMMAND, {}).job.command == COMMAND


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("name: a\nenv: {A: 1, GONE: }", 2),
        ("env:\n  A: 1\n  GONE:\n", 3),
        ("env:\n- A=1\n- GONE\n", 3),
        ("env: GONE", 1),
    ],
)
def test_a_variable_of_a_file_that_is_not_set_is_named_with_its_line(path: Path, text: str, line: int) -> None:
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        make_launch_config({"config": str(path)}, COMMAND, {})
    assert str(caught.value).startswith(
        f"{path}, line {line}: env: GONE: there is no such variable here; give it a value"
    )
    assert make_launch_config({"config": str(path)}, COMMAND, {"GONE": "3"}).job.env["GONE"] == "3"


# --- a number of ranks that changes ---------------------------------------------------------------------------------


def test_limits_of_an_elastic_job_come_from_flags_and_files(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("num_ranks: 4\nmin_np: 2\nmax_np: 8\nreset_limit: 3\ncooldown: [2, 30]\nelastic_timeout_s: 99\n")
    job = make_launch_config({"config": str(path), "max_np": "6"}, ("true",), {}).job
    assert job.limits == ElasticLimits(start_ranks=4, min_ranks=2, max_ranks=6, reset_limit=3, timeout_s=99.0)
    assert (job.cooldown_s, job.settings.heartbeat_s, job.placements) == ((2.0, 30.0), 2.5, ())


@pytest.mark.parametrize(
    ("flags", "limits"),
    [
        ({"num_ranks": "4", "min_np": "2"}, (4, 2, 4)),
        ({"num_ranks": "4", "max_np": "6"}, (4, 4, 6)),
        ({"min_np": "2", "discover": "./hosts.sh"}, (2, 2, 2)),
        ({"num_ranks": "3", "discover": "./hosts.sh"}, (3, 3, 3)),
        ({"min_np": "1", "hosts": "a:2,b:3"}, (5, 1, 5)),
    ],
)
def test_limits_that_are_not_given_are_the_number_of_ranks(flags: dict[str, str], limits: tuple[int, int, int]) -> None:
    found = make_launch_config(flags, ("true",), {}).job.limits
    assert found is not None and (found.start_ranks, found.min_ranks, found.max_ranks) == limits


def test_the_heartbeat_of_an_elastic_job_is_faster_unless_it_is_given() -> None:
    for flags, environ, expected_s in (
        ({}, {}, 2.5),
        ({"heartbeat_s": "7"}, {}, 7.0),
        ({}, {"RONDE_HEARTBEAT_S": "8"}, 8.0),
    ):
        assert make_launch_config({"min_np": "1", **flags}, ("true",), environ).job.settings.heartbeat_s == expected_s
    assert make_launch_config({}, ("true",), {}).job.settings.heartbeat_s == 10.0


def test_a_hostfile_is_watched_only_in_an_elastic_job(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a\nb:4\n")
    flags = {"hostfile": str(path), "slots_per_host": "2"}
    assert make_launch_config(flags, ("true",), {}).watched_hostfile == ""
    config = make_launch_config({**flags, "min_np": "1"}, ("true",), {})
    assert (config.watched_hostfile, config.slots_per_host, config.job.num_ranks) == (str(path), 2, 6)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"num_ranks": "2", "min_np": "3"}, "min_np must be from 1 to np, which is 2; got 3"),
        ({"num_ranks": "2", "max_np": "1"}, "max_np must be at least np, which is 2; got 1"),
        ({"reset_limit": "1"}, "reset_limit is for jobs whose number of ranks changes: give min_np, too"),
        ({"cooldown": ["1", "2"]}, "cooldown is for jobs whose number of ranks changes"),
        ({"min_np": "1", "cooldown": ["2", "1"]}, "--cooldown must be two numbers of seconds, the longest last"),
        ({"min_np": "1", "debug": "0"}, "debug, tf_config and restarts are for jobs whose number of ranks is fixed"),
        ({"min_np": "1", "restarts": "1"}, "restarts are for jobs whose number of ranks is fixed"),
        ({"min_np": "1", "tf_config": True}, "restarts are for jobs whose number of ranks is fixed"),
        ({"hosts": "a", "discover": "x", "min_np": "1"}, "hosts and discover exclude each other"),
        ({"hosts": "a:2", "num_ranks": "4", "min_np": "1"}, "4 ranks, but only 2 slots"),
    ],
)
def test_an_elastic_job_that_cannot_be_is_refused(flags: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        make_launch_config(flags, ("true",), {})


# --- job files -------------------------------------------------------------------------------------------------------


class SomeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str
    count: int = 1


def test_a_command_reads_its_section_of_a_job_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("run:\n  num_ranks: 3\n  command: python x.py\ndata:\n  path: a\n  count: 2\n")
    assert read_section(str(path), "data", SomeOptions) == SomeOptions(path="a", count=2)
    assert read_config(str(path)) == {"num_ranks": 3, "command": ("python", "x.py")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data:\n  path: a\n  cuont: 2\n", "line 3: unknown key 'cuont' in the section 'data'; did you mean 'count'?"),
        ("data:\n  path: a\n  count: x\n", "line 3: data: Expected `int`, got `str` - at `$.count`"),
        ("data:\n  count: 1\n", ": data: Object missing required field `path`"),
        ("data:\n  path: a\nextra: 1\n", "line 3: unknown section 'extra'; there are run, data, "),
        ("data: 3\n", "the section 'data' must hold keys and values, got 3"),
        ("run:\n  num_ranks: 1\n", "has no section `data:`"),
        ("", "has no section `data:`"),
    ],
)
def test_a_mistake_in_a_section_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_section(str(path), "data", SomeOptions)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_command_takes_how_hosts_are_reached_from_its_section_and_then_from_that_of_run(path: Path) -> None:
    path.write_text(
        "run: {ssh_port: 2222, ssh_identity: run_key, ssh_option: [A=1], env: {ONE: 1, TWO: 2}, hosts: c}\n"
        "predict: {hosts: 'a:2,b', ssh_identity: own_key, ssh_option: [B=2], ssh_start_s: 5, env: [TWO=3]}\n"
    )
    flags = host_flags(read_section(str(path), "predict", HostOptions), str(path))
    job = ask(**flags).job
    assert job.ssh == SshOptions(port=2222, identity="own_key", options=("B=2", "A=1"), start_s=5.0)
    assert (job.env, job.hosts, job.num_ranks) == ({"ONE": "1", "TWO": "3"}, (Host("a", 2), Host("b", 1)), 3)
    assert host_flags(HostOptions()) == {}, "nothing is said where nothing was given"
