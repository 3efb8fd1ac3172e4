"""Ranks that are processes, for tests: started once, they run one behaviour after the other and report per rank."""

from __future__ import annotations

from contextlib import ExitStack

from ronde.settings import Settings
from tests.conformance.cases import Case
from tests.conformance.ranks import RanksFailed
from tests.jobs.kit import LocalRanks, start_ranks
from tests.limits import OPERATION_S, RANK_S

SETTINGS = Settings(operation_s=OPERATION_S, start_s=OPERATION_S, stall_s=0.0, shutdown_s=2.0)


class ProcessRanks:
    """Processes of one job. Started when they are needed, and again after a failure."""

    def __init__(self, size: int, *, hosts: str = "one", extension: str = "there") -> None:
        self._size = size
        self._env = {"TEST_HOSTS": hosts, "TEST_EXTENSION": extension}
        self._opened = ExitStack()
        self._ranks: LocalRanks | None = None

    def run(self, case: Case) -> None:
        """Run it on every rank."""
        try:
            if self._ranks is None:
                ranks = start_ranks("behaviours", self._size, settings=SETTINGS, env=self._env, patience_s=RANK_S)
                self._ranks = self._opened.enter_context(ranks)
            self._ranks.send(range(self._size), case=case.name)
            answers = self._ranks.receive_all(range(self._size), "ended")
            if failures := {rank: answer["error"] for rank, answer in answers.items() if answer["error"]}:
                raise RanksFailed({**failures, -1: f"the ranks printed:\n{self._ranks.printed()}"})
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._ranks = None
        self._opened.close()
