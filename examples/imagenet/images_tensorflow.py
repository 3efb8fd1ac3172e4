"""The images of a folder as batches for TensorFlow: tf.data reads, decodes and cuts them, in threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import numpy as np
import tensorflow as tf
from folder import ImageFolder

import ronde

__all__ = ["Images"]

DECODED = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")


class Images:
    """One split of an image folder."""

    def __init__(self, folder: ImageFolder, split: str, *, image_size: int, num_threads: int = 0) -> None:
        part = folder.splits[split]
        for file in part.files:
            if PurePath(file).suffix.lower() not in DECODED:
                raise SystemExit(f"TensorFlow cannot decode {folder.root / file}; it knows {' '.join(DECODED)}")
        self._files = np.array([str(folder.root / file) for file in part.files])
        self._labels = np.array(part.labels, np.int32)
        self._image_size = image_size
        self._num_threads = num_threads or tf.data.AUTOTUNE

    def __len__(self) -> int:
        return len(self._files)

    def training_batches(self, batch_size: int, *, seed: int, epoch: int, consumed: int) -> Iterator[tuple[Any, Any]]:
        """This rank's batches of an epoch of which all ranks together have used `consumed` images. A few images of its
        beginning are used twice, so that all ranks have equally many.

        The order, and where an image is cut, depend on seed and epoch only: the epoch goes on with any number of ranks.
        """
        order = np.random.default_rng([seed, epoch]).permutation(len(self))
        left = order[consumed:]
        left = np.concatenate([left, np.resize(order, -len(left) % ronde.size())])
        seeds = np.stack([np.full(len(left), seed), epoch * len(self) + consumed + np.arange(len(left))], axis=1)
        share = slice(ronde.rank(), None, ronde.size())
        return self._batches(left[share], batch_size, seeds[share])

    def evaluation_batches(self, batch_size: int) -> Iterator[tuple[Any, Any]]:
        """This rank's batches of images that belong to no other rank: one rank may have one image more than others."""
        return self._batches(np.arange(ronde.rank(), len(self), ronde.size()), batch_size, None)

    def _batches(self, indices: Any, batch_size: int, seeds: Any) -> Iterator[tuple[Any, Any]]:
        files, labels = self._files[indices], self._labels[indices]
        dataset = tf.data.Dataset.from_tensor_slices((files, labels, np.zeros_like(labels) if seeds is None else seeds))

        def load(file: Any, label: Any, seed: Any) -> tuple[Any, Any]:
            # Larger than the model sees it: a window at a random place of an image is almost a new image.
            image = load_square(file, round(self._image_size * 8 / 7))
            window = [self._image_size, self._image_size, 3]
            if seeds is None:
                return tf.image.resize_with_crop_or_pad(image, *window[:2]), label
            return tf.image.stateless_random_crop(image, window, seed), label

        batches = dataset.map(load, num_parallel_calls=self._num_threads).batch(batch_size).prefetch(2)
        try:
            number = 0
            for batch in batches:
                yield batch
                number += 1
        except tf.errors.OpError as error:
            # TensorFlow does not say which image it was: one of the batch that did not come.
            for file in files[number * batch_size : (number + 1) * batch_size]:
                check_image(str(file))
            raise error


def load_square(file: Any, size: int) -> Any:
    """The middle of an image, its shorter side scaled to `size` pixels."""
    image = tf.io.decode_image(tf.io.read_file(file), channels=3, expand_animations=False)
    image = tf.ensure_shape(image, [None, None, 3])
    rows, columns = tf.unstack(tf.shape(image)[:2])
    side = tf.minimum(rows, columns)
    square = tf.image.crop_to_bounding_box(image, (rows - side) // 2, (columns - side) // 2, side, side)
    return tf.cast(tf.round(tf.image.resize(square, [size, size], antialias=True)), tf.uint8)


def check_image(file: str) -> None:
    """End the job if this image cannot be read."""
    try:
        load_square(file, 1)
    except tf.errors.OpError as error:
        raise SystemExit(
            f"cannot read the image {file}: {error.message.rpartition('} ')[2].partition(' [Op:')[0]}"
        ) from error
