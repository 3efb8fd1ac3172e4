"""Errors of ronde inside of those of a framework. A kernel can only fail with a status and a text, so the exception is
kept here under a number, which the text ends with; find_error() gives it back."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict

from ronde.elastic.training_loop import register_error_finder
from ronde.errors import Mismatch, RondeError

MAX_KEPT_ERRORS = 256
"""A step that fails may fail in every bucket; nobody looks for the errors of earlier ones."""
MAX_CHAIN = 16
"""How many exceptions behind an error are looked at."""

_NUMBER = re.compile(r"\[ronde error (\d+)\]")
_kept: OrderedDict[int, Exception] = OrderedDict()
_lock = threading.Lock()
_last_number = 0


def describe_error(error: Exception) -> str:
    """Keep the error, and return the text with which a kernel fails because of it."""
    global _last_number
    with _lock:
        _last_number += 1
        number = _last_number
        # Without its traceback, whose frames have arrays in them.
        _kept[number] = error.with_traceback(None)
        if len(_kept) > MAX_KEPT_ERRORS:
            _kept.popitem(last=False)
    return f"{error or type(error).__name__} [ronde error {number}]"


def find_error(error: BaseException) -> RondeError | ValueError | TypeError | None:
    """Return the error of ronde (PeerLost, Mismatch, …) that has caused an error of TensorFlow or JAX; None if it has
    another cause. An error of ronde itself is returned as it is. The error may have been raised while that of the
    framework was handled: with JAX, fit() of Keras fails once more when it looks for the results of the step."""
    found: BaseException | None = error
    for _ in range(MAX_CHAIN):
        if found is None:
            return None
        if isinstance(found, RondeError | Mismatch):
            return found
        match = _NUMBER.search(str(found))
        kept = _kept.get(int(match.group(1))) if match else None
        if isinstance(kept, RondeError | ValueError | TypeError):
            return kept
        found = found.__cause__ or found.__context__
    return None


def _find_loss(error: Exception) -> Exception | None:
    found = find_error(error)
    return found if isinstance(found, RondeError) else None


register_error_finder(_find_loss)
