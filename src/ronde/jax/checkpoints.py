"""Checkpoints of a training run: any tree of arrays and plain values.

    checkpoints = ronde.jax.Checkpoints("runs/7")
    restored = checkpoints.restore(tree)       # the latest valid one, on every rank; None at the first start
    if restored:
        tree, step = restored.tree, restored.step
    ...
    checkpoints.save(step, tree)

Rank 0 of the group writes and reads; the others need no access to the path. A file is a NumPy archive with the bytes of
each array, and a table of what they are. Reading one runs no code.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import jax
import msgspec
import numpy as np

from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.errors import CheckpointError
from ronde.jax.broadcast_state import array_of, bytes_of, is_array, leaf_like
from ronde.training import checkpoints
from ronde.training.checkpoints import open_storage

TABLE = "table"
"""The entry of the archive that says what the others are."""


class SavedLeaf(msgspec.Struct, frozen=True, omit_defaults=True):
    """A leaf of a tree in a checkpoint."""

    path: str
    dtype: str = ""
    """Of an array; empty for a plain value."""
    shape: tuple[int, ...] = ()
    value: bool | int | float | str | None = None


@dataclass(frozen=True)
class RestoredTree:
    """The checkpoint that restore() has loaded."""

    step: int
    """As it was given to save()."""
    tree: Any
    """As it was given to save(), in the structure that was given to restore()."""
    path: str
    """Where it was read."""


class TreeCheckpoints:
    """The checkpoints of one run, in a folder: a local path, or any that fsspec supports, such as s3://bucket/run. The
    last `keep` are kept."""

    def __init__(self, path: str | os.PathLike[str], *, keep: int = 3, group: Group | None = None) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._storage = open_storage(path)
        self._keep = keep
        self._group = group

    def save(self, step: int, tree: Any) -> str | None:
        """Write a checkpoint of a tree: arrays of JAX and NumPy, keys of random generators, numbers and texts. Other
        leaves, such as the functions of a model of Equinox, are left out.

        Rank 0 returns its path when it is on disk; the others return None at once.
        """
        if resolve_group(self._group).rank != 0 or checkpoints.is_candidate():
            return None
        return checkpoints.save(self._storage, step, lambda path: _write(tree, path), keep=self._keep)

    def restore(self, tree: Any, step: int | None = None) -> RestoredTree | None:
        """Load the latest valid checkpoint (or that of a step). Return None if there is none.

        `tree` gives the structure, dtypes and shapes, which have to be those that were saved, and the leaves that a
        checkpoint leaves out. Every rank calls it. Rank 0 reads, the others get it from there. A checkpoint that is
        damaged, as after a crash, is skipped with a warning. In a process that comes to a running elastic job it
        returns None: the process gets the state of the others.
        """
        members = resolve_group(self._group)
        if checkpoints.is_candidate():
            return None
        with checkpoints.open_on_all_ranks(self._storage, members, step) as opened:
            if opened is None:
                return None
            found, source = opened
            try:
                with source.open("rb") if isinstance(source, Path) else source as file:
                    return RestoredTree(found.step, read_tree(tree, file), found.full_path)
            except CheckpointError as error:
                raise CheckpointError(f"the checkpoint {found.full_path} does not fit: {error}") from None
            except (OSError, ValueError, KeyError, msgspec.MsgspecError) as error:
                raise CheckpointError(f"cannot read the checkpoint {found.full_path}: {error}") from error

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in order, as this rank sees the folder."""
        return sorted({found.step for found in checkpoints.list_checkpoints(self._storage.names())})

    def clear(self) -> None:
        """Remove all checkpoints of the folder, to start over. Rank 0 does it; the others return at once."""
        if resolve_group(self._group).rank == 0 and not checkpoints.is_candidate():
            checkpoints.clear(self._storage)


def _write(tree: Any, path: Path) -> None:
    table: list[SavedLeaf] = []
    arrays: dict[str, Array] = {}
    for place, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(place)
        if is_array(leaf):
            array = array_of(leaf)
            arrays[str(len(table))] = bytes_of(array)
            table.append(SavedLeaf(name, array.dtype.name, array.shape))
        elif isinstance(leaf, bool | int | float | str):
            table.append(SavedLeaf(name, value=leaf))
    encoded = np.frombuffer(msgspec.json.encode(table), np.uint8)
    with path.open("wb") as file:
        np.savez(file, **{TABLE: encoded}, **arrays)  # type: ignore[arg-type]  # NumPy's names are arguments, too


def read_tree(tree: Any, file: BinaryIO, *, part: str = "") -> Any:
    """Return the tree with the arrays of a checkpoint file, or of the part of it under this key, field or number.
    CheckpointError if they do not fit."""
    with np.load(file, allow_pickle=False) as archive:
        table = msgspec.json.decode(archive[TABLE].tobytes(), type=list[SavedLeaf])
        saved = {leaf.path: (str(index), leaf) for index, leaf in enumerate(table)}
        if part:
            saved = _choose_part(saved, part)
        places, structure = jax.tree_util.tree_flatten_with_path(tree)
        leaves = []
        for place, leaf in places:
            name = jax.tree_util.keystr(place)
            is_kept = is_array(leaf) or isinstance(leaf, bool | int | float | str)
            if is_kept and name not in saved:
                raise CheckpointError(f"it has no {name}; it has {', '.join(saved) or 'nothing'}")
            if not is_kept:
                leaves.append(leaf)
                continue
            entry, found = saved.pop(name)
            if not is_array(leaf):
                leaves.append(found.value)
                continue
            wanted = array_of(leaf)
            if (found.dtype, found.shape) != (wanted.dtype.name, wanted.shape):
                raise CheckpointError(
                    f"{name} is {found.dtype}{list(found.shape)} in it, and {wanted.dtype}{list(wanted.shape)} here"
                )
            leaves.append(leaf_like(leaf, archive[entry].view(wanted.dtype).reshape(wanted.shape)))
        if saved:
            raise CheckpointError(f"it has {', '.join(saved)}, which the tree has not")
    return jax.tree.unflatten(structure, leaves)


def _choose_part(saved: dict[str, tuple[str, SavedLeaf]], part: str) -> dict[str, tuple[str, SavedLeaf]]:
    """The leaves below a key of a dict, a field of an object or a place in a tuple, by the rest of their paths."""
    for prefix in (f"[{part!r}]", f".{part}", f"[{part}]"):
        found = {path.removeprefix(prefix): leaf for path, leaf in saved.items() if path.startswith(prefix)}
        chosen = {rest: leaf for rest, leaf in found.items() if not rest or rest[0] in ".["}
        if chosen:
            return chosen
    raise CheckpointError(f"it has no part {part!r}; it has {', '.join(saved) or 'nothing'}")
