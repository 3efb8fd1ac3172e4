"""What agents are told to start."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ronde.launch.environment import make_endpoints, make_rank_orders
from ronde.launch.job import Job
from ronde.launch.network import HostFacts
from ronde.launch.placement import Host, place_ranks
from ronde.launch.protocol import RankOrder

JOB = Job(command=("python", "train.py"), num_ranks=3, hosts=(Host("a", 2), Host("b", 1)), cwd="/data")
SITES = (
    HostFacts((0, 1, 2, 3), "10.0.0.1", (4001, 4002), is_local=True),
    HostFacts((0, 1), "10.0.0.2", (), is_local=False),
)
ENVIRON = {"PATH": "/bin", "HOME": "/home/me", "DISPLAY": ":0"}


def orders(job: Job = JOB, *, terminals: Collection[int] = ()) -> dict[int, RankOrder]:
    seats = place_ranks(job.hosts, job.num_ranks)
    meeting = make_endpoints(
        seats,
        coordinator="10.0.0.1:4000",
        key="0" * 64,
        addresses=[site.address for site in SITES],
        ports=[site.free_ports for site in SITES],
    )
    made = make_rank_orders(job, seats, meeting, SITES, environ=ENVIRON, tty_fds=terminals)
    assert [[order.rank for order in made[index].orders] for index in (0, 1)] == [[0, 1], [2]]
    return {order.rank: order for launch in made.values() for order in launch.orders}


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
