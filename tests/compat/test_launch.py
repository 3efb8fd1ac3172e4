"""horovodrun's flags: each is honoured, or told to be without effect; and the job that follows from them."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from horovod.runner.common.util import config_parser
from horovod.runner.launch import (
    ONLY_ELASTIC,
    WITHOUT_EFFECT,
    check_build,
    make_host_source,
    make_job,
    no_effect_messages,
    parse_args,
    parse_arguments,
    run_commandline,
)
from ronde.launch.job import Job, SshOptions
from ronde.launch.placement import Host

NP = ("-np", "2")

FLAGS: list[tuple[str, dict[str, str]]] = [
    ("--fusion-threshold-mb 10", {"HOROVOD_FUSION_THRESHOLD": str(10 * 1024 * 1024)}),
    ("--cycle-time-ms 20", {"HOROVOD_CYCLE_TIME": "20.0"}),
    ("--cache-capacity 512", {"HOROVOD_CACHE_CAPACITY": "512"}),
    ("--hierarchical-allreduce", {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}),
    ("--no-hierarchical-allgather", {"HOROVOD_HIERARCHICAL_ALLGATHER": "0"}),
    ("--torus-allreduce", {"HOROVOD_TORUS_ALLREDUCE": "1"}),
    ("--autotune", {"HOROVOD_AUTOTUNE": "1"}),
    ("--autotune-log-file x", {}),
    (
        "--autotune --autotune-log-file x --autotune-warmup-samples 1 --autotune-steps-per-sample 2 "
        "--autotune-bayes-opt-max-samples 3 --autotune-gaussian-process-noise 0.5",
        {
            "HOROVOD_AUTOTUNE": "1",
            "HOROVOD_AUTOTUNE_LOG": "x",
            "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
            "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2",
            "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "3",
            "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.5",
        },
    ),
    ("--timeline-filename t.json", {"HOROVOD_TIMELINE": "t.json"}),
    ("--timeline-mark-cycles", {}),
    (
        "--timeline-filename t.json --timeline-mark-cycles",
        {"HOROVOD_TIMELINE": "t.json", "HOROVOD_TIMELINE_MARK_CYCLES": "1"},
    ),
    ("--no-stall-check", {"HOROVOD_STALL_CHECK_DISABLE": "1"}),
    ("--stall-check", {"HOROVOD_STALL_CHECK_DISABLE": "0"}),
    ("--stall-check-warning-time-seconds 3", {"HOROVOD_STALL_CHECK_TIME_SECONDS": "3"}),
    ("--stall-check-shutdown-time-seconds 4", {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}),
    ("--mpi-threads-disable", {"HOROVOD_MPI_THREADS_DISABLE": "1"}),
    ("--num-nccl-streams 2", {"HOROVOD_NUM_NCCL_STREAMS": "2"}),
    ("--thread-affinity 1", {"HOROVOD_THREAD_AFFINITY": "1"}),
    ("--gloo-timeout-seconds 60", {"HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}),
    ("--log-level INFO", {"HOROVOD_LOG_LEVEL": "INFO"}),
    ("--log-with-timestamp", {"HOROVOD_LOG_HIDE_TIME": "0"}),
    ("--log-without-timestamp", {"HOROVOD_LOG_HIDE_TIME": "1"}),
    ("--log-hide-timestamp", {"HOROVOD_LOG_HIDE_TIME": "1"}),
    ("--no-log-hide-timestamp", {"HOROVOD_LOG_HIDE_TIME": "0"}),
    ("--gloo --verbose -prefix-timestamp --output-filename d --disable-cache", {}),
]

CONFIG = """
controller: gloo
params: {fusion_threshold_mb: 32, cycle_time_ms: 10, hierarchical_allreduce: true}
autotune: {enabled: true, log_file: log.txt}
timeline: {filename: t.json, mark_cycles: true}
stall_check: {enabled: false, warning_time_seconds: 120}
library_options: {gloo_timeout_seconds: 60}
logging: {level: INFO, with_timestamp: false}
"""


def job(*words: str, environ: dict[str, str] | None = None) -> Job:
    return make_job(parse_arguments([*NP, *words]), ("python", "train.py"), environ or {})


@pytest.mark.parametrize(("words", "expected"), FLAGS, ids=[words for words, _ in FLAGS])
def test_flags_become_variables(words: str, expected: dict[str, str]) -> None:
    assert config_parser.set_env_from_args({}, parse_arguments([*NP, *words.split()])) == expected


def test_processes_get_the_variables_that_have_an_effect() -> None:
    # The flags of the others have been told of: the variables would be told of once more.
    words = "--tcp --log-level INFO --cycle-time-ms 5 --cache-capacity 0 --autotune --no-torus-allreduce"
    assert job(*words.split()).env == {"NCCL_IB_DISABLE": "1", "HOROVOD_LOG_LEVEL": "INFO"}


def test_a_tf_config_is_left_to_the_job_unless_a_flag_says_otherwise() -> None:
    assert [job(*words).tf_config for words in ((), ("--tf-config",), ("--no-tf-config",))] == [None, True, False]
    assert job("--min-np", "1", "--no-tf-config").limits is not None
    with pytest.raises(ValueError, match="tf_config and restarts are for jobs whose number of ranks is fixed"):
        job("--min-np", "1", "--tf-config")


def test_a_flag_counts_more_than_a_variable() -> None:
    assert job("--stall-check", environ={"HOROVOD_STALL_CHECK_DISABLE": "1"}).settings.stall_s == 60.0
    assert job(environ={"HOROVOD_STALL_CHECK_DISABLE": "1"}).settings.stall_s == 0.0


def test_what_is_behind_the_first_word_belongs_to_the_command() -> None:
    args = parse_arguments([*NP, "-H", "a:2", "python", "train.py", "-np", "7", "--verbose"])
    assert args.command == ["python", "train.py", "-np", "7", "--verbose"]
    assert (args.num_proc, args.verbose) == (2, False)
    assert parse_arguments([*NP, "--", "python", "x"]).command == ["python", "x"]


def test_the_job_of_many_hosts() -> None:
    words = "-np 16 -H server1:4,server2:4,server3:4,server4:4 -p 2222 -i /key --start-timeout 40 python train.py"
    args = parse_arguments(words.split())
    found = make_job(args, tuple(args.command), {})
    assert (found.num_ranks, found.command) == (16, ("python", "train.py"))
    assert found.hosts == tuple(Host(f"server{number}", 4) for number in range(1, 5))
    assert found.ssh == SshOptions(port=2222, identity="/key", options=("StrictHostKeyChecking=no",), start_s=40.0)


def test_hosts_may_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    for flag in ("-hostfile", "--hostfile"):
        assert job(flag, str(tmp_path / "hosts")).hosts == (Host("a", 1), Host("b", 1))


def test_variables_reach_the_coordinator_as_settings() -> None:
    found = job(
        "--stall-check-warning-time-seconds", "7", environ={"HOROVOD_FUSION_THRESHOLD": "99", "RONDE_RANK": "5"}
    )
    assert (found.settings.stall_s, found.settings.fusion_bytes, found.settings.rank) == (7.0, 99, 0)
    assert job().settings.stall_s == 60.0


def test_every_flag_without_effect_says_why() -> None:
    switches = """disable_cache hierarchical_allreduce hierarchical_allgather torus_allreduce autotune
        mpi_threads_disable use_mpi use_jsrun""".split()
    assert no_effect_messages(parse_arguments(NP)) == []
    for dest, (flag, why) in {**WITHOUT_EFFECT, **ONLY_ELASTIC}.items():
        values = ["1 2"] if dest == "cooldown_range" else ["1", "0"]  # 0 is a number as any other
        for value in [""] if dest in switches else values:
            messages = no_effect_messages(parse_arguments([*NP, flag, *value.split()]))
            assert messages == [f"{flag} has no effect: {why}"]
    assert no_effect_messages(parse_arguments([*NP, "--no-autotune"])) == []
    elastic = "--min-np 1 --max-np 2 --slots-per-host 1 --reset-limit 1 --blacklist-cooldown-range 1 2"
    assert no_effect_messages(parse_arguments([*NP, *elastic.split()])) == []


def test_a_file_gives_options_that_the_command_line_may_overrule(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    args = parse_arguments([*NP, "--fusion-threshold-mb", "256", "--config-file", str(path), "--cycle-time-ms", "20"])
    assert (args.fusion_threshold_mb, args.cycle_time_ms) == (256, 20)
    assert (args.use_gloo, args.hierarchical_allreduce, args.autotune) == (True, True, True)
    assert args.autotune_log_file == "log.txt"
    assert (args.timeline_filename, args.timeline_mark_cycles, args.no_stall_check) == ("t.json", True, True)
    assert (args.log_level, args.log_with_timestamp, args.gloo_timeout_seconds) == ("INFO", False, 60)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read: No such file"),
        ("- a", "must hold sections"),
        ("{", "is no YAML"),
        ("controller: x", "controller must be gloo or mpi"),
        ("params: 5", "params must hold options such as `fusion_threshold_mb: …`, got 5"),
        ("params: {cycle_time_ms: abc}", "cycle_time_ms in params must be a number, got 'abc'"),
        ("params: {fusion_threshold_mb: 1.5}", "fusion_threshold_mb in params must be a whole number"),
        ("params: {cache_capacity: true}", "cache_capacity in params must be a whole number"),
        ("params: {cycle_time_ms: -1}", "--cycle-time-ms must be at least 0"),
        ("stall_check: {enabled: maybe}", "enabled in stall_check must be true or false, got 'maybe'"),
        ("timeline: {filename: [a]}", "filename in timeline must be a text"),
        ("logging: {level: LOUD}", "level in logging must be one of TRACE"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(text: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"{path} cannot be used: .*{words}"):
        parse_arguments([*NP, "--config-file", str(path)])


def test_a_file_may_say_yes_and_no_in_numbers_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("stall_check: {enabled: 1}\nparams: {torus_allreduce: 0, cycle_time_ms: }\ntimeline:\n")
    args = parse_arguments([*NP, "--config-file", str(path)])
    assert (args.no_stall_check, args.torus_allreduce, args.cycle_time_ms) == (False, False, None)
    assert no_effect_messages(args) == []


@pytest.mark.parametrize(
    "words", ["--fusion-threshold-mb -1", "--autotune-gaussian-process-noise 2", "--gloo-timeout-seconds -3"]
)
def test_numbers_that_cannot_be_are_refused(words: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_arguments([*NP, *words.split()])


def test_the_limits_of_an_elastic_job() -> None:
    words = "--min-np 1 --max-np 5 --reset-limit 3 --elastic-timeout 60 --blacklist-cooldown-range 2 30"
    found = job(*words.split(), environ={"HOROVOD_ELASTIC_TIMEOUT": "7"})
    assert found.limits is not None
    limits = found.limits
    assert (limits.start_ranks, limits.min_ranks, limits.max_ranks, limits.reset_limit) == (2, 1, 5, 3)
    assert (limits.timeout_s, found.settings.elastic_timeout_s, found.cooldown_s) == (60.0, 60.0, (2, 30))
    assert found.env["HOROVOD_ELASTIC"] == "1"
    found = job("--host-discovery-script", "x", environ={"HOROVOD_ELASTIC_TIMEOUT": "7"})
    assert found.limits is not None
    assert (found.limits.min_ranks, found.limits.max_ranks, found.limits.timeout_s) == (2, sys.maxsize, 7.0)
    on_this_machine = job("--min-np", "1").limits
    assert on_this_machine is not None
    assert on_this_machine.max_ranks == 2
    assert job("--max-np", "5").limits is None


@pytest.mark.parametrize("words", ["--min-np 0", "--min-np 3", "--min-np 1 --max-np 1", "--min-np 1 --reset-limit -1"])
def test_limits_that_cannot_be_are_refused(words: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        job(*words.split())


def test_where_the_hosts_of_an_elastic_job_come_from(tmp_path: Path) -> None:
    script, hostfile = tmp_path / "discover", tmp_path / "hosts"
    script.write_text("echo a\necho b:3\n")  # without #!
    script.chmod(0o755)
    hostfile.write_text("c slots=4\nd\n")
    for words, expected in [
        (("--host-discovery-script", str(script), "--slots-per-host", "2"), (Host("a", 2), Host("b", 3))),
        (("--min-np", "1", "--hostfile", str(hostfile)), (Host("c", 4), Host("d", 1))),
    ]:
        source = make_host_source(parse_arguments([*NP, *words]))
        assert source is not None
        with contextlib.closing(source):
            assert source.hosts() == expected
    for fixed in (("--min-np", "1", "-H", "a:1"), ("--hostfile", str(hostfile))):
        assert make_host_source(parse_arguments([*NP, *fixed])) is None


@pytest.mark.parametrize(
    "words", ["-H a:1 --hostfile b", "--gloo --mpi", "--log-with-timestamp -prefix-timestamp", "--no-such-flag"]
)
def test_flags_that_exclude_each_other_end_with_the_usage(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([*NP, *words.split()])
    assert "usage: horovodrun" in capsys.readouterr().err


def test_variables_that_are_set_already_stay() -> None:
    env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "1800"}
    assert config_parser.set_env_from_args(env, parse_arguments(NP)) == {"HOROVOD_GLOO_TIMEOUT_SECONDS": "1800"}


def test_interfaces_add_up() -> None:
    args = parse_arguments([*NP, "--network-interfaces", "a,b", "--network-interface", "c"])
    assert args.nics == {"a", "b", "c"}
    with pytest.warns(DeprecationWarning, match="--network-interfaces"):
        parse_arguments([*NP, "--network-interface", "a,b"])


@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        ("--version", 0, "0.28.1"),
        ("--check-build", 0, "[X] PyTorch"),
        ("-cb", 0, "[ ] NCCL"),
        ("", 2, "-np is needed"),
        ("-np 2", 2, "there is no command to run"),
        ("-np 2 -H a:1 python", 2, "1 slot short"),
        ("-np 2 --min-np 3 python", 2, "min_np must be from 1 to np"),
    ],
)
def test_the_command_says_what_is_asked_or_wrong(
    words: str, code: int, shown: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["horovodrun", *words.split()])
    with pytest.raises(SystemExit) as ended:
        run_commandline()
    assert ended.value.code == code
    out, err = capfd.readouterr()
    assert shown in out + err


def test_arguments_come_from_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["horovodrun", "-np", "3", "ls"])
    assert parse_args().num_proc == 3


def test_the_build_is_told_in_boxes() -> None:
    sections = [line for line in check_build().splitlines() if line.startswith("Available")]
    assert sections == ["Available Frameworks:", "Available Controllers:", "Available Tensor Operations:"]
