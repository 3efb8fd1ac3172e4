"""Ranks that are processes, for tests: started once, they run one behaviour after the other and report per rank.

As a program (`python -m tests.conformance.runner ADDRESS`) it is one such rank: it joins the job, and for every line
{"case": …} from the test's process it answers {"error": …}, empty if all went well.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import tempfile
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import ronde
from ronde.comm.world import current_world
from ronde.settings import Settings
from ronde.types import Deadline
from tests.conformance.cases import Case, all_cases
from tests.conformance.ranks import RanksFailed
from tests.limits import OPERATION_S, PATIENCE_S, RANK_S
from tests.local_job import LocalJob

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 5.0
"""When one rank has failed, the others get this long to fail as well."""
SETTINGS = Settings(operation_s=OPERATION_S, start_s=OPERATION_S, stall_s=0.0, shutdown_s=2.0)


class ProcessRanks:
    """Processes of one job. Started when they are needed, and again after a failure."""

    def __init__(self, size: int, *, hosts: str = "one", env: Mapping[str, str] | None = None) -> None:
        self._size = size
        self._env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "RONDE_TEST_HOSTS": hosts, **(env or {})}
        self._opened = ExitStack()
        self._ranks: dict[int, IO[str]] = {}
        self._sockets: dict[int, socket.socket] = {}

    def run(self, case: Case) -> None:
        """Run it on every rank."""
        if not self._ranks:
            self._start()
        for lines in self._ranks.values():
            lines.write(json.dumps({"case": case.name}) + "\n")
            lines.flush()
        failures = self._collect()
        if failures:
            printed = self._printed()
            self.close()
            raise RanksFailed({**failures, **({-1: f"the ranks printed:\n{printed}"} if printed else {})})

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._ranks.clear()
        self._sockets.clear()
        self._opened.close()

    def _start(self) -> None:
        with ExitStack() as opened:
            folder = opened.enter_context(tempfile.TemporaryDirectory())
            self._output = opened.enter_context(tempfile.TemporaryFile())
            listener = opened.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(f"{folder}/socket")
            listener.listen(self._size)
            listener.settimeout(PATIENCE_S)
            argv = [sys.executable, "-W", "error", "-m", "tests.conformance.runner", f"{folder}/socket"]
            outputs = [self._output] * self._size
            opened.enter_context(LocalJob(argv, self._size, env=self._env, settings=SETTINGS, outputs=outputs))
            for _ in range(self._size):
                sock = opened.enter_context(listener.accept()[0])
                lines = opened.enter_context(sock.makefile("rw"))
                rank = json.loads(lines.readline())["rank"]
                self._ranks[rank], self._sockets[rank] = lines, sock
            self._opened = opened.pop_all()

    def _collect(self) -> dict[int, str]:
        failures: dict[int, str] = {}
        deadline = Deadline(RANK_S)
        with selectors.DefaultSelector() as selector:
            for rank, sock in self._sockets.items():
                selector.register(sock, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select(deadline.remaining_s):
                    selector.unregister(key.fileobj)
                    answer = self._ranks[key.data].readline()
                    error = json.loads(answer)["error"] if answer else "its process has ended"
                    if error:
                        failures[key.data] = error
                        deadline = Deadline(min(GRACE_S, deadline.remaining_s))
                if deadline.expired:
                    return {**{key.data: "it hangs" for key in selector.get_map().values()}, **failures}
        return failures

    def _printed(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")


def host_name(rank: int) -> str:
    """Which host a rank shall think it is on: one for all, each its own, or two that alternate."""
    return {"one": "", "apart": f"host-{rank}", "two": f"host-{rank % 2}"}[os.environ["RONDE_TEST_HOSTS"]]


def answer(case: Case) -> str:
    """What went wrong, or nothing."""
    try:
        ronde.init(host=host_name(Settings.load().rank))
        case.body(current_world())
        if case.spoils:
            ronde.shutdown()
    except Exception:  # the edge of the process: the test shows it
        return traceback.format_exc()
    return ""


def main(address: str) -> None:
    cases = all_cases()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        with sock.makefile("rw") as lines:
            lines.write(json.dumps({"rank": Settings.load().rank}) + "\n")
            lines.flush()
            for line in lines:
                lines.write(json.dumps({"error": answer(cases[json.loads(line)["case"]])}) + "\n")
                lines.flush()
    ronde.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
