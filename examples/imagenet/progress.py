"""How the training goes: on the terminal (Display), and in the log and TensorBoard as well (Telling)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import SupportsFloat

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from scalars import Scalars

import ronde
from ronde.dash import RankTimeBreakdown, RunLog, read_log, write_report

__all__ = ["Display", "Telling", "is_finished", "tell_result"]

PLAIN_EVERY_S = 10.0
REPORT_STEPS = 10
"""Steps from one look at all ranks to the next."""


class Display:
    """A live line on a terminal, a plain line now and then elsewhere. A context manager; on ranks other than 0 it stays
    silent."""

    def __init__(self, num_steps: int, done: int, *, silent: bool) -> None:
        self._silent = silent
        self._console = Console(quiet=silent, highlight=False)
        self._live = self._console.is_terminal and not silent
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self._console, disable=not self._live)
        self._task = self._progress.add_task("", total=num_steps, completed=done)
        self._num_steps = num_steps
        self._plain_due_s = 0.0

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, soft_wrap=True)

    def step(self, step: int, loss: float, images_per_second: float, shares: Sequence[RankTimeBreakdown]) -> None:
        """How it goes now, with the mean step time of each rank."""
        times = " ".join(f"{1e3 * share.mean_step_s:.0f}" for share in shares)
        text = f"loss {loss:.3f}  {images_per_second:.0f} images/s  ms per step: {times}"
        if self._live:
            self._progress.update(self._task, completed=step, description=text)
        elif not self._silent and time.monotonic() >= self._plain_due_s:
            self.say(f"step {step}/{self._num_steps}  {text}")
            self._plain_due_s = time.monotonic() + PLAIN_EVERY_S

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class Telling:
    """How it goes, every few steps: to the log, TensorBoard and the terminal."""

    def __init__(self, log: RunLog, display: Display, scalars: Scalars, *, lr: Callable[[], float]) -> None:
        self.log, self.display, self.scalars = log, display, scalars
        self._lr = lr
        self._step = 0
        self._losses: list[SupportsFloat] = []
        self._num_images = 0

    def step(self, step: int, loss: SupportsFloat, num_images: int) -> None:
        """After each step. The loss is that of this rank; its number is read later, when a GPU has computed it."""
        self._step = step
        self._losses.append(loss)
        self._num_images += num_images
        if len(self._losses) == REPORT_STEPS:
            self.flush()

    def flush(self) -> None:
        """Print and log the losses since the last call. Collective."""
        if not self._losses:
            return
        shares = self.log.gather(self._step)
        loss = fmean(ronde.objects.allgather(fmean(map(float, self._losses))))
        rate = ronde.size() * self._num_images / max(share.total_s for share in shares)
        self.values(self._step, {"train/loss": loss, "train/images per second": rate, "train/lr": self._lr()})
        self.display.step(self._step, loss, rate, shares)
        self._losses, self._num_images = [], 0

    def values(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers after so many steps."""
        self.log.add(step, values)
        self.scalars.add(step, values)


def is_finished(log: Path) -> bool:
    """Whether the run of this log came to its end; the answer of rank 0, for all."""
    finished: bool = ronde.objects.broadcast(ronde.rank() == 0 and log.exists() and read_log(log).ended)
    return finished


def tell_result(display: Display, test: Mapping[str, float], log: Path, report: Path) -> None:
    """Print the result of the run, and write its report. Called by all ranks; rank 0 does it."""
    for name, value in test.items():
        display.say(f"{name}: {value:.2%}" if name.endswith("accuracy") else f"{name}: {value:.4f}")
    if ronde.rank() == 0:
        page = write_report(log, report, title="AlexNet")
        took_s = time.time() - psutil.Process().create_time()
        display.say(f"took {took_s:.0f} s, all included\nreport: {page}")
