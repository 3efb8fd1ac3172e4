"""Checkpoints in a store: written whole or not at all, the last few kept, the latest valid one found. Used by the
frameworks' checkpoints, which know what goes into the file.

A checkpoint of step 1200 is two files: step-000000001200.data, and step-000000001200.json, its manifest with the size
and a CRC of the data. A checkpoint is never written over: a step that is saved again gets the next version
(step-000000001200-1.data and .json), and the version before goes when that is whole. The manifest comes last when one
is written and goes first when one is removed, so at any moment:

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
from typing import NamedTuple

import msgspec

from ronde.binding.store import UNFINISHED, Store
from ronde.errors import CheckpointError

__all__ = ["Found", "Label", "Manifest", "clear", "latest", "save", "saved", "superfluous"]

logger = logging.getLogger("ronde.checkpoint")

FORMAT = 1
CHUNK_BYTES = 4 << 20
OURS = re.compile(rf"(?:{re.escape(UNFINISHED)})?step-(\d{{12}})(?:-(\d+))?\.(data|json)")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What there has to be for a checkpoint to be whole."""

    step: int
    num_bytes: int
    crc32: int
    format: int = FORMAT


class Label(NamedTuple):
    """Which checkpoint: the later one is greater."""

    step: int
    version: int = 0
    """One more than that of the checkpoint of this step that was there when it was saved."""

    @property
    def data(self) -> str:
        """The file with the contents."""
        return f"{self._stem}.data"

    @property
    def manifest(self) -> str:
        """The file that says that they are complete."""
        return f"{self._stem}.json"

    @property
    def _stem(self) -> str:
        return f"step-{self.step:012d}" + (f"-{self.version}" if self.version else "")


class Found(NamedTuple):
    """A checkpoint that is whole."""

    step: int
    place: str
    """The whole path of its data, for messages."""
    path: Path
    """Where they are on this machine."""
    num_bytes: int


def save(store: Store, step: int, fill: Callable[[Path], None], *, keep: int) -> str:
    """Write a checkpoint, then remove all but the last `keep` and what crashes left. Its path."""
    if not 0 <= step < 10**12:
        raise ValueError(f"step must be from 0 to 10**12 - 1, got {step}")
    seen: list[tuple[int, int]] = []

    def fill_and_sum(path: Path) -> None:
        fill(path)
        seen.append(_sum(path))

    label = Label(step)
    try:
        # Not over the one that is there: until the new one is whole it may be the only one.
        versions = [there.version for there in saved(store.names()) if there.step == step]
        label = Label(step, max(versions) + 1 if versions else 0)
        store.write(label.data, fill_and_sum)
        num_bytes, crc = seen[-1]
        manifest = msgspec.json.encode(Manifest(step=step, num_bytes=num_bytes, crc32=crc))
        store.write(label.manifest, lambda path: _write_bytes(path, manifest))
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint {store.place(label.data)}: {error}") from error
    _tidy(store, keep, label)
    return store.place(label.data)


def clear(store: Store) -> None:
    """Remove all checkpoints, and what crashes left."""
    try:
        for name in _ours(store.names()):
            store.remove(name)
    except OSError as error:
        raise CheckpointError(f"cannot remove the checkpoints in {store.place('')}: {error}") from error


def _tidy(store: Store, keep: int, newest: Label) -> None:
    """Remove what is superfluous. The new checkpoint is safe, so nothing here is a reason to stop training."""
    try:
        names = [*store.names(), newest.manifest]  # also where a new file is listed late
        for name in superfluous(names, keep, newest.step):
            store.remove(name)
    except OSError as error:
        logger.warning("cannot remove old checkpoints beside %s: %s", store.place(newest.data), error)
        return
    latest_step = saved(names)[-1].step
    if latest_step > newest.step:
        logger.warning(
            "%s is not the latest there: a restart takes step %d, of an earlier run; remove it or use another folder",
            store.place(newest.data),
            latest_step,
        )


def superfluous(names: list[str], keep: int, newest: int) -> list[str]:
    """Files to remove, manifests first: all but the last `keep` checkpoints up to the newest step; earlier versions;
    data without a manifest.

    Checkpoints later than the newest belong to another run: they are not ours to remove.
    """
    labels = saved(names)
    last_versions = {label.step: label for label in labels}
    upto = [label for step, label in last_versions.items() if step <= newest]
    kept_labels = [*upto[-keep:], *(label for label in labels if label.step > newest)]
    kept = {name for label in kept_labels for name in (label.data, label.manifest)}
    return [name for name in _ours(names) if name not in kept]


def _ours(names: list[str]) -> list[str]:
    """Those of checkpoints, manifests first."""
    ours = (name for name in names if OURS.fullmatch(name))
    return sorted(ours, key=lambda name: (not name.endswith(".json"), name))


def saved(names: list[str]) -> list[Label]:
    """The checkpoints of which there is a manifest, in order."""
    found = (OURS.fullmatch(name) for name in names if not name.startswith(UNFINISHED))
    return sorted(Label(int(match[1]), int(match[2] or 0)) for match in found if match and match[3] == "json")


@contextmanager
def latest(store: Store, step: int | None = None) -> Iterator[Found | None]:
    """A context with the latest checkpoint (of a step) that is whole, its data checked and at a path of this machine;
    None if there never was one. Damaged ones are reported.

    When there are only damaged ones, or none of that step, it is an error: training must not start over by itself.
    """
    with _readable(store.place("")):
        there = saved(store.names())
    labels = [label for label in there if step in (None, label.step)]
    if step is not None and not labels:
        steps = ", ".join(str(each) for each in sorted({label.step for label in there})) or "none"
        raise CheckpointError(f"there is no checkpoint of step {step} in {store.place('')}; those there: {steps}")
    damaged = []
    for label in reversed(labels):
        with ExitStack() as opening:
            try:
                found = opening.enter_context(_opened(store, label))
            except CheckpointError as error:
                logger.warning("%s; it is passed over", error)
                damaged.append(str(error))
                continue
            yield found
            return
    if damaged:
        raise CheckpointError(f"no checkpoint can be used: {'; '.join(damaged)}")
    yield None


@contextmanager
def _opened(store: Store, label: Label) -> Iterator[Found]:
    place = store.place(label.data)
    with ExitStack() as reading:
        with _readable(place):
            with store.reading(label.manifest) as path:
                manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
            path = reading.enter_context(store.reading(label.data))
            found = _sum(path)
        if manifest.format != FORMAT:
            raise CheckpointError(f"the checkpoint {place} has format {manifest.format}, this ronde reads {FORMAT}")
        if found != (manifest.num_bytes, manifest.crc32):
            raise CheckpointError(
                f"the checkpoint {place} is damaged: {found[0]} bytes with CRC {found[1]:08x}, "
                f"but {manifest.num_bytes} with {manifest.crc32:08x} were written"
            )
        yield Found(label.step, place, path, manifest.num_bytes)


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
