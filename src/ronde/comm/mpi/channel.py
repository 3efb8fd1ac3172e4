"""One channel of the mpi backend: a communicator of its own, calls in order, deadlines, aborts. Made by mpi/backend.

A collective call is a *round*: the members exchange headers, compare them, and move the data. A call that they agreed
on before goes without headers. Sends and receives wait for nothing but their other side.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ronde.comm.backend import Call, ChannelSpec, Looking, Outcome, Ticket
from ronde.comm.buffers import address
from ronde.comm.mpi.executor import Executor
from ronde.comm.mpi.header import HEADER_BYTES, Header, agreed, check_pair
from ronde.comm.mpi.moves import Moves, check_call
from ronde.comm.mpi.notices import NoticeBoard, Saying
from ronde.comm.mpi.standing import NAMING_S, Lane, Standing, Wait, lane_of
from ronde.errors import Mismatch, OperationTimeout, PeerLost, RondeError, RoundEnded
from ronde.types import Deadline, Kind

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiChannel"]

TAG_SENDER = 2
TAG_RECEIVER = 3

SMALL_BYTES = 64 * 1024
"""A trusted call up to this size goes without asking whether everybody is there: the question would take as long."""

CLOSE_S = 5.0
ALIGNMENT = 64


class MpiChannel:
    """One total order of collective calls, over a communicator with the members in their order. `retire` takes the
    communicator when the channel was closed in good order."""

    def __init__(self, spec: ChannelSpec, comm: MPI.Intracomm, retire: Callable[[NoticeBoard], None]) -> None:
        self.spec = spec
        self._comm = comm
        self._standing = Standing(spec, NoticeBoard(comm))
        self._bucket = _aligned_zeros(spec.bucket_bytes)
        self._lock = threading.Lock()
        self._lanes: dict[Lane, Executor] = {}
        self._waits: dict[Lane, Wait] = {}
        self._retire = retire
        self._closed = False

    def run(self, call: Call, deadline: Deadline) -> Outcome:
        """Execute the call and wait for it."""
        try:
            return self._executor(call).run(call, deadline)
        except OperationTimeout as error:  # perhaps of a call that was still in the queue
            self._give_up(error)
            raise

    def submit(self, call: Call, deadline: Deadline) -> Ticket:
        """Queue the call behind those before it."""
        return self._executor(call).submit(call, deadline)

    def bucket(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """My bucket memory."""
        return self._bucket

    def look(self) -> Looking | None:
        """The oldest call under way, or None when idle."""
        oldest: Looking | None = None
        for lane, executor in list(self._lanes.items()):
            current, wait = executor.current(), self._waits.get(lane)
            if current is not None and (oldest is None or current[1] < oldest.since_ns):
                oldest = Looking(current[0].text, current[1], wait.missing() if wait is not None else ())
        return oldest

    def abort(self, *, lost: int = -1, why: str) -> None:
        """End all waits at once, here and at the other members. The first abort wins; safe from any thread."""
        if not self._closed:
            self._standing.abort(lost, why)

    def close(self) -> None:
        """Abort what is under way and free everything. Idempotent."""
        from mpi4py import MPI

        with self._lock:
            if self._closed:
                return
            self._closed = True
        if MPI.Is_finalized():
            return
        executors = list(self._lanes.values())
        why = f"rank {self._standing.rank} has closed channel {self.spec.id}"
        if any(executor.busy() for executor in executors):
            self._standing.abort(-1, why)
        elif self._standing.aborted is None:
            self._standing.tell(Saying.CLOSED, why=why)
        deadline = Deadline(CLOSE_S)
        idle = all([executor.close(deadline) for executor in executors])
        # A communicator with calls that never complete cannot be freed; it stays with them until the process ends.
        if idle and not self._standing.broken and self._standing.aborted is None:
            self._retire(self._standing.board)

    def _executor(self, call: Call) -> Executor:
        """The executor of the call's lane; refuses calls that make no sense before anything is sent."""
        check_call(call, len(self.spec.members), self.spec.me)
        lane = lane_of(call)
        with self._lock:
            if self._closed:
                raise RoundEnded(f"{call.text}: channel {self.spec.id} is closed")
            if lane not in self._lanes:
                self._lanes[lane] = Executor(
                    f"mpi-{self.spec.id}", self._execute, explain=self._explain, grace_s=2 * NAMING_S
                )
            return self._lanes[lane]

    def _execute(self, call: Call, deadline: Deadline) -> Outcome:
        from mpi4py import MPI

        start_ns = time.monotonic_ns()
        wait = self._waits[lane_of(call)] = Wait(self._standing, call, deadline)
        try:
            wait.check()
            self._rounds(wait)
        except MPI.Exception as error:
            self._standing.broken = True
            failure = self._failure(error, call)
            self._give_up(failure)
            raise failure from error
        except BaseException as error:
            if self._standing.broken or isinstance(error, OperationTimeout):
                self._give_up(error)
            raise
        finally:
            del self._waits[lane_of(call)]
        end_ns = time.monotonic_ns()
        return Outcome(start_ns, wait.ready_ns or end_ns, end_ns, "mpi")

    def _explain(self, call: Call) -> str:
        """Behind which call this one is, if it has not begun, and for whom both wait."""
        wait = self._waits.get(lane_of(call))
        if wait is None:
            return ""
        return f"{'' if wait.call is call else f', behind {wait.call.text}'}{wait.for_whom()}"

    def _give_up(self, error: BaseException) -> None:
        """Something is left half done: nobody can use this channel any more."""
        if isinstance(error, PeerLost):
            self._standing.abort(error.peer, error.why)
        else:
            self._standing.abort(-1, f"rank {self._standing.rank} gave up: {error}")

    def _failure(self, error: MPI.Exception, call: Call) -> RondeError:
        from mpi4py import MPI

        if error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING):
            failed = self._comm.Get_failed().Translate_ranks(None, self._comm.Get_group())
            peer = self.spec.members[failed[0]] if failed else -1
            return PeerLost(rank=self._standing.rank, peer=peer, op=call.text, why="its process failed, says MPI")
        return RondeError(f"MPI failed during {call.text}: {error.Get_error_string()}")

    # --- rounds -------------------------------------------------------------------------------------------------

    def _rounds(self, wait: Wait) -> None:
        """Do the call: one round, or for a member that has joined as many as the others want."""
        call, lane = wait.call, lane_of(wait.call)
        moves = Moves(self._comm, wait.until)
        while True:
            try:
                header = self._meet(wait)
            except Mismatch:  # the same for all members: the round is over, the channel goes on
                self._standing.num_finished[lane] += 1
                raise
            if call.kind is not Kind.JOIN:
                moves.move(call)
            elif header is not None:
                moves.allreduce_zeros(header.call(), header.count)
            self._standing.num_finished[lane] += 1
            if call.kind is not Kind.JOIN or header is None:
                return
            wait.next_round()

    def _meet(self, wait: Wait) -> Header | None:
        """Wait for everybody and compare what they want. What that is; None when it is known, or all have joined.

        Members agree on a call by name without those that joined; but those keep to a plan, so planned calls must ask.
        """
        call, found = wait.call, None
        if call.kind in (Kind.SEND, Kind.RECEIVE):
            if not call.trusted:
                self._compare_pair(wait)
        elif call.kind is Kind.JOIN or not call.trusted or self.spec.bucket_bytes:
            mine = Header.of(call).encode()
            everybody = bytearray(len(mine) * len(self.spec.members))
            wait.until([self._comm.Iallgather(mine, everybody)])
            wait.ready()
            found = agreed(bytes(everybody), self.spec.members)
        elif not self._is_small(call):
            wait.until([self._comm.Ibarrier()])
            wait.ready()
        return found

    def _compare_pair(self, wait: Wait) -> None:
        call = wait.call
        mine, theirs = Header.of(call), bytearray(HEADER_BYTES)
        sending = call.kind is Kind.SEND
        my_tag, their_tag = (TAG_SENDER, TAG_RECEIVER) if sending else (TAG_RECEIVER, TAG_SENDER)
        out = self._comm.Isend(mine.encode(), call.peer, my_tag)
        wait.until([out, self._comm.Irecv(theirs, call.peer, their_tag)])
        wait.ready()
        me, peer = (self._standing.rank, mine), (self.spec.members[call.peer], Header.decode(bytes(theirs)))
        check_pair(*((me, peer) if sending else (peer, me)))

    def _is_small(self, call: Call) -> bool:
        """Equal on all members, so never by what one of them alone gives or gets."""
        if call.kind in (Kind.BARRIER, Kind.ALLTOALL):
            return False
        count = sum(call.counts) if call.counts is not None else sum(part.count for part in call.parts)
        return count * call.dtype.num_bytes <= SMALL_BYTES


def _aligned_zeros(num_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    room = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    start = -address(room) % ALIGNMENT
    return room[start : start + num_bytes]
