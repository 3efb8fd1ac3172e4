"""Finds out about hosts and pairs of hosts, with real jobs: what fails here fails in the same way for the user's. Used
by command.

Every job is quiet and has a deadline; hosts are looked at side by side, so that one that does not answer holds up
nobody.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

from ronde.cli.doctor.report import HostReport, PairReport
from ronde.launch.checkup import IMPORT_S, examine
from ronde.launch.driver import Driver
from ronde.launch.function import CALLEE, judge_outcome, pack_call
from ronde.launch.job import Host, Job
from ronde.launch.output.options import PrintOptions, Target
from ronde.launch.output.printer import Printer
from ronde.launch.speed import PAIR_S, measure

__all__ = ["Survey", "reason"]

AT_ONCE = 16
"""Most hosts that are looked at side by side."""
START_S = 30.0
"""For ranks to start and to find each other; ssh has its own limit on top."""
GRACE_S = 1.0


class Survey:
    """The jobs of one `ronde doctor`. As a context, its end is the end of all of them."""

    def __init__(self, job: Job) -> None:
        """`job` says which hosts there are, and how to reach them."""
        self._job = replace(
            job,
            command=CALLEE,
            cwd="/",  # every host has it
            settings=replace(
                job.settings, backend="native", timeline="", stall_s=0.0, start_s=START_S, operation_s=PAIR_S
            ),
            grace_s=GRACE_S,
            terminate_s=GRACE_S,
        )
        self._names = [host.name for host in job.hosts] or ["localhost"]
        # Its threads run drivers, one each; results leave through futures.
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="ronde-doctor")
        self._drivers: set[Driver] = set()
        self._over = False

    def __enter__(self) -> Survey:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End what still runs."""
        self._over = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for driver in tuple(self._drivers):
            driver.stop("the doctor has ended")
        self._pool.shutdown()

    @property
    def num_hosts(self) -> int:
        """How many there are to look at."""
        return len(self._names)

    def look_at_hosts(self, done: Callable[[], None]) -> list[HostReport]:
        """All of them; `done` is called for each."""

        def look(name: str) -> HostReport:
            report = self._look_at(name)
            done()
            return report

        return list(self._pool.map(look, self._names))

    def look_at_pairs(self, names: Sequence[str], done: Callable[[], None]) -> list[PairReport]:
        """Two ranks of each of these hosts, and every pair of them. In one job, if they all get on; otherwise each by
        itself, so that those who do are told from those who do not. `done` is called for each of those. One after the
        other: they would disturb each other's numbers."""
        pairs = [(name, name) for name in names] + list(itertools.combinations(names, 2))
        found = self._pool.submit(self._measure, names, pairs).result() if pairs else []
        if len(pairs) > 1 and found[0].trouble:
            found = []
            for pair in pairs:
                found += self._pool.submit(self._measure, tuple(dict.fromkeys(pair)), [pair]).result()
                done()
        return found

    def _look_at(self, name: str) -> HostReport:
        try:
            (facts,) = self._run((Host(name),), pack_call(examine, (), {}), START_S + IMPORT_S)
        except Exception as error:  # the job's edge: whatever a rank raised there
            return HostReport(name, trouble=reason(error, name))
        return HostReport(name, facts)

    def _measure(self, names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[PairReport]:
        first = {name: 2 * index for index, name in enumerate(names)}
        ranks = [(first[one], first[two] + (one == two)) for one, two in pairs]
        hosts = tuple(Host(name, 2) for name in names)
        try:
            results = self._run(hosts, pack_call(measure, (ranks,), {}), START_S + PAIR_S * len(pairs))
        except Exception as error:  # as above
            return [PairReport(*pair, trouble=reason(error, *pair)) for pair in pairs]
        speeds = [results[leader][index] for index, (leader, _) in enumerate(ranks)]
        return [PairReport(*pair, speed) for pair, speed in zip(pairs, speeds, strict=True)]

    def _run(self, hosts: tuple[Host, ...], call: bytes, limit_s: float) -> list[Any]:
        num_ranks = sum(host.slots for host in hosts)
        job = replace(self._job, hosts=hosts, num_ranks=num_ranks, call=call)
        with (
            open(os.devnull, "wb") as nowhere,  # noqa: PTH123  # a device
            closing(Printer(Target(nowhere, nowhere), num_ranks=num_ranks, options=PrintOptions(fold=False))) as screen,
        ):
            driver = Driver(job, screen)
            limit_s += job.ssh.start_s
            timer = threading.Timer(limit_s, driver.stop, [f"it took longer than {limit_s:g} s"])
            self._drivers.add(driver)
            timer.start()
            try:
                if self._over:
                    driver.stop("the doctor has ended")
                return judge_outcome(driver.run(), num_ranks)
            finally:
                timer.cancel()
                timer.join()
                self._drivers.discard(driver)


def reason(error: Exception, *hosts: str) -> str:
    """Why a job failed, for a place in a table: without the heading of a list, and without the name that is there
    already."""
    text = str(error) or type(error).__name__
    heading, _, rest = text.partition("\n")
    if heading.endswith(":") and rest:
        text = "; ".join(line.strip() for line in rest.splitlines())
    return text.removeprefix(f"{hosts[0]}: ") if len(set(hosts)) == 1 else text
