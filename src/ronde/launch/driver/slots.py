"""On which slots of an elastic job workers are started now, and which workers are asked to leave. Without I/O.

A host has slots, each with room for one worker. SlotTable knows the hosts that the job may use, whether each has an
agent, and which worker is in which slot. plan() decides from that what to do now, and when to look again:

- a host that the job needs slots of gets an agent; one that the job may not use any more loses it;
- a free slot gets a worker, as long as there are fewer workers than wanted: `start_workers` before the first round,
  `max_workers` after it;
- a worker whose host or slot is not there any more is asked to leave, and killed when it takes too long. When all that
  hold the state of training would have to leave while there are other hosts, one of them is kept until others hold it.

What has failed is left alone for a while: a slot when its worker ended by itself, or was asked to leave because the
host or the slot was taken away; a host when its agent was lost or could not be started. This cooldown doubles with each
failure, so that a host that comes and goes does not change the ranks of the others all the time. After a slot or a host
has been well for as long as the longest cooldown, the next one is the shortest again.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ronde.launch.placement import Host


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingLimits:
    """How many workers are wanted, and how long is waited. ValueError if it cannot be."""

    start_workers: int
    max_workers: int
    min_cooldown_s: float = 1.0
    max_cooldown_s: float = 60.0
    leave_s: float = 600.0
    """How long a worker that was asked to leave may take before it is killed."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_cooldown_s <= self.max_cooldown_s < math.inf:
            raise ValueError(
                f"the shortest cooldown must be from 0 to the longest, got {self.min_cooldown_s:g} and "
                f"{self.max_cooldown_s:g} seconds"
            )


@dataclass(frozen=True, slots=True)
class Slot:
    host: str
    index: int
    """From 0 among the slots of its host."""


@dataclass(frozen=True, slots=True)
class Cooldown:
    """How often something has failed lately, and until when it is left alone."""

    num_failures: int = 0
    until_s: float = -math.inf

    def after_failure(self, now_s: float, *, well_s: float, limits: ScalingLimits) -> Cooldown:
        """Return the cooldown after another failure; before it, there was none for `well_s`."""
        num_failures = 0 if well_s >= limits.max_cooldown_s else self.num_failures
        # 2.0**1024 overflows.
        length_s = min(limits.max_cooldown_s, limits.min_cooldown_s * 2.0 ** min(num_failures, 1000))
        return Cooldown(num_failures + 1, now_s + length_s)


class AgentStage(enum.Enum):
    NONE = enum.auto()
    CONNECTING = enum.auto()
    READY = enum.auto()
    STOPPING = enum.auto()
    """It takes no more workers: it ends those that it has, and itself."""


class AskReason(enum.Enum):
    """Why a worker is asked to leave."""

    HOST_REMOVED = "its host is not among the hosts of the job any more"
    FEWER_SLOTS = "its host has fewer slots now"


class AskedWorker(NamedTuple):
    number: int
    reason: AskReason


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """What to do now."""

    connect: tuple[Host, ...] = ()
    """Hosts whose agents are to be started."""
    disconnect: tuple[str, ...] = ()
    """Hosts whose agents are to be stopped."""
    start: tuple[Slot, ...] = ()
    """Slots that get a new worker."""
    ask: tuple[AskedWorker, ...] = ()
    """Workers that are asked to leave."""
    keep: int | None = None
    """The worker that will be asked to leave when others hold the state of training."""
    kill: tuple[int, ...] = ()
    """Workers that were asked to leave, and did not in time."""
    due_s: float = math.inf
    """When to plan again, even if nothing happens."""


@dataclass(slots=True)
class _AgentRecord:
    stage: AgentStage = AgentStage.NONE
    since_s: float = 0.0
    cooldown: Cooldown = field(default_factory=Cooldown)


@dataclass(slots=True)
class _WorkerRecord:
    slot: Slot
    started_s: float
    asked_s: float = math.inf
    """When it was asked to leave."""
    is_killed: bool = False


