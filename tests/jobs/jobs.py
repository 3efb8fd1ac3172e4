"""Real jobs for tests: ranks are processes that run a script of tests/jobs/scripts, and each has a line to the test.

No test sleeps: a rank says where it is, the test tells it what to do, and every wait ends with a deadline and the
output of all ranks. What a rank has printed is complete only when it has ended; before that it is quoted in failures,
and no test looks at it.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from ronde.launch.local import LocalJob, start_local
from ronde.settings import Settings
from ronde.types import Deadline
from tests.limits import PATIENCE_S, SECONDS_S

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 1 << 20


class Ranks:
    """The lines to the ranks of a job, and what they print. Whoever starts them gives them `env` and `outputs`.
    `patience_s` is for each thing that the test waits for."""

    def __init__(self, num_ranks: int, folder: Path, opened: ExitStack, patience_s: float = PATIENCE_S) -> None:
        self._opened = opened
        self._patience_s = patience_s
        self._listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        # A path, not an abstract name: it can be reached from other network namespaces, too.
        self._listener.bind(str(folder / "talk"))
        self._listener.listen(num_ranks)
        self._paths = [folder / f"rank{rank}" for rank in range(num_ranks)]
        self.outputs = [opened.enter_context(path.open("wb")) for path in self._paths]
        self.env = {"TEST_TALK": str(folder / "talk"), "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "src")))}
        self.pids: dict[int, int] = {}
        self._lines: dict[int, socket.socket] = {}

    def meet(self) -> None:
        """Wait until every rank has called."""
        deadline = Deadline(self._patience_s)
        while len(self._lines) < len(self._paths):
            self._await(self._listener, deadline, "every rank to call")
            line = self._opened.enter_context(self._listener.accept()[0])
            here = json.loads(line.recv(MOST_BYTES))
            self._lines[here["rank"]] = line
            self.pids[here["rank"]] = here["pid"]

    def tell(self, ranks: Iterable[int], **wanted: object) -> None:
        """Tell these ranks what to do."""
        for rank in ranks:
            self._lines[rank].send(json.dumps(wanted).encode())

    def hear(self, rank: int, what: str) -> dict[str, Any]:
        """The next thing that a rank says, which has to be this."""
        line = self._lines[rank]
        self._await(line, Deadline(self._patience_s), f"rank {rank} to say {what!r}")
        try:
            data = line.recv(MOST_BYTES)
        except ConnectionResetError:
            data = b""
        heard: dict[str, Any] = json.loads(data) if data else {"what": "nothing more"}
        if not data:
            self._await_end(rank)
        assert heard["what"] == what, f"rank {rank} was to say {what!r}, but said {heard}\n{self.said()}"
        return heard

    def hear_all(self, ranks: Iterable[int], what: str) -> dict[int, dict[str, Any]]:
        """The same from each of these ranks."""
        return {rank: self.hear(rank, what) for rank in ranks}

    def said(self) -> str:
        """All that the ranks have printed."""
        return "\n".join(f"--- rank {rank}\n{self.output(rank)}" for rank in range(len(self._paths)))

    def output(self, rank: int) -> str:
        """What one rank has printed, its log included."""
        return self._paths[rank].read_text(errors="replace")

    def _await_end(self, rank: int) -> None:
        """Wait until a rank that has hung up has also ended, and so has printed why. Not for long: it may not end."""
        deadline = Deadline(SECONDS_S)
        while not deadline.expired:
            try:
                if psutil.Process(self.pids[rank]).status() == psutil.STATUS_ZOMBIE:
                    return
            except psutil.NoSuchProcess:
                return
            time.sleep(0.01)

    def _await(self, sock: socket.socket, deadline: Deadline, what: str) -> None:
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        if not poll.poll(1000 * deadline.remaining_s):
            raise TimeoutError(f"waited {deadline.timeout_s:g} s for {what}\n{self.said()}")


class Job(Ranks):
    """Ranks of this host with their coordinator in the test's process."""

    local: LocalJob

    def wait(self) -> list[int]:
        """Exit codes, when all ranks have ended."""
        try:
            return self.local.wait(Deadline(self._patience_s))
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.said()}") from None


@contextmanager
def folder_of_ranks() -> Iterator[tuple[Path, ExitStack]]:
    """A place for their files. Its name is short, as that of a socket must be."""
    with tempfile.TemporaryDirectory(prefix="ronde") as folder, ExitStack() as opened:
        yield Path(folder), opened


def program(script: str) -> list[str]:
    """The command of a rank that runs this script."""
    return [sys.executable, "-W", "error", "-m", f"tests.jobs.scripts.{script}"]


@contextmanager
def started(
    script: str,
    num_ranks: int,
    *,
    settings: Settings | None = None,
    env: Mapping[str, str] | None = None,
    before: Mapping[int, Sequence[str]] | None = None,
    patience_s: float = PATIENCE_S,
) -> Iterator[Job]:
    """A job of this host, running a script of tests/jobs/scripts; every rank has called. `before` are commands to run
    a rank's command with. `patience_s` is for each thing that the test waits for."""
    with folder_of_ranks() as (folder, opened):
        job = Job(num_ranks, folder, opened, patience_s)
        job.local = opened.enter_context(
            start_local(
                [*_prefixed(before or {}), *program(script)],
                num_ranks,
                env={**job.env, **(env or {})},
                settings=settings,
                stdout=job.outputs,
            )
        )
        job.meet()
        yield job


def _prefixed(before: Mapping[int, Sequence[str]]) -> list[str]:
    """All ranks of a local job have one command: so a shell looks who it is."""
    cases = "".join(f'{rank}) exec {shlex.join(words)} "$@";; ' for rank, words in before.items())
    return ["sh", "-c", f'case $RONDE_RANK in {cases}*) exec "$@";; esac', "sh"] if before else []


def hosted_by_rank_0() -> dict[str, object]:
    """Settings of a job whose coordinator is a thread of rank 0: no launcher tells how a rank has ended."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]  # nobody uses it now
    return {"coordinator": f"127.0.0.1:{port}", "coordinator_hosted": False}
