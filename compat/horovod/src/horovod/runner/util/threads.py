"""A thread in one line. Test suites written around Horovod take it from here, Horovod's own among them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """A thread that calls target(*args), started. With `silent`, what it raises is shown nowhere."""
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, got {args!r}; a single argument is written (argument,)")

    def quietly() -> None:
        try:
            target(*args)
        except Exception:  # the thread's edge, and it was asked to be silent
            return

    thread = threading.Thread(target=quietly, name=name, daemon=daemon)
    if not silent:
        thread = threading.Thread(target=target, args=args, name=name, daemon=daemon)
    thread.start()
    return thread
