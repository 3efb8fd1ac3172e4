"""A stream of ronde.data as a dataset of Keras, for fit() on any of its backends."""

from __future__ import annotations

from typing import Any

import keras

from ronde.data import Stream
from ronde.data.stream import StepPlan


class StreamPyDataset(keras.utils.PyDataset):
    """This rank's batches of a ronde.data.Stream, for fit(data, shuffle=False). `transform` of the stream makes tuples
    (x, y) of its samples.

    Its length is the number of steps from the position of the stream to the end of the epoch. With a State, the
    callback TrackState counts them; without one, an epoch of fit() is an epoch of the stream.
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__()  # one worker: batches are loaded ahead by the threads of the stream
        if not isinstance(stream, Stream):
            raise TypeError(f"StreamPyDataset takes a ronde.data.Stream, got a {type(stream).__name__}")
        self._stream = stream
        self._plan: StepPlan | None = None
        """Of the epoch of fit() that is under way."""
        self._batches: Any = None
        self._next_index = -1

    def __len__(self) -> int:
        """Return how many batches this rank has from the position to the end of the epoch; in fit(), from where the
        epoch has begun."""
        plan = self._plan or self._stream.plan()
        assert self._stream.length is not None
        return plan.num_steps(self._stream.length)

    def __getitem__(self, index: int) -> Any:
        """Return a batch, counted from the beginning of the epoch of fit() or from the position. Those in a row are
        loaded ahead."""
        if index != self._next_index or self._batches is None:
            self._close()
            plan = self._plan or self._stream.plan()
            self._batches = self._stream.loader.load(plan, skip=index)
        self._next_index = index + 1
        try:
            _, batch = next(self._batches)
        except StopIteration:
            raise IndexError(f"there is no batch {index} in this epoch") from None
        return batch

    def on_epoch_begin(self) -> None:
        # Called by fit().
        self._close()
        self._plan = self._stream.plan()

    def on_epoch_end(self) -> None:
        # Called by fit(), also before the first epoch, when it has looked at a batch.
        is_over = self._plan is not None and self._next_index >= len(self)
        self._close()
        self._plan = None
        if is_over and not self._stream.is_in_state:
            self._stream.end_epoch()

    def _close(self) -> None:
        """End the threads that load ahead."""
        if self._batches is not None:
            self._batches.close()
        self._batches, self._next_index = None, -1
