"""The workers of an elastic job: started on free slots, asked to leave, and told apart: is the end of a worker a loss
that others make up for, the end of the job, or its failure?

SlotTable decides which slots get workers and when, the coordinator who is in the next round and whether the job goes
on. WorkerPool carries out the former, follows the latter, and keeps the story of the rounds for the user.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ronde.coordinator.round_planning import Membership, PlanAction, PlanReason, RoundPlan
from ronde.coordinator.rounds import LostPeer, MembershipEnd
from ronde.errors import StartFailed
from ronde.launch.driver.failure_report import (
    JobResult,
    StopRequest,
    describe_exit,
    make_elastic_failure,
    make_job_result,
)
from ronde.launch.driver.monitor import MAX_ROUNDS_SHOWN, GoneWorker, RankStatus, RoundRecord
from ronde.launch.driver.slots import AgentStage, Slot, SlotTable
from ronde.launch.driver.ssh import HostError
from ronde.launch.driver.supervisor import RankLocation, RankSupervisor
from ronde.launch.driver.termination import TerminationEvent
from ronde.launch.job import Job
from ronde.launch.network import HostFacts
from ronde.launch.placement import Host, Placement
from ronde.launch.protocol import ExitReason, RankExit, RankOrder, StartRanks
from ronde.launch.timeouts import HAND_OVER_S
from ronde.net.event_loop import EventLoop, Timer


class HostAgents(Protocol):
    """What the pool needs of the agents of a job (AgentGroup)."""

    host_facts: dict[int, HostFacts]

    def add_host(self, host: Host) -> int: ...

    def remove_host(self, index: int) -> None: ...

    def host_name(self, index: int) -> str: ...


class WorkerRounds(Protocol):
    """What the pool tells the coordinator (CoordinatorServer)."""

    def set_host_name(self, number: int, name: str) -> None: ...

    def set_num_starting(self, count: int) -> None: ...

    def lost_peers(self) -> Mapping[int, LostPeer]: ...


class WorkerPool:
    """The policy of an elastic job. All methods are called in the driver's loop."""

    def __init__(
        self,
        loop: EventLoop,
        job: Job,
        slots: SlotTable,
        *,
        agents: HostAgents,
        supervisor: RankSupervisor,
        coordinator: WorkerRounds,
        make_order: Callable[[int, Placement, int, HostFacts], RankOrder],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`make_order` gets the number of a worker, its placement, the size of the job and the facts of its host."""
        assert job.limits is not None
        self._loop = loop
        self._job = job
        self._limits = job.limits
        self._slots = slots
        self._agents = agents
        self._supervisor = supervisor
        self._coordinator = coordinator
        self._make_order = make_order
        self._clock = clock
        self._began_s = clock()
        self._host_indices: dict[str, int] = {}
        """Of the hosts that have an agent, or get one."""
        self._host_errors: dict[str, str] = {}
        """By host, the last error that was printed."""
        self._membership = Membership(RoundPlan(PlanAction.WAIT, PlanReason.TOO_FEW))
        self._holds_state_s: dict[int, float] = {}
        """From when on a worker that is or was in a round surely holds the state of training."""
        self._kept: int | None = None
        """The worker that was told to the user as the last one with the state of training."""
        self._num_started = 0
        self._first_ranks: dict[int, int] = {}
        """Before the first round, the ranks of the workers that run."""
        self._exits: dict[int, RankExit] = {}
        """By number, in the order in which they came."""
        self._leaving: set[int] = set()
        """Workers that were told to leave, by the driver or by the agents of their hosts."""
        self._left_behind: dict[int, str] = {}
        """The workers that the coordinator has left behind, and why."""
        self._killed: set[int] = set()
        """Workers that were killed because the coordinator had lost them."""
        self._num_done = 0
        """Workers that have exited with code 0 before there was a round."""
        self._failed_exits: list[RankExit] = []
        """Because of which the job has failed."""
        self._failure = ""
        """Why the job cannot go on, if no failure of a worker is the reason."""
        self._told_of_failure: set[int] = set()
        """Workers that end because of that."""
        self._timer: Timer | None = None
        self._update_scheduled = False
        self.is_finished = False
        """Whether the job has done what it was started for."""
        self.rounds: list[RoundRecord] = []

    # --- what happens ----------------------------------------------------------------------------------------------

    def handle_hosts(self, hosts: tuple[Host, ...]) -> None:
        """The source of hosts has a new answer. Once there were hosts, an empty one is taken for an error: all workers
        would have to leave, and the state of training with them."""
        if not hosts and self._slots.hosts:
            self.handle_source_error(StartFailed("the source of hosts names none"))
            return
        self._slots.hosts = hosts
        num_slots, num_needed = sum(host.slots for host in hosts), self._limits.start_ranks
        if not self._has_begun and num_slots < num_needed:
            self._supervisor.print_message(
                f"the hosts have {num_slots} of the {num_needed} slots that the first round needs; waiting for others"
            )
        self.schedule_update()

    def handle_source_error(self, error: StartFailed) -> None:
        self._supervisor.print_message(f"{error}; the job goes on with the hosts that it knows")

    def handle_host_connected(self, index: int) -> None:
        """The agent of a host that was added can be used."""
        name = self._agents.host_name(index)
        self._host_errors.pop(name, None)
        self._host_indices[name] = index
        self._slots.agent_changed(name, AgentStage.READY, self._clock())
        self.schedule_update()

    def handle_agent_lost(self, host_index: int, error: HostError) -> None:
        name = self._agents.host_name(host_index)
        if self._host_indices.get(name, host_index) != host_index:
            return
        self._host_indices.pop(name, None)
        cooldown_s = self._slots.agent_failed(name, self._clock())
        if self._host_errors.get(name) != error.reason and not self._supervisor.is_ending:
            self._host_errors[name] = error.reason
            self._supervisor.print_message(f"host {name}: {error.reason}; it is left alone for {cooldown_s:g} s")
        self.schedule_update()

    def handle_agent_stopping(self, host_index: int) -> None:
        name = self._agents.host_name(host_index)
        if self._host_indices.get(name) != host_index:
            return  # it was removed, and perhaps another one was started there
        now_s = self._clock()
        self._slots.agent_changed(name, AgentStage.STOPPING, now_s)
        for number, location in self._supervisor.running_ranks.items():
            if location.host_index == host_index:
                self._leaving.add(number)
                self._slots.worker_asked(number, now_s)
        self.schedule_update()

    def handle_membership(self, membership: Membership) -> None:
        """The coordinator has started a round, or has another plan."""
        before, self._membership = self._membership, membership
        plan = membership.plan
        for number in plan.left_behind:
            why = "did not come back from the round before" if number in plan.absent else "was silent for too long"
            self._left_behind[number] = f"{why} and was left behind"
        # None of them can come back. A process that lives keeps its slot, perhaps for long, if its script is busy.
        useless = {*plan.left_behind, *membership.unreachable} - self._killed
        if useless:
            self._killed |= useless
            self._supervisor.ask_to_end(sorted(useless), signal.SIGKILL)
        if membership.num_rounds > before.num_rounds:
            self._record_round(before.members, membership)
        is_too_small = plan.reason in (PlanReason.TOO_FEW, PlanReason.STATE_LOST)
        is_waiting = plan.action is PlanAction.WAIT and is_too_small and membership.num_rounds
        if is_waiting and plan.describe() != before.plan.describe():
            self._supervisor.print_message(plan.describe())
        if plan.action is PlanAction.FAIL and not self._job.is_service:
            self._fail(plan.describe(), TerminationEvent.RANK_FAILED)
        if membership.is_finished and not before.is_finished:  # those that have not joined are not needed any more
            late = [number for number in self._supervisor.running_ranks if number not in membership.members]
            self._supervisor.ask_to_end(late, signal.SIGTERM)
        if self._has_failed_behind_training():  # its exit was reported before
            self._supervisor.end_job(TerminationEvent.RANK_FAILED)
        self._fail_if_abandoned()
        self._finish_if_done()
        self.schedule_update()

    def handle_exit(self, rank_exit: RankExit) -> TerminationEvent | None:
        number = rank_exit.rank
        self._exits[number] = rank_exit
        self._first_ranks.pop(number, None)
        is_before = not self._has_begun and not self._job.is_service
        is_failure = self._is_own_failure(rank_exit) and is_before
        is_done = is_before and rank_exit.exit_code == 0 and number not in self._leaving
        self._num_done += is_done
        with_host = rank_exit.reason is ExitReason.HOST_LOST
        cooldown_s = self._slots.worker_exited(number, self._clock(), with_host=with_host, is_done=is_done)
        if self._supervisor.is_ending:
            return None
        if self._job.is_service and not with_host:
            self._supervisor.print_message(
                f"worker {number} on host {rank_exit.host} {describe_exit(rank_exit)}; another one is started"
                + (f" after {cooldown_s:g} s" if cooldown_s else "")
            )
        was_member = any(number in record.members for record in self.rounds)
        if self._has_begun and not (was_member or rank_exit.requested or with_host or self._membership.is_finished):
            self._supervisor.print_message(
                f"worker {number} on host {rank_exit.host} {describe_exit(rank_exit)} before it was in a round; "
                f"its slot is used again after {cooldown_s:g} s"
            )
        if is_failure:
            self._failed_exits.append(rank_exit)
            return TerminationEvent.STOP_REQUESTED  # nobody tells the others
        if self._has_failed_behind_training():
            return TerminationEvent.RANK_FAILED
        if self._has_failed():
            self._failed_exits += [self._exits[member] for member in self._membership.members]
            return TerminationEvent.STOP_REQUESTED
        self._fail_if_abandoned()
        self._finish_if_done()
        self.schedule_update()
        return None

    @property
    def goes_on(self) -> bool:
        is_done = not self._has_begun and self._num_done >= self._limits.start_ranks
        return not (self.is_finished or is_done)

    @property
    def plan(self) -> RoundPlan:
        """The coordinator's newest plan. Any thread may read it."""
        return self._membership.plan

    def member_statuses(self) -> dict[int, RankStatus]:
        """Return what is known about the processes of the newest round, by rank. Any thread may call it."""
        statuses, members = {**self._supervisor.rank_statuses}, self._membership.members
        if not members:
            members = tuple(range(self._limits.start_ranks))
        unknown = RankStatus(rank=-1, state="starting")
        return {rank: statuses.get(number, unknown) for rank, number in enumerate(members)}

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # --- what is done ----------------------------------------------------------------------------------------------

    def schedule_update(self) -> None:
        """Plan at the end of this turn of the loop, so that what happens together is planned together."""
        if not self._update_scheduled:
            self._update_scheduled = True
            self._loop.call_soon(self._update)

    def _update(self) -> None:
        self._update_scheduled = False
        if self._timer is not None:
            self._timer.cancel()
        has_trained = self._membership.is_finished or bool(self._membership.finished)
        if self._supervisor.is_ending or self.is_finished or has_trained:
            return  # nobody has to come any more, and whoever has to go may be saving the model
        now_s = self._clock()
        running = [number for number in self._membership.members if number in self._supervisor.running]
        holders_s = {number: self._holds_state_s.get(number, now_s) for number in running}
        holders = [number for number, at_s in holders_s.items() if at_s <= now_s]
        plan = self._slots.plan(now_s, has_begun=self._has_begun, holders=holders)
        for host in plan.connect:
            self._slots.agent_changed(host.name, AgentStage.CONNECTING, now_s)
            self._host_indices[host.name] = self._agents.add_host(host)
        for name in plan.disconnect:
            self._slots.agent_changed(name, AgentStage.NONE, now_s)
            self._agents.remove_host(self._host_indices.pop(name))
        for number, reason in plan.ask:
            self._slots.worker_asked(number, now_s)
            self._leaving.add(number)
            name = self._supervisor.running[number].host
            self._supervisor.print_message(f"worker {number} on host {name} is asked to leave: {reason.value}")
        if plan.keep is not None and plan.keep != self._kept:
            name = self._supervisor.running[plan.keep].host
            self._supervisor.print_message(f"worker {plan.keep} on host {name} has to leave when others have its state")
        self._kept = plan.keep
        self._supervisor.ask_to_end([number for number, _ in plan.ask], signal.SIGTERM)
        for number in plan.kill:
            self._slots.worker_killed(number)
        self._supervisor.ask_to_end(plan.kill, signal.SIGKILL)
        self._start_workers(plan.start, now_s)
        self._coordinator.set_num_starting(self._count_starting())
        due_s = min([plan.due_s, *(at_s for at_s in holders_s.values() if at_s > now_s)])
        if due_s < math.inf:
            self._timer = self._loop.call_later(due_s - now_s, self._update)

    def _start_workers(self, slots: Sequence[Slot], now_s: float) -> None:
        locations: list[RankLocation] = []
        orders: dict[int, list[RankOrder]] = {}
        ranks, size = self._choose_ranks(len(slots))
        for slot, rank in zip(slots, ranks, strict=True):
            number = self._num_started
            self._num_started += 1
            self._first_ranks[number] = rank
            index = self._host_indices[slot.host]
            self._slots.worker_started(number, slot, now_s)
            self._coordinator.set_host_name(number, slot.host)
            order = self._make_order(number, self._place(slot, rank), size, self._agents.host_facts[index])
            orders.setdefault(index, []).append(order)
            locations.append(RankLocation(number, index, slot.host, slot.index))
        if locations:
            job = self._job
            self._supervisor.start_ranks(
                locations,
                {
                    index: StartRanks(tuple(of_host), job.pickled_call, job.terminate_s)
                    for index, of_host in orders.items()
                },
            )

    def _choose_ranks(self, num_new: int) -> tuple[list[int], int]:
        """Return the ranks that new workers would have in a round that began now, and its size: in the first round,
        those that are free; later, those behind all others."""
        if not self._has_begun:
            size = self._limits.start_ranks
            taken = {rank for number, rank in self._first_ranks.items() if not self._slots.was_asked(number)}
            return [rank for rank in range(size) if rank not in taken][:num_new], size
        num_others = self._slots.num_workers
        return list(range(num_others, num_others + num_new)), num_others + num_new

    def _place(self, slot: Slot, rank: int) -> Placement:
        used = [host.name for host in self._slots.hosts if self._slots.stage(host.name) is AgentStage.READY]
        num_slots = self._slots.num_slots(slot.host)
        return Placement(
            rank=rank,
            host=Host(slot.host, num_slots),
            host_index=used.index(slot.host),
            local_rank=slot.index,
            local_size=num_slots,
            cross_rank=used.index(slot.host),
            cross_size=len(used),
            num_hosts=len(used),
        )

    def _count_starting(self) -> int:
        """Return how many workers run that are neither members nor known to be ready."""
        plan = self._membership.plan
        ready = plan.workers if plan.reason in (PlanReason.NEWCOMERS, PlanReason.SETTLING) else ()
        known = {*self._membership.members, *ready}
        return sum(number not in known for number in self._supervisor.running_ranks)

    # --- what it means ---------------------------------------------------------------------------------------------

    @property
    def _has_begun(self) -> bool:
        return self._membership.num_rounds > 0

    def _is_own_failure(self, rank_exit: RankExit) -> bool:
        """Whether a worker has failed by itself: not by a signal, with its host, or because it was told to end."""
        is_lost = rank_exit.reason in (ExitReason.HOST_LOST, ExitReason.OOM_KILLED)
        return rank_exit.exit_code > 0 and not is_lost and not rank_exit.requested

    def _has_failed_behind_training(self) -> bool:
        """Whether a worker that has finished training has ended otherwise than with code 0, and was not told to end by
        the driver: nobody makes up for what it has not done. One that was lost in the barrier at the end of training
        has not finished it; the others did its work."""
        if self._supervisor.is_ending or self._failed_exits:
            return False
        finished = self._membership.finished
        for number in self._membership.members:
            rank_exit = self._exits.get(number)
            if rank_exit is None or rank_exit.exit_code == 0 or rank_exit.requested:
                continue
            if number in finished or (self._membership.is_finished and self._is_own_failure(rank_exit)):
                self._failed_exits.append(rank_exit)
        return bool(self._failed_exits)

    def _has_failed(self) -> bool:
        """Whether nobody is left who could go on: all members have failed by themselves, or one because another was
        lost. That is a script that does not train with ronde.elastic.run, and no other worker could join it."""
        members = self._membership.members
        if not members or any(number not in self._exits for number in members):
            return False
        own_failures = [rank for rank, number in enumerate(members) if self._is_own_failure(self._exits[number])]
        return len(own_failures) == len(members) or not self._coordinator.lost_peers().keys().isdisjoint(own_failures)

    def _finish_if_done(self) -> None:
        """The job is done when its members have ended: those of a round that has finished it, or all of them with
        code 0 and without being told to leave, because the script has come to its end."""
        members = self._membership.members
        if self.is_finished or not members or any(number in self._supervisor.running for number in members):
            return
        told = {*self._leaving, *self._membership.preempted}
        has_ended = all(
            number in self._exits and self._exits[number].exit_code == 0 and number not in told for number in members
        )
        if self._membership.is_finished or has_ended:
            self.is_finished = True
            if self._supervisor.running_ranks and not self._supervisor.is_ending:
                self._supervisor.end_job(TerminationEvent.STOP_REQUESTED)

    def _fail_if_abandoned(self) -> None:
        """The first round never begins when one of its workers has ended without joining it."""
        if self._num_done and not self._has_begun and self._membership.plan.num_ready:
            done = next(each for each in self._exits.values() if each.exit_code == 0 and each.rank not in self._leaving)
            reason = f"worker {done.rank} on host {done.host} left before the first round, and others wait for it"
            self._fail(reason, TerminationEvent.STOP_REQUESTED)  # nobody tells the others

    def _fail(self, reason: str, event: TerminationEvent) -> None:
        if not self._supervisor.is_ending:
            self._failure = reason
            lost = {*self._membership.members} - {*self._membership.plan.workers}
            self._told_of_failure = self._supervisor.running.keys() - lost
            self._supervisor.print_message(f"the job cannot go on: {reason}")
            self._supervisor.end_job(event)

    def _record_round(self, before: tuple[int, ...], membership: Membership) -> None:
        members = membership.members
        gone = tuple(
            GoneWorker(number, self._supervisor.rank_statuses[number].host, self._describe_end(number))
            for number in before
            if number not in members
        )
        known = {number for record in self.rounds for number in record.members}
        hand_over_s = HAND_OVER_S if known else 0.0  # the first round begins with the state that all have
        for number in members:
            self._holds_state_s.setdefault(number, self._clock() + hand_over_s)
        came = tuple(number for number in members if known and number not in known)
        # Not membership.plan: that may be a newer one.
        reason = PlanReason.STATE_LOST if len(came) == len(members) else PlanReason.ENOUGH
        plan = RoundPlan(PlanAction.START, reason, members=members, workers=came).describe()
        number, elapsed_s = membership.num_rounds - 1, self._clock() - self._began_s
        record = RoundRecord(round=number, elapsed_s=elapsed_s, members=members, came=came, gone=gone, plan=plan)
        if self.rounds:
            self._supervisor.print_message(record.describe())
        self.rounds.append(record)

    def _describe_end(self, number: int) -> str:
        rank_exit = self._exits.get(number)
        if number in self._left_behind:
            return self._left_behind[number]
        if number in self._membership.unreachable:
            return "could not be reached"
        if number in self._membership.preempted:
            return "left in good order"
        return describe_exit(rank_exit) if rank_exit is not None else "was lost"

    def make_result(
        self,
        *,
        tail: Callable[[int, int], str],
        first_lost: tuple[int, MembershipEnd] | None,
        lost_peers: Mapping[int, LostPeer],
    ) -> JobResult:
        """Report on the job when it is over."""
        supervisor = self._supervisor
        exit_codes = {number: rank_exit.exit_code for number, rank_exit in self._exits.items()}
        still_running = sorted(supervisor.running)
        stop_request: StopRequest | None = supervisor.stop_request
        if self._failed_exits:
            exits = [*self._exits.values()]
            exits = exits[min(exits.index(failed) for failed in self._failed_exits) :]
            numbers = dict(enumerate(self._membership.members))
            if first_lost is not None:
                first_lost = (numbers[first_lost[0]], first_lost[1]) if first_lost[0] in numbers else None
            return make_job_result(
                exits,
                still_running=still_running,
                tail=tail,
                first_lost=first_lost,
                lost_peers={numbers.get(rank, rank): lost for rank, lost in lost_peers.items()},
                return_values=supervisor.return_values,
                stop_request=stop_request,
            )
        if self._failure:
            losses = [
                each
                for each in self._exits.values()
                if each.exit_code != 0 and not each.requested and each.rank not in self._told_of_failure
            ]
            return make_elastic_failure(self._failure, losses, exit_codes=exit_codes, tail=tail)
        if stop_request is not None or still_running:
            return make_job_result([], still_running=still_running, stop_request=stop_request)
        values = {
            rank: supervisor.return_values[number]
            for rank, number in enumerate(self._membership.members or sorted(supervisor.return_values))
            if number in supervisor.return_values
        }
        story = [record.describe() for record in self.rounds[-MAX_ROUNDS_SHOWN:]] if len(self.rounds) > 1 else []
        if len(story) < len(self.rounds) and story:
            story.insert(0, f"{len(self.rounds)} rounds, these last:")
        return JobResult(0, "\n".join(story), exit_codes=exit_codes, return_values=values)
