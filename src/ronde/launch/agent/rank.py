"""One rank as seen by its agent: its process, its pipes or ptys, and its result.

    standard input     empty, or the rank's pty, or a pipe beside that (order.stdin_pipe)
    standard output    a pipe; a pty that does not change the bytes (order.output_ptys); or the rank's pty (order.tty)
    standard error     the same, apart; with order.tty both are one
    $RONDE_CALL_FD     the pickled call, up to the end of the pipe
    $RONDE_RESULT_FD   takes the result: its length (8 bytes, big endian), then so many bytes
    $RONDE_MESSAGE_FDS two descriptors, for messages to the rank and from it (order.message_pipes): frames, each with
                       its length (4 bytes, big endian) first; rank_messages is the other end

Call and result exist when there is a pickled call. All output of a rank is reported before its exit, and what it has
printed before it sent a message is reported before the message.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import struct
import subprocess
from collections.abc import Callable
from functools import partial

from ronde.errors import StartFailed
from ronde.launch.agent.orphans import OrphanKiller
from ronde.launch.protocol import AgentMessage, FunctionResult, RankMessage, RankOrder, RankOutput, StdStream
from ronde.launch.timeouts import OUTPUT_DRAIN_TIMEOUT_S
from ronde.launch.tty import EOF_CHARACTER, open_pty, set_window_size, with_controlling_terminal
from ronde.net.event_loop import EventLoop, PipeReader, PipeWriter, Timer
from ronde.types import Deadline

CALL_FD_VARIABLE = "RONDE_CALL_FD"
RESULT_FD_VARIABLE = "RONDE_RESULT_FD"
MAX_PENDING_INPUT_BYTES = 1024 * 1024
"""What is typed beyond this, into a terminal that the rank does not read from, is lost, as in any terminal."""
RESULT_LENGTH_BYTES = 8
MESSAGE_FDS_VARIABLE = "RONDE_MESSAGE_FDS"
MESSAGE_LENGTH = struct.Struct("!I")

LIMIT_ADVICE = {
    errno.E2BIG: "its arguments and its environment are larger than the system allows; pass large values by file",
    errno.EAGAIN: "no more processes may be started; raise the limit (ulimit -u), or start fewer ranks",
    errno.ENOMEM: "there is no memory for another process; start fewer ranks, or use a larger host",
    errno.EMFILE: "no more files may be open; raise the limit (ulimit -n), or start fewer ranks",
    errno.ENFILE: "no more files may be open on the whole host; raise fs.file-max, or start fewer ranks",
}

_STREAMS: tuple[StdStream, ...] = ("out", "err")


class CommandNotExecutable(StartFailed):
    """The command exists but is no program that may be run."""


class RankProcess:
    """A rank from its start, which may raise StartFailed, to its end: then on_exit is called with the exit code.

    Its process leads a session and a process group, and keeps its process id until it is reaped. So until then what is
    left of the group can be killed without hitting an unrelated process.
    """

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
        self._order = order
        self._loop = loop
        self._orphan_killer = orphan_killer
        self._on_report = on_report
        self._on_exit = on_exit
        self._exit_code: int | None = None
        self._drain_timer: Timer | None = None
        parent_fds: dict[str, int] = {}
        child_fds: dict[str, int] = {}
        try:
            _open_pipes(order, bool(pickled_call), parent_fds, child_fds)
            self._popen = _spawn(order, child_fds, orphan_killer)
            self.pid = self._popen.pid
            self._pidfd = self._watch_process()
        except BaseException as error:
            for fd in parent_fds.values():
                os.close(fd)
            if isinstance(error, OSError | ValueError):
                raise describe_spawn_error(error, order) from None
            raise
        finally:
            for fd in child_fds.values():
                os.close(fd)
        loop.add_reader(self._pidfd, self._handle_process_exit)
        self._readers: set[PipeReader] = set()
        self._output_readers = [
            self._add_reader(parent_fds[stream], partial(self._report_output, stream))
            for stream in _STREAMS
            if stream in parent_fds
        ]
        self._stdin_writer = PipeWriter(loop, parent_fds["in"]) if order.tty else None
        self._call_writer: PipeWriter | None = None
        self._result = bytearray()
        if pickled_call:
            self._call_writer = PipeWriter(loop, parent_fds["call"])
            self._call_writer.write(pickled_call)
            self._call_writer.write_eof()
            self._add_reader(parent_fds["result"], self._result.extend)
        self._message_writer: PipeWriter | None = None
        self._message_bytes = bytearray()
        if order.message_pipes:
            self._message_writer = PipeWriter(loop, parent_fds["messages_in"])
            self._add_reader(parent_fds["messages_out"], self._report_messages)

    def signal(self, number: int) -> None:
        """Send a signal to the whole group."""
        self.killed_by_agent = self.killed_by_agent or number == signal.SIGKILL
        self._signal_group(number)

    def write_input(self, data: bytes) -> None:
        """Write into the rank's terminal, if it has one; no data is the end of the input."""
        if self._stdin_writer is None:
            return
        if self._order.stdin_pipe and not data:
            self._stdin_writer.write_eof()
        elif self._stdin_writer.pending_bytes < MAX_PENDING_INPUT_BYTES:
            self._stdin_writer.write(data or EOF_CHARACTER)

    def write_message(self, data: bytes) -> None:
        """Write a message for the rank, if it has pipes for messages."""
        if self._message_writer is not None:
            self._message_writer.write(MESSAGE_LENGTH.pack(len(data)) + data)

    def resize_terminal(self, rows: int, columns: int) -> None:
        for reader in self._output_readers:
            if (self._order.tty or self._order.output_ptys) and reader.fd >= 0:
                set_window_size(reader.fd, rows, columns)

    def set_reading_paused(self, paused: bool) -> None:
        """Stop reading output, so that the rank waits, or go on. What little a dead rank has left is read anyway."""
        if self._exit_code is None:
            for reader in self._output_readers:
                if paused:
                    reader.pause_reading()
                else:
                    reader.resume_reading()

    def close(self, deadline: Deadline) -> None:
        """Kill the rank if it still runs, and free everything; nothing is reported any more. Idempotent."""
        self._close_pipes()
        self._readers.clear()
        if self._pidfd >= 0:
            self.signal(signal.SIGKILL)
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            has_ended = poll.poll(deadline.remaining_s * 1000)
            self._close_pidfd()
            if has_ended:
                self._reap()

    def _watch_process(self) -> int:
        self._orphan_killer.watch_group(self.pid)
        try:
            return os.pidfd_open(self.pid)
        except OSError as error:
            self._reap()
            raise StartFailed(f"process {self.pid} cannot be watched ({error.strerror}); raise ulimit -n") from None

    def _signal_group(self, number: int) -> None:
        if self._exit_code is None:
            # It ended in between; or all that is left runs as another user.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _reap(self) -> None:
        """Kill what is left of the group and get the leader's exit code."""
        self._signal_group(signal.SIGKILL)
        self._orphan_killer.forget_group(self.pid)
        self._exit_code = self._popen.wait()

    def _close_pidfd(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1

    def _add_reader(self, fd: int, on_data: Callable[[bytes], None]) -> PipeReader:
        def on_closed() -> None:
            self._readers.discard(reader)
            self._finish_if_done()

        reader = PipeReader(self._loop, fd, on_data, on_closed)
        self._readers.add(reader)
        return reader

    def _report_output(self, stream: StdStream, data: bytes) -> None:
        self._on_report(RankOutput(self._order.rank, stream, data))

    def _report_messages(self, data: bytes) -> None:
        for reader in self._output_readers:
            reader.read_available()
        self._message_bytes += data
        while len(self._message_bytes) >= MESSAGE_LENGTH.size:
            end = MESSAGE_LENGTH.size + MESSAGE_LENGTH.unpack_from(self._message_bytes)[0]
            if end > len(self._message_bytes):
                break
            message = bytes(self._message_bytes[MESSAGE_LENGTH.size : end])
            del self._message_bytes[:end]
            self._on_report(RankMessage(self._order.rank, message))

    def _handle_process_exit(self) -> None:
        self._close_pidfd()
        self.set_reading_paused(False)
        self._reap()
        self._drain_timer = self._loop.call_later(OUTPUT_DRAIN_TIMEOUT_S, self._drain_readers)
        self._finish_if_done()

    def _drain_readers(self) -> None:
        for reader in [*self._readers]:
            reader.read_remaining()

    def _finish_if_done(self) -> None:
        if self._exit_code is None or self._readers:
            return
        self._close_pipes()
        length = int.from_bytes(self._result[:RESULT_LENGTH_BYTES], "big")
        del self._result[:RESULT_LENGTH_BYTES]
        if length and len(self._result) == length:
            self._on_report(FunctionResult(self._order.rank, bytes(self._result)))
        self._on_exit(self._exit_code)

    def _close_pipes(self) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        for pipe in (*self._readers, self._stdin_writer, self._call_writer, self._message_writer):
            if pipe is not None:
                pipe.close()


def _open_pipes(order: RankOrder, has_call: bool, parent_fds: dict[str, int], child_fds: dict[str, int]) -> None:
    """Add both ends of all pipes and ptys between a rank and its agent, by name."""
    if order.tty:
        parent_fds["out"], child_fds["out"] = open_pty(raw=False)
        if order.stdin_pipe:
            child_fds["in"], parent_fds["in"] = os.pipe()
        else:
            parent_fds["in"] = os.dup(parent_fds["out"])
    else:
        for stream in _STREAMS:
            parent_fds[stream], child_fds[stream] = open_pty(raw=True) if order.output_ptys else os.pipe()
    if has_call:
        child_fds["call"], parent_fds["call"] = os.pipe()
        parent_fds["result"], child_fds["result"] = os.pipe()
    if order.message_pipes:
        child_fds["messages_in"], parent_fds["messages_in"] = os.pipe()
        parent_fds["messages_out"], child_fds["messages_out"] = os.pipe()


def _spawn(order: RankOrder, fds: dict[str, int], orphan_killer: OrphanKiller) -> subprocess.Popen[bytes]:
    inherited = {
        variable: fds[name]
        for variable, name in ((CALL_FD_VARIABLE, "call"), (RESULT_FD_VARIABLE, "result"))
        if name in fds
    }
    variables = {name: str(fd) for name, fd in inherited.items()}
    message_fds = [fds[name] for name in ("messages_in", "messages_out") if name in fds]
    if message_fds:
        variables[MESSAGE_FDS_VARIABLE] = ",".join(map(str, message_fds))
    out = fds["out"]
    before = os.sched_getaffinity(0)
    try:
        if order.cpus:  # a child inherits the affinity of the thread that starts it; other threads keep theirs
            try:
                os.sched_setaffinity(0, order.cpus)
            except (OSError, ValueError, OverflowError):
                wanted, allowed = (", ".join(map(str, sorted(each))) for each in (order.cpus, before))
                raise StartFailed(
                    f"it cannot be bound to core {wanted}: host {os.uname().nodename} lets us use {allowed}; "
                    "run without core binding"
                ) from None
        return subprocess.Popen(
            with_controlling_terminal(out, order.argv) if order.tty else order.argv,
            env={**order.env, **variables, **orphan_killer.cookie},
            cwd=order.cwd or None,
            stdin=fds.get("in", out) if order.tty else subprocess.DEVNULL,
            stdout=out,
            stderr=fds.get("err", out),
            pass_fds=(*inherited.values(), *message_fds),
            start_new_session=True,
        )
    finally:
        if order.cpus:
            os.sched_setaffinity(0, before)


def describe_spawn_error(error: OSError | ValueError, order: RankOrder) -> StartFailed:
    """Make the exception that says why a process could not be started, and what to do."""
    if not isinstance(error, OSError):  # a null byte, or text that cannot be encoded
        return StartFailed(f"its command or its environment cannot be handed to a process: {error}")
    host = f"host {os.uname().nodename}"
    if error.errno in LIMIT_ADVICE:
        return StartFailed(f"{host}: {LIMIT_ADVICE[error.errno]}")
    if order.cwd and error.filename == order.cwd:
        problem = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be entered ({error.strerror})"
        return StartFailed(f"the working directory {order.cwd} {problem} on {host}; choose one that every host has")
    name = order.argv[0] if order.argv else ""
    if isinstance(error, FileNotFoundError):
        return StartFailed(
            f"there is no command {name!r} on {host}; give its full path, or check PATH there "
            "(if it is a script, the interpreter in its first line may be missing)"
        )
    if isinstance(error, PermissionError):
        return CommandNotExecutable(
            f"{name!r} may not be executed on {host}; is it a script? start it with python, or chmod +x it"
        )
    if error.errno == errno.ENOEXEC:
        return CommandNotExecutable(
            f"{name!r} is no program for {host}; is it a script? start it with python, or begin it with #!"
        )
    return StartFailed(f"{name!r} could not be started on {host}: {error.strerror or error}")
