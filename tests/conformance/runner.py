"""Ranks that are processes, for tests: started once, they run one behaviour after the other and report per rank."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from ronde.settings import Settings
from tests.conformance.ranks import RanksFailed
from tests.jobs.kit import LocalRanks, start_ranks
from tests.limits import LONG_S, OPERATION_S, RANK_S

SETTINGS = Settings(operation_s=OPERATION_S, start_s=OPERATION_S, stall_s=0.0, shutdown_s=2.0)


class ProcessRanks:
    """Processes of one job. Started when they are needed, and again after a failure."""

    def __init__(
        self,
        size: int,
        *,
        hosts: str = "one",
        extension: str = "there",
        python: str | Path = sys.executable,
        env: Mapping[str, str] | None = None,
        prefixes: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        """`python` is that of another environment, and `prefixes` are commands that start the command of a rank."""
        self._size = size
        self._env = {"TEST_HOSTS": hosts, "TEST_EXTENSION": extension, **(env or {})}
        self._python = python
        self._prefixes = prefixes
        self._opened = ExitStack()
        self._ranks: LocalRanks | None = None

    def run(self, name: str, framework: str = "", mode: str = "") -> None:
        """Run a behaviour on every rank; with a framework, one of the collective cases."""
        try:
            if self._ranks is None:
                ranks = start_ranks(
                    "behaviours",
                    self._size,
                    settings=SETTINGS,
                    env=self._env,
                    python=self._python,
                    prefixes=self._prefixes,
                    patience_s=RANK_S if self._python == sys.executable else LONG_S,
                )
                self._ranks = self._opened.enter_context(ranks)
            self._ranks.send(range(self._size), case=name, framework=framework, mode=mode)
            answers = self._ranks.receive_all(range(self._size), "ended")
            if failures := {rank: answer["error"] for rank, answer in answers.items() if answer["error"]}:
                raise RanksFailed({**failures, -1: f"the ranks printed:\n{self._ranks.printed()}"})
        except BaseException:
            self.close()
            raise

    def printed(self) -> str:
        """What the ranks have printed so far."""
        return "" if self._ranks is None else self._ranks.printed()

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._ranks = None
        self._opened.close()
