"""What is wrong with what `ronde doctor` has found, and what to do about it. Decides only; does nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from ronde.cli.doctor.report import DoctorReport, HostPairReport, HostReport, Problem
from ronde.cli.doctor.system_info import SystemInfo
from ronde.version import __version__

MIN_OPEN_FILES = 1024
"""A rank has some sockets per peer, and a framework opens hundreds of files."""
MIN_PROCESSES = 1024
"""Threads included."""
MIN_AVAILABLE_BYTES = 512 * 1024 * 1024
MIN_DEV_SHM_BYTES = 1024 * 1024 * 1024
MIN_BYTES_PER_S = 100e6
"""Gigabit Ethernet has 117 MB/s."""
MAX_ROUND_TRIP_S = 0.002
"""Round trips inside a data centre take much less."""
MIN_FRACTION_OF_MEDIAN = 0.5
"""A pair with less than this part of the median bandwidth is reported."""
MIN_PAIRS_FOR_MEDIAN = 3
"""With fewer, no pair is compared with the median."""
MAX_CLOCK_DIFFERENCE_S = 0.5


def make_doctor_report(hosts: Sequence[HostReport], pairs: Sequence[HostPairReport]) -> DoctorReport:
    """The whole report. `healthy` is whether nothing is broken; warnings do not count."""
    problems = [
        *(problem for host in hosts for problem in _host_problems(host.name, host.facts, host.error)),
        *_version_problems(hosts),
        *_pair_problems(pairs),
    ]
    problems.sort(key=lambda problem: problem.severity != "broken")
    healthy = all(problem.severity != "broken" for problem in problems)
    return DoctorReport(__version__, healthy, tuple(hosts), tuple(pairs), tuple(problems))


def _host_problems(where: str, facts: SystemInfo | None, error: str) -> Iterator[Problem]:
    if facts is None:
        yield Problem("broken", where, "host", error)
        return

    def warning(check: str, what: str, advice: str) -> Problem:
        return Problem("warning", where, check, what, advice)

    states = {each.name: each for each in (*facts.backends, *facts.frameworks)}
    native, mpi, shared, limits = states["native"], states["mpi"], facts.shared_memory, facts.limits
    if native.state != "usable":
        yield Problem("broken", where, "native", native.note, "reinstall ronde; in a checkout, run `make build`")
    elif native.note.startswith("portable") and facts.system.endswith("x86_64"):
        why = "the CPU has no AVX2: sums take several times as long"
        yield warning("native", why, "if this is a virtual machine, let it see the host's CPU")
    if mpi.state == "broken":
        yield warning("mpi", mpi.note, "only --backend mpi needs it: repair mpi4py or its MPI library")
    for component in facts.frameworks:
        if component.state == "broken":
            yield warning(component.name, component.note, f"if you need it, repair the install of {component.name}")
    if not shared.works:
        advice = "let memfd_create through (a container's seccomp profile), and leave some memory free"
        yield Problem("broken", where, "shared", f"no shared memory: {shared.why}", advice)
    elif shared.dev_shm_bytes < MIN_DEV_SHM_BYTES and states["torch"].state == "usable":
        what = f"/dev/shm has only {shared.dev_shm_bytes / 1e6:.3g} MB; ronde needs none, but PyTorch's DataLoader does"
        yield warning("shared", what, "docker run --shm-size=8g, or no loader workers")
    if facts.memory.available < MIN_AVAILABLE_BYTES:
        what = f"only {facts.memory.available / 1e6:.3g} MB of memory are left"
        yield warning("memory", what, "end other programs, or raise the container's limit")
    if limits.open_files is not None and limits.open_files < MIN_OPEN_FILES:
        what = f"only {limits.open_files} open files per process"
        yield warning("limits", what, "ulimit -n 65536, or nofile in /etc/security/limits.conf")
    if limits.processes is not None and limits.processes < MIN_PROCESSES:
        what = f"only {limits.processes} processes and threads"
        yield warning("limits", what, "ulimit -u 32768, or docker run --pids-limit")


def _version_problems(hosts: Sequence[HostReport]) -> Iterator[Problem]:
    """Libraries whose versions differ between hosts: models and messages of one may mean nothing to another."""
    versions: dict[str, dict[str, list[str]]] = {}
    for host in hosts:
        if host.facts is not None:
            usable = {each.name: each.version for each in host.facts.frameworks if each.state == "usable"}
            for name, version in {"numpy": host.facts.libraries.get("numpy", "?"), **usable}.items():
                versions.setdefault(name, {}).setdefault(version, []).append(host.name)
    for name, hosts_by_version in versions.items():
        if len(hosts_by_version) > 1:
            what = "; ".join(f"{version} on {', '.join(where)}" for version, where in hosts_by_version.items())
            where = ", ".join(host for names in hosts_by_version.values() for host in names)
            yield Problem("warning", where, name, f"different versions: {what}", "install one version on all hosts")


def _pair_problems(pairs: Sequence[HostPairReport]) -> Iterator[Problem]:
    # Ranks of one host use no network: their speed depends on how busy the host is just now.
    rates = [pair.speed.slowest_bytes_per_s for pair in pairs if pair.speed is not None and pair.first != pair.second]
    median = statistics.median(rates) if len(rates) >= MIN_PAIRS_FOR_MEDIAN else 0.0
    for pair in pairs:
        speed, where = pair.speed, f"{pair.first}, {pair.second}"
        if speed is None:
            yield Problem("broken", where, "pair", pair.error)
            continue
        if pair.first == pair.second:
            continue
        rate = speed.slowest_bytes_per_s
        if rate < MIN_BYTES_PER_S:
            what = f"only {rate / 1e6:.3g} MB/s, less than gigabit Ethernet"
            advice = "look for a faster network between them, or compress gradients"
            yield Problem("warning", where, "pair", what, advice)
        if speed.round_trip_s > MAX_ROUND_TRIP_S:
            what = f"a round trip takes {speed.round_trip_s * 1e3:.3g} ms: they are far from each other"
            yield Problem("warning", where, "pair", what, "use hosts of one site")
        if abs(speed.clock_ahead_s) - speed.round_trip_s / 2 > MAX_CLOCK_DIFFERENCE_S:
            what = f"their clocks differ by {abs(speed.clock_ahead_s):.3g} s"
            yield Problem("warning", where, "clock", what, "let chrony or systemd-timesyncd set them")
        if rate < MIN_FRACTION_OF_MEDIAN * median:  # because of a cable, a port, or a busy neighbour
            what = f"{rate / 1e6:.3g} MB/s, where most have {median / 1e6:.3g}"
            yield Problem("warning", where, "pair", what, "look at the cables, ports and neighbours of these hosts")
