"""What rank 0 shows of the training: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ronde.dash import RankTimeBreakdown

__all__ = ["Display"]

PLAIN_EVERY_S = 10.0


class Display:
    """A context manager; on ranks other than 0 it stays silent."""

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
