"""What thousands of ranks cost the coordinator, and how these costs grow: a simulated world.

    python benchmarks/scale.py --ranks 64,512,4096,16384 --json scale.jsonl

The coordinator is the real one without its network: every message of a rank is decoded and handled, and every answer is
encoded and given to a ControlServer to which nobody is connected. Ranks are nothing but the bytes that they would send.
Only the coordinator's processor time is measured (not the kernel's work and not encryption, which a thread of ZeroMQ
does), so the numbers are of use on a busy machine. Each number of ranks has a process of its own.

| phase | what every rank does |
|---|---|
| join | connects and sends JoinRound; the round starts |
| first step | announces all names in full, in one message |
| step | announces all names by their ids, in one message |
| scattered step | the same in eight messages, cut at other places on each rank and mixed with those of the others |
| second | sends what it sends every second: a heartbeat and its activity |
| stall | one rank is silent, all others wait; one check for stalled operations is one event |
| loss | one rank dies, and the others leave because of it, up to 256 of them |

The table shows for each phase the time per event (a message, a connection or a check) and, from one line to the next,
the exponents of growth of the time of the whole phase and of the bytes that are sent: 1 when they grow as the ranks do,
2 when they grow as their square.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import itertools
import logging
import math
import multiprocessing
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from ronde.coordinator.coordinator import CoordinatorCore, Event, MessageReceived, ProcessExited, RankConnected
from ronde.coordinator.negotiation import Send
from ronde.net.control import ControlServer, _KnownClient
from ronde.net.handshake import ConnectionRequest
from ronde.net.keys import JobKey, new_job_key
from ronde.net.messages import (
    LIVENESS,
    VERSION,
    ActivityReport,
    AnnounceOperations,
    ArrivalSamples,
    JoinRound,
    LeaveReason,
    LeaveRound,
    OperationRequest,
    RankHeartbeat,
    RunOperations,
    WorkerMessage,
    WorkerMessageDecoder,
    encode,
)
from ronde.observe.activity import ActivitySample
from ronde.observe.stragglers import ArrivalSample, max_samples_per_s
from ronde.settings import Settings
from ronde.types import DType, Member, OperationKind

EVENTS_PER_TURN = 100
"""Events that the coordinator finds together in its sockets, before it answers."""
RANKS_PER_HOST = 8
NUM_STEPS = 3
NUM_PIECES = 8
NUM_CHECKS = 10
MAX_LEAVES = 256
PHASES = ("join", "first step", "step", "scattered step", "second", "stall", "loss")


class PhaseCost(msgspec.Struct, frozen=True):
    """One line of the JSON."""

    phase: str
    ranks: int
    names: int
    events: int
    """Messages of ranks, connections, and checks."""
    cpu_s: float
    us_per_event: float
    received_bytes: int
    sent_messages: int
    sent_bytes: int
    memory_mb: float
    """Of the process at the end of the phase, above what it was before the first rank."""


class FromRank(NamedTuple):
    """An encoded message of a rank."""

    rank: int
    data: bytes


class SimulatedWorld:
    def __init__(self, size: int, num_names: int) -> None:
        self.costs: list[PhaseCost] = []
        self._size = size
        self._num_names = num_names
        self._settings = Settings()
        self._now_ns = 0
        self._base_bytes = psutil.Process().memory_info().rss
        self._core = CoordinatorCore(size, self._settings)
        self._decoder = WorkerMessageDecoder()
        self._server = ControlServer("127.0.0.1", JobKey(new_job_key()))
        self._ids: dict[str, int] = {}
        self._num_events = self._received_bytes = self._num_sent = self._sent_bytes = 0
        self._cpu_s = 0.0
        self._random = random.Random(0)

    def run(self) -> None:
        with self._phase("join"):
            self._turns(self._joins())
        requests = tuple(make_request(index) for index in range(self._num_names))
        with self._phase("first step"):
            self._turns(self._from_all(AnnounceOperations(requests)))
        by_id = AnnounceOperations((), tuple(self._ids[request.name] for request in requests))
        with self._phase("step", NUM_STEPS):
            for _ in range(NUM_STEPS):
                self._turns(self._from_all(by_id))
        with self._phase("scattered step"):
            self._turns(self._scattered(by_id.known_ids))
        with self._phase("second"):
            self._turns(self._from_all(RankHeartbeat(self._now_ns)))
            self._turns(self._from_all(self._make_activity()))
        self._turns(self._from_all(by_id, num_silent=1))
        with self._phase("stall"):
            for check in range(NUM_CHECKS):
                self._now_ns += int(self._settings.stall_s * 1e9) if check == 0 else 1_000_000_000
                self._turn([])
                self._num_events += 1
        with self._phase("loss"):
            self._turns([ProcessExited(0, "killed by SIGKILL")])
            self._now_ns += 1_000_000_000
            self._turn([])
            leave = LeaveRound(LeaveReason.FAILED, "PeerLost: rank 0 is lost: killed by SIGKILL", lost_peer=0)
            self._turns(itertools.islice(self._from_all(leave, num_silent=1), MAX_LEAVES))
        self._server.close(0)

    # --- what ranks send ---------------------------------------------------------------------------------------------

    def _joins(self) -> Iterator[Event | FromRank]:
        for rank in range(self._size):
            host = rank // RANKS_PER_HOST
            port, pid = self._random.randrange(30_000, 60_000), self._random.randrange(1000, 4_000_000)
            address = f"10.{host // 250}.{host % 250}.1:{port}"
            unix_socket = f"ronde-{self._random.getrandbits(128):032x}"
            worker = f"{self._random.getrandbits(64):016x}"
            member = Member(rank, f"host-{host:05}", pid, unix_socket, (address,), "pid:[4026531836]", worker)
            sender = self._core.admit(ConnectionRequest(LIVENESS, rank, f"{rank:016x}", worker), 1).sender
            self._server._clients[sender] = _KnownClient()  # without a client the server would not try to send
            yield RankConnected(rank, sender, f"{rank:016x}")
            yield FromRank(rank, encode(JoinRound(VERSION, self._size, member)))

    def _from_all(self, message: WorkerMessage, num_silent: int = 0) -> Iterator[FromRank]:
        """The same message from all ranks but the first ones, in any order."""
        data = encode(message)
        ranks = list(range(num_silent, self._size))
        self._random.shuffle(ranks)
        return (FromRank(rank, bytes(bytearray(data))) for rank in ranks)

    def _scattered(self, ids: tuple[int, ...]) -> Iterator[FromRank]:
        pieces: list[list[FromRank]] = [[] for _ in range(NUM_PIECES)]
        evenly = [round(index * len(ids) / NUM_PIECES) for index in range(1, NUM_PIECES)]
        for rank in range(self._size):
            jitter = [cut + self._random.randint(-2, 2) for cut in evenly]
            cuts = [0, *sorted(min(max(0, cut), len(ids)) for cut in jitter), len(ids)]
            for index in range(NUM_PIECES):
                piece = ids[cuts[index] : cuts[index + 1]]
                pieces[index].append(FromRank(rank, encode(AnnounceOperations((), piece))))
        for together in pieces:
            self._random.shuffle(together)
            yield from together

    def _make_activity(self) -> ActivityReport:
        """What a rank reports of the last second, with a quarter of the arrivals that it may report."""
        numbers = range(max_samples_per_s(self._size) // 4)
        samples = tuple(ArrivalSample(number, 0, self._now_ns, 1000, 1000) for number in numbers)
        activity = ActivitySample(at_ns=self._now_ns, steps=10, operations=1610, bytes=1 << 30)
        return ActivityReport(activity, (ArrivalSamples("0.plan.1", 0, samples),))

    # --- what the coordinator does -----------------------------------------------------------------------------------

    @contextmanager
    def _phase(self, name: str, repeats: int = 1) -> Iterator[None]:
        gc.collect()
        self._num_events = self._received_bytes = self._num_sent = self._sent_bytes = 0
        self._cpu_s = 0.0
        yield
        memory_mb = (psutil.Process().memory_info().rss - self._base_bytes) / 2**20
        self.costs.append(
            PhaseCost(
                phase=name,
                ranks=self._size,
                names=self._num_names,
                events=self._num_events // repeats,
                cpu_s=round(self._cpu_s / repeats, 6),
                us_per_event=round(self._cpu_s * 1e6 / max(1, self._num_events), 2),
                received_bytes=self._received_bytes // repeats,
                sent_messages=self._num_sent // repeats,
                sent_bytes=self._sent_bytes // repeats,
                memory_mb=round(memory_mb, 1),
            )
        )

    def _turns(self, events: Iterable[Event | FromRank]) -> None:
        """Handle events, and answer after each turn of EVENTS_PER_TURN of them."""
        pending = iter(events)
        while turn := list(itertools.islice(pending, EVENTS_PER_TURN)):
            self._turn(turn)

    def _turn(self, turn: list[Event | FromRank]) -> None:
        self._now_ns += 1_000_000
        began_s = time.process_time()
        sends: list[Send] = []
        for event in turn:
            if isinstance(event, FromRank):
                event_of_core: Event = MessageReceived(
                    self._core.senders[event.rank], 0, self._decoder.decode(event.data)
                )
            else:
                event_of_core = event
            sends += self._core.handle(event_of_core, self._now_ns)
        sends += self._core.advance(self._now_ns)
        self._core.next_due_ns(self._now_ns)
        for ranks, message in sends:
            self._server.send_to_all([self._core.senders[rank] for rank in ranks], message)
        self._cpu_s += time.process_time() - began_s
        self._num_events += len(turn)
        self._received_bytes += sum(len(event.data) for event in turn if isinstance(event, FromRank))
        for ranks, message in sends:
            self._num_sent += len(ranks)
            self._sent_bytes += len(ranks) * len(encode(message, for_many=len(ranks) > 1))
            if isinstance(message, RunOperations):
                self._ids.update({item.name: item.id for item in message.operations})


def make_request(index: int) -> OperationRequest:
    shape = (64 + index, 3, 3)
    return OperationRequest(0, f"layer{index}.conv.weight", OperationKind.ALLREDUCE, DType.FLOAT32, (shape,), op=1)


def measure(size: int, num_names: int) -> list[PhaseCost]:
    logging.disable()  # of the rank that is lost
    world = SimulatedWorld(size, num_names)
    world.run()
    return world.costs


def measure_all(cases: list[tuple[int, int]], console: Console) -> list[PhaseCost]:
    """Each in a process of its own, so that the memory of one is not that of another."""
    costs: list[PhaseCost] = []
    context = multiprocessing.get_context("spawn")
    for size, num_names in cases:
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            began_s = time.monotonic()
            costs += pool.submit(measure, size, num_names).result()
            console.print(f"{size} ranks, {num_names} names: {time.monotonic() - began_s:.0f} s", style="dim")
    return costs


def exponent(before: tuple[float, float] | None, now: tuple[float, float]) -> str:
    if before is None or before[1] <= 0 or now[1] <= 0 or before[0] == now[0]:
        return ""
    return f"{math.log(now[1] / before[1]) / math.log(now[0] / before[0]):.2f}"


def render(costs: list[PhaseCost], by: str) -> Table:
    """A row per phase and case, with exponents against the row before; `by` is what grows, ranks or names."""
    table = Table("phase", by, "events", "µs/event", "CPU s", "exponent", "sent", "MB sent", "exponent", "memory MB")
    for phase in PHASES:
        before: PhaseCost | None = None
        for cost in (cost for cost in costs if cost.phase == phase):
            number = getattr(cost, by)
            cpu = exponent((getattr(before, by), before.cpu_s) if before else None, (number, cost.cpu_s))
            sent = exponent((getattr(before, by), before.sent_bytes) if before else None, (number, cost.sent_bytes))
            table.add_row(
                "" if before else phase,
                f"{number:,}",
                f"{cost.events:,}",
                f"{cost.us_per_event:,.1f}",
                f"{cost.cpu_s:.3f}",
                cpu,
                f"{cost.sent_messages:,}",
                f"{cost.sent_bytes / 1e6:,.1f}",
                sent,
                f"{cost.memory_mb:,.0f}",
            )
            before = cost
        table.add_section()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how the coordinator's costs grow with ranks and names.")
    parser.add_argument("--ranks", default="64,512,4096,16384", help="numbers of ranks")
    parser.add_argument("--names", type=int, default=161, help="named operations of a step")
    parser.add_argument("--by-names", default="", help="also measure these numbers of names, with 512 ranks")
    parser.add_argument("--json", help="write the results to this file, one JSON object per line")
    flags = parser.parse_args()
    console = Console(width=140)
    by_ranks = measure_all([(int(part), flags.names) for part in flags.ranks.split(",")], console)
    console.print(render(by_ranks, "ranks"))
    by_names: list[PhaseCost] = []
    if flags.by_names:
        by_names = measure_all([(512, int(part)) for part in flags.by_names.split(",")], console)
        console.print(render(by_names, "names"))
    if flags.json:
        with Path(flags.json).open("wb") as file:
            file.writelines(msgspec.json.encode(cost) + b"\n" for cost in [*by_ranks, *by_names])


if __name__ == "__main__":
    main()
