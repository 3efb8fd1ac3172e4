"""Workers and servers as state machines, under every kind of schedule and fault."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ronde.ps.commit_log.staleness import Mode
from tests.unit.ps.simulation import Simulation

SEEDS = st.integers(0, 2**32)
CLIP = st.sampled_from([0.0, 1e9])
"""In sync mode the servers measure the norm of each step, if gradients are clipped."""
MODES = st.sampled_from([Mode.SYNC, Mode.BOUNDED, Mode.DYNAMIC, Mode.ASYNC])


def check_end(simulation: Simulation) -> None:
    """Every worker that lives has finished, and each sample is in the weights exactly once, on all replicas."""
    assert all(worker.is_done and worker.core.is_finished for worker in simulation.live_workers)
    values = simulation.values()
    assert values and all((each == values[0]).all() for each in values)
    simulation.check_tables()
    if simulation.mode is not Mode.SYNC and not simulation.setup.delay_compensation:
        assert (values[0] == 1).all(), values[0]


@given(SEEDS, MODES, st.integers(0, 3), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_without_faults_every_sample_is_used_once(
    seed: int, mode: Mode, staleness: int, num_workers: int, num_servers: int
) -> None:
    workers, servers = range(num_workers), range(num_workers, num_workers + num_servers)
    simulation = Simulation(random.Random(seed), workers=workers, servers=servers, mode=mode, staleness=staleness)
    simulation.run()
    check_end(simulation)


@pytest.mark.slow
@given(SEEDS, MODES, st.integers(0, 400), CLIP)
@settings(max_examples=150, deadline=None)
def test_a_worker_killed_at_any_moment_costs_its_unfinished_step_only(
    seed: int, mode: Mode, moment: int, clip_norm: float
) -> None:
    simulation = Simulation(
        random.Random(seed), workers=range(3), servers=(3, 4), mode=mode, staleness=1, clip_norm=clip_norm
    )
    simulation.run_until_ready()
    for _ in range(moment):
        simulation.deliver_one()
    simulation.kill(seed % 3)
    simulation.run()
    check_end(simulation)


@pytest.mark.slow
@given(SEEDS, MODES, st.integers(0, 400), st.booleans(), CLIP)
@settings(max_examples=200, deadline=None)
def test_a_server_killed_at_any_moment_loses_nothing(
    seed: int, mode: Mode, moment: int, in_ranks: bool, clip_norm: float
) -> None:
    servers = range(3) if in_ranks else range(3, 6)
    simulation = Simulation(
        random.Random(seed), workers=range(3), servers=servers, mode=mode, staleness=1, clip_norm=clip_norm
    )
    simulation.run_until_ready()
    for _ in range(moment):
        simulation.deliver_one()
    simulation.kill(servers[seed % 3])
    simulation.run()
    check_end(simulation)


@pytest.mark.slow
@given(SEEDS, MODES, st.lists(st.integers(20, 300), max_size=2))
@settings(max_examples=100, deadline=None)
def test_replicas_stay_equal_when_delays_are_compensated_and_servers_are_killed(
    seed: int, mode: Mode, moments: list[int]
) -> None:
    """A new backup needs what each worker has read, too."""
    simulation = Simulation(
        random.Random(seed), workers=range(3), servers=(3, 4, 5, 6), mode=mode, staleness=2, delay_compensation=0.5
    )
    simulation.run_until_ready()
    victims = random.Random(seed).sample((3, 4, 5, 6), len(moments))
    for victim, moment in zip(victims, moments, strict=True):
        for _ in range(moment):
            simulation.deliver_one()
        while not is_replicated(simulation) and simulation.deliver_one():
            pass
        if is_replicated(simulation):
            simulation.kill(victim)
    simulation.run()
    check_end(simulation)


@pytest.mark.slow
@given(SEEDS, MODES, st.integers(0, 300), st.integers(0, 300), CLIP)
@settings(max_examples=200, deadline=None)
def test_a_stopped_server_that_wakes_is_refused(
    seed: int, mode: Mode, moment: int, sleep: int, clip_norm: float
) -> None:
    simulation = Simulation(
        random.Random(seed), workers=range(2), servers=(2, 3, 4), mode=mode, staleness=1, clip_norm=clip_norm
    )
    simulation.run_until_ready()
    for _ in range(moment):
        simulation.deliver_one()
    stopped = 2 + seed % 3
    simulation.stopped.add(stopped)
    for _ in range(sleep // 2):
        simulation.deliver_one()
    simulation.suspect(stopped)
    for _ in range(sleep // 2):
        simulation.deliver_one()
    simulation.stopped.clear()
    simulation.run()
    check_end(simulation)


@pytest.mark.slow
@given(SEEDS, MODES, st.lists(st.integers(50, 400), min_size=2, max_size=3))
@settings(max_examples=150, deadline=None)
def test_servers_killed_one_after_the_other_lose_nothing(seed: int, mode: Mode, moments: list[int]) -> None:
    """When the parts of one have been copied, the next may be lost."""
    simulation = Simulation(
        random.Random(seed), workers=range(2), servers=(2, 3, 4, 5), mode=mode, staleness=2, num_samples=24
    )
    simulation.run_until_ready()
    victims = random.Random(seed).sample((2, 3, 4, 5), len(moments))
    for victim, moment in zip(victims, moments, strict=True):
        for _ in range(moment):
            simulation.deliver_one()
        while not is_replicated(simulation) and simulation.deliver_one():
            pass
        if is_replicated(simulation):
            simulation.kill(victim)
        else:  # when training is over, nothing is copied any more
            assert all(worker.core.is_finished for worker in simulation.live_workers)
    simulation.run()
    check_end(simulation)


def is_replicated(simulation: Simulation) -> bool:
    """Whether all living servers know of each other's configuration and have copies of their parts."""
    living = [server for rank, server in simulation.servers.items() if rank not in simulation.dead]
    epochs = {server.configuration.epoch for server in living}
    return (
        len(epochs) == 1
        and all(server.is_ready and not server.log.is_collecting for server in living)
        and not set(living[0].configuration.servers) & simulation.dead
    )


