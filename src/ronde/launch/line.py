"""The way from the driver to the agent of one host: in the driver's own process, or through ssh. Used by crew."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from typing import IO, Protocol, TypeAlias

from ronde.errors import ProtocolError
from ronde.launch.agent import Agent
from ronde.launch.frames import encode_frame, from_agent
from ronde.launch.job import Host
from ronde.launch.loop import Loop
from ronde.launch.messages import Beat, FromAgent, FromDriver, Quit
from ronde.launch.ssh import SshCall, Trouble

__all__ = ["AgentLine", "Gone", "LocalLine", "Report", "SshLine"]

READ_BYTES = 1 << 18
SAID_BYTES = 8192
"""So much of what ssh says is kept, from its end."""
REAP_S = 5.0
"""A killed process ends at once, unless the kernel is busy for it."""


class AgentLine(Protocol):
    """What the driver needs of an agent, wherever it is."""

    host: Host

    def send(self, message: FromDriver) -> None:
        """Tell the agent. Never waits; after the end of the line it is forgotten."""

    def beat(self, message: Beat) -> None:
        """Tell it that the driver lives. The one method for other threads."""

    def pause(self, on: bool) -> None:
        """Leave what the agent says where it is, or go on: its ranks wait then, and nothing is lost."""

    def end(self) -> None:
        """Kill what runs there and end: `gone` is called when that is done, and nothing afterwards."""

    def close(self) -> None:
        """Be ended when this returns, and call nobody. Idempotent."""


Report: TypeAlias = Callable[[AgentLine, FromAgent], None]
Gone: TypeAlias = Callable[[AgentLine, Trouble], None]


class LocalLine:
    """To an agent in this process."""

    def __init__(self, loop: Loop, host: Host, report: Report, gone: Gone) -> None:
        self.host = host
        self._loop = loop
        self._gone = gone
        self._closed = False
        self._agent = Agent(loop, partial(report, self))

    def send(self, message: FromDriver) -> None:
        """See AgentLine."""
        if not self._closed:
            self._agent.handle(message)

    def beat(self, message: Beat) -> None:
        """An agent in this process needs no sign of life."""

    def pause(self, on: bool) -> None:
        """See AgentLine. An agent in this process still tells who has ended."""
        self._agent.pause(on)

    def end(self) -> None:
        """See AgentLine."""
        self.close()
        self._loop.soon(partial(self._gone, self, Trouble("ended", "")))

    def close(self) -> None:
        """See AgentLine."""
        self._closed = True
        self._agent.close()


class SshLine:
    """To an agent at the other end of an ssh connection."""

    def __init__(self, loop: Loop, call: SshCall, report: Report, gone: Gone) -> None:
        self.host = call.host
        self._loop = loop
        self._call = call
        self._report = report
        self._gone = gone
        self._reader = from_agent()
        self._said = b""
        self._unsent = bytearray()
        self._sending = threading.Lock()
        """Who holds it may write to ssh."""
        self._ending = False
        self._ended = False
        self._paused = False
        self._process = subprocess.Popen(
            call.command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "LC_ALL": "C"},  # its words are read by explain()
            start_new_session=True,  # Ctrl-C is for the driver to hear
        )
        self._pidfd = os.pidfd_open(self._process.pid)
        self._in, self._out, self._err = (_unblocked(pipe) for pipe in self._pipes)
        loop.watch(self._out, self._read)
        loop.watch(self._err, self._read_errors)
        loop.watch(self._pidfd, self._reap)

    @property
    def _pipes(self) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
        process = self._process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        return process.stdin, process.stdout, process.stderr

    def send(self, message: FromDriver) -> None:
        """See AgentLine."""
        if self._in < 0:
            return
        with self._sending:
            waits = bool(self._unsent)
            self._unsent += encode_frame(message)
            if not waits:
                self._write()
                if self._unsent:
                    self._loop.watch(self._in, self._go_on, write=True)

    def beat(self, message: Beat) -> None:
        """See AgentLine."""
        with self._sending:
            if not self._unsent and self._in >= 0:
                try:
                    # So few bytes go into a pipe as a whole or not at all.
                    os.write(self._in, encode_frame(message))
                except (BlockingIOError, BrokenPipeError):  # it hears enough, or nothing any more
                    pass

    def pause(self, on: bool) -> None:
        """See AgentLine. The agent's own buffers fill up, and it pauses its ranks."""
        if self._ended or on == self._paused:
            return
        self._paused = on
        if on:
            self._loop.unwatch(self._out)
        else:
            self._loop.watch(self._out, self._read)

    def end(self) -> None:
        """See AgentLine."""
        self.send(Quit())
        self._ending = True
        if not self._unsent:
            self._hang_up()

    def close(self) -> None:
        """See AgentLine."""
        if self._ended:
            return
        self._ended = True
        self._hang_up()
        for fd in (self._out, self._err, self._pidfd):
            self._loop.unwatch(fd)
        os.close(self._pidfd)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(REAP_S)
        for pipe in self._pipes:
            pipe.close()

    def _hang_up(self) -> None:
        """The agent takes the end of its input for Quit."""
        with self._sending:
            if self._in >= 0:
                self._loop.unwatch(self._in)
                self._in = -1
                self._pipes[0].close()

    def _write(self) -> None:
        """As much as goes without waiting."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self._in, self._unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # ssh has ended, and that is about to be heard
            self._unsent.clear()

    def _go_on(self) -> None:
        with self._sending:
            self._write()
            if not self._unsent:
                self._loop.unwatch(self._in)
        if not self._unsent and self._ending:
            self._hang_up()

    def _read(self) -> None:
        data = _read_some(self._out)
        if data:
            self._hear(data)
        elif data == b"":
            self._loop.unwatch(self._out)  # ssh is about to end, which says more

    def _hear(self, data: bytes) -> None:
        try:
            messages = self._reader.feed(data)
        except ProtocolError as error:
            return self._fail(Trouble("version", f"it does not speak the language of this ronde ({error})"))
        for message in messages:
            if not self._ended:
                self._report(self, message)

    def _read_errors(self) -> None:
        data = _read_some(self._err)
        if data:
            self._said = (self._said + data)[-SAID_BYTES:]
        elif data == b"":
            self._loop.unwatch(self._err)

    def _reap(self) -> None:
        """ssh has ended: hear what it left in its pipes, then say so."""
        # A process that ssh left in the background may hold the pipes: so their end is not waited for.
        while not self._ended and (data := _read_some(self._out)):
            self._hear(data)
        if self._ended:
            return
        while data := _read_some(self._err):
            self._said = (self._said + data)[-SAID_BYTES:]
        said = (self._said or self._reader.noise).decode(errors="replace")
        self._fail(self._call.explain(self._process.wait(), said))

    def _fail(self, trouble: Trouble) -> None:
        self.close()
        self._gone(self, trouble)


def _unblocked(pipe: IO[bytes]) -> int:
    os.set_blocking(pipe.fileno(), False)
    return pipe.fileno()


def _read_some(fd: int) -> bytes | None:
    """What is there; nothing at its end, None when there is nothing yet."""
    try:
        return os.read(fd, READ_BYTES)
    except BlockingIOError:
        return None
