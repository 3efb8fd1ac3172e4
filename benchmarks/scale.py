"""What thousands of ranks cost the coordinator, and how these costs grow: a simulated world.

    python benchmarks/scale.py --ranks 64,512,4096,16384 --json scale.jsonl
    python benchmarks/scale.py --ranks "" --connections 64,512

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

With --connections it counts the sockets to ranks of other hosts, of the rank that has most of them. All ranks are
threads of one process here, and run the calls of a training with one optimizer on real channels of the native library,
which ask for links as they do between real hosts.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import itertools
import logging
import math
import multiprocessing
import os
import random
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from ronde.comm.backends.base import ChannelSpec
from ronde.comm.backends.native import NativeChannel
from ronde.comm.backends.native_library import EventKind, LinkKind, load_library, make_channel_params, open_channel
from ronde.comm.backends.native_links import EVENT
from ronde.comm.call import Call, Span
from ronde.coordinator.coordinator import CoordinatorCore, Event, MessageReceived, ProcessExited, RankConnected
from ronde.coordinator.negotiation import Send
from ronde.net.control_connection import ControlServer, _KnownClient
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
from ronde.net.open_files import raise_open_files_limit
from ronde.net.shared_memory import create_shared_memory
from ronde.observe.activity import ActivitySample
from ronde.observe.stragglers import ArrivalSample, max_samples_per_s
from ronde.settings import Settings
from ronde.types import Deadline, DType, Member, OperationKind

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


class SocketCount(msgspec.Struct, frozen=True):
    """One line of the JSON, with --connections."""

    phase: str
    ranks: int
    hosts: int
    most_sockets: int
    """To other hosts, of the rank that has most, after this phase and those before it."""


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


class SimulatedLinks:
    """Opens the links that channels of this process ask for, and counts the sockets of each rank."""

    def __init__(self, size: int, num_ring_sockets: int) -> None:
        self.channels: list[NativeChannel] = []
        """The number of a channel is its index; that of rank r is `size` after that of rank r on the channel before."""
        self.num_sockets = [0] * size
        self._size = size
        self._num_ring_sockets = num_ring_sockets
        self._reader, self._writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def events_fd(self) -> int:
        return self._writer.fileno()

    def close(self) -> None:
        self._writer.shutdown(socket.SHUT_WR)
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def _serve(self) -> None:
        while record := self._reader.recv(EVENT.size):
            number, kind, member, link_kind, *_ = EVENT.unpack(record)
            assert kind == EventKind.LINK_WANTED, "a call has failed"
            rank = number % self._size
            num = self._num_ring_sockets if link_kind == LinkKind.RING else 1
            pairs = [socket.socketpair() for _ in range(num)]
            ends = [[pair[side].detach() for pair in pairs] for side in (0, 1)]
            self.channels[number].add_link(member, link_kind, True, ends[0])
            self.channels[number - rank + member].add_link(rank, link_kind, False, ends[1])
            self.num_sockets[rank] += num
            self.num_sockets[member] += num


def count_sockets(size: int) -> list[SocketCount]:
    """Run the calls of a training on channels of so many ranks."""
    raise_open_files_limit()
    settings = Settings()
    hosts = [rank // RANKS_PER_HOST for rank in range(size)]
    links = SimulatedLinks(size, settings.num_sockets)
    counts: list[SocketCount] = []
    # Small slots, or all of them together would need gigabytes; large enough for an algorithm for many bytes.
    slot_bytes = RANKS_PER_HOST * 72 * 1024
    with ExitStack() as opened:
        opened.callback(links.close)
        for name in ("ordered", "negotiated", "plan"):
            segments: dict[int, int] = {}
            for rank, host in enumerate(hosts):
                params = make_channel_params(hosts, rank, slot_bytes, 16 * 1024, 0)
                if host not in segments:
                    num_bytes = load_library().rd_segment_bytes(params)
                    segments[host] = create_shared_memory(f"scale {name}", num_bytes)
                handle = open_channel(params, segments[host], links.events_fd, len(links.channels))
                spec = ChannelSpec(id=name, members=tuple(range(size)), member_index=rank)
                links.channels.append(NativeChannel(spec, handle, ""))
                opened.callback(links.channels[-1].close)
            for segment in segments.values():
                os.close(segment)
        array = np.zeros(1 << 20, np.float32)  # of all ranks: what they compute does not matter
        pool = opened.enter_context(concurrent.futures.ThreadPoolExecutor(size))

        def run(phase: str, channel: int, call: Call) -> None:
            for _ in pool.map(lambda each: each.run(call, Deadline(600)), links.channels[channel * size :][:size]):
                pass
            counts.append(SocketCount(phase, size, hosts[-1] + 1, max(links.num_sockets)))

        def make_call(kind: OperationKind, count: int, *, pre_agreed: bool = False, **more: Any) -> Call:
            spans = (Span(array.ctypes.data, array.ctypes.data, count),)
            return Call(kind, DType.FLOAT32, spans=spans, description=kind.name, pre_agreed=pre_agreed, **more)

        run("broadcast of the parameters", 0, make_call(OperationKind.BROADCAST, 100_000, peer=0))
        run("agreement on the buckets", 1, make_call(OperationKind.ALLGATHER, 4, pre_agreed=True, counts=(4,) * size))
        run("a small bucket", 2, make_call(OperationKind.ALLREDUCE, 100, pre_agreed=True))
        run("a large bucket", 2, make_call(OperationKind.ALLREDUCE, array.size, pre_agreed=True))
        run("an allreduce without a name", 0, make_call(OperationKind.ALLREDUCE, 100))
    return counts


def render_sockets(counts: list[SocketCount]) -> Table:
    table = Table("ranks", "hosts", "after", "sockets of the rank with most")
    for count in counts:
        table.add_row(f"{count.ranks:,}", f"{count.hosts:,}", count.phase, f"{count.most_sockets:,}")
    return table


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
    parser.add_argument("--connections", default="", help="also count the sockets of so many ranks")
    flags = parser.parse_args()
    console = Console(width=140)
    by_ranks = measure_all([(int(part), flags.names) for part in flags.ranks.split(",") if part], console)
    console.print(render(by_ranks, "ranks"))
    sockets = [count for part in flags.connections.split(",") if part for count in count_sockets(int(part))]
    if sockets:
        console.print(render_sockets(sockets))
    by_names: list[PhaseCost] = []
    if flags.by_names:
        by_names = measure_all([(512, int(part)) for part in flags.by_names.split(",")], console)
        console.print(render(by_names, "names"))
    if flags.json:
        with Path(flags.json).open("wb") as file:
            file.writelines(msgspec.json.encode(cost) + b"\n" for cost in [*by_ranks, *by_names, *sockets])


if __name__ == "__main__":
    main()
