"""The environment of a rank."""

from __future__ import annotations

import json

import pytest

from ronde.launch.environment import (
    JobEndpoints,
    count_ports,
    exportable_variables,
    login_variables,
    make_endpoints,
    rank_environment,
)
from ronde.launch.job import Job
from ronde.launch.placement import Host, place_ranks
from ronde.settings import Settings

KEY = "ab" * 32
HOSTS = (Host("a", 2), Host("b", 2))
MEETING = JobEndpoints(coordinator="10.0.0.9:7", key=KEY, torch_store=("10.0.0.1", 5), jax_coordinator="10.0.0.1:6")


def job(**changes: object) -> Job:
    return Job(**{"command": ("x",), "num_ranks": 3, "hosts": HOSTS, **changes})  # type: ignore[arg-type]


def variables(rank: int = 0, base: dict[str, str] | None = None, **changes: object) -> dict[str, str]:
    one = job(**changes)
    seat = place_ranks(one.hosts, one.num_ranks)[rank]
    return rank_environment(one, seat, MEETING, base=base or {}, num_cores=8, address="10.0.0.1")


def test_a_rank_learns_its_place_in_every_dialect() -> None:
    found = variables(2)
    assert found == {
        "RONDE_RANK": "2",
        "RONDE_SIZE": "3",
        "RONDE_COORDINATOR": "10.0.0.9:7",
        "RONDE_COORDINATOR_HOSTED": "1",
        "RONDE_KEY": KEY,
        "RONDE_ADDRESS": "10.0.0.1",
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "5",
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:6",
        "JAX_NUM_PROCESSES": "3",
        "JAX_PROCESS_ID": "2",
        "HOROVOD_RANK": "2",
        "HOROVOD_SIZE": "3",
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": "1",
        "HOROVOD_CROSS_SIZE": "2",
        "HOROVOD_HOSTNAME": "b",
        "OMP_NUM_THREADS": "8",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def test_ronde_finds_its_settings_in_it() -> None:
    settings = Settings.load(environ=variables(1, settings=Settings(stall_s=7, backend="mpi")))
    assert (settings.rank, settings.size, settings.coordinator_hosted) == (1, 3, True)
    assert (settings.address, settings.stall_s, settings.backend) == ("10.0.0.1", 7, "mpi")


def test_on_one_machine_there_is_no_address_to_tell() -> None:
    seat = place_ranks((), 1)[0]
    found = rank_environment(job(hosts=(), num_ranks=1), seat, MEETING, base={"RONDE_ADDRESS": "x"}, num_cores=1)
    assert "RONDE_ADDRESS" not in found


def test_the_jobs_settings_count_and_not_what_the_environment_said_before_them() -> None:
    base = {"RONDE_STALL_S": "5", "RONDE_KEY": "of an outer job", "RONDE_HOST": "outer", "RONDE_MINE": "1"}
    found = variables(base=base)
    assert "RONDE_STALL_S" not in found and "RONDE_HOST" not in found
    assert found["RONDE_KEY"] == KEY
    assert found["RONDE_MINE"] == "1", "only settings are ours"


def test_variables_of_the_job_are_stronger_than_the_environment_and_weaker_than_the_place() -> None:
    found = variables(base={"A": "1", "B": "1"}, env={"B": "2", "RANK": "9", "RONDE_FUSION_BYTES": "0"})
    assert (found["A"], found["B"], found["RANK"], found["RONDE_FUSION_BYTES"]) == ("1", "2", "0", "0")


def test_the_cores_of_a_host_are_shared_by_its_ranks_unless_the_user_said_otherwise() -> None:
    assert variables(0)["OMP_NUM_THREADS"] == "4"
    assert variables(2)["OMP_NUM_THREADS"] == "8"
    assert variables(base={"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"
    assert variables(base={"OMP_NUM_THREADS": "3"}, env={"OMP_NUM_THREADS": "5"})["OMP_NUM_THREADS"] == "5"
    assert variables(base={"PYTHONUNBUFFERED": ""})["PYTHONUNBUFFERED"] == ""


def test_a_torchrun_around_us_does_not_mislead_the_ranks() -> None:
    assert not any(name.startswith("TORCHELASTIC") for name in variables(base={"TORCHELASTIC_USE_AGENT_STORE": "True"}))


def test_ports_are_wanted_where_they_are_used_and_all_are_different() -> None:
    seats = place_ranks(HOSTS, 3)
    assert count_ports(job(), seats) == (2, 0)
    assert count_ports(job(tf_config=True), seats) == (4, 1)
    meeting = make_endpoints(
        seats, coordinator="c:1", key=KEY, addresses=("10.0.0.1", "fd00::2"), ports=((1, 2, 3, 4), (1,))
    )
    assert (meeting.torch_store, meeting.jax_coordinator) == (("10.0.0.1", 1), "10.0.0.1:2")
    assert meeting.tf_workers == ("10.0.0.1:3", "10.0.0.1:4", "[fd00::2]:1")
    assert make_endpoints(seats, coordinator="c:1", key=KEY, addresses=("a", "b"), ports=((1, 2), ())).tf_workers == ()


def test_tensorflow_gets_a_list_of_workers_when_asked_for() -> None:
    one = job(tf_config=True)
    meeting = JobEndpoints(
        coordinator="c:1", key=KEY, torch_store=("a", 1), jax_coordinator="a:2", tf_workers=("a:3", "a:4", "b:5")
    )
    found = rank_environment(one, place_ranks(HOSTS, 3)[2], meeting, base={}, num_cores=1)
    assert json.loads(found["TF_CONFIG"]) == {
        "cluster": {"worker": ["a:3", "a:4", "b:5"]},
        "task": {"type": "worker", "index": 2},
    }


def test_the_key_shows_in_no_text() -> None:
    assert KEY not in repr(MEETING)


@pytest.mark.parametrize("name", ["HOME", "USER", "SSH_AUTH_SOCK", "DISPLAY", "HOSTNAME", "CUDA_VISIBLE_DEVICES", "_"])
def test_what_belongs_to_one_host_stays_there(name: str) -> None:
    assert exportable_variables({name: "x", "PATH": "p", "MY_HOME": "y"}) == {"PATH": "p", "MY_HOME": "y"}


def test_an_agent_adds_what_only_its_host_knows() -> None:
    assert login_variables({"HOME": "/h", "PATH": "p", "USER": "me"}) == {"HOME": "/h", "USER": "me"}
