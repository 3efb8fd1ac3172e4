"""Carries out a job: calls its hosts together, hosts its coordinator, starts its ranks and leaves nothing behind. Used
by `ronde run` and ronde.run.

Everything happens in the thread that calls run(), in one loop. What is decided is decided elsewhere: who sits where
(placement), how hosts reach each other (reach), how a job is ended (ending), who is to blame (verdict).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial

from ronde.comm.coordination.coordinator import Coordinator
from ronde.errors import StartFailed
from ronde.launch.course import Course
from ronde.launch.crew import Crew, Stopped
from ronde.launch.ending import On
from ronde.launch.endpoint import Endpoint
from ronde.launch.job import Job
from ronde.launch.log import noted
from ronde.launch.loop import Loop
from ronde.launch.orders import make_orders
from ronde.launch.output.screen import Screen
from ronde.launch.placement import hosts_or_here, place
from ronde.launch.signals import listening
from ronde.launch.status import JobStatus, describe_job, describe_stacks
from ronde.launch.variables import arrange, wanted_ports
from ronde.launch.verdict import Stop, judge
from ronde.net.keys import JobKey, new_key
from ronde.observe.stacks import RankStack
from ronde.settings import Settings
from ronde.types import Deadline

__all__ = ["HUNG_UP", "INTERRUPTED", "TERMINATED", "Driver", "Outcome"]

NOT_BEGUN_CODE = 1
"""The job's, when its hosts cannot be used."""
WEEK_S = 7 * 24 * 3600.0
"""Longer than anybody debugs."""
LAST_WORDS_S = 2.0
"""When somebody has ended the job: so long does it wait for a reader that takes nothing (`| less`, Ctrl-S)."""

