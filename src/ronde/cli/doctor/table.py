"""A doctor's report for people: a table per host, one of the pairs, and what to do. Used by command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ronde.cli.doctor.report import HostReport, PairReport, Problem, Report
from ronde.cli.figures import format_size
from ronde.launch.checkup import Cores, Facts, Limits, Memory
from ronde.launch.components import Component

__all__ = ["draw_report"]

MARKS = {"ok": "green", "-": "dim", "warning": "yellow", "broken": "bold red"}
"""What a row begins with, and its style."""
MOST_PAIRS = 40
"""Of more pairs only the slowest are shown."""


@dataclass(frozen=True, slots=True)
class Row:
    """One check of a host."""

    check: str
    text: str
    mark: str = "ok"


def draw_report(report: Report) -> RenderableType:
    """All of it; what is wrong comes last, where it is seen."""
    parts: list[RenderableType] = []
    for host in report.hosts:
        parts += [_host_table(host, report.problems), ""]
    if report.pairs:
        parts += [_pair_table(report.pairs), ""]
    if report.problems:
        parts += [_problem_table(report.problems), ""]
    return Group(*parts, _verdict(report))


def _frame(title: str) -> Table:
    return Table(
        title=Text(title, style="bold"), title_justify="left", box=None, padding=(0, 1, 0, 0), show_header=False
    )


def _host_table(host: HostReport, problems: Sequence[Problem]) -> Table:
    wrong = {problem.check: problem.severity for problem in reversed(problems) if problem.where == host.name}
    is_named = host.facts is None or host.facts.node == host.name
    table = _frame(f"host {host.name}" + ("" if is_named or host.facts is None else f" ({host.facts.node})"))
    table.add_column(no_wrap=True, width=7)
    table.add_column(no_wrap=True, width=10)
    table.add_column(overflow="fold")
    rows = [Row("host", host.trouble)] if host.facts is None else _rows(host.facts)
    for row in rows:
        mark = wrong.get(row.check, row.mark)
        table.add_row(Text(mark, style=MARKS[mark]), row.check, Text(row.text, style="dim" if mark == "-" else ""))
    return table


def _rows(facts: Facts) -> Iterator[Row]:
    shared = facts.shared_memory
    words = f"memfd, up to {format_size(facts.memory.available)}" if shared.works else shared.why
    yield Row("ronde", f"{facts.ronde}, Python {facts.python} ({facts.executable})")
    yield Row("system", f"{facts.system}, {facts.cpu}")
    yield Row("cores", _cores(facts.cores))
    yield Row("memory", _memory(facts.memory))
    yield Row("shared", f"{words}; /dev/shm {format_size(shared.dev_shm_bytes)}")
    yield Row("limits", _limits(facts.limits))
    yield Row("libraries", ", ".join(f"{name} {version}" for name, version in facts.libraries.items()))
    for component in (*facts.backends, *facts.frameworks):
        yield _component(component)


def _component(component: Component) -> Row:
    text = ", ".join(part for part in (component.version, component.note) if part)
    return Row(component.name, text or "usable", "ok" if component.state == "usable" else "-")


def _cores(cores: Cores) -> str:
    some = f"{cores.allowed}" + (f" of {cores.total}" if cores.allowed != cores.total else "")
    return some + (f", of which a container's limit lets {cores.quota:g} be busy" if cores.quota is not None else "")


def _memory(memory: Memory) -> str:
    limit = f", a container's limit is {format_size(memory.limit)}" if memory.limit is not None else ""
    return f"{format_size(memory.total)}, {format_size(memory.available)} available{limit}"


def _limits(limits: Limits) -> str:
    locked = "any" if limits.locked_bytes is None else format_size(limits.locked_bytes)
    counts = ((limits.open_files, "open files"), (limits.processes, "processes"))
    return ", ".join(
        [*(f"{'any number of' if n is None else n} {what}" for n, what in counts), f"{locked} locked memory"]
    )


def _pair_table(pairs: Sequence[PairReport]) -> Table:
    def rate(pair: PairReport) -> float:
        return 0.0 if pair.speed is None else min(pair.speed.bytes_per_s, pair.speed.back_bytes_per_s)

    shown = pairs
    if len(pairs) > MOST_PAIRS:
        slowest = sorted(range(len(pairs)), key=lambda index: rate(pairs[index]))[:MOST_PAIRS]
        shown = [pairs[index] for index in sorted(slowest)]
    table = Table(title=Text("between ranks", style="bold"), title_justify="left", box=None, padding=(0, 1, 0, 0))
    for title in ("from", "to"):
        table.add_column(title, max_width=22, no_wrap=True, overflow="ellipsis")
    for title in ("round trip", "there", "back", "clock"):
        table.add_column(title, justify="right", no_wrap=True)
    for pair in shown:
        same = pair.first == pair.second
        names = Text(pair.first), Text("the same host" if same else pair.second, style="dim" if same else "")
        table.add_row(*names, *_numbers(pair))
    if len(shown) < len(pairs):
        table.caption = Text(f"the slowest {len(shown)} of {len(pairs)}; --json has all")
    return table


def _numbers(pair: PairReport) -> tuple[Text, ...]:
    speed = pair.speed
    if speed is None:
        return (Text("broken", style=MARKS["broken"]),)
    clock = "" if pair.first == pair.second else f"{speed.clock_ahead_s * 1e3:+.1f} ms"
    trip = speed.round_trip_s * 1e6
    texts = (
        f"{trip:.0f} µs" if trip < 1000 else f"{trip / 1e3:.2f} ms",
        f"{format_size(speed.bytes_per_s)}/s",
        f"{format_size(speed.back_bytes_per_s)}/s",
        clock,
    )
    return tuple(map(Text, texts))


def _problem_table(problems: Sequence[Problem]) -> Table:
    table = _frame("what to do")
    table.add_column(no_wrap=True, width=7)
    table.add_column(overflow="fold")
    for problem in problems:
        # The two ends of a pair, and a host that is not there at all, say enough.
        check = "" if problem.check in ("host", "pair") else f" {problem.check}:"
        text = Text(f"{problem.where}:{check} {problem.what}")
        if problem.advice:
            text.append(f"\n→ {problem.advice}", style="cyan")
        table.add_row(Text(problem.severity, style=MARKS[problem.severity]), text)
    return table


def _verdict(report: Report) -> Text:
    broken = sum(problem.severity == "broken" for problem in report.problems)
    warnings = len(report.problems) - broken
    words = [f"{broken} broken"] * bool(broken) + [f"{warnings} warning{'s' * (warnings > 1)}"] * bool(warnings)
    if not report.healthy:
        return Text(f"jobs will fail: {', '.join(words)}", style=MARKS["broken"])
    return Text(f"jobs can run ({words[0]})" if words else "all is well", style=MARKS["warning" if words else "ok"])
