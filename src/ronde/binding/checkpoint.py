"""Checkpoints in a store: written whole or not at all, the last few kept, the latest valid one found. Used by the
frameworks' checkpoints, which know what goes into the file.

A checkpoint of step 1200 is two files: step-000000001200.data, and step-000000001200.json, its manifest with the size
and a CRC of the data. The manifest comes last when one is written and goes first when one is removed, so at any moment:

    data   manifest   what it is
    no     no         nothing
    part   no         a crash while writing: it does not count, and the next save() removes it
    yes    no         a crash before the manifest, or while removing: as above
    yes    yes        a checkpoint, if size and CRC agree; otherwise a damaged one, which is passed over with a warning
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from ronde.binding.store import UNFINISHED, Store
from ronde.errors import CheckpointError

__all__ = ["Manifest", "data_name", "latest", "manifest_name", "opened", "save", "saved_steps", "superfluous"]

logger = logging.getLogger("ronde.checkpoint")

FORMAT = 1
CHUNK_BYTES = 4 << 20
OURS = re.compile(rf"(?:{re.escape(UNFINISHED)})?step-(\d{{12}})\.(data|json)")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What there has to be for a checkpoint to be whole."""

    step: int
    num_bytes: int
    crc32: int
    format: int = FORMAT


def data_name(step: int) -> str:
    """The file with the contents."""
    return f"step-{step:012d}.data"


def manifest_name(step: int) -> str:
    """The file that says that they are complete."""
    return f"step-{step:012d}.json"


def save(store: Store, step: int, fill: Callable[[Path], None], *, keep: int) -> str:
    """Write a checkpoint, then remove all but the last `keep` and what crashes left. Its path."""
    if not 0 <= step < 10**12:
        raise ValueError(f"step must be from 0 to 10**12 - 1, got {step}")
    seen: list[tuple[int, int]] = []

    def fill_and_sum(path: Path) -> None:
        fill(path)
        seen.append(_sum(path))

    place = store.place(data_name(step))
    try:
        store.remove(manifest_name(step))  # of an earlier run that came this far: it must not vouch for new data
        store.write(data_name(step), fill_and_sum)
        num_bytes, crc = seen[-1]
        manifest = msgspec.json.encode(Manifest(step=step, num_bytes=num_bytes, crc32=crc))
        store.write(manifest_name(step), lambda path: _write_bytes(path, manifest))
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint {place}: {error}") from error
    _tidy(store, keep, step)
    return place


def _tidy(store: Store, keep: int, newest: int) -> None:
    """Remove what is superfluous. The new checkpoint is safe, so nothing here is a reason to stop training."""
    try:
        names = store.names()
        for name in superfluous(names, keep, newest):
            store.remove(name)
    except OSError as error:
        logger.warning("cannot remove old checkpoints beside %s: %s", store.place(data_name(newest)), error)
        return
    later = [step for step in saved_steps(names) if step > newest]
    if later:
        logger.warning(
            "%s is not the latest there: a restart takes step %d, of an earlier run; remove it or use another folder",
            store.place(data_name(newest)),
            later[-1],
        )


def superfluous(names: list[str], keep: int, newest: int) -> list[str]:
    """Files to remove, manifests first: all but the last `keep` checkpoints up to the newest; data without a manifest.

    Checkpoints later than the newest belong to another run: they are not ours to remove.
    """
    steps = saved_steps(names)
    upto = [step for step in steps if step <= newest]
    kept_steps = [*upto[-keep:], *(step for step in steps if step > newest)]
    kept = {name for step in kept_steps for name in (data_name(step), manifest_name(step))}
    ours = [name for name in names if OURS.fullmatch(name)]
    return sorted((name for name in ours if name not in kept), key=lambda name: (not name.endswith(".json"), name))


def saved_steps(names: list[str]) -> list[int]:
    """The steps of which there is a manifest, in order."""
    found = (OURS.fullmatch(name) for name in names if not name.startswith(UNFINISHED))
    return sorted(int(match[1]) for match in found if match and match[2] == "json")


@contextmanager
def latest(store: Store) -> Iterator[tuple[int, Path] | None]:
    """A context with the step and, checked and at a path of this machine, the data of the latest checkpoint that is
    whole; None if there never was one. Damaged ones are reported.

    When there are only damaged ones that is an error: training must not start over by itself.
    """
    with _readable(store.place("")):
        steps = saved_steps(store.names())
    damaged = []
    for step in reversed(steps):
        with ExitStack() as opening:
            try:
                path = opening.enter_context(opened(store, step))
            except CheckpointError as error:
                logger.warning("%s; trying the one before", error)
                damaged.append(str(error))
                continue
            yield step, path
            return
    if damaged:
        raise CheckpointError(f"no checkpoint can be used: {'; '.join(damaged)}")
    yield None


@contextmanager
def opened(store: Store, step: int) -> Iterator[Path]:
    """A context in which the data of a checkpoint, checked, is at a path of this machine."""
    place = store.place(data_name(step))
    with ExitStack() as reading:
        with _readable(place):
            with store.reading(manifest_name(step)) as path:
                manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
            path = reading.enter_context(store.reading(data_name(step)))
            found = _sum(path)
        if manifest.format != FORMAT:
            raise CheckpointError(f"the checkpoint {place} has format {manifest.format}, this ronde reads {FORMAT}")
        if found != (manifest.num_bytes, manifest.crc32):
            raise CheckpointError(
                f"the checkpoint {place} is damaged: {found[0]} bytes with CRC {found[1]:08x}, "
                f"but {manifest.num_bytes} with {manifest.crc32:08x} were written"
            )
        yield path


@contextmanager
def _readable(place: str) -> Iterator[None]:
    try:
        yield
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"cannot read the checkpoint {place}: {error}") from error


def _sum(path: Path) -> tuple[int, int]:
    """Number of bytes, and their CRC."""
    crc = num_bytes = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
            num_bytes += len(chunk)
    return num_bytes, crc


def _write_bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)
