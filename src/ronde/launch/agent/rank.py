"""One rank of an agent: its process, what it prints, what it is handed and what it returns. Used by launch/agent.

    standard input     nothing, or its terminal, or a pipe next to that (order.piped)
    standard output    a pipe, or a terminal that leaves the bytes as they are (order.progress), or its terminal
    standard error     the same, apart; with a terminal of its own, both are one
    $RONDE_CALL_FD     order.call, up to the end of the pipe
    $RONDE_RESULT_FD   takes the result: its length (8 bytes, big endian), then so many bytes

The last two are there when the order has a call. All that a rank has printed is reported before its end is.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial

from ronde.launch.agent.orphans import OrphanKiller
from ronde.launch.agent.process import ChildProcess, ProcessSpec, describe_spawn_error, spawn
from ronde.launch.protocol import AgentMessage, FunctionResult, RankOrder, RankOutput, StdStream
from ronde.launch.tty import EOF_CHARACTER, open_pty, set_window_size, with_controlling_terminal
from ronde.net.event_loop import EventLoop, PipeReader, PipeWriter, Timer
from ronde.types import Deadline

__all__ = ["CALL_FD_VARIABLE", "RESULT_FD_VARIABLE", "RankProcess"]

CALL_FD_VARIABLE = "RONDE_CALL_FD"
RESULT_FD_VARIABLE = "RONDE_RESULT_FD"
PIPE_CLOSE_TIMEOUT_S = 0.2
"""Somebody outside of the group may hold a dead rank's pipe open: so long do we wait for its end."""
MAX_PENDING_INPUT_BYTES = 1024 * 1024
"""Most that waits for a terminal that nobody reads from; what is typed beyond is lost, as in any terminal."""
RESULT_LENGTH_BYTES = 8

_STREAMS: tuple[StdStream, ...] = ("out", "err")


