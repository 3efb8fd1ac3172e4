"""A stream of ronde.data as a tf.data.Dataset: stream_dataset()."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from ronde.data import Stream


def stream_dataset(stream: Stream, *, signature: Any = None) -> Any:
    """Return this rank's batches of a ronde.data.Stream as a tf.data.Dataset, for fit() and for functions of
    TensorFlow. Each iteration over it gives those from the position of the stream to the end of the epoch.

    `signature` says what a batch is, as tf.data.Dataset.from_generator() wants it. By default one batch is loaded to
    see it. The dataset does not count batches: in fit(), the callback TrackState does for the streams of a State. A
    loop over the stream itself counts, and gives arrays, which TensorFlow takes as they are.
    """
    if not isinstance(stream, Stream):
        raise TypeError(f"stream_dataset() takes a ronde.data.Stream, got a {type(stream).__name__}")
    if signature is None:
        batches = _load(stream, num_threads=0)
        try:
            signature = _describe(next(batches))
        except StopIteration:
            raise ValueError("the stream has no batch from which to see what one is; pass signature=") from None
        finally:
            batches.close()

    def generate() -> Iterator[Any]:
        for batch in _load(stream):
            yield _keep(batch, signature)

    dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options).prefetch(tf.data.AUTOTUNE)


def _load(stream: Stream, *, num_threads: int | None = None) -> Any:
    return (batch for _, batch in stream.loader.load(stream.plan(), num_threads=num_threads))


def _describe(batch: Any) -> Any:
    """The signature of a batch: its first dimension may have any length, and texts are texts of TensorFlow."""
    if isinstance(batch, dict):
        found = {name: _describe(value) for name, value in batch.items()}
        return {name: spec for name, spec in found.items() if spec is not None}
    if isinstance(batch, tuple):
        return tuple(_describe(value) for value in batch)
    if isinstance(batch, list) and batch and all(isinstance(each, str | bytes) for each in batch):
        return tf.TensorSpec([None], tf.string)
    if not isinstance(batch, np.ndarray):
        return None  # samples of different shapes are no tensor
    kind = tf.string if batch.dtype.kind in "SU" else tf.as_dtype(batch.dtype)
    return tf.TensorSpec([None, *batch.shape[1:]], kind)


def _keep(batch: Any, signature: Any) -> Any:
    """Only the fields of the signature."""
    if isinstance(signature, dict):
        return {name: _keep(batch[name], spec) for name, spec in signature.items()}
    if isinstance(signature, tuple):
        return tuple(_keep(value, spec) for value, spec in zip(batch, signature, strict=True))
    return batch
