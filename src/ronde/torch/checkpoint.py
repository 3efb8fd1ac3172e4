"""Checkpoints of a training run: model, optimizer, scheduler, scaler, sampler and whatever else has a state_dict.

    checkpoints = Checkpoints("runs/7", model=model, optimizer=optimizer, sampler=sampler)
    restored = checkpoints.restore()           # the latest valid one, on every rank; None at the first start
    step = restored.step if restored else 0
    ...
    checkpoints.save(step, extras={"best": 0.97})

Rank 0 of the group writes; when training goes on elsewhere, only rank 0 needs to reach the path.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ronde.binding import checkpoint
from ronde.binding.store import open_store
from ronde.comm import objects
from ronde.comm.current import group_or_world
from ronde.comm.group import Group
from ronde.errors import CheckpointError

__all__ = ["Checkpoints", "Restored", "Stateful"]

CHUNK_BYTES = 64 << 20
"""A checkpoint goes from rank 0 to the others in pieces of this size."""


class Stateful(Protocol):
    """A part of a checkpoint."""

    def state_dict(self) -> Mapping[str, Any]:
        """What has to be kept."""

    def load_state_dict(self, state: Any, /) -> Any:  # noqa: ANN401  # each class has its own idea of it
        """Go on from there."""


@dataclass(frozen=True)
class Restored:
    """What restore() found."""

    step: int
    """As it was given to save()."""
    extras: dict[str, Any]
    """As they were given to save()."""
    path: str
    """Where it was read."""


class Checkpoints:
    """The checkpoints of one run, in a folder: a local path, or any that fsspec knows, such as s3://bucket/run.

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
        self._store = open_store(path)
        self._keep = keep
        self._trusted = trusted
        self._group = group
        self._parts = parts

    def save(self, step: int, *, extras: Mapping[str, Any] | None = None) -> str:
        """Write a checkpoint of all parts; where it is. Rank 0 returns when it is safe, the others at once.

        Call it between steps: after optimizer.step(), so that the sampler's position and the parameters fit together.
        """
        if group_or_world(self._group).rank != 0:
            return self._store.place(checkpoint.data_name(step))
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        contents = {"step": step, "extras": dict(extras or {}), "parts": parts}
        return checkpoint.save(self._store, step, lambda path: self._write(contents, path), keep=self._keep)

    def restore(self, step: int | None = None) -> Restored | None:
        """Load the latest valid checkpoint (or that of a step) into all parts, on every rank. None if there is none.

        Every rank calls it. Rank 0 reads, the others get it from there. A checkpoint that is damaged, as after a crash,
        is passed over with a warning.
        """
        members = group_or_world(self._group)
        with ExitStack() as reading:
            path, found = None, None
            if members.rank == 0:
                found, path = self._open(step, reading)
            found = found if members.size == 1 else objects.broadcast(found, members.ranks[0], group=members)
            if isinstance(found, str):
                raise CheckpointError(found)
            if found is None:
                return None
            found_step, num_bytes = found
            place = self._store.place(checkpoint.data_name(found_step))
            source = path if members.size == 1 else _share(members, path, num_bytes)
            contents = self._load(source, place)
        self._apply(contents["parts"], place)
        return Restored(found_step, contents["extras"], place)

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, in order, as this rank sees the folder."""
        return checkpoint.saved_steps(self._store.names())

    def _open(self, step: int | None, reading: ExitStack) -> tuple[tuple[int, int] | str | None, Path | None]:
        """Rank 0: step and size, None or the error, to be told to the others; and where the data are."""
        try:
            if step is None:
                found = reading.enter_context(checkpoint.latest(self._store))
                if found is None:
                    return None, None
                step, path = found
            else:
                path = reading.enter_context(checkpoint.opened(self._store, step))
        except CheckpointError as error:
            return str(error), None
        return (step, path.stat().st_size), path

    def _write(self, contents: dict[str, Any], path: Path) -> None:
        torch.save(contents, path)
        if self._trusted or not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"):
            return
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        if foreign:  # found out now: at the restart it would be too late
            raise TypeError(
                f"the checkpoint would hold more than tensors and plain values: {', '.join(foreign)}; "
                "convert them (float(x) for NumPy's numbers), or make Checkpoints(…, trusted=True)"
            )

    def _load(self, source: Path | io.BytesIO | None, place: str) -> dict[str, Any]:
        assert source is not None
        try:
            contents: dict[str, Any] = torch.load(source, map_location="cpu", weights_only=not self._trusted)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise CheckpointError(f"cannot read the checkpoint {place}: {error}") from error
        return contents

    def _apply(self, states: Mapping[str, Any], place: str) -> None:
        missing = [name for name in self._parts if name not in states]
        if missing:
            raise CheckpointError(f"the checkpoint {place} has no {', '.join(missing)}; it has {', '.join(states)}")
        for name, part in self._parts.items():
            try:
                part.load_state_dict(states[name])
            except (RuntimeError, ValueError, KeyError) as error:
                raise CheckpointError(f"{name} of the checkpoint {place} does not fit: {error}") from error


def _share(members: Group, path: Path | None, num_bytes: int) -> Path | io.BytesIO:
    """Rank 0's file for everybody: itself on rank 0, a copy in memory on the others."""
    root = members.ranks[0]
    if path is not None:
        data = np.memmap(path, np.uint8, "r")
        for start in range(0, num_bytes, CHUNK_BYTES):
            members.broadcast(data[start : start + CHUNK_BYTES], root=root)
        return path
    buffer = io.BytesIO()
    for start in range(0, num_bytes, CHUNK_BYTES):
        piece = np.empty(min(CHUNK_BYTES, num_bytes - start), np.uint8)
        buffer.write(members.broadcast(piece, root=root, out=piece).data)
    buffer.seek(0)
    return buffer
