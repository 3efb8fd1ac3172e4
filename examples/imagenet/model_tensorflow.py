"""AlexNet of model.py in Keras, for TensorFlow: the same layers, for images of any size from 63 pixels on."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

__all__ = ["make_alexnet"]

POOLED = 6
"""The convolutions' output is pooled to a grid of 6 x 6, as for images of 224 pixels; smaller images have less."""


def he_relu() -> dict[str, Any]:
    """How the weights of a layer start, as in model.py, and its activation. An initializer has one seed: layers that
    share it get the same numbers."""
    he_normal = keras.initializers.VarianceScaling(2.0, "fan_in", "untruncated_normal")
    return {"kernel_initializer": he_normal, "activation": "relu"}


def make_alexnet(num_classes: int, *, image_size: int = 224, width: int = 4096) -> Any:
    """Five convolutions, three dense layers: from bytes (batch, rows, columns, colours) to the scores of the classes.

    The scores are float32 under any policy of mixed precision.
    """
    if image_size < 63:
        raise ValueError(f"AlexNet needs images of at least 63 pixels, got {image_size}")
    model = keras.Sequential(
        [
            layers.Input((image_size, image_size, 3), dtype="uint8"),
            layers.Rescaling(1 / 64, offset=-127.5 / 64),
            layers.ZeroPadding2D(2),
            layers.Conv2D(64, 11, strides=4, **he_relu()),
            layers.MaxPooling2D(3, strides=2),
            layers.Conv2D(192, 5, padding="same", **he_relu()),
            layers.MaxPooling2D(3, strides=2),
            layers.Conv2D(384, 3, padding="same", **he_relu()),
            layers.Conv2D(256, 3, padding="same", **he_relu()),
            layers.Conv2D(256, 3, padding="same", **he_relu()),
            layers.MaxPooling2D(3, strides=2),
        ],
        name="alexnet",
    )
    if model.output_shape[1] > POOLED:
        model.add(layers.AdaptiveAveragePooling2D(POOLED))
    model.add(layers.Flatten())
    for _ in range(2):
        model.add(layers.Dropout(0.5))
        model.add(layers.Dense(width, **he_relu()))
    small = keras.initializers.RandomNormal(stddev=0.01)  # at first, every class is equally likely
    model.add(layers.Dense(num_classes, kernel_initializer=small, dtype="float32"))
    return model