class SlotTable:
    """The slots of a job, changed by what happens; plan() changes nothing."""

    def __init__(self, limits: ScalingLimits) -> None:
        self.limits = limits
        self.hosts: tuple[Host, ...] = ()
        """That the job may use, in the order in which they are filled. Set when that changes."""
        self._agents: dict[str, _AgentRecord] = {}
        self._workers: dict[int, _WorkerRecord] = {}
        self._cooldowns: dict[Slot, Cooldown] = {}
        self._finished_slots: set[Slot] = set()

    # --- what happens ----------------------------------------------------------------------------------------------

    def agent_changed(self, host: str, stage: AgentStage, now_s: float) -> None:
        """The agent of a host is being started, is ready, or stops; NONE: it was stopped because it was not needed."""
        record = self._agents.setdefault(host, _AgentRecord())
        record.stage, record.since_s = stage, now_s

    def agent_failed(self, host: str, now_s: float) -> float:
        """The agent of a host was lost, or could not be started. Return for how long the host is left alone."""
        record = self._agents.setdefault(host, _AgentRecord())
        well_s = now_s - record.since_s if record.stage is AgentStage.READY else 0.0
        record.cooldown = record.cooldown.after_failure(now_s, well_s=well_s, limits=self.limits)
        record.stage = AgentStage.NONE
        return record.cooldown.until_s - now_s

    def worker_started(self, number: int, slot: Slot, now_s: float) -> None:
        assert number not in self._workers, f"worker {number} was started before"
        assert all(each.slot != slot for each in self._workers.values()), f"{slot} has a worker"
        self._workers[number] = _WorkerRecord(slot, now_s)

    def worker_asked(self, number: int, now_s: float) -> None:
        self._workers[number].asked_s = now_s

    def worker_killed(self, number: int) -> None:
        if number in self._workers:
            self._workers[number].is_killed = True

    def worker_exited(self, number: int, now_s: float, *, with_host: bool = False, is_done: bool = False) -> float:
        """A worker has ended, which costs its slot a cooldown. `with_host`: its agent was lost, which costs the host
        one. `is_done`: it has done all that there is to do, and its slot gets no other one. Return for how long the
        slot is left alone."""
        record = self._workers.pop(number)
        if is_done:
            self._finished_slots.add(record.slot)
        elif not with_host:
            before = self._cooldowns.get(record.slot, Cooldown())
            well_s = now_s - record.started_s
            cooldown = self._cooldowns[record.slot] = before.after_failure(now_s, well_s=well_s, limits=self.limits)
            return cooldown.until_s - now_s
        return 0.0

    # --- what is known ---------------------------------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """Workers that run and were not asked to leave."""
        return sum(each.asked_s == math.inf for each in self._workers.values())

    def was_asked(self, number: int) -> bool:
        return number in self._workers and self._workers[number].asked_s < math.inf

    def stage(self, host: str) -> AgentStage:
        return self._agents[host].stage if host in self._agents else AgentStage.NONE

    def num_slots(self, host: str) -> int:
        """How many slots of a host the job may use at most."""
        return min(next((each.slots for each in self.hosts if each.name == host), 0), self.limits.max_workers)

    def plan(self, now_s: float, *, has_begun: bool, holders: Sequence[int] = ()) -> SlotPlan:
        """Decide what to do now; `has_begun`: the first round has. `holders`: the workers that hold the state of
        training, by rank."""
        num_wanted = self.limits.max_workers if has_begun else self.limits.start_workers - len(self._finished_slots)
        num_missing = num_wanted - self.num_workers
        ask, kill, due_s = self._plan_leaving(now_s)
        keep = self._find_last_holder({number for number, _ in ask}, holders)
        ask = [each for each in ask if each.number != keep]
        num_missing += len(ask)
        start: list[Slot] = []
        connect: list[Host] = []
        cooling_until_s: list[float] = []
        for host in self.hosts:
            stage = self.stage(host.name)
            if stage is AgentStage.STOPPING:
                continue
            ready_s = self._agents[host.name].cooldown.until_s if host.name in self._agents else -math.inf
            if stage is AgentStage.NONE and ready_s > now_s:
                cooling_until_s.append(ready_s)
                continue
            free = [*self._free_slots(host)]
            cool = [slot for slot in free if self._cooldown(slot).until_s <= now_s][: max(0, num_missing)]
            if stage is AgentStage.READY:
                start += cool
            elif stage is AgentStage.NONE and cool:
                connect.append(host)
            num_missing -= len(cool)
            cooling_until_s += [self._cooldown(slot).until_s for slot in free if slot not in cool]
        if num_missing > 0:
            due_s = min([due_s, *cooling_until_s])
        return SlotPlan(
            connect=tuple(connect),
            disconnect=tuple(self._unused_agents()),
            start=tuple(start),
            ask=tuple(ask),
            keep=keep,
            kill=tuple(kill),
            due_s=due_s,
        )

    def _find_last_holder(self, leaving: Collection[int], holders: Sequence[int]) -> int | None:
        """The worker that has to stay for the state of training, if all that hold it would be asked to leave now. Only
        where another one can come, and be in a round with it."""
        staying = [number for number in holders if number in self._workers and not self.was_asked(number)]
        can_be_followed = bool(self.hosts) and self.limits.max_workers > 1
        return staying[0] if can_be_followed and staying and all(each in leaving for each in staying) else None

    def _plan_leaving(self, now_s: float) -> tuple[list[AskedWorker], list[int], float]:
        slots = {host.name: host.slots for host in self.hosts}
        ask: list[AskedWorker] = []
        kill: list[int] = []
        due_s = math.inf
        for number, record in self._workers.items():
            if record.is_killed:
                continue
            if record.asked_s < math.inf:
                kill_s = record.asked_s + self.limits.leave_s
                if kill_s <= now_s:
                    kill.append(number)
                else:
                    due_s = min(due_s, kill_s)
            elif record.slot.host not in slots:
                ask.append(AskedWorker(number, AskReason.HOST_REMOVED))
            elif record.slot.index >= slots[record.slot.host]:
                ask.append(AskedWorker(number, AskReason.FEWER_SLOTS))
        return ask, kill, due_s

    def _free_slots(self, host: Host) -> Iterator[Slot]:
        taken = {record.slot for record in self._workers.values()} | self._finished_slots
        return (slot for index in range(self.num_slots(host.name)) if (slot := Slot(host.name, index)) not in taken)

    def _cooldown(self, slot: Slot) -> Cooldown:
        return self._cooldowns.get(slot, Cooldown())

    def _unused_agents(self) -> Sequence[str]:
        """Hosts with an agent that the job may not use any more, and whose workers have left."""
        busy = {host.name for host in self.hosts} | {record.slot.host for record in self._workers.values()}
        stages = (AgentStage.CONNECTING, AgentStage.READY)
        return [name for name, record in self._agents.items() if record.stage in stages and name not in busy]
