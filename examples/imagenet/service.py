"""AlexNet as a service: clients send JPEG files, and get the name of a class and its probability. The last part of
docs/tutorials/from-images-to-service.md.

    ronde serve job.yaml
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from ronde.serve import Handler, TensorInfo

MAX_PIXELS = 50_000_000
"""A few bytes can claim to be a picture of any size: this is the largest that is decoded."""


class PhotoHandler(Handler):
    inputs = (TensorInfo(name="photo", dtype="string", shape=(None,)),)
    outputs = (
        TensorInfo(name="label", dtype="string", shape=(None,)),
        TensorInfo(name="probability", dtype="float32", shape=(None,)),
    )

    def preprocess(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"images": np.stack([self.decode(data) for data in inputs["photo"]])}

    def postprocess(self, outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        scores = outputs["scores"]
        exponents = np.exp(scores - scores.max(axis=1, keepdims=True))
        probabilities = exponents / exponents.sum(axis=1, keepdims=True)
        labels = [self.model.metadata.labels[index] for index in probabilities.argmax(axis=1)]
        return {"label": np.array(labels, object), "probability": probabilities.max(axis=1).astype(np.float32)}

    def decode(self, data: bytes) -> np.ndarray:
        """The middle of a photo, as `preprocessing` of the exported model says. A ValueError is the reply (400)."""
        wanted = self.model.metadata.preprocessing["images"]
        try:
            with Image.open(io.BytesIO(data)) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise ValueError(f"the photo has {image.width} x {image.height} pixels, more than {MAX_PIXELS}")
                factor = (wanted.resize or wanted.height) / min(image.size)
                size = max(wanted.width, round(image.width * factor)), max(wanted.height, round(image.height * factor))
                small = image.convert("RGB").resize(size, Image.Resampling.BILINEAR)
        except (OSError, SyntaxError) as error:  # what Pillow raises for a file that is damaged or none of its own
            raise ValueError(f"that is no photo: {error}") from None
        left, top = (size[0] - wanted.width) // 2, (size[1] - wanted.height) // 2
        cut = small.crop((left, top, left + wanted.width, top + wanted.height))
        pixels = np.asarray(cut, np.float32) * np.float32(wanted.scale)
        normal = (pixels - np.array(wanted.mean, np.float32)) / np.array(wanted.std, np.float32)
        return normal.transpose(2, 0, 1)
