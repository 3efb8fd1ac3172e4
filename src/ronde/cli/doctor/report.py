"""The result of `ronde doctor`: its values, whose JSON docs/reference/json.md describes, and the tables of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ronde.cli.doctor.link_speed import LinkSpeed
from ronde.cli.doctor.system_info import ComponentStatus, CpuInfo, MemoryInfo, ResourceLimits, SystemInfo
from ronde.text import format_bytes

Severity: TypeAlias = Literal["broken", "warning"]


class HostReport(msgspec.Struct, frozen=True):
    name: str
    """As the user named it."""
    facts: SystemInfo | None = None
    """None: the check failed."""
    trouble: str = ""
    """Why it failed."""


class HostPairReport(msgspec.Struct, frozen=True):
    """Two hosts; or two ranks of one host, which is then named twice."""

    first: str
    second: str
    speed: LinkSpeed | None = None
    """None: the measurement failed."""
    trouble: str = ""
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


@dataclass(frozen=True, slots=True)
class _CheckRow:
    check: str
    text: str
    status: str = "ok"


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


def _make_table(title: str) -> Table:
    return Table(
        title=Text(title, style="bold"), title_justify="left", box=None, padding=(0, 1, 0, 0), show_header=False
    )


def _host_table(host: HostReport, problems: Sequence[Problem]) -> Table:
    severities = {problem.check: problem.severity for problem in reversed(problems) if problem.where == host.name}
    is_named = host.facts is None or host.facts.node == host.name
    table = _make_table(f"host {host.name}" + ("" if is_named or host.facts is None else f" ({host.facts.node})"))
    table.add_column(no_wrap=True, width=7)
    table.add_column(no_wrap=True, width=10)
    table.add_column(overflow="fold")
    rows = [_CheckRow("host", host.trouble)] if host.facts is None else _check_rows(host.facts)
    for row in rows:
        status = severities.get(row.check, row.status)
        table.add_row(
            Text(status, style=STATUS_STYLES[status]), row.check, Text(row.text, style="dim" if status == "-" else "")
        )
    return table


def _check_rows(facts: SystemInfo) -> Iterator[_CheckRow]:
    shared = facts.shared_memory
    memfd = f"memfd, up to {format_bytes(facts.memory.available)}" if shared.works else shared.why
    yield _CheckRow("ronde", f"{facts.ronde}, Python {facts.python} ({facts.executable})")
    yield _CheckRow("system", f"{facts.system}, {facts.cpu}")
    yield _CheckRow("cores", _format_cores(facts.cores))
    yield _CheckRow("memory", _format_memory(facts.memory))
    yield _CheckRow("shared", f"{memfd}; /dev/shm {format_bytes(shared.dev_shm_bytes)}")
    yield _CheckRow("limits", _format_limits(facts.limits))
    yield _CheckRow("libraries", ", ".join(f"{name} {version}" for name, version in facts.libraries.items()))
    for component in (*facts.backends, *facts.frameworks):
        yield _component_row(component)


def _component_row(component: ComponentStatus) -> _CheckRow:
    text = ", ".join(part for part in (component.version, component.note) if part)
    return _CheckRow(component.name, text or "usable", "ok" if component.state == "usable" else "-")


def _format_cores(cores: CpuInfo) -> str:
    number = f"{cores.allowed}" + (f" of {cores.total}" if cores.allowed != cores.total else "")
    return number + (f", of which a container's limit lets {cores.quota:g} be busy" if cores.quota is not None else "")


def _format_memory(memory: MemoryInfo) -> str:
    limit = f", a container's limit is {format_bytes(memory.limit)}" if memory.limit is not None else ""
    return f"{format_bytes(memory.total)}, {format_bytes(memory.available)} available{limit}"


def _format_limits(limits: ResourceLimits) -> str:
    locked = "any" if limits.locked_bytes is None else format_bytes(limits.locked_bytes)
    counts = ((limits.open_files, "open files"), (limits.processes, "processes"))
    return ", ".join(
        [*(f"{'any number of' if n is None else n} {what}" for n, what in counts), f"{locked} locked memory"]
    )


def _pair_table(pairs: Sequence[HostPairReport]) -> Table:
    def rate(pair: HostPairReport) -> float:
        return 0.0 if pair.speed is None else min(pair.speed.bytes_per_s, pair.speed.back_bytes_per_s)

    shown = pairs
    if len(pairs) > MAX_PAIRS_SHOWN:
        slowest = sorted(range(len(pairs)), key=lambda index: rate(pairs[index]))[:MAX_PAIRS_SHOWN]
        shown = [pairs[index] for index in sorted(slowest)]
    table = Table(title=Text("between ranks", style="bold"), title_justify="left", box=None, padding=(0, 1, 0, 0))
    for title in ("from", "to"):
        table.add_column(title, max_width=22, no_wrap=True, overflow="ellipsis")
    for title in ("round trip", "there", "back", "clock"):
        table.add_column(title, justify="right", no_wrap=True)
    for pair in shown:
        same = pair.first == pair.second
        names = Text(pair.first), Text("the same host" if same else pair.second, style="dim" if same else "")
        table.add_row(*names, *_speed_cells(pair))
    if len(shown) < len(pairs):
        table.caption = Text(f"the slowest {len(shown)} of {len(pairs)}; --json has all")
    return table


def _speed_cells(pair: HostPairReport) -> tuple[Text, ...]:
    speed = pair.speed
    if speed is None:
        return (Text("broken", style=STATUS_STYLES["broken"]),)
    clock = "" if pair.first == pair.second else f"{speed.clock_ahead_s * 1e3:+.1f} ms"
    trip = speed.round_trip_s * 1e6
    texts = (
        f"{trip:.0f} µs" if trip < 1000 else f"{trip / 1e3:.2f} ms",
        f"{format_bytes(speed.bytes_per_s)}/s",
        f"{format_bytes(speed.back_bytes_per_s)}/s",
        clock,
    )
    return tuple(map(Text, texts))


def _problem_table(problems: Sequence[Problem]) -> Table:
    table = _make_table("what to do")
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
