"""How a parameter server goes on with those who have met."""

from __future__ import annotations

from ronde.ps.commit_log.staleness import StalenessSettings
from ronde.ps.partition import NO_BACKUP, Configuration, Part, TensorSlice
from ronde.ps.server import ServerSetup
from ronde.ps.server_rounds import Greeting, InstanceStart, InstanceView, describe_member, plan_start
from ronde.settings import FIRST_SERVER
from tests.unit.ps.simulation import CountingOptimizer

A, B, C = FIRST_SERVER, FIRST_SERVER + 1, FIRST_SERVER + 2
PARTS = (Part((TensorSlice(0, 0, 4),), "float64", 0), Part((TensorSlice(1, 0, 4),), "float64", 0))
SETUP = ServerSetup(PARTS, (0, 1), StalenessSettings(), CountingOptimizer())
FIRST = Configuration(1, (A, B), (A, B), (B, A))
SECOND = Configuration(2, (B,), (B, B), (NO_BACKUP, NO_BACKUP))


def greet(number: int, known: Configuration | None, *, in_ranks: bool = False) -> Greeting:
    is_server = number >= FIRST_SERVER
    return Greeting(number, is_server, {0: InstanceView(known, is_server or in_ranks, not is_server)})


def plan(*greetings: Greeting) -> InstanceStart:
    return plan_start(0, SETUP, [*greetings])


def test_those_who_meet_again_begin_a_new_epoch_even_if_nothing_has_changed() -> None:
    start = plan(greet(0, FIRST), greet(A, FIRST), greet(B, FIRST))
    assert start == InstanceStart(None, Configuration(2, (A, B), (A, B), (B, A)))


def test_the_newest_configuration_that_anybody_knows_counts() -> None:
    start = plan(greet(0, FIRST), greet(1, SECOND), greet(B, FIRST))
    assert start.configuration == Configuration(3, (B,), (B, B), (NO_BACKUP, NO_BACKUP))


def test_a_server_that_has_come_is_the_backup_of_parts_that_have_none() -> None:
    start = plan(greet(0, SECOND), greet(B, SECOND), Greeting(C, True, {}))
    assert start.configuration == Configuration(3, (B, C), (B, B), (C, C))
    assert start.setup is SETUP


def test_workers_that_come_are_servers_where_ranks_are() -> None:
    known = Configuration(1, (0,), (0, 0), (NO_BACKUP, NO_BACKUP))
    start = plan(greet(0, known, in_ranks=True), greet(3, None, in_ranks=True))
    assert start.configuration == Configuration(2, (0, 3), (0, 0), (3, 3)) and start.setup is SETUP


def test_parts_that_nobody_has_any_more_are_an_error_with_the_names_of_their_servers() -> None:
    start = plan(greet(0, SECOND), Greeting(C, True, {}))
    assert start.configuration is None
    assert start.failure.startswith("2 parts of the parameters were only on server 1, gone; start again")
    assert describe_member(3) == "worker 3"
