"""The environment of a rank, and the order with which it is started."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

import pytest

from ronde.coordinator.round_planning import ElasticLimits
from ronde.launch.environment import (
    MAX_TF_CONFIG_RANKS,
    count_ports,
    login_variables,
    make_rank_orders,
    make_worker_order,
    makes_tf_config,
)
from ronde.launch.job import Job
from ronde.launch.network import HostFacts, JobNetwork
from ronde.launch.placement import Host, Placement
from ronde.launch.protocol import RankOrder
from ronde.settings import Settings

KEY = "ab" * 32
HOSTS = (Host("a", 2), Host("b", 2))


def make_job(**changes: object) -> Job:
    """Ranks 0 and 1 on host a, which is this machine, and rank 2 on host b."""
    return Job(**{"command": ("x", "y"), "num_ranks": 3, "hosts": HOSTS, "cwd": "/data", **changes})  # type: ignore[arg-type]


def orders(
    job: Job, environ: Mapping[str, str] | None = None, *, cpu_count: int = 8, terminals: Collection[int] = ()
) -> dict[int, RankOrder]:
    facts = (
        HostFacts(tuple(range(8)), cpu_count, "10.0.0.1" if job.hosts else "", (5, 6, 7, 8, 9), is_local=True),
        HostFacts((0, 1), 8, "fd00::2", (9,), is_local=False),
    )
    network = JobNetwork("10.0.0.9", dict(enumerate(facts[: len(job.used_hosts)])))
    made = make_rank_orders(
        job, network, coordinator="10.0.0.9:7", key=KEY, environ=environ or {}, tty_fds=terminals
    ).items()
    assert all(job.placements[order.rank].host_index == index for index, start in made for order in start.orders)
    return {order.rank: order for _, start in made for order in start.orders}


def variables(rank: int, environ: Mapping[str, str] | None = None, **changes: object) -> dict[str, str]:
    return orders(make_job(**changes), environ)[rank].env


def test_a_rank_learns_its_place_in_every_dialect() -> None:
    order = orders(make_job())[2]
    assert (order.argv, order.cwd) == (("x", "y"), "/data")
    assert order.env == {
        "RONDE_RANK": "2",
        "RONDE_SIZE": "3",
        "RONDE_COORDINATOR": "10.0.0.9:7",
        "RONDE_COORDINATOR_HOSTED": "1",
        "RONDE_KEY": KEY,
        "RONDE_ADDRESS": "fd00::2",
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
        "TF_CONFIG": json.dumps(
            {
                "cluster": {"worker": ["10.0.0.1:7", "10.0.0.1:8", "[fd00::2]:9"]},
                "task": {"type": "worker", "index": 2},
                "launcher": "ronde",
            }
        ),
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
    assert "RONDE_ADDRESS" not in variables(0, {"RONDE_ADDRESS": "x"}, hosts=())


def test_the_jobs_settings_count_and_not_what_the_environment_said_before_them() -> None:
    environ = {"RONDE_STALL_S": "5", "RONDE_KEY": "of an outer job", "RONDE_HOST": "outer", "RONDE_MINE": "1"}
    found = variables(0, environ | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert not {"RONDE_STALL_S", "RONDE_HOST", "TORCHELASTIC_USE_AGENT_STORE"} & found.keys()
    assert (found["RONDE_KEY"], found["RONDE_MINE"]) == (KEY, "1"), "only settings are ours"


def test_variables_of_the_job_are_stronger_than_the_environment_and_weaker_than_the_place() -> None:
    found = variables(0, {"A": "1", "B": "1"}, env={"B": "2", "RANK": "9", "RONDE_FUSION_BYTES": "0"})
    assert (found["A"], found["B"], found["RANK"], found["RONDE_FUSION_BYTES"]) == ("1", "2", "0", "0")


@pytest.mark.parametrize(("cpu_count", "threads"), [(8, "4"), (5, "2"), (2, "1"), (1, "1")])
def test_ranks_share_what_the_quota_of_their_container_allows_and_not_all_cores(cpu_count: int, threads: str) -> None:
    assert orders(make_job(), cpu_count=cpu_count)[0].env["OMP_NUM_THREADS"] == threads


def test_what_the_user_says_of_threads_and_python_counts() -> None:
    here = {"OMP_NUM_THREADS": "3", "PYTHONUNBUFFERED": ""}
    assert here.items() <= variables(0, here).items()
    assert variables(0, here, env={"OMP_NUM_THREADS": "5"})["OMP_NUM_THREADS"] == "5"


def test_every_worker_of_tensorflow_has_a_port_of_its_own_unless_there_is_no_cluster() -> None:
    assert count_ports(make_job(), {}) == ((2, 2), (0, 1))
    assert count_ports(make_job(tf_config=False), {}) == ((2, 0), (0, 0))
    assert "TF_CONFIG" not in variables(2, tf_config=False)


@pytest.mark.parametrize("tf_config", [None, True, False])
def test_a_tf_config_of_the_user_is_never_touched(tf_config: bool | None) -> None:
    for given in ('{"cluster": {"worker": ["a:1"]}}', "", "nonsense"):
        for environ, env in (
            ({"TF_CONFIG": given}, {}),
            ({}, {"TF_CONFIG": given}),
            ({"TF_CONFIG": "x"}, {"TF_CONFIG": given}),
        ):
            job = make_job(env=env, tf_config=tf_config)
            assert count_ports(job, environ) == ((2, 0), (0, 0))
            assert {order.env["TF_CONFIG"] for order in orders(job, environ).values()} == {given}


def test_the_tf_config_of_an_outer_job_is_not_the_users() -> None:
    outer = {"TF_CONFIG": variables(1)["TF_CONFIG"]}
    assert variables(2, outer)["TF_CONFIG"] == variables(2)["TF_CONFIG"] != outer["TF_CONFIG"]
    assert "TF_CONFIG" not in variables(2, outer, tf_config=False)
    assert "TF_CONFIG" not in worker_order(12, 5, environ=outer).env
    assert variables(2, outer, env=outer)["TF_CONFIG"] == outer["TF_CONFIG"], "asked for with -x"


@pytest.mark.parametrize(
    ("size", "by_default"), [(1, False), (2, True), (MAX_TF_CONFIG_RANKS, True), (MAX_TF_CONFIG_RANKS + 1, False)]
)
def test_jobs_of_one_rank_and_of_very_many_get_a_tf_config_only_when_asked_for(size: int, by_default: bool) -> None:
    assert makes_tf_config(make_job(num_ranks=size, hosts=()), {}) == by_default
    assert makes_tf_config(make_job(num_ranks=size, hosts=(), tf_config=True), {})


@pytest.mark.parametrize("name", ["HOME", "USER", "SSH_AUTH_SOCK", "DISPLAY", "HOSTNAME", "CUDA_VISIBLE_DEVICES", "_"])
def test_what_belongs_to_this_machine_stays_on_it(name: str) -> None:
    made = orders(make_job(), {name: "x", "PATH": "p", "MY_HOME": "y"})
    assert made[0].env[name] == "x" and name not in made[2].env
    assert (made[2].env["PATH"], made[2].env["MY_HOME"]) == ("p", "y")


def test_an_agent_adds_what_only_its_host_knows() -> None:
    assert login_variables({"HOME": "/h", "PATH": "p", "USER": "me"}) == {"HOME": "/h", "USER": "me"}


@pytest.mark.parametrize(("bind", "cpus"), [("none", [(), (), ()]), ("core", [(0, 1, 2, 3), (4, 5, 6, 7), (0, 1)])])
def test_cores_are_divided_only_when_asked_for(bind: str, cpus: list[tuple[int, ...]]) -> None:
    made = orders(make_job(bind=bind))
    assert [made[rank].cpus for rank in range(3)] == cpus


@pytest.mark.parametrize(
    ("debug_rank", "terminals", "drawing", "debugged", "piped"),
    [
        (None, (0, 1, 2), 0, None, None),
        (None, (0, 1), None, None, None),
        (2, (0, 1, 2), None, 2, None),
        (2, (1, 2), None, 2, 2),
    ],
)
def test_one_rank_may_draw_or_has_the_terminal_and_its_input_is_the_drivers(
    debug_rank: int | None, terminals: tuple[int, ...], drawing: int | None, debugged: int | None, piped: int | None
) -> None:
    for rank, order in orders(make_job(debug_rank=debug_rank), terminals=terminals).items():
        assert (order.output_ptys, order.tty, order.stdin_pipe) == (rank == drawing, rank == debugged, rank == piped)


# --- workers of elastic jobs ----------------------------------------------------------------------------------------


def worker_order(number: int, rank: int, environ: Mapping[str, str] | None = None, **changes: object) -> RankOrder:
    """The order for a worker in the second of four slots of host b, the second of two hosts."""
    limits = ElasticLimits(start_ranks=3, min_ranks=1, max_ranks=8)
    job = make_job(limits=limits, settings=Settings(heartbeat_s=2.5), **changes)
    return make_worker_order(
        job,
        number,
        Placement(
            rank=rank,
            host=Host("b", 4),
            host_index=1,
            local_rank=1,
            local_size=4,
            cross_rank=1,
            cross_size=2,
            num_hosts=2,
        ),
        6,
        HostFacts(tuple(range(8)), 8, "10.0.0.2", is_local=False),
        coordinator="10.0.0.9:7",
        key=KEY,
        environ=environ or {},
        tty_fds=(0, 1, 2),
    )


def test_a_worker_of_an_elastic_job_has_a_number_beside_its_rank() -> None:
    order = worker_order(12, 5)
    assert (order.rank, order.argv, order.output_ptys) == (12, ("x", "y"), False)
    expected = {
        "RONDE_ELASTIC": "1",
        "RONDE_WORKER": "12",
        "RONDE_SLOT": "1",
        "RONDE_RANK": "5",
        "RONDE_SIZE": "6",
        "RONDE_COORDINATOR": "10.0.0.9:7",
        "RONDE_COORDINATOR_HOSTED": "1",
        "RONDE_KEY": KEY,
        "RONDE_ADDRESS": "10.0.0.2",
        "RONDE_HEARTBEAT_S": "2.5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "OMP_NUM_THREADS": "2",
        "HOROVOD_HOSTNAME": "b",
    }
    assert expected.items() <= order.env.items()
    assert not any(name.startswith(("MASTER_", "JAX_", "TF_CONFIG")) for name in order.env), "any rank may be lost"


def test_only_the_first_worker_draws_progress_bars() -> None:
    assert worker_order(0, 0).output_ptys and not worker_order(4, 0).output_ptys


def test_workers_are_bound_to_the_cores_of_their_slots() -> None:
    assert worker_order(12, 5, bind="core").cpus == (2, 3)
