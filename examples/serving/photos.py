"""A service for photos: clients send JPEG files, and get the name of a class and its probability.

    python examples/serving/make_model.py /tmp/colors
    cd examples/serving && ronde serve /tmp/colors --handler photos:PhotoHandler --replicas 2

    curl --data-binary @photo.jpg -H "Inference-Header-Content-Length: 0" \\
         -H "Authorization: Bearer $(cat TOKEN_FILE)" localhost:8000/v2/models/colors/infer
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from ronde.serve import Handler, TensorInfo

MAX_PIXELS = 50_000_000
"""A few bytes of JPEG can claim to be a picture of any size: this is the largest that is decoded."""


class PhotoHandler(Handler):
    inputs = (TensorInfo(name="image", dtype="string", shape=(None,)),)
    outputs = (
        TensorInfo(name="label", dtype="string", shape=(None,)),
        TensorInfo(name="probability", dtype="float32", shape=(None,)),
    )

    def preprocess(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        (pixels,) = self.model.metadata.inputs
        _, _, height, width = pixels.shape
        return {pixels.name: np.stack([decode(data, width, height) for data in inputs["image"]])}

    def postprocess(self, outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        (scores,) = outputs.values()
        exponents = np.exp(scores - scores.max(axis=1, keepdims=True))
        probabilities = exponents / exponents.sum(axis=1, keepdims=True)
        best = probabilities.argmax(axis=1)
        labels = np.array([self.model.metadata.labels[index] for index in best], object)
        return {"label": labels, "probability": probabilities.max(axis=1).astype(np.float32)}


def decode(data: bytes, width: int, height: int) -> np.ndarray:
    """The pixels of a JPEG file, from 0 to 1, channels first. A ValueError is the client's reply (400)."""
    try:
        with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"the picture has {image.width} x {image.height} pixels, more than {MAX_PIXELS}")
            image.draft("RGB", (width, height))  # JPEG can be decoded at a fraction of its size, which is faster
            small = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
    except (OSError, SyntaxError) as error:  # what Pillow raises for a file that is damaged or none of its own
        raise ValueError(f"that is no JPEG: {error}") from None
    return np.asarray(small, np.float32).transpose(2, 0, 1) / 255
