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

from ronde.launch.guard import Guard
from ronde.launch.loop import Loop, Timer
from ronde.launch.messages import FromAgent, Output, RankOrder, Result, Stream
from ronde.launch.pipes import Reader, Writer
from ronde.launch.process import Command, Process, explain, start
from ronde.launch.terminal import END, open_terminal, resize, taking
from ronde.types import Deadline

__all__ = ["CALL_FD", "RESULT_FD", "Rank"]

CALL_FD = "RONDE_CALL_FD"
RESULT_FD = "RONDE_RESULT_FD"
LINGER_S = 0.2
"""Somebody outside of the group may hold a dead rank's pipe open: so long do we wait for its end."""
TYPED_BYTES = 1024 * 1024
"""Most that waits for a terminal that nobody reads from; what is typed beyond is lost, as in any terminal."""
LENGTH_BYTES = 8

_STREAMS: tuple[Stream, ...] = ("out", "err")


class Rank:
    """A rank from its start, which may raise StartFailed, to its end, which `over` is told once, with the exit code."""

    def __init__(
        self,
        order: RankOrder,
        *,
        loop: Loop,
        guard: Guard,
        report: Callable[[FromAgent], None],
        over: Callable[[int], None],
    ) -> None:
        self.killed = False
        """Whether it was us who sent SIGKILL."""
        self._loop = loop
        self._over = over
        self._code: int | None = None
        self._cut: Timer | None = None
        ends = _Ends(order)
        try:
            self._process = _start(order, ends, guard)
        except BaseException:
            ends.close_ours()
            raise
        finally:
            ends.close_theirs()
        self._printed = {
            stream: self._reader(ends.ours[stream], partial(_report_output, report, order.rank, stream))
            for stream in _STREAMS
            if stream in ends.ours
        }
        self._readers = set(self._printed.values())
        self._keyboard = Writer(loop, ends.ours["keyboard"]) if order.terminal else None
        self._piped = order.piped
        self._has_terminals = order.terminal or order.progress
        self._call: Writer | None = None
        if order.call:
            self._call = Writer(loop, ends.ours["call"])
            self._call.write(order.call)
            self._call.finish()
            collect = _Collector(lambda data: report(Result(order.rank, data)))
            self._readers.add(self._reader(ends.ours["result"], collect))
        loop.watch(self._process.fd, self._process_ended)

    @property
    def pid(self) -> int:
        """Of the rank's process, of its group and of its session."""
        return self._process.pid

    def signal(self, number: int) -> None:
        """To the whole group."""
        self.killed = self.killed or number == signal.SIGKILL
        self._process.signal(number)

    def type(self, data: bytes) -> None:
        """Into its terminal, if it has one; nothing is the end of the input."""
        if self._keyboard is None:
            return
        if self._piped and not data:
            self._keyboard.finish()
        elif self._keyboard.num_waiting_bytes < TYPED_BYTES:
            self._keyboard.write(data or END)

    def resize(self, rows: int, columns: int) -> None:
        """Its terminals, if it has any."""
        for reader in self._printed.values():
            if self._has_terminals and reader.fd >= 0:
                resize(reader.fd, rows, columns)

    def pause(self, on: bool) -> None:
        """Leave what it prints where it is, or go on. What a dead rank has left is little, and taken all the same."""
        if self._code is None:
            for reader in self._printed.values():
                reader.pause(on)

    def kill(self) -> None:
        """The whole group."""
        self.signal(signal.SIGKILL)

    def close(self, deadline: Deadline) -> None:
        """Kill what is left of it and free what it holds; nobody is told any more. Idempotent."""
        self._release()
        self._readers.clear()
        if self._code is None and self._process.fd >= 0:
            self._loop.unwatch(self._process.fd)
            self.kill()
            if self._process.ends(deadline):
                self._code = self._process.reap()
            self._process.close()

    def _reader(self, fd: int, got: Callable[[bytes], None]) -> Reader:
        reader = Reader(self._loop, fd, got, lambda: self._reader_ended(reader))
        return reader

    def _process_ended(self) -> None:
        self._loop.unwatch(self._process.fd)
        self.pause(False)
        self._code = self._process.reap()
        self._cut = self._loop.at(LINGER_S, self._drain)
        self._settle()

    def _reader_ended(self, reader: Reader) -> None:
        self._readers.discard(reader)
        self._settle()

    def _drain(self) -> None:
        for reader in [*self._readers]:
            reader.drain()

    def _settle(self) -> None:
        if self._code is not None and not self._readers:
            self._release()
            self._over(self._code)

    def _release(self) -> None:
        if self._cut is not None:
            self._cut.cancel()
        for pipe in (*self._readers, self._keyboard, self._call):
            if pipe is not None:
                pipe.close()


