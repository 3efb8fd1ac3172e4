"""The result of `ronde doctor`: its values, whose JSON docs/reference/json.md describes, and the tables of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ronde.cli.doctor.link_speed import LinkSpeed
from ronde.cli.doctor.system_info import SystemInfo
from ronde.text import format_bytes

Severity: TypeAlias = Literal["broken", "warning"]


class HostReport(msgspec.Struct, frozen=True):
    name: str
    """As the user named it."""
    facts: SystemInfo | None = None
    """None: the check failed."""
    error: str = ""
    """Why it failed."""


class HostPairReport(msgspec.Struct, frozen=True):
    """Two hosts; or two ranks of one host, which is then named twice."""

    first: str
    second: str
    speed: LinkSpeed | None = None
    """None: the measurement failed."""
    error: str = ""
    """Why it failed."""


class Problem(msgspec.Struct, frozen=True):
    severity: Severity
    """Broken: jobs will fail."""
    where: str
    """The host or hosts."""
    check: str
    """One word, as in the table of the host."""
    what: str
    advice: str = ""


class DoctorReport(msgspec.Struct, frozen=True):
    ronde: str
    """Version."""
    healthy: bool
    """Nothing that jobs need is broken."""
    hosts: tuple[HostReport, ...]
    pairs: tuple[HostPairReport, ...]
    problems: tuple[Problem, ...]


STATUS_STYLES = {"ok": "green", "-": "dim", "warning": "yellow", "broken": "bold red"}
MAX_PAIRS_SHOWN = 40
"""Of more pairs only the slowest are shown."""


def render_report(report: DoctorReport) -> RenderableType:
    """A table per host, one of the pairs, and what to do last, where it is seen."""
    parts: list[RenderableType] = []
    for host in report.hosts:
        parts += [_host_table(host, report.problems), ""]
    if report.pairs:
        parts += [_pair_table(report.pairs), ""]
    if report.problems:
        parts += [_problem_table(report.problems), ""]
    return Group(*parts, _summary_line(report))


def _make_table(title: str, **options: Any) -> Table:
    return Table(title=Text(title, style="bold"), title_justify="left", box=None, padding=(0, 1, 0, 0), **options)


def _host_table(host: HostReport, problems: Sequence[Problem]) -> Table:
    severities = {problem.check: problem.severity for problem in reversed(problems) if problem.where == host.name}
    node = "" if host.facts is None or host.facts.node == host.name else f" ({host.facts.node})"
    table = _make_table(f"host {host.name}{node}", show_header=False)
    table.add_column(no_wrap=True, width=7)
    table.add_column(no_wrap=True, width=10)
    table.add_column(overflow="fold")
    rows = {"host": host.error} if host.facts is None else _describe_facts(host.facts)
    missing = () if host.facts is None else (*host.facts.backends, *host.facts.frameworks)
    statuses = {each.name: "-" for each in missing if each.state != "usable"}
    for check, text in rows.items():
        status = severities.get(check) or statuses.get(check, "ok")
        table.add_row(
            Text(status, style=STATUS_STYLES[status]), check, Text(text, style="dim" if status == "-" else "")
        )
    return table


def _describe_facts(facts: SystemInfo) -> dict[str, str]:
    """A text per check."""
    cores, memory, shared, limits = facts.cores, facts.memory, facts.shared_memory, facts.limits
    total_cores = f" of {cores.total}" if cores.allowed != cores.total else ""
    quota = "" if cores.quota is None else f", of which a container's limit lets {cores.quota:g} be busy"
    memory_limit = "" if memory.limit is None else f", a container's limit is {format_bytes(memory.limit)}"
    memfd = f"memfd, up to {format_bytes(memory.available)}" if shared.works else shared.why
    counts = ((limits.open_files, "open files"), (limits.processes, "processes"))
    numbers = ", ".join(f"{'any number of' if n is None else n} {what}" for n, what in counts)
    locked = "any" if limits.locked_bytes is None else format_bytes(limits.locked_bytes)
    return {
        "ronde": f"{facts.ronde}, Python {facts.python} ({facts.executable})",
        "system": f"{facts.system}, {facts.cpu}",
        "cores": f"{cores.allowed}{total_cores}{quota}",
        "memory": f"{format_bytes(memory.total)}, {format_bytes(memory.available)} available{memory_limit}",
        "shared": f"{memfd}; /dev/shm {format_bytes(shared.dev_shm_bytes)}",
        "limits": f"{numbers}, {locked} locked memory",
        "libraries": ", ".join(f"{name} {version}" for name, version in facts.libraries.items()),
    } | {
        each.name: ", ".join(filter(None, (each.version, each.note))) or "usable"
        for each in (*facts.backends, *facts.frameworks)
    }


def _pair_table(pairs: Sequence[HostPairReport]) -> Table:
    def rate(pair: HostPairReport) -> float:
        return 0.0 if pair.speed is None else pair.speed.slowest_bytes_per_s

    shown = pairs
    table = _make_table("between ranks")
    if len(pairs) > MAX_PAIRS_SHOWN:
        slowest = sorted(range(len(pairs)), key=lambda index: rate(pairs[index]))[:MAX_PAIRS_SHOWN]
        shown = [pairs[index] for index in sorted(slowest)]
        table.caption = Text(f"the slowest {len(shown)} of {len(pairs)}; --json has all")
    for title in ("from", "to"):
        table.add_column(title, max_width=22, no_wrap=True, overflow="ellipsis")
    for title in ("round trip", "there", "back", "clock"):
        table.add_column(title, justify="right", no_wrap=True)
    for pair in shown:
        same, speed = pair.first == pair.second, pair.speed
        cells = [Text(pair.first), Text("the same host" if same else pair.second, style="dim" if same else "")]
        if speed is None:
            cells.append(Text("broken", style=STATUS_STYLES["broken"]))
        else:
            trip = speed.round_trip_s * 1e6
            cells.append(Text(f"{trip:.0f} µs" if trip < 1000 else f"{trip / 1e3:.2f} ms"))
            cells += [Text(f"{format_bytes(rate)}/s") for rate in (speed.bytes_per_s, speed.back_bytes_per_s)]
            cells.append(Text("" if same else f"{speed.clock_ahead_s * 1e3:+.1f} ms"))
        table.add_row(*cells)
    return table


def _problem_table(problems: Sequence[Problem]) -> Table:
    table = _make_table("what to do", show_header=False)
    table.add_column(no_wrap=True, width=7)
    table.add_column(overflow="fold")
    for problem in problems:
        # For a pair and for a host that cannot be reached, `where` says enough.
        check = "" if problem.check in ("host", "pair") else f" {problem.check}:"
        text = Text(f"{problem.where}:{check} {problem.what}")
        if problem.advice:
            text.append(f"\n→ {problem.advice}", style="cyan")
        table.add_row(Text(problem.severity, style=STATUS_STYLES[problem.severity]), text)
    return table


def _summary_line(report: DoctorReport) -> Text:
    broken = sum(problem.severity == "broken" for problem in report.problems)
    warnings = len(report.problems) - broken
    counts = [f"{broken} broken"] * bool(broken) + [f"{warnings} warning{'s' * (warnings > 1)}"] * bool(warnings)
    if not report.healthy:
        return Text(f"jobs will fail: {', '.join(counts)}", style=STATUS_STYLES["broken"])
    if counts:
        return Text(f"jobs can run ({counts[0]})", style=STATUS_STYLES["warning"])
    return Text("all is well", style=STATUS_STYLES["ok"])
