"""Which workers are started where and when, and who is asked to leave: without processes, with time as a number."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ronde.launch.driver.slots import (
    AgentStage,
    AskedWorker,
    AskReason,
    Cooldown,
    ScalingLimits,
    Slot,
    SlotPlan,
    SlotTable,
)
from ronde.launch.placement import Host

LIMITS = ScalingLimits(start_workers=2, max_workers=4, min_cooldown_s=1.0, max_cooldown_s=8.0, leave_s=30.0)


def table(*hosts: Host, limits: ScalingLimits = LIMITS, ready: bool = True) -> SlotTable:
    made = SlotTable(limits)
    made.hosts = hosts
    for host in hosts if ready else ():
        made.agent_changed(host.name, AgentStage.READY, 0.0)
    return made


def start_all(slots: SlotTable, now_s: float, *, has_begun: bool, first: int = 0) -> SlotPlan:
    """Start what is planned; workers get numbers from `first` on."""
    plan = slots.plan(now_s, has_begun=has_begun)
    for number, slot in enumerate(plan.start, start=first):
        slots.worker_started(number, slot, now_s)
    return plan


def test_the_job_starts_with_np_workers_and_grows_to_all_slots_after_the_first_round() -> None:
    slots = table(Host("a", 3), Host("b", 3))
    assert start_all(slots, 0.0, has_begun=False).start == (Slot("a", 0), Slot("a", 1))
    assert slots.plan(0.0, has_begun=False) == SlotPlan()
    assert start_all(slots, 0.0, has_begun=True, first=2).start == (Slot("a", 2), Slot("b", 0)), "four at most"
    assert slots.plan(0.0, has_begun=True) == SlotPlan()


def test_only_hosts_whose_slots_are_needed_get_an_agent() -> None:
    slots = table(Host("a", 2), Host("b", 2), Host("c", 2), ready=False)
    assert slots.plan(0.0, has_begun=False) == SlotPlan(connect=(Host("a", 2),))
    assert slots.plan(0.0, has_begun=True) == SlotPlan(connect=(Host("a", 2), Host("b", 2)))
    slots.agent_changed("a", AgentStage.CONNECTING, 0.0)
    assert slots.plan(0.0, has_begun=False) == SlotPlan(), "its slots are as good as there"
    slots.agent_failed("a", 0.0)
    assert slots.plan(0.0, has_begun=False) == SlotPlan(connect=(Host("b", 2),)), "another one takes its part"


def test_a_worker_that_dies_costs_its_slot_a_cooldown_that_doubles() -> None:
    slots = table(Host("a", 1), limits=LIMITS)
    now_s, waits = 0.0, []
    for number in range(6):
        start_all(slots, now_s, has_begun=True, first=number)
        slots.worker_exited(number, now_s)
        plan = slots.plan(now_s, has_begun=True)
        assert plan.start == ()
        waits.append(plan.due_s - now_s)
        now_s = plan.due_s
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    start_all(slots, now_s, has_begun=True, first=6)
    slots.worker_exited(6, now_s + LIMITS.max_cooldown_s)
    assert slots.plan(now_s + 8.0, has_begun=True).due_s == now_s + 8.0 + 1.0, "it has run well for a while"


def test_a_worker_that_is_done_before_the_first_round_is_not_made_up_for() -> None:
    slots = table(Host("a", 3))
    start_all(slots, 0.0, has_begun=False)
    slots.worker_exited(0, 5.0, is_done=True)
    assert slots.plan(5.0, has_begun=False) == SlotPlan()


def test_a_spare_slot_is_used_while_another_one_cools_down() -> None:
    slots = table(Host("a", 3))
    start_all(slots, 0.0, has_begun=False)
    slots.worker_exited(0, 5.0)
    assert start_all(slots, 5.0, has_begun=False, first=2).start == (Slot("a", 2),)
    assert slots.plan(6.0, has_begun=False).start == ()


def test_a_lost_agent_costs_the_host_and_not_its_slots() -> None:
    slots = table(Host("a", 1), Host("b", 1))
    start_all(slots, 0.0, has_begun=False)
    assert slots.agent_failed("b", 0.0) == 1.0
    slots.worker_exited(1, 0.0, with_host=True)
    assert slots.plan(0.5, has_begun=True) == SlotPlan(due_s=1.0)
    assert slots.plan(1.0, has_begun=True).connect == (Host("b", 1),)
    slots.agent_changed("b", AgentStage.READY, 1.0)
    assert slots.plan(1.0, has_begun=True).start == (Slot("b", 0),), "the slot itself is not to blame"
    assert slots.agent_failed("b", 2.0) == 2.0, "it flaps"


def test_workers_of_a_removed_host_are_asked_to_leave_and_their_agent_is_stopped_when_they_have() -> None:
    slots = table(Host("a", 1), Host("b", 1))
    start_all(slots, 0.0, has_begun=False)
    slots.hosts = (Host("a", 1),)
    assert slots.plan(5.0, has_begun=True) == SlotPlan(ask=(AskedWorker(1, AskReason.HOST_REMOVED),))
    slots.worker_asked(1, 5.0)
    assert slots.plan(5.0, has_begun=True) == SlotPlan(due_s=35.0)
    assert slots.plan(35.0, has_begun=True).kill == (1,)
    slots.worker_killed(1)
    assert slots.plan(36.0, has_begun=True) == SlotPlan()
    slots.worker_exited(1, 36.0)
    assert slots.plan(36.0, has_begun=True) == SlotPlan(disconnect=("b",))
    slots.agent_changed("b", AgentStage.NONE, 36.0)
    slots.hosts = (Host("a", 1), Host("b", 1))
    assert slots.plan(36.0, has_begun=True) == SlotPlan(due_s=37.0)
    assert slots.plan(37.0, has_begun=True).connect == (Host("b", 1),)


def test_a_host_that_comes_and_goes_is_left_alone_for_longer_each_time() -> None:
    a, b = Host("a", 1), Host("b", 1)
    slots = table(a, b)
    start_all(slots, 0.0, has_begun=False)
    now_s, waits = 0.0, []
    for number in range(1, 5):
        slots.hosts = (a,)
        slots.worker_asked(number, now_s)
        slots.worker_exited(number, now_s)
        slots.agent_changed("b", AgentStage.NONE, now_s)
        slots.hosts = (a, b)
        plan = slots.plan(now_s, has_begun=True)
        assert not plan.connect and not plan.start
        waits.append(plan.due_s - now_s)
        now_s = plan.due_s
        assert slots.plan(now_s, has_begun=True).connect == (b,)
        slots.agent_changed("b", AgentStage.READY, now_s)
        assert start_all(slots, now_s, has_begun=True, first=number + 1).start == (Slot("b", 0),)
    assert waits == [1.0, 2.0, 4.0, 8.0]


def test_when_all_hosts_are_replaced_one_worker_stays_until_others_hold_the_state() -> None:
    slots = table(Host("a", 2))
    start_all(slots, 0.0, has_begun=False)
    slots.hosts = (Host("b", 4),)
    assert slots.plan(0.0, has_begun=False).keep is None, "there is no state before the first round"
    plan = slots.plan(0.0, has_begun=True, holders=(1, 0))
    assert (plan.ask, plan.keep) == ((AskedWorker(0, AskReason.HOST_REMOVED),), 1)
    assert plan.connect == (Host("b", 4),)
    slots.worker_asked(0, 0.0)
    slots.worker_exited(0, 0.0)
    slots.agent_changed("b", AgentStage.READY, 0.0)
    plan = slots.plan(0.0, has_begun=True, holders=(1,))
    assert (plan.ask, plan.keep, len(plan.start)) == ((), 1, 3), "there is room for three more"
    for number, slot in enumerate(plan.start, start=2):
        slots.worker_started(number, slot, 0.0)
    assert slots.plan(0.0, has_begun=True, holders=(1,)).keep == 1
    plan = slots.plan(0.0, has_begun=True, holders=(1, 2, 3, 4))
    assert (plan.ask, plan.keep) == ((AskedWorker(1, AskReason.HOST_REMOVED),), None)
    slots.hosts = ()
    plan = slots.plan(0.0, has_begun=True, holders=(1, 2, 3, 4))
    assert (len(plan.ask), plan.keep) == (4, None), "nobody could follow"


def test_fewer_slots_cost_the_workers_behind_them() -> None:
    slots = table(Host("a", 4))
    start_all(slots, 0.0, has_begun=True)
    slots.hosts = (Host("a", 2),)
    asked = slots.plan(0.0, has_begun=True).ask
    assert asked == (AskedWorker(2, AskReason.FEWER_SLOTS), AskedWorker(3, AskReason.FEWER_SLOTS))


def test_an_agent_that_stops_gets_no_workers() -> None:
    slots = table(Host("a", 2))
    slots.agent_changed("a", AgentStage.STOPPING, 0.0)
    assert slots.plan(0.0, has_begun=False) == SlotPlan()


def test_a_slot_whose_worker_has_done_its_work_stays_empty() -> None:
    slots = table(Host("a", 2))
    start_all(slots, 0.0, has_begun=False)
    slots.worker_exited(0, 1.0, is_done=True)
    assert slots.plan(100.0, has_begun=False) == SlotPlan()


@pytest.mark.parametrize("cooldown_s", [(2.0, 1.0), (-1.0, 1.0), (1.0, math.inf)])
def test_cooldowns_that_cannot_be_are_refused(cooldown_s: tuple[float, float]) -> None:
    shortest_s, longest_s = cooldown_s
    with pytest.raises(ValueError, match="cooldown"):
        ScalingLimits(start_workers=1, max_workers=1, min_cooldown_s=shortest_s, max_cooldown_s=longest_s)


def test_very_many_failures_do_not_overflow() -> None:
    cooldown = Cooldown(num_failures=10**6).after_failure(0.0, well_s=0.0, limits=LIMITS)
    assert cooldown == Cooldown(10**6 + 1, LIMITS.max_cooldown_s)


NAMES = ("a", "b", "c")
HOST_LISTS = st.lists(st.builds(Host, st.sampled_from(NAMES), st.integers(1, 3)), unique_by=lambda host: host.name)


class AnyHistory(RuleBasedStateMachine):
    """Hosts come and go, agents and workers die, time passes; every plan is carried out."""

    @initialize(start=st.integers(1, 3), more=st.integers(0, 3))
    def begin(self, start: int, more: int) -> None:
        self.slots = SlotTable(ScalingLimits(start_workers=start, max_workers=start + more, max_cooldown_s=8.0))
        self.now_s = 0.0
        self.has_begun = False
        self.workers: dict[int, Slot] = {}
        self.num_started = 0
        self.last_end_s: dict[Slot, float] = {}

    @rule(hosts=HOST_LISTS)
    def list_hosts(self, hosts: list[Host]) -> None:
        self.slots.hosts = tuple(hosts)

    @rule()
    def begin_round(self) -> None:
        self.has_begun = True

    @rule(seconds=st.floats(0.0, 20.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def wait_until_due(self) -> None:
        due_s = self.slots.plan(self.now_s, has_begun=self.has_begun).due_s
        assert due_s > self.now_s, "a plan that is due at once would be made for ever"
        self.now_s = min(due_s, self.now_s + 1000.0)

    @rule(name=st.sampled_from(NAMES), stops=st.booleans())
    def lose_agent(self, name: str, stops: bool) -> None:
        if self.slots.stage(name) is not AgentStage.NONE:
            if stops:
                return self.slots.agent_changed(name, AgentStage.STOPPING, self.now_s)
            self.slots.agent_failed(name, self.now_s)
            for number in [number for number, slot in self.workers.items() if slot.host == name]:
                self.slots.worker_exited(number, self.now_s, with_host=True)
                del self.workers[number]

    @rule(data=st.data())
    def lose_worker(self, data: st.DataObject) -> None:
        if self.workers:
            number = data.draw(st.sampled_from(sorted(self.workers)))
            slot = self.workers.pop(number)
            if not self.slots.was_asked(number):
                self.last_end_s[slot] = self.now_s
            self.slots.worker_exited(number, self.now_s)

    @rule()
    def carry_out(self) -> None:
        plan = self.slots.plan(self.now_s, has_begun=self.has_begun)
        listed = {host.name: host.slots for host in self.slots.hosts}
        for host in plan.connect:
            assert host.name in listed
            self.slots.agent_changed(host.name, AgentStage.READY, self.now_s)
        for name in plan.disconnect:
            assert name not in listed and all(slot.host != name for slot in self.workers.values())
            self.slots.agent_changed(name, AgentStage.NONE, self.now_s)
        for number, _ in plan.ask:
            slot = self.workers[number]
            assert slot.index >= listed.get(slot.host, 0)
            self.slots.worker_asked(number, self.now_s)
        for slot in plan.start:
            assert slot.index < listed[slot.host] and slot not in self.workers.values()
            assert self.now_s >= self.last_end_s.get(slot, -math.inf) + self.slots.limits.min_cooldown_s
            self.slots.worker_started(self.num_started, slot, self.now_s)
            self.workers[self.num_started] = slot
            self.num_started += 1

    @invariant()
    def there_are_never_more_workers_than_wanted(self) -> None:
        if not hasattr(self, "slots"):
            return
        limits = self.slots.limits
        assert self.slots.num_workers <= (limits.max_workers if self.has_begun else limits.start_workers)

    @invariant()
    def nobody_waits_for_ever_while_a_slot_is_free(self) -> None:
        if not hasattr(self, "slots"):
            return
        plan = self.slots.plan(self.now_s, has_begun=self.has_begun)
        wanted = self.slots.limits.max_workers if self.has_begun else self.slots.limits.start_workers
        usable = sum(host.slots for host in self.slots.hosts if self.slots.stage(host.name) is not AgentStage.STOPPING)
        if self.slots.num_workers < min(wanted, usable) and not plan.ask:
            asked_slots = len(self.workers) - self.slots.num_workers
            assert plan.connect or plan.start or plan.due_s < math.inf or asked_slots


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
