"""Scalars for TensorBoard, written by rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import ronde

__all__ = ["Scalars"]


class Scalars:
    """A context manager. Other ranks write nothing, and nobody does when TensorBoard is not installed."""

    def __init__(self, folder: Path, step: int) -> None:
        self._writer: Any = None
        if ronde.rank() == 0:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                return
            # What an earlier start wrote of steps that are done again now is not shown.
            self._writer = SummaryWriter(folder, purge_step=step + 1 if step else None)

    @property
    def on(self) -> bool:
        return self._writer is not None

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers after so many steps."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def __enter__(self) -> Scalars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
