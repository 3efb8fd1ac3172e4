"""The workers of an elastic job, with agents and a coordinator that only record: who is started when, and what the end
of a worker means. Whole jobs are in tests/jobs/test_run_elastic.py."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from ronde.coordinator.round_planning import ElasticLimits, Membership, PlanAction, PlanReason, RoundPlan
from ronde.coordinator.rounds import LostPeer, MembershipEnd
from ronde.errors import StartFailed
from ronde.exit_codes import NOT_STARTED_CODE
from ronde.launch.driver.failure_report import JobResult
from ronde.launch.driver.slots import ScalingLimits, SlotTable
from ronde.launch.driver.ssh import HostError
from ronde.launch.driver.supervisor import RankSupervisor
from ronde.launch.driver.worker_pool import WorkerPool
from ronde.launch.job import Job
from ronde.launch.network import HostFacts
from ronde.launch.placement import Host, Placement
from ronde.launch.protocol import (
    AgentStopping,
    DriverMessage,
    ExitReason,
    RankExit,
    RankOrder,
    RankStarted,
    SignalRanks,
    StartRanks,
)
from ronde.launch.timeouts import HAND_OVER_S
from ronde.net.event_loop import EventLoop
from ronde.net.messages import LeaveReason
from tests.unit.launch.driver.test_driver import RecordingSink

LIMITS = ElasticLimits(start_ranks=2, min_ranks=1, max_ranks=3)
START = RoundPlan(PlanAction.START, PlanReason.ENOUGH)
CONTINUE = RoundPlan(PlanAction.CONTINUE, PlanReason.COMPLETE)


class FakeAgents:
    """Hosts are ready when the test says so."""

    def __init__(self) -> None:
        self.host_facts: dict[int, HostFacts] = {}
        self.names: list[str] = []
        self.removed: list[int] = []

    def add_host(self, host: Host) -> int:
        self.names.append(host.name)
        return len(self.names) - 1

    def remove_host(self, index: int) -> None:
        self.removed.append(index)

    def host_name(self, index: int) -> str:
        return self.names[index]


class FakeCoordinator:
    def __init__(self) -> None:
        self.host_names: dict[int, str] = {}
        self.num_starting = 0
        self.lost: dict[int, LostPeer] = {}

    def lost_peers(self) -> dict[int, LostPeer]:
        return self.lost

    def set_host_name(self, number: int, name: str) -> None:
        self.host_names[number] = name

    def set_num_starting(self, count: int) -> None:
        self.num_starting = count


class Scene:
    """An elastic job of two workers to begin with, on two hosts with two slots each."""

    def __init__(self, loop: EventLoop) -> None:
        self.loop = loop
        self.now_s = 100.0
        self.sink = RecordingSink()
        self.agents = FakeAgents()
        self.coordinator = FakeCoordinator()
        self.sent: list[tuple[int, DriverMessage]] = []
        self.placed: dict[int, tuple[Placement, int]] = {}
        job = Job(command=("true",), num_ranks=2, limits=LIMITS)
        self.supervisor = RankSupervisor(
            loop,
            job,
            send=lambda messages: self.sent.extend(messages.items()),
            output_sink=self.sink,
            on_rank_exit=lambda number, how: None,
            host_name=self.agents.host_name,
        )
        slots = SlotTable(ScalingLimits(start_workers=2, max_workers=3, leave_s=50.0))
        self.pool = WorkerPool(
            loop,
            job,
            slots,
            agents=self.agents,
            supervisor=self.supervisor,
            coordinator=self.coordinator,
            make_order=self._make_order,
            clock=lambda: self.now_s,
        )
        self.supervisor.policy = self.pool
        self.num_rounds = 0

    def _make_order(self, number: int, placement: Placement, size: int, facts: HostFacts) -> RankOrder:
        self.placed[number] = (placement, size)
        return RankOrder(number, (), {}, "/")

    def turn(self) -> None:
        """Let everything happen that is due now."""
        done: list[bool] = []
        self.loop.call_soon(lambda: self.loop.call_soon(lambda: done.append(True)))
        self.loop.run_until(lambda: bool(done))

    def later(self, seconds: float) -> None:
        self.now_s += seconds
        self.pool.schedule_update()
        self.turn()

    def connect(self, name: str) -> int:
        """The newest agent that was started on this host is ready."""
        index = max(index for index, known in enumerate(self.agents.names) if known == name)
        self.agents.host_facts[index] = HostFacts((0,), 1)
        self.pool.handle_host_connected(index)
        self.turn()
        return index

    def exit(self, number: int, code: int, reason: ExitReason = ExitReason.EXITED) -> None:
        self.supervisor.handle_message(0, RankExit(number, code, reason))
        self.turn()

    def begin_round(self, *members: int, **more: object) -> None:
        self.num_rounds += 1
        self.tell(members, plan=START, **more)

    def tell(self, members: tuple[int, ...], plan: RoundPlan = CONTINUE, **more: object) -> None:
        membership = Membership(plan, members, self.num_rounds, **more)  # type: ignore[arg-type]
        self.pool.handle_membership(membership)
        self.turn()

    def running(self) -> list[int]:
        return sorted(self.supervisor.running)

    def is_ending(self) -> bool:
        return self.supervisor.is_ending

    def is_finished(self) -> bool:
        return self.pool.is_finished

    def signals(self) -> list[SignalRanks]:
        return [message for _, message in self.sent if isinstance(message, SignalRanks)]

    def result(self, first_lost: tuple[int, MembershipEnd] | None = None) -> JobResult:
        return self.pool.make_result(tail=self.sink.tail, first_lost=first_lost, lost_peers={})


@pytest.fixture
def scene() -> Iterator[Scene]:
    loop = EventLoop()
    made = Scene(loop)
    yield made
    made.pool.close()
    made.supervisor.close()
    loop.close()


@pytest.fixture
def training(scene: Scene) -> Scene:
    """Workers 0 and 1 on host a and 2 on host b, all in a round."""
    scene.pool.handle_hosts((Host("a", 2), Host("b", 2)))
    scene.turn()
    scene.connect("a")
    scene.begin_round(0, 1)
    scene.connect("b")
    scene.begin_round(0, 1, 2)
    assert scene.running() == [0, 1, 2]
    return scene


def test_workers_get_numbers_and_the_ranks_that_they_would_have(training: Scene) -> None:
    ranks = {number: (place.rank, size, place.local_rank) for number, (place, size) in training.placed.items()}
    assert ranks == {0: (0, 2, 0), 1: (1, 2, 1), 2: (2, 3, 0)}
    place, _ = training.placed[2]
    assert (place.host.name, place.local_size, place.host_index, place.num_hosts) == ("b", 2, 1, 2)
    assert training.coordinator.host_names == {0: "a", 1: "a", 2: "b"}


def test_that_the_first_round_waits_for_slots_is_told(scene: Scene) -> None:
    scene.pool.handle_hosts((Host("a", 1),))
    waiting = "the hosts have 1 of the 2 slots that the first round needs; waiting for others"
    assert scene.sink.messages == [waiting]
    scene.pool.handle_hosts((Host("a", 2),))
    assert scene.sink.messages == [waiting]


def test_the_coordinator_knows_how_many_are_on_their_way(scene: Scene) -> None:
    scene.pool.handle_hosts((Host("a", 3),))
    scene.turn()
    scene.connect("a")
    assert scene.coordinator.num_starting == 2
    scene.begin_round(0, 1)
    assert (scene.running(), scene.coordinator.num_starting) == ([0, 1, 2], 1)
    scene.tell((0, 1), RoundPlan(PlanAction.CHANGE, PlanReason.NEWCOMERS, workers=(2,)))
    assert scene.coordinator.num_starting == 0


def test_a_lost_worker_is_made_up_for_after_its_cooldown_with_a_number_of_its_own(training: Scene) -> None:
    training.exit(1, -9)
    assert training.running() == [0, 2, 3], "host b has a spare slot"
    training.exit(3, 1)
    assert training.running() == [0, 2], "both slots cool down"
    training.later(1.0)
    assert training.running() == [0, 2, 4]
    assert not training.is_ending() and not training.supervisor.finished


def test_a_newcomer_that_fails_before_it_is_in_a_round_is_told_with_how_long_its_slot_waits(training: Scene) -> None:
    training.exit(2, -9)
    training.later(1.0)
    training.exit(3, 1)
    assert training.sink.messages[-1] == (
        "worker 3 on host b exited with code 1 before it was in a round; its slot is used again after 1 s"
    )
    assert not any("before it was in a round" in message for message in training.sink.messages[:-1])


def test_each_change_of_the_round_is_told_with_who_came_and_who_was_lost(training: Scene) -> None:
    training.exit(1, -9)
    training.begin_round(0, 2)
    training.begin_round(0, 2, 3)
    lost = "worker 1 on host a killed by signal 9 (SIGKILL)"
    assert [record.describe() for record in training.pool.rounds] == [
        "round 0: 2 ranks",
        "round 1: 3 ranks, worker 2 among them for the first time",
        f"round 2: 2 ranks; {lost}",
        "round 3: 3 ranks, worker 3 among them for the first time",
    ]
    assert training.sink.messages[-2:] == [record.describe() for record in training.pool.rounds[-2:]]


def test_a_lost_host_costs_its_workers_and_comes_back(training: Scene) -> None:
    index = training.agents.names.index("b")
    training.supervisor.handle_agent_lost(index, HostError("it does not answer"))
    training.turn()
    assert training.running() == [0, 1]
    assert training.sink.messages[-1] == "host b: it does not answer; it is left alone for 1 s"
    training.later(1.0)
    assert training.agents.names == ["a", "b", "b"], "it is tried again"
    training.supervisor.handle_agent_lost(2, HostError("it does not answer"))
    training.turn()
    assert sum("does not answer" in message for message in training.sink.messages) == 1, "once for each reason"
    training.later(2.0)
    training.connect("b")
    assert training.running() == [0, 1, 3]


def test_workers_of_a_removed_host_are_asked_to_leave_and_then_its_agent_is_stopped(training: Scene) -> None:
    training.pool.handle_hosts((Host("a", 2),))
    training.turn()
    assert training.signals() == [SignalRanks((2,), signal.SIGTERM)]
    assert training.agents.removed == []
    training.exit(2, 0)
    assert training.agents.removed == [training.agents.names.index("b")]
    assert training.running() == [0, 1] and not training.is_finished()


def test_when_all_hosts_are_replaced_one_worker_hands_its_state_over(training: Scene) -> None:
    training.pool.handle_hosts((Host("c", 3),))
    training.turn()
    assert {rank for each in training.signals() for rank in each.ranks} == {1, 2}
    assert "worker 0 on host a has to leave when others have its state" in training.sink.messages
    training.exit(1, 0)
    training.exit(2, 0)
    training.connect("c")
    assert training.running() == [0, 3, 4]
    training.begin_round(0, 3, 4)
    assert 0 not in {rank for each in training.signals() for rank in each.ranks}
    training.later(HAND_OVER_S)
    assert training.signals()[-1] == SignalRanks((0,), signal.SIGTERM)
    training.exit(0, 0)
    assert training.running() == [3, 4, 5]


def test_a_worker_that_does_not_leave_is_killed(training: Scene) -> None:
    training.pool.handle_hosts((Host("a", 2),))
    training.turn()
    training.later(50.0)
    assert training.signals()[-1] == SignalRanks((2,), signal.SIGKILL)


def test_an_agent_that_stops_gets_no_workers_any_more(training: Scene) -> None:
    index = training.agents.names.index("b")
    training.supervisor.handle_message(index, AgentStopping("it got SIGTERM"))
    training.exit(2, 0)
    training.later(100.0)
    assert training.running() == [0, 1]
    assert "host b: its agent ends its ranks (it got SIGTERM)" in training.sink.messages


def test_the_late_word_of_an_agent_that_was_removed_does_not_stop_the_next_one_of_its_host(training: Scene) -> None:
    removed = training.agents.names.index("b")
    training.pool.handle_hosts((Host("a", 2),))
    training.turn()
    training.exit(2, 0)
    training.pool.handle_hosts((Host("a", 2), Host("b", 2)))
    training.turn()
    training.supervisor.handle_message(removed, AgentStopping("it got SIGTERM"))
    training.connect("b")
    training.supervisor.handle_message(removed, AgentStopping("it got SIGTERM"))
    training.exit(3, -9)
    training.later(1.0)
    assert training.running() == [0, 1, 4]


def test_workers_that_are_left_behind_are_killed_once(training: Scene) -> None:
    plan = RoundPlan(PlanAction.WAIT, PlanReason.SURVIVORS, workers=(0,), left_behind=(1, 2), absent=(2,))
    training.tell((0, 1, 2), plan)
    training.tell((0, 1, 2), plan)
    assert training.signals() == [SignalRanks((1,), signal.SIGKILL), SignalRanks((2,), signal.SIGKILL)]
    training.exit(1, -9)
    training.exit(2, -9)
    training.begin_round(0)
    assert "worker 1 on host a was silent for too long and was left behind" in training.sink.messages[-1]
    assert (
        "worker 2 on host b did not come back from the round before and was left behind" in training.sink.messages[-1]
    )


def test_workers_that_cannot_be_reached_are_killed_so_that_their_slots_are_free(training: Scene) -> None:
    training.tell((0, 1, 2), unreachable=(1,))
    training.tell((0, 1, 2), unreachable=(1,))
    assert training.signals() == [SignalRanks((1,), signal.SIGKILL)]
    training.exit(1, -9)
    training.begin_round(0, 2, unreachable=(1,))
    assert "worker 1 on host a could not be reached" in training.sink.messages[-1]
    training.later(1.0)
    assert training.running() == [0, 2, 3]


def test_the_job_is_over_when_its_members_have_finished_and_nobody_else_is_needed(training: Scene) -> None:
    training.exit(1, -9)  # worker 3 is started
    training.tell((0, 1, 2), is_finished=True)
    assert training.signals() == [SignalRanks((3,), signal.SIGTERM)], "it is not needed any more"
    training.exit(0, 0)
    assert not training.is_ending()
    training.exit(2, 0)
    assert training.is_ending()
    training.exit(3, -15)
    assert training.supervisor.finished
    result = training.result()
    assert (result.exit_code, result.exit_codes) == (0, {1: -9, 0: 0, 2: 0, 3: -15})
    assert result.summary.splitlines()[0] == "round 0: 2 ranks"


def test_a_script_that_comes_to_its_end_without_a_word_is_over_but_not_if_all_were_told_to_go(training: Scene) -> None:
    training.tell((0, 1, 2), preempted=(0, 1, 2))
    for number in (0, 1, 2):
        training.exit(number, 0)
    training.later(1.0)
    assert not training.is_finished() and training.running() == [3, 4, 5]
    training.begin_round(3, 4, 5, preempted=(0, 1, 2))
    for number in (3, 4, 5):
        training.exit(number, 0)
    assert training.is_finished()
    for number in training.running():  # one was started in a spare slot before all had ended
        training.exit(number, -15)
    assert training.supervisor.finished and training.result().exit_code == 0


def test_a_failure_of_a_member_behind_the_end_is_that_of_the_job(training: Scene) -> None:
    training.tell((0, 1, 2), is_finished=True)
    training.exit(0, 5)
    assert training.is_ending()
    training.exit(1, 0)
    training.exit(2, 0)
    for lost in (None, (7, MembershipEnd(LeaveReason.PROCESS_ENDED))):  # a rank of a round that is not known here
        result = training.result(lost)
        assert (result.exit_code, result.first_failed_rank) == (5, 0)


@pytest.mark.parametrize("is_reported_first", [False, True])
@pytest.mark.parametrize(
    ("code", "reason"), [(-9, ExitReason.EXITED), (-15, ExitReason.EXITED), (-9, ExitReason.OOM_KILLED)]
)
def test_a_worker_that_is_killed_behind_training_fails_the_job(
    training: Scene, code: int, reason: ExitReason, is_reported_first: bool
) -> None:
    if not is_reported_first:
        training.tell((0, 1, 2), finished=(0, 1, 2))
    training.exit(0, code, reason)
    if is_reported_first:
        training.tell((0, 1, 2), finished=(0, 1, 2))
    assert training.is_ending() and not training.signals(), "the others may be saving something, too"
    training.tell((0, 1, 2), finished=(0, 1, 2), is_finished=True)
    training.exit(1, 0)
    training.exit(2, 0)
    for number in training.running():
        training.exit(number, -15)
    result = training.result((0, MembershipEnd(LeaveReason.PROCESS_ENDED)))
    assert training.supervisor.finished and (result.exit_code, result.first_failed_rank) == (128 - code, 0)


def test_a_worker_that_was_killed_in_the_barrier_at_the_end_of_training_is_no_failure(training: Scene) -> None:
    training.tell((0, 1, 2), finished=(0, 2))
    training.exit(1, -9)
    training.tell((0, 1, 2), finished=(0, 2), is_finished=True)
    training.exit(0, 0)
    training.exit(2, 0)
    assert training.is_finished() and training.running() == [] and training.result().exit_code == 0


def test_behind_training_nobody_is_asked_to_leave_or_started(training: Scene) -> None:
    training.tell((0, 1, 2), finished=(0, 1, 2))
    training.pool.handle_hosts((Host("c", 2),))
    training.turn()
    assert training.signals() == [] and training.agents.names == ["a", "b"]


def test_a_worker_that_leaves_before_the_first_round_while_others_wait_for_it_ends_the_job(scene: Scene) -> None:
    scene.pool.handle_hosts((Host("a", 3),))
    scene.turn()
    scene.connect("a")
    scene.exit(1, 0)
    assert scene.running() == [0] and not scene.is_ending(), "it may be a script that does not use ronde"
    scene.tell((), RoundPlan(PlanAction.WAIT, PlanReason.TOO_FEW, num_ready=1, num_needed=2))
    assert scene.is_ending()
    scene.exit(0, -15)
    result = scene.result()
    why = "worker 1 on host a left before the first round, and others wait for it"
    assert (result.exit_code, result.summary) == (1, f"the job cannot go on: {why}")


def test_a_worker_that_is_asked_to_leave_before_the_first_round_leaves_its_rank_to_another_one(scene: Scene) -> None:
    scene.pool.handle_hosts((Host("a", 2),))
    scene.turn()
    scene.connect("a")
    scene.pool.handle_hosts((Host("a", 1), Host("b", 1)))
    scene.turn()
    scene.connect("b")
    assert scene.running() == [0, 1, 2]
    assert [placement.rank for placement, _ in scene.placed.values()] == [0, 1, 1]


@pytest.mark.parametrize(
    ("code", "reason", "ends"),
    [
        (1, ExitReason.EXITED, True),
        (NOT_STARTED_CODE, ExitReason.NOT_STARTED, True),
        (-9, ExitReason.EXITED, False),
        (-9, ExitReason.OOM_KILLED, False),
    ],
)
def test_before_the_first_round_a_failure_of_the_script_ends_the_job(
    scene: Scene, code: int, reason: ExitReason, ends: bool
) -> None:
    scene.pool.handle_hosts((Host("a", 2),))
    scene.turn()
    scene.connect("a")
    scene.exit(0, code, reason)
    assert scene.is_ending() == ends
    if ends:
        scene.exit(1, -15)
        result = scene.result()
        assert (result.exit_code, result.first_failed_rank) == (code, 0) and scene.supervisor.finished


def test_when_all_members_fail_by_themselves_nobody_is_left_who_could_go_on(training: Scene) -> None:
    training.exit(2, 1)
    training.exit(0, 1)
    assert not training.is_ending()
    training.exit(1, 1)
    assert training.is_ending()
    for number in training.running():
        training.exit(number, -15)
    assert (training.result().exit_code, training.result().first_failed_rank) == (1, 2)


@pytest.mark.parametrize("knows_elastic", [True, False])
def test_a_script_that_fails_because_another_rank_was_lost_ends_the_job(training: Scene, knows_elastic: bool) -> None:
    if not knows_elastic:
        training.coordinator.lost = {0: LostPeer(1, "PeerLost: rank 1 is gone")}
    training.exit(1, -9)
    training.exit(2, -9)
    training.exit(0, 1)
    assert training.is_ending() != knows_elastic
    if not knows_elastic:
        for number in training.running():
            training.exit(number, -15)
        assert (training.result().exit_code, training.result().first_failed_rank) == (137, 1)


def test_a_plan_that_fails_ends_the_job_with_its_reason_and_who_was_lost_but_not_who_heard_of_it(
    training: Scene,
) -> None:
    training.exit(1, -9)  # worker 3 is started
    plan = RoundPlan(PlanAction.FAIL, PlanReason.TOO_FEW, workers=(0,), num_ready=1, num_needed=2)
    training.tell((0, 1, 2), plan)
    assert training.is_ending()
    for number in (0, 3, 2):  # worker 2 was lost before: its end is reported late
        training.exit(number, 1)
    result = training.result()
    assert result.exit_code == 1 and training.supervisor.finished
    assert result.summary.splitlines() == [
        "the job cannot go on: only 1 of the 2 ranks that are needed came in time",
        "worker 1 on host a killed by signal 9 (SIGKILL)",
        "worker 2 on host b exited with code 1",
    ]


def test_nothing_is_started_while_the_job_is_being_ended(training: Scene) -> None:
    num_starts = sum(isinstance(message, StartRanks) for _, message in training.sent)
    training.supervisor.handle_message(0, RankStarted(0, 4711))
    training.tell((0, 1, 2), RoundPlan(PlanAction.FAIL, PlanReason.RESET_LIMIT))
    training.exit(0, 1)
    training.later(1000.0)
    assert sum(isinstance(message, StartRanks) for _, message in training.sent) == num_starts


def test_an_answer_without_hosts_is_told_as_an_error_and_nobody_has_to_leave(training: Scene) -> None:
    training.pool.handle_hosts(())
    training.later(100.0)
    assert training.signals() == [] and training.running() == [0, 1, 2]
    assert training.sink.messages[-1] == (
        "the source of hosts names none; the job goes on with the hosts that it knows"
    )
    training.pool.handle_hosts((Host("a", 2),))
    training.turn()
    assert training.signals() == [SignalRanks((2,), signal.SIGTERM)], "the next answer counts"


def test_an_error_of_the_source_is_told_and_changes_nothing(training: Scene) -> None:
    training.pool.handle_source_error(StartFailed("the cloud is down"))
    assert training.sink.messages[-1] == "the cloud is down; the job goes on with the hosts that it knows"
    assert training.running() == [0, 1, 2]
