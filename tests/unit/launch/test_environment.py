"""The environment of a rank, and the order with which it is started."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace

import pytest

from ronde.launch.environment import (
    JobEndpoints,
    count_ports,
    exportable_variables,
    login_variables,
    make_endpoints,
    make_rank_orders,
    rank_environment,
)
from ronde.launch.job import Job
from ronde.launch.network import HostFacts, JobNetwork
from ronde.launch.placement import Host
from ronde.launch.protocol import RankOrder
from ronde.settings import Settings

KEY = "ab" * 32
HOSTS = (Host("a", 2), Host("b", 2))
ENDPOINTS = JobEndpoints(coordinator="10.0.0.9:7", key=KEY, torch_store=("10.0.0.1", 5), jax_coordinator="10.0.0.1:6")


def job(**changes: object) -> Job:
    return Job(**{"command": ("x",), "num_ranks": 3, "hosts": HOSTS, **changes})  # type: ignore[arg-type]


def variables(
    rank: int = 0, base: dict[str, str] | None = None, *, cpu_count: int = 8, **changes: object
) -> dict[str, str]:
    one = job(**changes)
    facts = HostFacts(tuple(range(8)), cpu_count, "10.0.0.1" if one.hosts else "")
    return rank_environment(one, one.placements[rank], ENDPOINTS, facts, base=base or {})


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
    assert "RONDE_ADDRESS" not in variables(base={"RONDE_ADDRESS": "x"}, hosts=(), num_ranks=1)


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


@pytest.mark.parametrize(("cpu_count", "threads"), [(8, "4"), (5, "2"), (2, "1"), (1, "1")])
def test_ranks_share_what_the_quota_of_their_container_allows_and_not_all_cores(cpu_count: int, threads: str) -> None:
    assert variables(0, cpu_count=cpu_count)["OMP_NUM_THREADS"] == threads


def test_a_torchrun_around_us_does_not_mislead_the_ranks() -> None:
    assert not any(name.startswith("TORCHELASTIC") for name in variables(base={"TORCHELASTIC_USE_AGENT_STORE": "True"}))


def network(*free_ports: tuple[int, ...]) -> JobNetwork:
    addresses = ("10.0.0.1", "fd00::2")
    facts = [HostFacts((0,), 1, address, ports) for address, ports in zip(addresses, free_ports, strict=True)]
    return JobNetwork("10.0.0.9", tuple(facts))


def test_ports_are_wanted_where_they_are_used_and_all_are_different() -> None:
    assert count_ports(job()) == (2, 0)
    assert count_ports(job(tf_config=True)) == (4, 1)
    endpoints = make_endpoints(job(tf_config=True), network((1, 2, 3, 4), (1,)), coordinator="c:1", key=KEY)
    assert (endpoints.torch_store, endpoints.jax_coordinator) == (("10.0.0.1", 1), "10.0.0.1:2")
    assert endpoints.tf_workers == ("10.0.0.1:3", "10.0.0.1:4", "[fd00::2]:1")
    assert make_endpoints(job(), network((1, 2), ()), coordinator="c:1", key=KEY).tf_workers == ()


def test_tensorflow_gets_a_list_of_workers_when_asked_for() -> None:
    one = job(tf_config=True)
    network_found = network((1, 2, 3, 4), (5,))
    endpoints = make_endpoints(one, network_found, coordinator="c:1", key=KEY)
    found = rank_environment(one, one.placements[2], endpoints, network_found.host_facts[1], base={})
    assert json.loads(found["TF_CONFIG"]) == {
        "cluster": {"worker": ["10.0.0.1:3", "10.0.0.1:4", "[fd00::2]:5"]},
        "task": {"type": "worker", "index": 2},
    }


def test_the_key_shows_in_no_text() -> None:
    assert KEY not in repr(ENDPOINTS)


@pytest.mark.parametrize("name", ["HOME", "USER", "SSH_AUTH_SOCK", "DISPLAY", "HOSTNAME", "CUDA_VISIBLE_DEVICES", "_"])
def test_what_belongs_to_one_host_stays_there(name: str) -> None:
    assert exportable_variables({name: "x", "PATH": "p", "MY_HOME": "y"}) == {"PATH": "p", "MY_HOME": "y"}


def test_an_agent_adds_what_only_its_host_knows() -> None:
    assert login_variables({"HOME": "/h", "PATH": "p", "USER": "me"}) == {"HOME": "/h", "USER": "me"}


JOB = Job(command=("python", "train.py"), num_ranks=3, hosts=(Host("a", 2), Host("b", 1)), cwd="/data")
NETWORK = JobNetwork(
    "10.0.0.9",
    (
        HostFacts((0, 1, 2, 3), 4, "10.0.0.1", (4001, 4002), is_local=True),
        HostFacts((0, 1), 2, "10.0.0.2", (), is_local=False),
    ),
)
ENVIRON = {"PATH": "/bin", "HOME": "/home/me", "DISPLAY": ":0"}


def orders(job: Job = JOB, *, terminals: Collection[int] = ()) -> dict[int, RankOrder]:
    endpoints = make_endpoints(job, NETWORK, coordinator="10.0.0.1:4000", key=KEY)
    made = make_rank_orders(job, NETWORK, endpoints, environ=ENVIRON, tty_fds=terminals)
    assert [[order.rank for order in made[index].orders] for index in (0, 1)] == [[0, 1], [2]]
    return {order.rank: order for start in made.values() for order in start.orders}


def test_every_rank_gets_its_command_directory_and_address() -> None:
    made = orders()
    assert {(order.argv, order.cwd) for order in made.values()} == {(("python", "train.py"), "/data")}
    addresses = [made[rank].env["RONDE_ADDRESS"] for rank in range(3)]
    assert addresses == ["10.0.0.1", "10.0.0.1", "10.0.0.2"]
    assert {order.env["MASTER_ADDR"] for order in made.values()} == {"10.0.0.1"}


def test_what_belongs_to_this_machine_stays_on_it() -> None:
    made = orders()
    assert made[0].env["HOME"] == "/home/me" and made[0].env["DISPLAY"] == ":0"
    assert made[2].env["PATH"] == "/bin" and not {"HOME", "DISPLAY"} & made[2].env.keys()


def test_cores_are_divided_only_when_asked_for() -> None:
    assert {order.cpus for order in orders().values()} == {()}
    bound = orders(replace(JOB, bind="core"))
    assert [bound[rank].cpus for rank in range(3)] == [(0, 1), (2, 3), (0, 1)]


def test_rank_0_may_draw_unless_another_rank_has_the_terminal() -> None:
    assert [orders(terminals=(0, 1, 2))[rank].output_ptys for rank in range(3)] == [True, False, False]
    assert not any(order.output_ptys for order in orders(terminals=(0, 1)).values())
    debugged = orders(replace(JOB, debug_rank=2), terminals=(0, 1, 2))
    assert [(debugged[rank].tty, debugged[rank].output_ptys) for rank in range(3)] == [
        (False, False),
        (False, False),
        (True, False),
    ]


def test_the_input_of_the_debugged_rank_is_what_the_drivers_is() -> None:
    for terminals, piped in (((0,), False), ((1, 2), True)):
        made = orders(replace(JOB, debug_rank=2), terminals=terminals)
        assert [made[rank].stdin_pipe for rank in range(3)] == [False, False, piped]
