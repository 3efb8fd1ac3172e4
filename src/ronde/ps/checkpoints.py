"""Sharded checkpoints of a parameter server: each server writes its own parts, and one worker the manifest.

A checkpoint of version 1200 is a folder, version-000000001200. It has a file for each part, part-00000.npy …, with the
values and the states of the optimizer, and manifest.json with the sizes and CRCs of all files, which is written last. A
folder without a manifest is of a save that has not ended. Files appear whole or not at all. The parts are described in
the manifest, so they can be read by any number of servers, and cut anew.

The folder has to be one that all servers and the workers reach under the same path.
"""

from __future__ import annotations

import re
import uuid
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ronde.errors import CheckpointError
from ronde.ps.partition import Array, Part, TensorSlice, TensorSpec
from ronde.ps.payloads import unpack_arrays
from ronde.ps.server import ServerSetup
from ronde.training.checkpoints import LocalStorage

MANIFEST = "manifest.json"
FORMAT = 1
FOLDER_PATTERN = re.compile(r"version-(\d{12})")


class SavedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file that a server has written, or why it could not."""

    num_bytes: int = 0
    crc32: int = 0
    error: str = ""


class SavedTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of rows."""

    name: str
    dim: int
    dtype: str
    num_states: int


class SavedTablePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rows first, first + stride, first + 2 stride … of a table."""

    table: int
    first: int
    stride: int


class ShardedManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is in a checkpoint."""

    format: int = FORMAT
    version: int
    num_states: int
    tensors: tuple[TensorSpec, ...]
    parts: tuple[tuple[TensorSlice, ...], ...]
    tables: tuple[SavedTable, ...] = ()
    table_parts: tuple[SavedTablePart, ...] = ()
    files: tuple[SavedFile, ...]
    """By part, those of tables behind the others."""


def folder_of(directory: str, version: int) -> Path:
    return Path(directory) / f"version-{version:012d}"


def write_part(directory: str, version: int, part: int, state: Array) -> SavedFile:
    """Write one part. Called by its primary."""
    sums = [0, 0]

    def fill(path: Path) -> None:
        with path.open("wb") as file:
            np.save(file, state, allow_pickle=False)
        data = path.read_bytes()
        sums[:] = [len(data), zlib.crc32(data)]

    try:
        _write(folder_of(directory, version), _file_of(part), fill)
    except OSError as error:
        return SavedFile(error=f"{folder_of(directory, version) / _file_of(part)}: {error.strerror or error}")
    return SavedFile(num_bytes=sums[0], crc32=sums[1])


def _write(folder: Path, name: str, fill: Callable[[Path], object]) -> None:
    """Create a file, or replace one that has the same content: two workers may save one version at the same time, and a
    server that was stopped may wake and write what another one has written in its place."""
    own = f"{name}.{uuid.uuid4().hex}"
    LocalStorage(folder).write(own, fill)
    (folder / own).replace(folder / name)


def write_manifest(directory: str, version: int, setup: ServerSetup, tables: list[str], files: list[SavedFile]) -> Path:
    """Complete a checkpoint whose parts are written. CheckpointError if one could not be."""
    failed = [each.error for each in files if each.error]
    if failed:
        raise CheckpointError(f"a server could not write its part of a checkpoint: {failed[0]}")
    manifest = ShardedManifest(
        version=version,
        num_states=setup.optimizer.num_states,
        tensors=setup.tensors,
        parts=tuple(part.slices for part in setup.parts),
        tables=tuple(
            SavedTable(name=name, dim=table.dim, dtype=table.dtype, num_states=setup.num_states_of(number))
            for number, (name, table) in enumerate(zip(tables, setup.tables, strict=True))
        ),
        table_parts=tuple(
            SavedTablePart(table=each.table, first=each.first, stride=each.stride) for each in setup.table_parts
        ),
        files=tuple(files),
    )
    folder = folder_of(directory, version)
    try:
        _write(folder, MANIFEST, lambda path: path.write_bytes(msgspec.json.encode(manifest)))
    except OSError as error:
        raise CheckpointError(f"cannot write {folder / MANIFEST}: {error.strerror or error}") from error
    return folder


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint that ParameterServer.save() has made: a folder version-…, or the newest whole one in the folder
    that was given to save(). Return what ParameterServer takes as `state`, also with another number of servers.
    CheckpointError if there is none, or if it is damaged."""
    folder = _find_folder(Path(path))
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=ShardedManifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"cannot read the checkpoint {folder}: {error}") from error
    if manifest.format != FORMAT:
        raise CheckpointError(f"the checkpoint {folder} has format {manifest.format}, this ronde reads {FORMAT}")
    arrays = {part: _read_part(folder, part, saved) for part, saved in enumerate(manifest.files)}
    num_states = manifest.num_states
    values = {each.name: np.empty(each.shape, each.dtype) for each in manifest.tensors}
    states = {each.name: np.empty((num_states, *each.shape), each.dtype) for each in manifest.tensors}
    flat_values = [array.reshape(-1) for array in values.values()]
    for index, slices in enumerate(manifest.parts):
        part = Part(slices, "", 0)
        rows = arrays[index].reshape(1 + num_states, part.size)
        part.scatter(rows[0], flat_values)
        for number in range(num_states):
            part.scatter(rows[1 + number], [each.reshape(num_states, -1)[number] for each in states.values()])
    tables = {each.name: _join_table(manifest, number, arrays) for number, each in enumerate(manifest.tables)}
    return {"version": manifest.version, "parameters": values, "optimizer": states, "tables": tables}


def _find_folder(path: Path) -> Path:
    if FOLDER_PATTERN.fullmatch(path.name):
        return path
    found = [
        each for each in path.glob("version-*") if FOLDER_PATTERN.fullmatch(each.name) and (each / MANIFEST).exists()
    ]
    if not found:
        raise CheckpointError(f"there is no whole checkpoint of a parameter server in {path}")
    return max(found)


def _read_part(folder: Path, part: int, saved: SavedFile) -> Array:
    path = folder / _file_of(part)
    try:
        data = path.read_bytes()
        if (len(data), zlib.crc32(data)) != (saved.num_bytes, saved.crc32):
            raise CheckpointError(
                f"{path} is damaged: {len(data)} bytes with CRC {zlib.crc32(data):08x}, but {saved.num_bytes} with "
                f"{saved.crc32:08x} were written"
            )
        array: Array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    return array


def _join_table(manifest: ShardedManifest, table: int, arrays: Mapping[int, Array]) -> dict[str, Array]:
    """The trained rows of a table, sorted, with their values and states."""
    saved = manifest.tables[table]
    rows, values = [np.zeros(0, np.int64)], [np.zeros((0, saved.dim), saved.dtype)]
    states = [np.zeros((saved.num_states, 0, saved.dim), saved.dtype)]
    for number, part in enumerate(manifest.table_parts):
        if part.table == table:
            _, own, own_values, own_states = unpack_arrays(arrays[len(manifest.parts) + number])
            rows.append(part.first + part.stride * own)
            values.append(own_values)
            states.append(own_states.reshape(saved.num_states, len(own), saved.dim))
    order = np.argsort(np.concatenate(rows))
    return {
        "rows": np.concatenate(rows)[order],
        "values": np.concatenate(values)[order],
        "states": np.concatenate(states, axis=1)[:, order],
    }


def _file_of(part: int) -> str:
    return f"part-{part:05d}.npy"
