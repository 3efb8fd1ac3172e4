"""`ronde doctor`: can jobs run on these hosts, and how fast do they talk? Used by cli/commands.

Finds out about hosts and pairs of hosts, with real jobs: what fails here fails in the same way for the user's. Used
by command.

Every job is quiet and has a deadline; hosts are looked at side by side, so that one that does not answer holds up
nobody.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from ronde.cli.doctor.link_speed import PAIR_TIMEOUT_S, measure_links
from ronde.cli.doctor.problems import make_doctor_report
from ronde.cli.doctor.report import DoctorReport, HostPairReport, HostReport, render_report
from ronde.cli.doctor.system_info import IMPORT_TIMEOUT_S, collect_system_info
from ronde.launch.config import launch_options, make_launch_config
from ronde.launch.driver.driver import Driver
from ronde.launch.function import FUNCTION_RANK_COMMAND, pickle_call, unpickle_results
from ronde.launch.job import Job
from ronde.launch.output.printer import OutputOptions, Printer
from ronde.launch.output.terminal import StandardStreams
from ronde.launch.placement import Host

__all__ = ["DoctorRunner", "app", "format_job_error"]

BROKEN_CODE = 1
USAGE_ERROR_CODE = 2
INTERRUPTED_CODE = 130

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False, rich_markup_mode=None)


def _run_option(name: str) -> Any:  # typer's own
    """The same as that of `ronde run`."""
    option = next(option for option in launch_options() if option.name == name)
    return typer.Option(*option.flags, option.flag, help=option.help, metavar=option.metavar)


OptionValue = str | None


@app.command()
def doctor(
    hosts: Annotated[OptionValue, _run_option("hosts")] = None,
    hostfile: Annotated[OptionValue, _run_option("hostfile")] = None,
    ssh_port: Annotated[OptionValue, _run_option("ssh_port")] = None,
    ssh_identity: Annotated[OptionValue, _run_option("ssh_identity")] = None,
    ssh_option: Annotated[list[str] | None, _run_option("ssh_option")] = None,
    ssh_start_s: Annotated[OptionValue, _run_option("ssh_start_s")] = None,
    python: Annotated[OptionValue, _run_option("python")] = None,
    json: Annotated[bool, typer.Option("--json", help="Everything as JSON, on standard output.")] = False,
) -> None:
    """Say whether jobs can run on these hosts, and what to do if not.

    Without hosts: on this machine. Looks at versions, frameworks, data planes, cores, memory, shared memory and limits
    of every host, and measures how fast ranks talk, on each host and between all pairs of hosts. Ends with 1 when
    something is broken that jobs need.
    """
    given = {
        "hosts": hosts,
        "hostfile": hostfile,
        "ssh_port": ssh_port,
        "ssh_identity": ssh_identity,
        "ssh_option": ssh_option or None,
        "ssh_start_s": ssh_start_s,
        "python": python,
    }
    try:
        request = make_launch_config(
            {name: value for name, value in given.items() if value is not None}, ("ronde doctor",)
        )
    except ValueError as error:
        typer.echo(f"ronde doctor: {error}", err=True)
        raise typer.Exit(USAGE_ERROR_CODE) from None
    try:
        report = run_checks(request.job)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_CODE) from None
    if json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    else:
        Console().print(render_report(report))
    raise typer.Exit(0 if report.healthy else BROKEN_CODE)


def run_checks(job: Job) -> DoctorReport:
    """Look at everything, and say on a terminal what is being done."""
    with ExitStack() as opened:
        survey = opened.enter_context(DoctorRunner(job))
        progress = opened.enter_context(ProgressSpinner())
        progress.start_phase("looking at", survey.num_hosts, "host")
        hosts = survey.check_hosts(progress.count_one)
        usable = [host.name for host in hosts if host.facts is not None]
        num_pairs = len(usable) * (len(usable) + 1) // 2
        progress.start_phase("measuring", num_pairs, "pair")
        return make_doctor_report(hosts, survey.measure_pairs(usable, progress.count_one))


class ProgressSpinner:
    """What is being done, on standard error, where that is a terminal. A context."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._status = console.status("") if console.is_terminal else None
        self._phase, self._num_done, self._num_total = "", 0, 0

    def __enter__(self) -> ProgressSpinner:
        """Itself, shown."""
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Gone again."""
        if self._status is not None:
            self._status.stop()

    def start_phase(self, action: str, num_total: int, noun: str) -> None:
        """Something new begins."""
        self._phase, self._num_done, self._num_total = (
            f"{action} {num_total} {noun}{'s' * (num_total != 1)}",
            0,
            num_total,
        )
        self._update()

    def count_one(self) -> None:
        """One of them is done. From any thread."""
        self._num_done += 1
        self._update()

    def _update(self) -> None:
        if self._status is not None:
            self._status.update(f"{self._phase}{f', {self._num_done} done' if self._num_done else ''} …")


MAX_HOSTS_AT_ONCE = 16
"""Most hosts that are looked at side by side."""
START_TIMEOUT_S = 30.0
"""For ranks to start and to find each other; ssh has its own limit on top."""
GRACE_PERIOD_S = 1.0


class DoctorRunner:
    """The jobs of one `ronde doctor`. As a context, its end is the end of all of them."""

    def __init__(self, job: Job) -> None:
        """`job` says which hosts there are, and how to reach them."""
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
        self._host_names = [host.name for host in job.hosts] or ["localhost"]
        # Its threads run drivers, one each; results leave through futures.
        self._pool = ThreadPoolExecutor(MAX_HOSTS_AT_ONCE, thread_name_prefix="ronde-doctor")
        self._drivers: set[Driver] = set()
        self._closed = False

    def __enter__(self) -> DoctorRunner:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End what still runs."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for driver in tuple(self._drivers):
            driver.stop("the doctor has ended")
        self._pool.shutdown()

    @property
    def num_hosts(self) -> int:
        """How many there are to look at."""
        return len(self._host_names)

    def check_hosts(self, on_done: Callable[[], None]) -> list[HostReport]:
        """All of them; `done` is called for each."""

        def look(name: str) -> HostReport:
            report = self._check_host(name)
            on_done()
            return report

        return list(self._pool.map(look, self._host_names))

    def measure_pairs(self, names: Sequence[str], on_done: Callable[[], None]) -> list[HostPairReport]:
        """Two ranks of each of these hosts, and every pair of them. In one job, if they all get on; otherwise each by
        itself, so that those who do are told from those who do not. `done` is called for each of those. One after the
        other: they would disturb each other's numbers."""
        pairs = [(name, name) for name in names] + list(itertools.combinations(names, 2))
        found = self._pool.submit(self._measure_in_one_job, names, pairs).result() if pairs else []
        if len(pairs) > 1 and found[0].trouble:
            found = []
            for pair in pairs:
                found += self._pool.submit(self._measure_in_one_job, tuple(dict.fromkeys(pair)), [pair]).result()
                on_done()
        return found

    def _check_host(self, name: str) -> HostReport:
        try:
            (facts,) = self._run_job(
                (Host(name),), pickle_call(collect_system_info, (), {}), START_TIMEOUT_S + IMPORT_TIMEOUT_S
            )
        except Exception as error:  # the job's edge: whatever a rank raised there
            return HostReport(name, trouble=format_job_error(error, name))
        return HostReport(name, facts)

    def _measure_in_one_job(self, names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[HostPairReport]:
        first = {name: 2 * index for index, name in enumerate(names)}
        ranks = [(first[one], first[two] + (one == two)) for one, two in pairs]
        hosts = tuple(Host(name, 2) for name in names)
        try:
            results = self._run_job(
                hosts, pickle_call(measure_links, (ranks,), {}), START_TIMEOUT_S + PAIR_TIMEOUT_S * len(pairs)
            )
        except Exception as error:  # as above
            return [HostPairReport(*pair, trouble=format_job_error(error, *pair)) for pair in pairs]
        speeds = [results[leader][index] for index, (leader, _) in enumerate(ranks)]
        return [HostPairReport(*pair, speed) for pair, speed in zip(pairs, speeds, strict=True)]

    def _run_job(self, hosts: tuple[Host, ...], pickled_call: bytes, timeout_s: float) -> list[Any]:
        num_ranks = sum(host.slots for host in hosts)
        job = replace(self._job, hosts=hosts, num_ranks=num_ranks, pickled_call=pickled_call)
        with (
            open(os.devnull, "wb") as nowhere,  # noqa: PTH123  # a device
            closing(
                Printer(StandardStreams(nowhere, nowhere), num_ranks=num_ranks, options=OutputOptions(fold=False))
            ) as screen,
        ):
            driver = Driver(job, screen)
            timeout_s += job.ssh.start_s
            timer = threading.Timer(timeout_s, driver.stop, [f"it took longer than {timeout_s:g} s"])
            self._drivers.add(driver)
            timer.start()
            try:
                if self._closed:
                    driver.stop("the doctor has ended")
                return unpickle_results(driver.run(), num_ranks)
            finally:
                timer.cancel()
                timer.join()
                self._drivers.discard(driver)


def format_job_error(error: Exception, *hosts: str) -> str:
    """Why a job failed, for a place in a table: without the heading of a list, and without the name that is there
    already."""
    text = str(error) or type(error).__name__
    heading, _, rest = text.partition("\n")
    if heading.endswith(":") and rest:
        text = "; ".join(line.strip() for line in rest.splitlines())
    return text.removeprefix(f"{hosts[0]}: ") if len(set(hosts)) == 1 else text