class _Ends:
    """Both ends of everything between a rank and its agent, by name."""

    def __init__(self, order: RankOrder) -> None:
        self.ours: dict[str, int] = {}
        self.theirs: dict[str, int] = {}
        try:
            if order.terminal:
                self.ours["out"], self.theirs["out"] = open_terminal(raw=False)
                if order.piped:
                    self.theirs["in"], self.ours["keyboard"] = os.pipe()
                else:
                    self.ours["keyboard"] = os.dup(self.ours["out"])
            else:
                for stream in _STREAMS:
                    self.ours[stream], self.theirs[stream] = open_terminal(raw=True) if order.progress else os.pipe()
            if order.call:
                self.theirs["call"], self.ours["call"] = os.pipe()
                self.ours["result"], self.theirs["result"] = os.pipe()
        except OSError as error:
            self.close_ours()
            self.close_theirs()
            raise explain(error, _command(order)) from None

    def close_ours(self) -> None:
        """Nobody uses them."""
        for fd in self.ours.values():
            os.close(fd)

    def close_theirs(self) -> None:
        """The rank has its own copies."""
        for fd in self.theirs.values():
            os.close(fd)


def _command(order: RankOrder, **variables: str) -> Command:
    return Command(argv=order.argv, env={**order.env, **variables}, cwd=order.cwd or None, cpus=order.cpus)


def _start(order: RankOrder, ends: _Ends, guard: Guard) -> Process:
    passed = {CALL_FD: ends.theirs["call"], RESULT_FD: ends.theirs["result"]} if order.call else {}
    command = _command(order, **{name: str(fd) for name, fd in passed.items()})
    if order.terminal:
        command = dataclasses.replace(command, argv=taking(ends.theirs["out"], command.argv))
    return start(
        command,
        guard,
        stdin=ends.theirs.get("in", ends.theirs["out"]) if order.terminal else subprocess.DEVNULL,
        stdout=ends.theirs["out"],
        stderr=ends.theirs.get("err", ends.theirs["out"]),
        inherited=tuple(passed.values()),
    )


def _report_output(report: Callable[[FromAgent], None], rank: int, stream: Stream, data: bytes) -> None:
    report(Output(rank, stream, data))


class _Collector:
    """Collects a result. One that its rank did not finish is none."""

    def __init__(self, whole: Callable[[bytes], None]) -> None:
        self._whole = whole
        self._parts: list[bytes] = []
        self._num_bytes = -LENGTH_BYTES
        """Of the result, so far."""
        self._length: int | None = None

    def __call__(self, data: bytes) -> None:
        """Some more of it. Put together once: there may be hundreds of megabytes."""
        self._parts.append(data)
        self._num_bytes += len(data)
        if self._length is None and self._num_bytes >= 0:
            begin = b"".join(self._parts)
            self._length, self._parts = int.from_bytes(begin[:LENGTH_BYTES], "big"), [begin[LENGTH_BYTES:]]
        if self._length is not None and self._num_bytes >= self._length:
            result, self._parts = b"".join(self._parts), []
            self._whole(result)
