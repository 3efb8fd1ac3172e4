"""A limit on threads, as `ulimit -u` and containers have one, but of this process alone and for root, too."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

TOO_LARGE = 1 << 47
"""No process has so much memory."""
ATTRIBUTES_BYTES = 64


@contextmanager
def no_new_threads() -> Iterator[None]:
    """Within this context no thread can be started: the system refuses the size of its stack, with EAGAIN."""
    libc = ctypes.CDLL(None)
    before, changed = (ctypes.create_string_buffer(ATTRIBUTES_BYTES) for _ in range(2))
    for attributes in (before, changed):
        assert libc.pthread_getattr_default_np(attributes) == 0
    assert libc.pthread_attr_setstacksize(changed, ctypes.c_size_t(TOO_LARGE)) == 0
    assert libc.pthread_setattr_default_np(changed) == 0
    try:
        yield
    finally:
        assert libc.pthread_setattr_default_np(before) == 0
