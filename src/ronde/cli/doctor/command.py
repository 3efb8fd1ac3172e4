"""`ronde doctor`: whether jobs can run on these hosts, and how fast their ranks communicate.

The checks are real jobs, so what fails here fails in the same way for the user's. Every job has a deadline. Hosts are
checked side by side, so that one that does not answer does not hold up the others.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import msgspec
from rich.console import Console

from ronde.cli.arguments import CommandParser, print_error
from ronde.cli.doctor.link_speed import PAIR_TIMEOUT_S, measure_links
from ronde.cli.doctor.problems import make_doctor_report
from ronde.cli.doctor.report import HostPairReport, HostReport, render_report
from ronde.cli.doctor.system_info import IMPORT_TIMEOUT_S, collect_system_info
from ronde.cli.run import add_launch_option
from ronde.launch.config import launch_options, make_launch_config
from ronde.launch.driver.driver import Driver
from ronde.launch.function import FUNCTION_RANK_COMMAND, pickle_call, unpickle_results
from ronde.launch.job import Job
from ronde.launch.output.printer import OutputOptions, Printer
from ronde.launch.output.terminal import StandardStreams
from ronde.launch.placement import Host
from ronde.text import format_count

BROKEN_CODE = 1
MAX_HOSTS_AT_ONCE = 16
START_TIMEOUT_S = 30.0
"""For ranks to start and to connect; the time limit of ssh is added for other hosts."""
GRACE_PERIOD_S = 1.0

DESCRIPTION = """Say whether jobs can run on these hosts, and what to do if not.