class RankProcess:
    """A rank from its start, which may raise StartFailed, to its end, which `over` is told once, with the exit code."""

    def __init__(
        self,
        order: RankOrder,
        *,
        loop: EventLoop,
        orphan_killer: OrphanKiller,
        on_report: Callable[[AgentMessage], None],
        on_exit: Callable[[int], None],
    ) -> None:
        self.killed_by_agent = False
        """Whether it was us who sent SIGKILL."""
        self._loop = loop
        self._on_exit = on_exit
        self._exit_code: int | None = None
        self._drain_timer: Timer | None = None
        ends = _StdioPipes(order)
        try:
            self._process = _spawn_rank(order, ends, orphan_killer)
        except BaseException:
            ends.close_parent_fds()
            raise
        finally:
            ends.close_child_fds()
        self._output_readers = {
            stream: self._make_reader(ends.parent_fds[stream], partial(_report_output, on_report, order.rank, stream))
            for stream in _STREAMS
            if stream in ends.parent_fds
        }
        self._readers = set(self._output_readers.values())
        self._stdin_writer = PipeWriter(loop, ends.parent_fds["keyboard"]) if order.tty else None
        self._stdin_is_pipe = order.stdin_pipe
        self._has_ptys = order.tty or order.output_ptys
        self._call_writer: PipeWriter | None = None
        if order.pickled_call:
            self._call_writer = PipeWriter(loop, ends.parent_fds["call"])
            self._call_writer.write(order.pickled_call)
            self._call_writer.write_eof()
            collect = _ResultReader(lambda data: on_report(FunctionResult(order.rank, data)))
            self._readers.add(self._make_reader(ends.parent_fds["result"], collect))
        loop.add_reader(self._process.pidfd, self._handle_process_exit)

    @property
    def pid(self) -> int:
        """Of the rank's process, of its group and of its session."""
        return self._process.pid

    def signal(self, number: int) -> None:
        """To the whole group."""
        self.killed_by_agent = self.killed_by_agent or number == signal.SIGKILL
        self._process.signal(number)

    def write_input(self, data: bytes) -> None:
        """Into its terminal, if it has one; nothing is the end of the input."""
        if self._stdin_writer is None:
            return
        if self._stdin_is_pipe and not data:
            self._stdin_writer.write_eof()
        elif self._stdin_writer.pending_bytes < MAX_PENDING_INPUT_BYTES:
            self._stdin_writer.write(data or EOF_CHARACTER)

    def resize_terminal(self, rows: int, columns: int) -> None:
        """Its terminals, if it has any."""
        for reader in self._output_readers.values():
            if self._has_ptys and reader.fd >= 0:
                set_window_size(reader.fd, rows, columns)

    def set_reading_paused(self, paused: bool) -> None:
        """Leave what it prints where it is, or go on. What a dead rank has left is little, and taken all the same."""
        if self._exit_code is None:
            for reader in self._output_readers.values():
                if paused:
                    reader.pause_reading()
                else:
                    reader.resume_reading()

    def kill(self) -> None:
        """The whole group."""
        self.signal(signal.SIGKILL)

    def close(self, deadline: Deadline) -> None:
        """Kill what is left of it and free what it holds; nobody is told any more. Idempotent."""
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

    def _handle_process_exit(self) -> None:
        self._loop.remove_reader(self._process.pidfd)
        self.set_reading_paused(False)
        self._exit_code = self._process.reap()
        self._drain_timer = self._loop.call_later(PIPE_CLOSE_TIMEOUT_S, self._drain_readers)
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
    """Both ends of everything between a rank and its agent, by name."""

    def __init__(self, order: RankOrder) -> None:
        self.parent_fds: dict[str, int] = {}
        self.child_fds: dict[str, int] = {}
        try:
            if order.tty:
                self.parent_fds["out"], self.child_fds["out"] = open_pty(raw=False)
                if order.stdin_pipe:
                    self.child_fds["in"], self.parent_fds["keyboard"] = os.pipe()
                else:
                    self.parent_fds["keyboard"] = os.dup(self.parent_fds["out"])
            else:
                for stream in _STREAMS:
                    self.parent_fds[stream], self.child_fds[stream] = (
                        open_pty(raw=True) if order.output_ptys else os.pipe()
                    )
            if order.pickled_call:
                self.child_fds["call"], self.parent_fds["call"] = os.pipe()
                self.parent_fds["result"], self.child_fds["result"] = os.pipe()
        except OSError as error:
            self.close_parent_fds()
            self.close_child_fds()
            raise describe_spawn_error(error, _make_process_spec(order)) from None

    def close_parent_fds(self) -> None:
        """Nobody uses them."""
        for fd in self.parent_fds.values():
            os.close(fd)

    def close_child_fds(self) -> None:
        """The rank has its own copies."""
        for fd in self.child_fds.values():
            os.close(fd)


def _make_process_spec(order: RankOrder, **variables: str) -> ProcessSpec:
    return ProcessSpec(argv=order.argv, env={**order.env, **variables}, cwd=order.cwd or None, cpus=order.cpus)


def _spawn_rank(order: RankOrder, pipes: _StdioPipes, orphan_killer: OrphanKiller) -> ChildProcess:
    passed = (
        {CALL_FD_VARIABLE: pipes.child_fds["call"], RESULT_FD_VARIABLE: pipes.child_fds["result"]}
        if order.pickled_call
        else {}
    )
    command = _make_process_spec(order, **{name: str(fd) for name, fd in passed.items()})
    if order.tty:
        command = dataclasses.replace(command, argv=with_controlling_terminal(pipes.child_fds["out"], command.argv))
    return spawn(
        command,
        orphan_killer,
        stdin=pipes.child_fds.get("in", pipes.child_fds["out"]) if order.tty else subprocess.DEVNULL,
        stdout=pipes.child_fds["out"],
        stderr=pipes.child_fds.get("err", pipes.child_fds["out"]),
        inherited_fds=tuple(passed.values()),
    )


def _report_output(on_report: Callable[[AgentMessage], None], rank: int, stream: StdStream, data: bytes) -> None:
    on_report(RankOutput(rank, stream, data))


class _ResultReader:
    """Collects a result. One that its rank did not finish is none."""

    def __init__(self, on_result: Callable[[bytes], None]) -> None:
        self._on_result = on_result
        self._parts: list[bytes] = []
        self._num_bytes = -RESULT_LENGTH_BYTES
        """Of the result, so far."""
        self._length: int | None = None

    def __call__(self, data: bytes) -> None:
        """Some more of it. Put together once: there may be hundreds of megabytes."""
        self._parts.append(data)
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
