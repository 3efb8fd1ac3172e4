"""Carries out a batch prediction: ranks take parts until all are done. Used by `ronde predict`.

Ranks do not talk to each other. What is done stands in the output folder (output). So a rank may die at any moment, and
be replaced, and a run that was killed goes on with the parts that are left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ronde.errors import DataError
from ronde.predict.output import OutputFolder
from ronde.predict.plan import PartRange, PredictManifest, PredictOptions, make_plan, order_parts
from ronde.predict.rows import RowPredictor, RowReader, encode_errors, encode_rows
from ronde.serve.model import OnnxModel

POLL_S = 0.1
"""How often a rank looks whether others have finished what they claim."""
STUCK_S = 60.0
"""If no part was finished for so long, or for ten times as long as one takes, a rank does what others claim: the holder
may be stopped or out of reach."""


class PredictProgress(NamedTuple):
    """How far it has come, all ranks together."""

    num_rows: int
    """That are done."""
    num_all_rows: int
    num_parts: int
    num_all_parts: int


class PredictWorker:
    """One rank's part of the work."""

    def __init__(self, options: PredictOptions, *, rank: int = 0, size: int = 1) -> None:
        self.plan, self._reader, self._model_folder = make_plan(options)
        self._options = options
        self._order = order_parts(len(self.plan.parts), rank, size)
        self.output = OutputFolder(self.plan)

    def run(self, on_progress: Callable[[PredictProgress], object]) -> PredictManifest:
        """Predict parts until all are done, and return the manifest."""
        try:
            return self._run(on_progress)
        except (DataError, OSError):
            complete = self.output.read_complete()
            if complete is None:
                raise
            # Another rank has finished meanwhile, and removed the folder in which this one was about to write.
            self.output.remove_work()
            return complete

    def _run(self, on_progress: Callable[[PredictProgress], object]) -> PredictManifest:
        complete = self.output.read_complete()
        if complete is not None:
            on_progress(self._progress(set(self.plan.parts)))
            return complete
        self.output.begin()
        predictor = RowPredictor(self._options, OnnxModel(self._model_folder, threads=self._options.threads))
        rows = RowReader(self._reader)
        longest_s, last_change, num_seen = 0.0, time.monotonic(), -1
        while True:
            done = self.output.list_done()
            on_progress(self._progress(done))
            if len(done) != num_seen:
                num_seen, last_change = len(done), time.monotonic()
            left = [index for index in self._order if self.plan.parts[index] not in done]
            if not left:
                return self._finish()
            complete = self.output.read_complete()
            if complete is not None:  # another rank has finished, and removed the entries
                self.output.remove_work()
                return complete
            is_stuck = time.monotonic() - last_change > max(STUCK_S, 10 * longest_s)
            claimed = next((index for index in left if self.output.claim(index)), left[0] if is_stuck else None)
            if claimed is None:
                time.sleep(POLL_S)
                continue
            started = time.monotonic()
            part = self.plan.parts[claimed]
            try:
                if part not in self.output.list_done():  # since we looked, its last holder may have finished it
                    found, errors = predictor.predict(rows.read(part))
                    data = encode_rows(found, self.plan.names.format)
                    self.output.publish(part, data, encode_errors(errors), len(errors))
            finally:
                self.output.release(claimed)
            longest_s = max(longest_s, time.monotonic() - started)

    def current_progress(self) -> PredictProgress:
        """How far all ranks have come, for the process that has started them."""
        done = self.output.list_done()
        return self._progress(set(self.plan.parts) if not done and self.output.read_complete() else done)

    def _finish(self) -> PredictManifest:
        complete = self.output.read_complete()
        return complete if complete is not None else self.output.finish()

    def _progress(self, done: set[PartRange]) -> PredictProgress:
        num_rows = sum(part.stop - part.start for part in done)
        return PredictProgress(num_rows, self.plan.num_rows, len(done), len(self.plan.parts))


def predict(
    options: PredictOptions,
    *,
    rank: int = 0,
    size: int = 1,
    on_progress: Callable[[PredictProgress], Any] = lambda progress: None,
) -> PredictManifest:
    """Predict as the options say, together with other processes that do the same: returns when all of it is done.
    `rank` and `size` only say where to begin. A run that was killed goes on where it was."""
    worker = PredictWorker(options, rank=rank, size=size)
    try:
        return worker.run(on_progress)
    finally:
        worker.output.close()
