"""hvd.load_model(): models that model.save() has written, h5 files of old scripts among them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from horovod._keras.keras2 import is_keras_2

SHORT_LOSSES = ("mse", "mae", "mape", "msle", "kld", "bce")
"""Names that compile() takes and Keras 3 writes into h5 files, but does not find when it reads them."""


def load_model(
    keras: Any, wrap_optimizer: Callable[[Any], Any], filepath: Any, custom_optimizers: Any, custom_objects: Any
) -> Any:
    """Load a model, and let wrap_optimizer() make its optimizer distributed. `keras` is the module that it is from."""
    is_old_file = hasattr(keras, "ops") and str(filepath).endswith((".h5", ".hdf5"))
    known = {name: keras.losses.get(name) for name in SHORT_LOSSES} if is_old_file else {}
    known |= {kind.__name__: kind for kind in custom_optimizers or ()}
    with warnings.catch_warnings():
        if is_old_file:  # what it could not read of the optimizer is read here
            warnings.filterwarnings("ignore", message=".*optimizer.*")
        model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        if is_old_file:
            optimizer = rebuild_optimizer(optimizer, model.trainable_variables, filepath)
        distributed = wrap_optimizer(optimizer)
        if distributed is not optimizer and is_keras_2(optimizer):
            copy_state(optimizer, distributed, model.trainable_variables)
        model.optimizer = distributed
    return model


def copy_state(source: Any, target: Any, variables: list[Any]) -> None:
    """Give the state of an optimizer of Keras 2 to the one that was made of its configuration."""
    own, others = create_variables(source, variables), create_variables(target, variables)
    if [tuple(each.shape) for each in own] != [tuple(each.shape) for each in others]:
        warnings.warn(
            f"the saved state of the optimizer ({type(source).__name__}) is not that of the distributed one, which "
            "begins anew",
            stacklevel=5,
        )
        return
    for variable, value in zip(others, own, strict=True):
        variable.assign(value)


def create_variables(optimizer: Any, variables: list[Any]) -> list[Any]:
    """The variables of an optimizer of Keras 2 that trains these. What a SavedModel has for them is read here."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if hasattr(inner, "_create_all_weights"):  # of tf.keras.optimizers.legacy
        inner._create_all_weights(variables)
    else:
        inner.build(variables)
    found = optimizer.variables
    return list(found() if callable(found) else found)


def rebuild_optimizer(optimizer: Any, variables: list[Any], filepath: Any) -> Any:
    """Return an optimizer for these variables, with its state in the h5 file. Keras 3 itself builds the optimizer of
    such a file for a part of the variables, or none, and cannot train then."""
    import h5py

    fresh = type(optimizer).from_config(optimizer.get_config())
    fresh.build(variables)
    saved: dict[str, Any] = {}
    with h5py.File(filepath, "r") as file:
        if "optimizer_weights" in file:
            file["optimizer_weights"].visititems(
                lambda name, found: saved.update({last_part(name): found[()]}) if hasattr(found, "shape") else None
            )
    state = [(variable, saved.get(last_part(variable.path))) for variable in fresh.variables]
    if all(value is not None and tuple(value.shape) == tuple(variable.shape) for variable, value in state):
        for variable, value in state:
            variable.assign(value)
    else:
        warnings.warn(
            f"{filepath} has no state for this optimizer ({type(fresh).__name__}), which begins anew; "
            "Keras 3 does not read that of Keras 2",
            stacklevel=5,
        )
    return fresh


def last_part(path: str) -> str:
    """The name without the optimizer's, which hvd.DistributedOptimizer() changes."""
    return path.rpartition("/")[2]
