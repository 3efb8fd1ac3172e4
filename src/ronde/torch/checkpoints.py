"""Checkpoints of a training run: model, optimizer, scheduler, scaler, sampler and whatever else has a state_dict.

    checkpoints = Checkpoints("runs/7", model=model, optimizer=optimizer, sampler=sampler)
    restored = checkpoints.restore()           # the latest valid one, on every rank; None at the first start
    step = restored.step if restored else 0
    ...
    checkpoints.save(step, extras={"best": 0.97})

Rank 0 of the group writes and reads; the others need no access to the path.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.errors import CheckpointError
from ronde.training import checkpoints
from ronde.training.checkpoints import open_storage


class Stateful(Protocol):
    """A part of a checkpoint."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...  # classes differ in both types


@dataclass(frozen=True)
class Restored:
    """The checkpoint that restore() has loaded."""

    step: int
    """As it was given to save()."""
    extras: dict[str, Any]
    """As they were given to save()."""
    path: str
    """Where it was read."""


class Checkpoints:
    """The checkpoints of one run, in a folder: a local path, or any that fsspec supports, such as s3://bucket/run.

    The last `keep` are kept. A checkpoint holds tensors and plain values only, so reading one cannot run code; with
    trusted=True it may hold any object that can be pickled: use that for folders that only you can write to.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int = 3,
        trusted: bool = False,
        group: Group | None = None,
        **parts: Stateful,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        for name, part in parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise TypeError(
                    f"{name} has no state_dict() and load_state_dict(); give plain values to save(extras=…)"
                )
        self._storage = open_storage(path)
        self._keep = keep
        self._trusted = trusted
        self._group = group
        self._parts = parts

    def save(self, step: int, *, extras: Mapping[str, Any] | None = None) -> str | None:
        """Write a checkpoint of all parts. Rank 0 returns its path when it is on disk; the others return None at once.

        Call it between steps: after optimizer.step(), so that the sampler's position and the parameters fit together.
        """
        if not self._is_writer():
            return None
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        contents = {"step": step, "extras": dict(extras or {}), "parts": parts}
        return checkpoints.save(self._storage, step, lambda path: self._write(contents, path), keep=self._keep)

    def restore(self, step: int | None = None) -> Restored | None:
        """Load the latest valid checkpoint (or that of a step) into all parts. Return None if there is none.

        Every rank calls it. Rank 0 reads, the others get it from there. A checkpoint that is damaged, as after a crash,
        is skipped with a warning. In a process that comes to a running elastic job it returns None: the process gets
        the state of the others. The same on the others if a rank of an elastic job is lost meanwhile.
        """
        members = resolve_group(self._group)
        if checkpoints.is_candidate():
            return None
        with checkpoints.open_on_all_ranks(self._storage, members, step) as opened:
            if opened is None:
                return None
            found, source = opened
            path = found.full_path
            try:
                contents = torch.load(source, map_location="cpu", weights_only=not self._trusted)
            except Exception as error:  # of a trusted one's objects: any
                raise CheckpointError(f"cannot read the checkpoint {path}: {error}") from error
        self._apply(contents["parts"], path)
        return Restored(found.step, contents["extras"], path)

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in order, as this rank sees the folder."""
        return sorted({found.step for found in checkpoints.list_checkpoints(self._storage.names())})

    def clear(self) -> None:
        """Remove all checkpoints of the folder, to start over. Rank 0 does it; the others return at once."""
        if self._is_writer():
            checkpoints.clear(self._storage)

    def _is_writer(self) -> bool:
        return resolve_group(self._group).rank == 0 and not checkpoints.is_candidate()

    def _write(self, contents: dict[str, Any], path: Path) -> None:
        try:
            with path.open("wb") as file:
                torch.save(contents, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # a full disk, which PyTorch calls an "unexpected pos"
                raise error.__context__ from None
            raise
        if self._trusted or not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"):
            return
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        if foreign:  # found out now: at the restart it would be too late
            raise TypeError(
                f"the checkpoint would hold more than tensors and plain values: {', '.join(foreign)}; "
                "convert them (float(x) for NumPy's numbers), or make Checkpoints(…, trusted=True)"
            )

    def _apply(self, states: Mapping[str, Any], path: str) -> None:
        missing = [name for name in self._parts if name not in states]
        if missing:
            raise CheckpointError(f"the checkpoint {path} has no {', '.join(missing)}; it has {', '.join(states)}")
        loaded: list[str] = []
        for name, part in self._parts.items():
            try:
                part.load_state_dict(states[name])
            except Exception as error:  # each class of parts has its own
                text = f"{name} of the checkpoint {path} does not fit: {type(error).__name__}: {error}"
                raise CheckpointError(f"{text} (loaded before it: {', '.join(loaded) or 'nothing'})") from error
            loaded.append(name)