Without hosts: on this machine. Looks at versions, frameworks, data planes,
cores, memory, shared memory and limits of every host, and measures how fast
ranks communicate, on each host and between all pairs of hosts. Ends with 1
when something is broken that jobs need."""

LAUNCH_OPTIONS = ("hosts", "hostfile", "ssh_port", "ssh_identity", "ssh_option", "ssh_start_s", "python")
"""Those of `ronde run` that `ronde doctor` has too."""


def doctor(arguments: Sequence[str]) -> int:
    parser = CommandParser("doctor", DESCRIPTION)
    for option in launch_options():
        if option.name in LAUNCH_OPTIONS:
            add_launch_option(parser, option)
    parser.add_argument("--json", action="store_true", help="Everything as JSON, on standard output.")
    flags = {name: value for name, value in vars(parser.parse(arguments)).items() if value is not None}
    as_json = flags.pop("json")
    try:
        config = make_launch_config(flags, (parser.prog,))
    except ValueError as error:
        return print_error(parser.prog, error)
    runner = DoctorRunner(config.job)
    with Console(stderr=True).status("") as status:
        hosts = runner.check_hosts(status.update)
        usable = [host.name for host in hosts if host.facts is not None]
        report = make_doctor_report(hosts, runner.measure_pairs(usable, status.update))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    else:
        Console().print(render_report(report))
    return 0 if report.healthy else BROKEN_CODE


class DoctorRunner:
    """Runs the jobs of one `ronde doctor`."""

    def __init__(self, job: Job) -> None:
        """`job` has the hosts and how to reach them."""
        self._host_names = [host.name for host in job.hosts] or ["localhost"]
        self._job = replace(
            job,
            command=FUNCTION_RANK_COMMAND,
            cwd="/",  # every host has it
            settings=job.settings.replace(
                backend="native",
                timeline="",
                stall_s=0.0,
                start_s=START_TIMEOUT_S,
                operation_s=PAIR_TIMEOUT_S,
            ),
            grace_s=GRACE_PERIOD_S,
            terminate_s=GRACE_PERIOD_S,
        )
        self._drivers: set[Driver] = set()
        self._stopped = False

    def check_hosts(self, show_progress: Callable[[str], None]) -> list[HostReport]:
        """Collect the facts about every host."""
        call = pickle_call(collect_system_info, (), {})
        jobs = [self._make_job((Host(name),), call) for name in self._host_names]
        reports: list[HostReport] = []
        action = f"looking at {format_count(len(jobs), 'host')}"
        show_progress(f"{action} …")
        for name, outcome in zip(self._host_names, self._run_jobs(jobs, IMPORT_TIMEOUT_S), strict=True):
            if isinstance(outcome, Exception):
                reports.append(HostReport(name, error=format_job_error(outcome, name)))
            else:
                reports.append(HostReport(name, outcome[0]))
            show_progress(f"{action}, {len(reports)} done …")
        return reports

    def measure_pairs(self, names: Sequence[str], show_progress: Callable[[str], None]) -> list[HostPairReport]:
        """Measure two ranks of each host, and a rank of each with a rank of every other. One job measures them all; if
        it fails, a job per pair shows which pairs fail. The jobs run one after the other, as they would distort each
        other's numbers."""
        pairs = [(name, name) for name in names] + list(itertools.combinations(names, 2))
        if not pairs:
            return []
        action = f"measuring {format_count(len(pairs), 'pair')}"
        show_progress(f"{action} …")
        found = self._measure_in_one_job(names, pairs)
        if len(pairs) > 1 and found[0].error:
            found = []
            for pair in pairs:
                found += self._measure_in_one_job(tuple(dict.fromkeys(pair)), [pair])
                show_progress(f"{action}, {len(found)} done …")
        return found

    def _measure_in_one_job(self, names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[HostPairReport]:
        first_rank = {name: 2 * index for index, name in enumerate(names)}
        ranks = [(first_rank[one], first_rank[two] + (one == two)) for one, two in pairs]
        job = self._make_job(tuple(Host(name, 2) for name in names), pickle_call(measure_links, (ranks,), {}))
        (outcome,) = self._run_jobs([job], PAIR_TIMEOUT_S * len(pairs))
        if isinstance(outcome, Exception):
            return [HostPairReport(*pair, error=format_job_error(outcome, *pair)) for pair in pairs]
        speeds = [outcome[client][index] for index, (client, _) in enumerate(ranks)]
        return [HostPairReport(*pair, speed) for pair, speed in zip(pairs, speeds, strict=True)]

    def _make_job(self, hosts: tuple[Host, ...], pickled_call: bytes) -> Job:
        return replace(self._job, hosts=hosts, num_ranks=sum(host.slots for host in hosts), pickled_call=pickled_call)

    def _run_jobs(self, jobs: Sequence[Job], timeout_s: float) -> Iterator[list[Any] | Exception]:
        """Run jobs side by side, and yield in their order what their ranks returned, or the error of the job. A job may
        take START_TIMEOUT_S and so long."""
        timeout_s += START_TIMEOUT_S + self._job.ssh.start_s
        # Each thread is owned by the pool, and runs the driver of one job after the other.
        with ThreadPoolExecutor(MAX_HOSTS_AT_ONCE, "ronde-driver") as pool:
            try:
                yield from pool.map(lambda job: self._run_job(job, timeout_s), jobs)
            except BaseException:
                self._stopped = True
                for driver in list(self._drivers):
                    driver.stop("the doctor has ended")
                raise

    def _run_job(self, job: Job, timeout_s: float) -> list[Any] | Exception:
        """Run a job that prints nothing; the summary of a failure quotes the end of its output."""
        try:
            with (
                open(os.devnull, "wb") as discard,  # noqa: PTH123  # a device
                closing(
                    Printer(
                        StandardStreams(discard, discard),
                        num_ranks=job.num_ranks,
                        options=OutputOptions(fold=False),
                    )
                ) as printer,
            ):
                driver = Driver(job, printer)
                self._drivers.add(driver)
                timer = threading.Timer(timeout_s, driver.stop, (f"it took longer than {timeout_s:g} s",))
                timer.start()
                try:
                    if self._stopped:
                        driver.stop("the doctor has ended")
                    result = driver.run()
                finally:
                    timer.cancel()
                    self._drivers.discard(driver)
            return unpickle_results(result, job.num_ranks)
        except Exception as error:  # whatever a rank raised
            return error


def format_job_error(error: Exception, *hosts: str) -> str:
    """Why a job failed, for a cell of a table: without the heading of a list, and without the host if there is one."""
    text = str(error) or type(error).__name__
    heading, _, rest = text.partition("\n")
    if heading.endswith(":") and rest:
        text = "; ".join(line.strip() for line in rest.splitlines())
    return text.removeprefix(f"{hosts[0]}: ") if len(set(hosts)) == 1 else text
