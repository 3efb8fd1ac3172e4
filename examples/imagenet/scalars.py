"""Scalars for TensorBoard, written by rank 0 with TensorBoard's own writer."""

from __future__ import annotations

import time
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
                from tensorboard.compat.proto.event_pb2 import Event, SessionLog
                from tensorboard.compat.proto.summary_pb2 import Summary
                from tensorboard.summary.writer.event_file_writer import EventFileWriter
            except ImportError:
                return
            self._Event, self._Summary = Event, Summary
            self._writer = EventFileWriter(str(folder))
            if step:  # what an earlier start wrote of steps that are done again now is not shown
                start = SessionLog(status=SessionLog.START)
                self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers after so many steps."""
        if self._writer is not None:
            summary = self._Summary(
                value=[self._Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            )
            self._writer.add_event(self._Event(wall_time=time.time(), step=step, summary=summary))

    def __enter__(self) -> Scalars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
