"""A running `ronde serve`, for tests."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ronde.types import Deadline
from tests.commands import PROGRAMS
from tests.limits import PATIENCE_S

TOKEN = "the-token-of-these-tests"


class RunningService:
    """A service, and how to ask it."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log
        self.port = int(self.wait_for("listening at http://").rpartition(":")[2])

    @property
    def printed(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str) -> str:
        """The line in which a text appears, when it does."""
        deadline = Deadline(PATIENCE_S)
        while True:
            is_over = self.process.poll() is not None
            for line in self.printed.splitlines():
                if text in line:
                    return line
            assert not is_over and not deadline.expired, f"there is no {text!r} in:\n{self.printed}"
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)

    def ask(
        self, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None, method: str = ""
    ) -> tuple[int, Any, http.client.HTTPMessage]:
        """Status, decoded JSON (or bytes), and headers of a reply."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            given = {"Authorization": f"Bearer {TOKEN}", **(headers or {})}
            connection.request(method or ("GET" if body is None else "POST"), path, body, given)
            reply = connection.getresponse()
            data = reply.read()
            is_json = reply.headers.get("content-type") == "application/json"
            return reply.status, json.loads(data) if is_json else data, reply.headers

    def metric(self, name: str) -> float:
        _, text, _ = self.ask("/metrics")
        found = [
            line.rpartition(" ")[2] for line in text.decode().splitlines() if line.startswith(f"ronde_serve_{name} ")
        ]
        return float(found[0])

    def replicas(self) -> list[psutil.Process]:
        """The processes of the replicas that live now."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "function_rank" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def wait_until(self, condition: Any) -> None:
        deadline = Deadline(PATIENCE_S)
        while not condition():
            assert not deadline.expired and self.process.poll() is None, self.printed
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)

    def end(self) -> int:
        """Tell it to end; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


@contextlib.contextmanager
def serving(folder: Path, *arguments: str, command: Sequence[str] = ()) -> Iterator[RunningService]:
    """A service that is ready, started in a folder; with a command instead of arguments, by that."""
    log = folder / "service.log"
    command = command or [str(PROGRAMS / "ronde"), "serve", *arguments, "--port", "0"]
    env = {**os.environ, "RONDE_SERVE_TOKEN": TOKEN}
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output, text=True)
        try:
            service = RunningService(process, log)
            service.wait_for("ready: ")
            yield service
            if process.poll() is None:
                assert service.end() == 0, service.printed
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
