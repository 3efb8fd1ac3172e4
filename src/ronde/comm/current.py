"""The world of this process: init() makes it, shutdown() ends it. The only place that knows which one is current."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterable
from typing import Any

from ronde.comm.group import Group
from ronde.comm.guest import complete
from ronde.comm.place import find_place
from ronde.comm.world import World, as_ranks
from ronde.errors import NotInitialized
from ronde.observe.events import shorten

__all__ = ["current", "group_or_world", "init", "is_initialized", "shutdown"]

logger = logging.getLogger("ronde.comm")


class _Process:
    """What this process remembers between calls."""

    world: World | None = None
    num_rounds = 0
    hooked = False
    inherited: World | None = None
    """In a forked child: the parent's world, kept so that nothing of it is ever finalized here."""


_process = _Process()


def init(*, groups: Iterable[Iterable[int]] = (), **settings: Any) -> None:  # see Settings
    """Join the round. Settings come from arguments, then the environment (RONDE_*), then the variables of whatever
    launcher started this process, then defaults.

    `groups` are sets of ranks to begin with, the same on all ranks; ronde.groups() has them afterwards. A second call
    while the round is running does nothing.
    """
    if _process.world is not None:
        return
    loaded = complete(settings)
    sorted_groups = tuple(as_ranks(ranks, loaded.size) for ranks in groups)
    place = find_place(loaded, sorted_groups, _process.num_rounds)
    _process.num_rounds += 1
    _process.world = World(place, sorted_groups)
    if not _process.hooked:
        _process.hooked = True
        atexit.register(_exit)
        os.register_at_fork(after_in_child=_forget_in_child)


def shutdown() -> None:
    """Leave the round. Without a running one it does nothing; afterwards init() may begin another."""
    world, _process.world = _process.world, None
    if world is not None:
        world.close()


def is_initialized() -> bool:
    """Whether a round is running here."""
    return _process.world is not None


def current(what: str = "this call") -> World:
    """The running world."""
    world = _process.world
    if world is None:
        raise NotInitialized(what)
    return world


def group_or_world(group: Group | None) -> Group:
    """The group, or all ranks."""
    return current().group if group is None else group


def _exit() -> None:
    """The process ends without shutdown(): tell the others why, so that they need not guess.

    Most scripts just end. That is leaving in good order, unless an exception ended them.
    """
    world, _process.world = _process.world, None
    if world is None:
        return
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    try:
        why = "exited without shutdown" if error is None else _name(error)
        world.close(orderly=error is None, why=why, error=error)
    except Exception:  # the process's edge: its own end matters more than how it said goodbye
        logger.exception("leaving the round failed")


def _name(error: BaseException) -> str:
    """In one line, as Python ends a traceback; its message may be a page long."""
    kind, text = type(error).__name__, str(error).strip()
    return shorten(f"{kind}: {text.splitlines()[0]}" if text else kind)


def _forget_in_child() -> None:
    """A forked child is no member. The lifeline must not live on in it, or nobody would see its parent die."""
    world, _process.world = _process.world, None
    _process.inherited = world or _process.inherited
    if world is not None:
        world.abandon()