@pytest.mark.slow
@given(
    SEEDS,
    MODES,
    st.integers(1, 2),
    st.lists(st.tuples(st.integers(0, 250), st.sampled_from("swSWx")), min_size=1, max_size=5),
    CLIP,
)
@settings(max_examples=150, deadline=None)
def test_members_that_meet_anew_at_any_moment_lose_nothing(
    seed: int, mode: Mode, num_servers: int, changes: list[tuple[int, str]], clip_norm: float
) -> None:
    """Servers and workers are lost (s, w), or come (S, W), or all of them lose what was on its way (x). The only server
    takes pushes in another way than several do."""
    simulation = Simulation(
        random.Random(seed),
        workers=range(2),
        servers=(10, 11)[:num_servers],
        mode=mode,
        staleness=1,
        clip_norm=clip_norm,
    )
    simulation.run_until_ready()
    num_came = 0
    for moment, what in changes:
        for _ in range(moment):
            simulation.deliver_one()
        victims = [rank for rank in simulation.servers if rank not in simulation.dead]
        if what == "w":
            # Training is over when all workers are lost before another one has come
            trains = {rank for rank, each in simulation.workers.items() if each.core.has_joined or not each.is_late}
            victims = sorted(trains - simulation.dead)
        if what == "s" and not is_replicated(simulation):
            continue  # nobody else may have its parts
        if what in "sw" and len(victims) > 1:
            simulation.kill(simulation.schedule.choice(victims))
            for _ in range(moment % 20):  # the others hear of it, each at its own time, and go on for a moment
                simulation.drop_losses()
                simulation.deliver_one()
        num_came += 1
        simulation.begin_round(
            servers=[20 + num_came] if what in "sS" else [], workers=[40 + num_came] if what in "wW" else []
        )
    simulation.run()
    check_end(simulation)


@pytest.mark.parametrize("mode", list(Mode))
def test_parts_without_a_living_replica_are_reported(mode: Mode) -> None:
    simulation = Simulation(random.Random(1), workers=(0, 1), servers=(2, 3), mode=mode, staleness=1)
    for _ in range(40):
        simulation.deliver_one()
    simulation.kill(2)
    simulation.kill(3)
    simulation.run()
    assert not any(worker.is_done for worker in simulation.live_workers)


def test_a_server_that_does_not_answer_is_waited_for_if_nobody_else_has_its_parts() -> None:
    simulation = Simulation(random.Random(1), workers=(0, 1), servers=(2, 3), replicate=False)
    simulation.run_until_ready()
    simulation.stopped.add(3)
    simulation.suspect(3)
    simulation.run()
    assert not any(server.failure for server in simulation.servers.values())
    simulation.stopped.clear()
    simulation.run()
    check_end(simulation)
    simulation = Simulation(random.Random(1), workers=(0, 1), servers=(2, 3), replicate=False)
    simulation.run_until_ready()
    simulation.kill(3)
    simulation.run()
    assert all("which is gone" in worker.core.failure for worker in simulation.live_workers)