INTERRUPTED = Stop(128 + signal.SIGINT, "interrupted by Ctrl-C")
TERMINATED = Stop(128 + signal.SIGTERM, "ended by SIGTERM")
HUNG_UP = Stop(128 + signal.SIGHUP, "ended by SIGHUP: the terminal was closed")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job has ended."""

    code: int
    """For the shell: 0, or that of the rank that failed first."""
    summary: str
    """What its user should know; empty when all is well."""
    results: dict[int, bytes] = field(default_factory=dict)
    """What the function of each rank returned or raised, as launch/function pickled it."""
    codes: dict[int, int] = field(default_factory=dict)
    """Exit code of every rank, a signal below 0; empty when none was started."""
    culprit: int | None = None
    """The rank that failed first."""
    stop: Stop | None = None
    """Who ended it from outside, if anybody did."""


class Driver:
    """One job. run() it, once; stop() it from any thread."""

    def __init__(self, job: Job, screen: Screen) -> None:
        self._job = job if job.debug_rank is None else replace(job, settings=_patient(job.settings))
        self._screen = screen
        self._seats = place(job.hosts, job.num_ranks)
        self._hosts = hosts_or_here(job.hosts, job.num_ranks)[: self._seats[0].num_hosts]
        self._wishes: deque[tuple[Stop, On]] = deque()
        self._loop: Loop | None = None
        self._crew: Crew | None = None
        self._course: Course | None = None

    def stop(self, why: str) -> None:
        """End everything. From any thread, also before and after run()."""
        self._wishes.append((Stop(TERMINATED.code, why), On.STOP))
        if self._loop is not None:
            self._loop.soon(self._obey)

    def run(self) -> Outcome:
        """Start it, wait for its end, and leave nothing behind."""
        with ExitStack() as opened:
            loop = self._loop = opened.enter_context(closing(Loop()))
            opened.enter_context(listening(loop, self._signals()))
            opened.enter_context(noted(loop, self._note))
            crew = self._crew = Crew(loop, self._job, self._hosts, python=self._job.python or sys.executable)
            opened.callback(crew.close)
            self._obey()
            try:
                crew.meet()
                return self._run(loop, crew, opened)
            except StartFailed as error:
                return Outcome(NOT_BEGUN_CODE, str(error))
            except Stopped:
                stop = self._wishes[0][0]
                return Outcome(stop.code, f"{stop.why}, before any rank was started", stop=stop)

    def _run(self, loop: Loop, crew: Crew, opened: ExitStack) -> Outcome:
        job, key = self._job, new_key()
        ground = crew.ground(key, wanted_ports(job, self._seats))
        if self._wishes:
            raise Stopped
        coordinator = Coordinator(ground.coordinator, 0, job.num_ranks, JobKey(key), settings=job.settings, rounds=None)
        opened.callback(coordinator.close)
        coordinator.start([self._hosts[seat.host_index].name for seat in self._seats])
        meeting = arrange(
            self._seats,
            coordinator=coordinator.address,
            key=key,
            addresses=ground.addresses,
            ports=[site.ports for site in ground.sites],
        )
        terminals = [fd for fd in range(3) if os.isatty(fd)]
        orders = make_orders(job, self._seats, meeting, ground.sites, environ=os.environ, terminals=terminals)
        course = self._course = Course(loop, job, self._seats, agents=crew, screen=self._screen, lost=coordinator.lost)
        opened.callback(course.close)
        self._open_endpoint(course, coordinator, opened)
        crew.take_over(course.hear, course.lose)
        crew.send(orders)
        loop.run(lambda: course.over)
        return self._outcome(course, coordinator)

    def _outcome(self, course: Course, coordinator: Coordinator) -> Outcome:
        verdict = judge(
            course.ends,
            num_ranks=self._job.num_ranks,
            tail=self._screen.tail,
            first_lost=coordinator.first_lost(),
            whereabouts=coordinator.whereabouts(),
            stop=course.stop,
        )
        codes = {end.rank: end.code for end in course.ends}
        if course.stop is not None:
            self._screen.close(give_up_s=LAST_WORDS_S)
        summary = "\n".join(verdict.lines)
        return Outcome(verdict.code, summary, course.results, codes, verdict.culprit, course.stop)

    def _open_endpoint(self, course: Course, coordinator: Coordinator, opened: ExitStack) -> None:
        """Where `ronde top` and `ronde stack` ask."""
        job, began_s = self._job, time.monotonic()

        def status(name: str) -> JobStatus:
            return describe_job(name, job.command, coordinator.vitals(), course.facts, time.monotonic() - began_s)

        def stacks(limit_s: float) -> tuple[RankStack, ...]:
            return describe_stacks(coordinator.ask_stacks(Deadline(limit_s)), course.facts)

        pid = os.getpid()
        names = [job.name] if job.name else [str(pid), *(f"{pid}-{number}" for number in range(2, 100))]
        for name in names:
            try:
                opened.callback(Endpoint(name, partial(status, name), stacks).close)
                return
            except ValueError:  # another job of this process, or of this name
                if name == names[-1]:
                    raise
            except (StartFailed, OSError) as error:  # the job runs all the same
                return self._screen.note(f"`ronde top` and `ronde stack` will not find this job: {error}")

    def _note(self, text: str) -> None:
        (self._screen if self._course is None else self._course).note(text)

    # --- what others want --------------------------------------------------------------------------------------

    def _signals(self) -> dict[signal.Signals, Callable[[], None]]:
        return {
            signal.SIGINT: lambda: self._wish(INTERRUPTED, On.CTRL_C),
            signal.SIGTERM: lambda: self._wish(TERMINATED, On.STOP),
            signal.SIGHUP: lambda: self._wish(HUNG_UP, On.STOP),
            signal.SIGWINCH: lambda: self._course.resize() if self._course is not None else None,
            signal.SIGTSTP: self._sleep,
        }

    def _wish(self, stop: Stop, on: On) -> None:
        self._wishes.append((stop, on))
        self._obey()

    def _obey(self) -> None:
        if self._wishes and self._course is None and self._crew is not None:
            self._crew.stop()
        while self._wishes and self._course is not None:
            self._course.end(*self._wishes.popleft())

    def _sleep(self) -> None:
        """Ctrl-Z: this process is stopped until somebody wakes it; agents must not take that for its death."""
        assert self._crew is not None
        self._crew.sleep(True)
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, before)
        self._crew.sleep(False)


def _patient(settings: Settings) -> Settings:
    """For --debug: whoever waits for a rank in a debugger waits for a person."""
    return replace(settings, start_s=WEEK_S, operation_s=WEEK_S, stall_s=0.0)
