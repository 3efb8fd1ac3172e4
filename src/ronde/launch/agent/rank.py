"""One rank of an agent: its process, its pipes or ptys, and its result.

    standard input     empty, or the rank's pty, or a pipe beside that (order.stdin_pipe)
    standard output    a pipe; a pty that does not change the bytes (order.output_ptys); or the rank's pty (order.tty)
    standard error     the same, apart; with order.tty both are one
    $RONDE_CALL_FD     the pickled call, up to the end of the pipe
    $RONDE_RESULT_FD   takes the result: its length (8 bytes, big endian), then so many bytes

The last two exist when there is a pickled call. All output of a rank is reported before its exit.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial

import msgspec

from ronde.launch.agent.orphans import OrphanKiller
from ronde.launch.agent.process import ChildProcess, describe_spawn_error, spawn
from ronde.launch.protocol import AgentMessage, FunctionResult, RankOrder, RankOutput, StdStream
from ronde.launch.timeouts import OUTPUT_DRAIN_TIMEOUT_S
from ronde.launch.tty import EOF_CHARACTER, open_pty, set_window_size, with_controlling_terminal
from ronde.net.event_loop import EventLoop, PipeReader, PipeWriter, Timer
from ronde.types import Deadline

CALL_FD_VARIABLE = "RONDE_CALL_FD"
RESULT_FD_VARIABLE = "RONDE_RESULT_FD"
MAX_PENDING_INPUT_BYTES = 1024 * 1024
"""What is typed beyond this, into a terminal that the rank does not read from, is lost, as in any terminal."""
RESULT_LENGTH_BYTES = 8

_STREAMS: tuple[StdStream, ...] = ("out", "err")


class RankProcess:
    """A rank from its start, which may raise StartFailed, to its end: then on_exit is called with the exit code."""

    def __init__(
        self,
        order: RankOrder,
        pickled_call: bytes,
        *,
        loop: EventLoop,
        orphan_killer: OrphanKiller,
        on_report: Callable[[AgentMessage], None],
        on_exit: Callable[[int], None],
    ) -> None:
        self.killed_by_agent = False
        self._rank = order.rank
        self._loop = loop
        self._on_report = on_report
        self._on_exit = on_exit
        self._exit_code: int | None = None
        self._drain_timer: Timer | None = None
        pipes = _StdioPipes(order, has_call=bool(pickled_call))
        try:
            self._process = _spawn_rank(order, pipes, orphan_killer)
        except BaseException:
            pipes.close_parent_fds()
            raise
        finally:
            pipes.close_child_fds()
        self._output_readers = {
            stream: self._make_reader(pipes.parent_fds[stream], partial(self._report_output, stream))
            for stream in _STREAMS
            if stream in pipes.parent_fds
        }
        self._readers = set(self._output_readers.values())
        self._stdin_writer = PipeWriter(loop, pipes.parent_fds["in"]) if order.tty else None
        self._stdin_is_pipe = order.stdin_pipe
        self._has_ptys = order.tty or order.output_ptys
        self._call_writer: PipeWriter | None = None
        if pickled_call:
            self._call_writer = PipeWriter(loop, pipes.parent_fds["call"])
            self._call_writer.write(pickled_call)
            self._call_writer.write_eof()
            result_reader = _ResultReader(lambda data: on_report(FunctionResult(order.rank, data)))
            self._readers.add(self._make_reader(pipes.parent_fds["result"], result_reader))
        loop.add_reader(self._process.pidfd, self._handle_process_exit)

    @property
    def pid(self) -> int:
        """The process id, which is also that of the rank's process group and session."""
        return self._process.pid

    def signal(self, number: int) -> None:
        """Send a signal to the whole group."""
        self.killed_by_agent = self.killed_by_agent or number == signal.SIGKILL
        self._process.signal(number)

    def write_input(self, data: bytes) -> None:
        """Write into the rank's terminal, if it has one; no data is the end of the input."""
        if self._stdin_writer is None:
            return
        if self._stdin_is_pipe and not data:
            self._stdin_writer.write_eof()
        elif self._stdin_writer.pending_bytes < MAX_PENDING_INPUT_BYTES:
            self._stdin_writer.write(data or EOF_CHARACTER)

    def resize_terminal(self, rows: int, columns: int) -> None:
        for reader in self._output_readers.values():
            if self._has_ptys and reader.fd >= 0:
                set_window_size(reader.fd, rows, columns)

    def set_reading_paused(self, paused: bool) -> None:
        """Stop reading output, so that the rank waits, or go on. What little a dead rank has left is read anyway."""
        if self._exit_code is None:
            for reader in self._output_readers.values():
                if paused:
                    reader.pause_reading()
                else:
                    reader.resume_reading()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def close(self, deadline: Deadline) -> None:
        """Kill the rank if it still runs, and free everything; nothing is reported any more. Idempotent."""
        self._close_pipes()
        self._readers.clear()
        if self._exit_code is None and self._process.pidfd >= 0:
            self._loop.remove_reader(self._process.pidfd)
            self.kill()
            if self._process.wait(deadline):
                self._exit_code = self._process.reap()
            self._process.close()

    def _make_reader(self, fd: int, on_data: Callable[[bytes], None]) -> PipeReader:
        reader = PipeReader(self._loop, fd, on_data, lambda: self._handle_reader_closed(reader))
        return reader

    def _report_output(self, stream: StdStream, data: bytes) -> None:
        self._on_report(RankOutput(self._rank, stream, data))

    def _handle_process_exit(self) -> None:
        self._loop.remove_reader(self._process.pidfd)
        self.set_reading_paused(False)
        self._exit_code = self._process.reap()
        self._drain_timer = self._loop.call_later(OUTPUT_DRAIN_TIMEOUT_S, self._drain_readers)
        self._finish_if_done()

    def _handle_reader_closed(self, reader: PipeReader) -> None:
        self._readers.discard(reader)
        self._finish_if_done()

    def _drain_readers(self) -> None:
        for reader in [*self._readers]:
            reader.read_remaining()

    def _finish_if_done(self) -> None:
        if self._exit_code is not None and not self._readers:
            self._close_pipes()
            self._on_exit(self._exit_code)

    def _close_pipes(self) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        for pipe in (*self._readers, self._stdin_writer, self._call_writer):
            if pipe is not None:
                pipe.close()


