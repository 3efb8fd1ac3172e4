"""What a user may change about predictions: a handler, between what clients send and what the model takes.

    class Photos(ronde.serve.Handler):
        inputs = (ronde.serve.TensorInfo(name="image", dtype="string", shape=(None,)),)

        def preprocess(self, inputs):
            return {"pixels": np.stack([decode(jpeg) for jpeg in inputs["image"]])}

A handler is made in each replica, for each model that is loaded there.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ronde.comm.buffers import Array
from ronde.launch.named_functions import load_function
from ronde.serve.inference_protocol import ModelSignature
from ronde.serve.model import OnnxModel, TensorInfo


class Handler:
    """Prepares the inputs of a model, predicts, and prepares its outputs for clients.

    Subclasses override what they change. preprocess() and postprocess() get one request at a time, so that a bad one
    concerns nobody else; predict() gets the samples of all requests of a batch. A ValueError says that the request
    cannot be predicted, and its message is the reply (400). Any other error is a failure of the service (500).
    """

    inputs: tuple[TensorInfo, ...] = ()
    """What clients send. By default: the inputs of the model."""
    outputs: tuple[TensorInfo, ...] = ()
    """What clients get. By default: the outputs of the model."""

    def __init__(self, model: OnnxModel) -> None:
        self.model = model
        """The loaded model; `model.metadata` has its labels and what else was exported with it."""

    def preprocess(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return what the model takes, for the inputs of one request. Elements of `string` are bytes. The first axis
        of each array that is returned counts samples."""
        return {name: _decode_texts(name, array) if array.dtype == object else array for name, array in inputs.items()}

    def predict(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return the outputs of the model for all samples of a batch."""
        return self.model.predict(inputs)

    def postprocess(self, outputs: dict[str, Array]) -> dict[str, Array]:
        """Return what the client gets, for the outputs of one request."""
        return outputs

    def warm_up(self, num_samples: int) -> None:
        """Predict something, before clients wait for it. Called with 1 and with the size of the largest batch."""
        self.model.predict(self.model.make_example(num_samples))

    # For replicas only, from here on.

    @property
    def signature(self) -> ModelSignature:
        metadata = self.model.metadata
        return ModelSignature(self.inputs or metadata.inputs, self.outputs or metadata.outputs)

    @property
    def is_plain(self) -> bool:  # whether the model gets what clients send, and they get what it returns
        kind = type(self)
        is_changed = kind.preprocess is not Handler.preprocess or kind.postprocess is not Handler.postprocess
        return not is_changed and all(each.dtype != "string" for each in self.signature.inputs)


def _decode_texts(name: str, array: Array) -> Array:
    texts = np.empty(array.size, object)
    try:
        texts[:] = [bytes(each).decode() for each in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise ValueError(f"the input {name!r} holds what is no UTF-8: {error}") from None
    return texts.reshape(array.shape)


def load_handler(name: str) -> type[Handler]:
    """Return the class `module:Class`; without a name, the one that changes nothing. ValueError if there is none."""
    if not name:
        return Handler
    found: object = load_function(name)
    if not isinstance(found, type) or not issubclass(found, Handler):
        raise ValueError(f"the handler {name!r} must be a class that inherits ronde.serve.Handler")
    return found


def check_outputs(outputs: Mapping[str, Array], signature: ModelSignature) -> list[Array]:
    """Return the outputs in the order of the signature. TypeError if the handler has returned others."""
    found = []
    for info in signature.outputs:
        if info.name not in outputs:
            raise TypeError(f"the handler returned no {info.name!r}, which its `outputs` promise")
        array = np.asarray(outputs[info.name])
        is_text = array.dtype.kind in "OUS"
        if is_text != (info.dtype == "string") or (not is_text and array.dtype != info.numpy_dtype):
            raise TypeError(f"the handler returned {array.dtype} as {info.describe()}")
        found.append(array)
    return found
