"""Which launcher started this process, from its variables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ronde.comm.launchers import (
    JaxVariables,
    LauncherEnvironment,
    coordinator_port_range,
    detect_launcher,
    find_launcher_process,
    first_slurm_host,
    read_jax_variables,
)

TORCH = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
TORCHRUN = {**TORCH, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "r"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}
BATCH = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[3-4]"}
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[3-4]",
    "SLURM_PROCID": "3",
}
HOROVOD = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "4",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "node0",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4000",
}
CLUSTER = {"chief": ["node0:2222"], "worker": ["node1:2222", "node2:2223"], "ps": ["node3:2224"]}
OPTIONAL = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_JOB_NODELIST")


def tf_config(cluster: object, *task: object) -> dict[str, str]:
    """TF_CONFIG of a task, given by type and index."""
    described = {"task": dict(zip(("type", "index"), task, strict=True))} if task else {}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, **described})}


def detect(variables: dict[str, str], **changes: str) -> LauncherEnvironment:
    found = detect_launcher({**variables, **changes})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        (TORCHRUN, ("torchrun", 1, 4)),
        (TORCH, ("torch.distributed's variables", 1, 4)),
        (OPEN_MPI, ("Open MPI", 2, 4)),
        (MPICH, ("MPICH", 3, 4)),
        (STEP, ("srun", 3, 4)),
        (HOROVOD, ("Horovod's variables", 1, 4)),
        # The shell of a batch script is no rank, nor is the interactive step of salloc; one in a step is a job of one.
        (BATCH, None),
        ({**BATCH, "SLURM_STEP_ID": "4294967291"}, None),
        ({**BATCH, "SLURM_STEP_ID": "4294967290"}, None),
        ({**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, ("srun", 0, 1)),
        # An MPI inside of Slurm counts more than the srun of its daemon.
        ({**STEP, **OPEN_MPI}, ("Open MPI", 2, 4)),
        ({**STEP, **MPICH, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, ("MPICH", 3, 4)),
        # srun may set the variables of MPICH.
        ({**STEP, "PMI_RANK": "3", "PMI_SIZE": "4"}, ("srun", 3, 4)),
        # torchrun counts more than what started it.
        ({**STEP, **TORCHRUN}, ("torchrun", 1, 4)),
        ({**OPEN_MPI, **TORCHRUN}, ("torchrun", 1, 4)),
        ({**MPICH, **TORCHRUN}, ("torchrun", 1, 4)),
        # Variables that anybody may have exported come last.
        ({**STEP, **TORCH}, ("srun", 3, 4)),
        ({**OPEN_MPI, **TORCH}, ("Open MPI", 2, 4)),
        ({**MPICH, **TORCH}, ("MPICH", 3, 4)),
        ({**HOROVOD, **TORCH}, ("torch.distributed's variables", 1, 4)),
        # The chief is rank 0 and workers follow; parameter servers and evaluators are no ranks.
        (tf_config(CLUSTER, "chief", 0), ("TF_CONFIG", 0, 3)),
        (tf_config(CLUSTER, "worker", 1), ("TF_CONFIG", 2, 3)),
        (tf_config({"worker": ["a:1", "b:1"], "evaluator": ["c:1"]}, "worker", "1"), ("TF_CONFIG", 1, 2)),
        (tf_config({"worker": ["a:1"]}, "worker", 0), ("TF_CONFIG", 0, 1)),
        # Without a cluster there is one process, for TensorFlow, too.
        ({"TF_CONFIG": ""}, None),
        ({"TF_CONFIG": "{}"}, None),
        ({"TF_CONFIG": '{"cluster": {}, "task": {}, "environment": "cloud"}'}, None),
        # Whatever else there is counts more, and what does not count may be nonsense.
        *(
            ({**each, **tf_config(CLUSTER, "chief", 0)}, name)
            for each, name in [
                (TORCHRUN, ("torchrun", 1, 4)),
                (OPEN_MPI, ("Open MPI", 2, 4)),
                (MPICH, ("MPICH", 3, 4)),
                (STEP, ("srun", 3, 4)),
                (TORCH, ("torch.distributed's variables", 1, 4)),
                (HOROVOD, ("Horovod's variables", 1, 4)),
            ]
        ),
        ({**TORCH, "TF_CONFIG": "{"}, ("torch.distributed's variables", 1, 4)),
    ],
)
def test_each_launcher_is_recognised(variables: dict[str, str], expected: tuple[str, int, int] | None) -> None:
    found = detect_launcher(variables)
    assert (found and (found.launcher, found.rank, found.size)) == expected


@pytest.mark.parametrize("variables", [TORCH, OPEN_MPI, MPICH, {"SLURM_STEP_ID": "0", **BATCH}, HOROVOD])
def test_half_of_a_set_is_no_set(variables: dict[str, str]) -> None:
    for missing in set(variables) - set(OPTIONAL):
        assert detect_launcher({name: value for name, value in variables.items() if name != missing}) is None


@pytest.mark.parametrize(
    ("variables", "changes", "host"),
    [
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "4"}, "127.0.0.1"),
        (TORCHRUN, {}, "node0"),
        (TORCH, {"MASTER_ADDR": "localhost"}, "127.0.0.1"),
        (TORCH, {}, "node0"),
        (OPEN_MPI, {}, "127.0.0.1"),
        (OPEN_MPI, {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ""),
        (MPICH, {}, "127.0.0.1"),
        (MPICH, {"MPI_LOCALNRANKS": "2"}, ""),
        (MPICH, {"MPI_LOCALNRANKS": ""}, ""),
        (STEP, {}, "n3"),
        (STEP, {"SLURM_STEP_NUM_NODES": "1"}, "127.0.0.1"),
        (STEP, {"SLURM_STEP_NUM_NODES": "", "SLURM_STEP_NODELIST": "n3"}, "127.0.0.1"),
        (tf_config(CLUSTER, "worker", 1), {}, "node0"),
        (tf_config({"worker": ["n:1", "n:2"], "ps": ["other:3"]}, "worker", 1), {}, "127.0.0.1"),
        (tf_config({"chief": ["localhost:1"], "worker": ["[::1]:2", "127.0.0.1:3"]}, "worker", 0), {}, "127.0.0.1"),
        (tf_config({"worker": ["[fd00::1]:1", "[fd00::2]:1"]}, "worker", 0), {}, "fd00::1"),
    ],
)
def test_ranks_on_one_host_use_the_loopback_and_others_the_host_of_the_launcher(
    variables: dict[str, str], changes: dict[str, str], host: str
) -> None:
    found = detect(variables, **changes)
    assert found.host == host and found.is_one_host == (host == "127.0.0.1")


@pytest.mark.parametrize(
    ("variables", "rank", "other"),
    [
        (TORCHRUN, "RANK", {"MASTER_PORT": "29501"}),
        ({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-a-1@1"}, "OMPI_COMM_WORLD_RANK", {"PMIX_NAMESPACE": "prterun-a-2@1"}),
        (STEP, "SLURM_PROCID", {"SLURM_STEP_ID": "1"}),
    ],
)
def test_ranks_of_one_job_agree_on_its_name_and_other_jobs_do_not(
    variables: dict[str, str], rank: str, other: dict[str, str]
) -> None:
    assert "" != detect(variables).job == detect(variables, **{rank: "0"}).job != detect(variables, **other).job


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({**TORCH, "RANK": "x"}, "RANK must be a whole number, got 'x'"),
        ({**TORCH, "RANK": "4"}, "RANK=4 does not fit to WORLD_SIZE=4; set RONDE_RANK and RONDE_SIZE"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "-1"}, "OMPI_COMM_WORLD_SIZE must be a whole number"),
        ({"TF_CONFIG": "{"}, "TF_CONFIG cannot be used: Input data was truncated. Correct it, or unset it"),
        ({"TF_CONFIG": "[]"}, "Expected `object`, got `array`"),
        (tf_config({"worker": "a:1"}, "worker", 0), "Expected `array`, got `str` - at `$.cluster"),
        (tf_config({"worker": {"1": "a:1"}}, "worker", 0), "Expected `array`, got `object`"),
        (tf_config({"worker": ["a:1", "b"]}, "worker", 0), "address must be host:port, as in 10.0.0.1:29500, got 'b'"),
        (tf_config({"worker": ["a:1"], "boss": ["b:1"]}, "worker", 0), "the cluster has a 'boss'"),
        (tf_config({"chief": ["a:1", "b:1"]}, "chief", 0), "there is more than one chief"),
        (tf_config(CLUSTER), "there is a cluster, but no task"),
        (tf_config(CLUSTER, "worker", "x"), "Expected `int`, got `str` - at `$.index`"),
        (tf_config(CLUSTER, "worker", -1), "Expected `int` >= 0 - at `$.index`"),
        (tf_config(CLUSTER, "worker", 2), "this process is worker 2, which the cluster does not have"),
        (tf_config(CLUSTER, "ps", 0), "this process is ps 0, and only chief and workers are ranks"),
        (tf_config(CLUSTER, "evaluator", 0), "this process is evaluator 0, and only chief and workers are ranks"),
    ],
)
def test_nonsense_is_named(variables: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        detect_launcher(variables)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n3,n4", "n3"),
        ("n[03-12,20],m1", "n03"),
        ("n[5,7]", "n5"),
        ("rack[0-3]node[1-2],x", "rack0node1"),
        ("gpu-a[1-2]-ib", "gpu-a1-ib"),
    ],
)
def test_the_first_host_of_slurms_short_form(nodes: str, first: str) -> None:
    assert first_slurm_host(nodes) == first


def test_the_ports_follow_the_launchers_or_come_from_the_job() -> None:
    assert coordinator_port_range("a", 29500, "j") == "a:29501-29516"
    assert coordinator_port_range("::1", 65535, "j") == "[::1]:65519-65534"
    mine, other = coordinator_port_range("a", 0, "job 1"), coordinator_port_range("a", 0, "job 2")
    assert mine == coordinator_port_range("a", 0, "job 1") != other
    first, last = map(int, mine.rpartition(":")[2].split("-"))
    assert 20000 <= first < last <= 29999 and last - first == 15


@pytest.mark.parametrize(
    ("port", "others", "ports"),
    [
        (20000, (20000, 20001), "20002-20017"),
        (20000, (20010, 20000, 20040), "20011-20026"),
        (20000, (20010, 20026), "20027-20042"),
        (12345, (12345, 23456), "12346-12361"),
        (65530, (65530, 65531), "65514-65529"),
        (65530, (65530, 65520), "65504-65519"),
    ],
)
def test_no_port_that_the_job_opens_itself_is_taken(port: int, others: tuple[int, ...], ports: str) -> None:
    assert coordinator_port_range("a", port, "", others) == f"a:{ports}"


def test_ranks_of_one_cluster_agree_on_where_they_meet_and_other_clusters_do_not() -> None:
    found = [detect(tf_config(CLUSTER, *task)) for task in (("chief", 0), ("worker", 0), ("worker", 1))]
    assert [each.rank for each in found] == [0, 1, 2]
    assert len({(each.job, each.host, each.port, each.other_ports) for each in found}) == 1
    assert found[0].other_ports == {2222, 2223, 2224}
    assert detect(tf_config({**CLUSTER, "chief": ["node0:2225"]}, "chief", 0)).job != found[0].job


def test_a_cluster_that_leaves_no_ports_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="leaves no 16 ports in a row for the coordinator; set RONDE_COORDINATOR"):
        coordinator_port_range("a", 8, "", range(1, 65536, 16))


def test_the_launcher_is_the_nearest_process_above_without_the_variable(tmp_path: Path) -> None:
    script = "from ronde.comm.launchers import find_launcher_process; print(find_launcher_process('LAUNCHER_TEST'))"
    shell = f'"{sys.executable}" -c "{script}"; true'  # one more process between
    found = subprocess.run(
        ["sh", "-c", shell], env={"LAUNCHER_TEST": "1"}, capture_output=True, text=True, check=True, timeout=30
    )
    assert found.stdout.strip() == find_launcher_process("LAUNCHER_TEST") != "", "which is us"
    assert find_launcher_process("X", tmp_path / "none") == "", "/proc does not show it"


def test_the_variables_for_jax_count_only_in_a_job_of_ronde() -> None:
    given = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:77", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
    assert read_jax_variables({**given, "RONDE_RANK": "3"}) == JaxVariables("10.0.0.1:77", 4, 3)
    assert read_jax_variables(given) is None
    assert read_jax_variables({**given, "RONDE_RANK": "3", "JAX_NUM_PROCESSES": ""}) is None