class _StdioPipes:
    """Both ends of all pipes and ptys between a rank and its agent, by name."""

    def __init__(self, order: RankOrder, *, has_call: bool) -> None:
        self.parent_fds: dict[str, int] = {}
        self.child_fds: dict[str, int] = {}
        try:
            if order.tty:
                self.parent_fds["out"], self.child_fds["out"] = open_pty(raw=False)
                if order.stdin_pipe:
                    self.child_fds["in"], self.parent_fds["in"] = os.pipe()
                else:
                    self.parent_fds["in"] = os.dup(self.parent_fds["out"])
            else:
                for stream in _STREAMS:
                    self.parent_fds[stream], self.child_fds[stream] = (
                        open_pty(raw=True) if order.output_ptys else os.pipe()
                    )
            if has_call:
                self.child_fds["call"], self.parent_fds["call"] = os.pipe()
                self.parent_fds["result"], self.child_fds["result"] = os.pipe()
        except OSError as error:
            self.close_parent_fds()
            self.close_child_fds()
            raise describe_spawn_error(error, order) from None

    def close_parent_fds(self) -> None:
        for fd in self.parent_fds.values():
            os.close(fd)

    def close_child_fds(self) -> None:
        for fd in self.child_fds.values():
            os.close(fd)


def _spawn_rank(order: RankOrder, pipes: _StdioPipes, orphan_killer: OrphanKiller) -> ChildProcess:
    inherited = {
        variable: pipes.child_fds[name]
        for variable, name in ((CALL_FD_VARIABLE, "call"), (RESULT_FD_VARIABLE, "result"))
        if name in pipes.child_fds
    }
    out = pipes.child_fds["out"]
    order = msgspec.structs.replace(
        order,
        argv=with_controlling_terminal(out, order.argv) if order.tty else order.argv,
        env={**order.env, **{variable: str(fd) for variable, fd in inherited.items()}},
    )
    return spawn(
        order,
        orphan_killer,
        stdin=pipes.child_fds.get("in", out) if order.tty else subprocess.DEVNULL,
        stdout=out,
        stderr=pipes.child_fds.get("err", out),
        inherited_fds=tuple(inherited.values()),
    )


class _ResultReader:
    """Collects a result, and passes it on when it is complete."""

    def __init__(self, on_result: Callable[[bytes], None]) -> None:
        self._on_result = on_result
        self._parts: list[bytes] = []
        self._num_bytes = -RESULT_LENGTH_BYTES
        """Bytes of the result so far."""
        self._length: int | None = None

    def __call__(self, data: bytes) -> None:
        self._parts.append(data)  # joined once: there may be hundreds of megabytes
        self._num_bytes += len(data)
        if self._length is None and self._num_bytes >= 0:
            begin = b"".join(self._parts)
            self._length, self._parts = (
                int.from_bytes(begin[:RESULT_LENGTH_BYTES], "big"),
                [begin[RESULT_LENGTH_BYTES:]],
            )
        if self._length is not None and self._num_bytes >= self._length:
            result, self._parts = b"".join(self._parts), []
            self._on_result(result)
