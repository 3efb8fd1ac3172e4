"""Data sets that are read in one order by any number of ranks, their preparation, and their transfer."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ronde.data.dataset import open_dataset
    from ronde.data.preparation import PrepareOptions, choose_split, prepare
    from ronde.data.samples import decode_image
    from ronde.data.stream import Stream

__all__ = ["PrepareOptions", "Stream", "choose_split", "decode_image", "open_dataset", "prepare"]

_HOMES = {
    "PrepareOptions": "preparation",
    "Stream": "stream",
    "choose_split": "preparation",
    "decode_image": "samples",
    "open_dataset": "dataset",
    "prepare": "preparation",
}


def __getattr__(name: str) -> object:
    """Load what is used. A replica of a service, for which clients wait, uses only the names of files."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"ronde.data.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    """For completion at a prompt."""
    return sorted({*globals(), *__all__})
