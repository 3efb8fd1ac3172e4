"""What a service has done so far, in the text format of Prometheus. Used by the front, in its thread."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Iterable, Sequence

SECONDS_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
ROWS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """How many values were at most as large as each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def lines(self, name: str) -> Iterable[str]:
        total = 0
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            total += count
            shown = "+Inf" if bound == math.inf else f"{bound:g}"
            yield f'{name}_bucket{{le="{shown}"}} {total}'
        yield f"{name}_sum {self.sum:.6f}"
        yield f"{name}_count {total}"


class ServingMetrics:
    """Counts, sums and present values."""

    def __init__(self) -> None:
        self._began_s = time.time()
        self.replies: dict[int, int] = {}
        """By status, of requests for predictions."""
        self.request_s = Histogram(SECONDS_BUCKETS)
        self.queue_s = Histogram(SECONDS_BUCKETS)
        self.predict_s = Histogram(SECONDS_BUCKETS)
        self.batch_rows = Histogram(ROWS_BUCKETS)
        self.num_replicas_lost = 0
        self.num_retried = 0
        self.num_set_aside = 0
        self.num_model_changes = 0
        self.num_model_failures = 0
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        """By name: what it means, and its value."""

    def count_reply(self, status: int, seconds: float) -> None:
        self.replies[status] = self.replies.get(status, 0) + 1
        self.request_s.add(seconds)

    def render(self) -> str:
        lines: list[str] = []

        def add(name: str, kind: str, help: str, values: Iterable[str]) -> None:
            lines.extend((f"# HELP ronde_serve_{name} {help}", f"# TYPE ronde_serve_{name} {kind}", *values))

        by_status = [
            f'ronde_serve_requests_total{{code="{status}"}} {count}' for status, count in sorted(self.replies.items())
        ]
        add("requests_total", "counter", "Requests for predictions, by the status of the reply.", by_status)
        histograms = {
            "request_seconds": ("Time from a request to its reply.", self.request_s),
            "queue_seconds": ("Time for which a request waited for a replica.", self.queue_s),
            "predict_seconds": ("Time that a replica took for a batch.", self.predict_s),
            "batch_rows": ("Samples in a batch.", self.batch_rows),
        }
        for name, (help, histogram) in histograms.items():
            add(name, "histogram", help, histogram.lines(f"ronde_serve_{name}"))
        counters = {
            "replicas_lost_total": ("Replicas that have died.", self.num_replicas_lost),
            "requests_retried_total": ("Requests that were sent to another replica.", self.num_retried),
            "requests_set_aside_total": ("Requests with which two replicas died.", self.num_set_aside),
            "model_changes_total": ("Models that have replaced another.", self.num_model_changes),
            "model_failures_total": ("Models that could not replace another.", self.num_model_failures),
        }
        for name, (help, value) in counters.items():
            add(name, "counter", help, [f"ronde_serve_{name} {value}"])
        for name, (help, read) in self.gauges.items():
            add(name, "gauge", help, [f"ronde_serve_{name} {read():g}"])
        add(
            "start_time_seconds",
            "gauge",
            "When the service began.",
            [f"ronde_serve_start_time_seconds {self._began_s:.3f}"],
        )
        return "\n".join(lines) + "\n"
