"""How parameters are cut into parts, and which server holds which part. Without I/O.

A part is at most 4 MB of one dtype and one group of hyper-parameters: some small tensors, or a piece of a large one. It
is what travels in one message, and what is spread over servers. Each part has a primary and, if there is more than one
server, a backup on another one. A Configuration says which; it changes when a server is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from ronde.comm.backends.native_library import allocate_memory
from ronde.comm.buffers import as_array

Array: TypeAlias = NDArray[Any]

MAX_PART_BYTES = 4 * 1024 * 1024
MIN_PART_BYTES = 64 * 1024
"""Smaller parts would cost more in messages than they gain in balance: a small model is not on all servers."""
USUAL_PART_BYTES = 512 * 1024
"""Below it one part per server is enough: a message costs about as much as copying so many bytes."""
PARTS_PER_SERVER = 16
"""Between hosts at least so many, if they are not smaller than USUAL_PART_BYTES: a server passes one on while the next
arrives, and servers can be loaded evenly. Inside a host, where bytes do not travel, at least PARTS_IN_HOST."""
PARTS_IN_HOST = 4
NO_BACKUP = -1
MIN_REUSED_BYTES = 64 * 1024
"""Arrays of so many bytes get memory that is used again and again: new pages cost more than writing to them."""


class TensorSpec(NamedTuple):
    """One tensor of the parameters, as all members know it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """The name of its NumPy type: float32 or float64."""
    group: int = 0
    """Tensors of one group have the same hyper-parameters."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


class TensorSlice(NamedTuple):
    """Elements start to stop of a tensor that is flattened."""

    tensor: int
    start: int
    stop: int


def new_array(size: int, dtype: DTypeLike) -> Array:
    """An array of one dimension for a part, with any elements."""
    num_bytes = size * np.dtype(dtype).itemsize
    if num_bytes < MIN_REUSED_BYTES:
        return np.empty(size, dtype)
    return as_array(allocate_memory(num_bytes)).view(dtype)


@dataclass(frozen=True, slots=True)
class Part:
    """What one message carries: slices of tensors, one behind the other."""

    slices: tuple[TensorSlice, ...]
    dtype: str
    group: int
    bounds: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """Where its slices begin in the part, and where the last one ends."""

    def __post_init__(self) -> None:
        sizes = [piece.stop - piece.start for piece in self.slices]
        object.__setattr__(self, "bounds", tuple(accumulate(sizes, initial=0)))

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.bounds[-1]

    @property
    def num_bytes(self) -> int:
        return self.size * np.dtype(self.dtype).itemsize

    def gather(self, flat_tensors: Mapping[int, Array] | Sequence[Array], *, copy: bool = True) -> Array:
        """The elements of the part, in new memory. Without `copy` it may be that of a tensor, if they are there one
        behind the other."""
        if not self.slices:
            return np.zeros(0, self.dtype)
        if not copy and len(self.slices) == 1:
            piece = self.slices[0]
            return flat_tensors[piece.tensor][piece.start : piece.stop]
        pieces = [flat_tensors[piece.tensor][piece.start : piece.stop] for piece in self.slices]
        return np.concatenate(pieces, out=new_array(self.size, self.dtype))

    def scatter(self, values: Array, flat_tensors: Sequence[Array]) -> None:
        """Write the elements of the part back to where they belong."""
        bounds = self.bounds
        for piece, start, stop in zip(self.slices, bounds, bounds[1:], strict=False):
            flat_tensors[piece.tensor][piece.start : piece.stop] = values[start:stop]


def choose_part_bytes(
    total_bytes: int, num_servers: int, max_bytes: int = MAX_PART_BYTES, *, in_host: bool = False
) -> int:
    """How large a part may be. `in_host` says that all members are on one host."""
    share = -(-total_bytes // num_servers)
    usual = max(MIN_PART_BYTES, min(MAX_PART_BYTES if in_host else USUAL_PART_BYTES, share))
    return min(max_bytes, max(usual, -(-share // (PARTS_IN_HOST if in_host else PARTS_PER_SERVER))))


def cut_into_parts(
    tensors: Sequence[TensorSpec],
    num_servers: int,
    *,
    max_bytes: int = MAX_PART_BYTES,
    keep_whole: bool = False,
    in_host: bool = False,
) -> tuple[Part, ...]:
    """Cut tensors into parts, in their order. Every element is in exactly one part, and no part has more than
    max_bytes, unless tensors are to be kept whole, as optimizers need it that look at norms of tensors."""
    total_bytes = sum(tensor.size * np.dtype(tensor.dtype).itemsize for tensor in tensors)
    limit_bytes = choose_part_bytes(total_bytes, num_servers, max_bytes, in_host=in_host)
    parts: list[Part] = []
    slices: list[TensorSlice] = []
    room = 0
    kind = ("", 0)

    def end_part() -> None:
        if slices:
            parts.append(Part(tuple(slices), *kind))
            slices.clear()

    for index, tensor in enumerate(tensors):
        limit = max(1, limit_bytes // np.dtype(tensor.dtype).itemsize)
        if (tensor.dtype, tensor.group) != kind:
            end_part()
            kind, room = (tensor.dtype, tensor.group), limit
        if tensor.size > room and (keep_whole or tensor.size <= limit):  # a tensor that fits into one part is not cut
            end_part()
            room = limit
        start = 0
        while start < tensor.size:
            if room <= 0:
                end_part()
                room = limit
            stop = tensor.size if keep_whole else min(tensor.size, start + room)
            slices.append(TensorSlice(index, start, stop))
            room -= stop - start
            start = stop
    end_part()
    return tuple(parts)


class Sized(Protocol):
    """A part of anything."""

    @property
    def num_bytes(self) -> int: ...


class Configuration(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which servers there are, and which parts they hold. There is one for each epoch."""

    epoch: int
    servers: tuple[int, ...]
    """The ranks of the servers, in order. The first is the sequencer, the second its backup."""
    primaries: tuple[int, ...]
    """By part, the rank that workers send to and read from."""
    backups: tuple[int, ...]
    """By part, the rank that holds its copy; NO_BACKUP if none does."""

    @property
    def sequencer(self) -> int:
        return self.servers[0]

    @property
    def sequencer_backup(self) -> int:
        return self.servers[1] if len(self.servers) > 1 else NO_BACKUP

    def replicas_of(self, part: int) -> tuple[int, ...]:
        """The primary, and the backup if there is one."""
        backup = self.backups[part]
        return (self.primaries[part],) if backup == NO_BACKUP else (self.primaries[part], backup)


class PartsLost(Exception):
    """All replicas of some parts are gone, so there is no further configuration."""

    def __init__(self, parts: Sequence[int], servers: Collection[int]) -> None:
        self.parts = tuple(parts)
        self.servers = tuple(sorted(servers))
        super().__init__(f"{len(self.parts)} parts were only on servers {self.servers}")


def make_configuration(parts: Sequence[Sized], servers: Iterable[int], *, replicate: bool = True) -> Configuration:
    """The configuration of the first epoch: the largest part first, each to the server that has the fewest bytes."""
    ranks = tuple(servers)
    if not ranks:
        raise ValueError("a parameter server needs at least one rank as a server")
    loads = dict.fromkeys(ranks, 0)
    primaries, backups = [0] * len(parts), [NO_BACKUP] * len(parts)
    for index in sorted(range(len(parts)), key=lambda index: -parts[index].num_bytes):
        primaries[index] = _least_loaded(loads)
        loads[primaries[index]] += parts[index].num_bytes
    if replicate and len(ranks) > 1:
        _add_backups(parts, ranks, primaries, backups)
    return Configuration(1, ranks, tuple(primaries), tuple(backups))


def change_servers(
    configuration: Configuration,
    parts: Sequence[Sized],
    *,
    lost: Collection[int] = (),
    added: Iterable[int] = (),
    replicate: bool = True,
) -> Configuration:
    """The configuration of the next epoch, without the lost servers and with those that were added, behind the others.
    The backups of lost primaries become primaries. With `replicate`, parts that have no backup get one, if there is a
    server for it. Raises PartsLost."""
    servers = tuple(rank for rank in configuration.servers if rank not in lost)
    primaries, backups = list(configuration.primaries), list(configuration.backups)
    gone: list[int] = []
    for index in range(len(primaries)):
        living = [rank for rank in configuration.replicas_of(index) if rank in servers]
        if not living:
            gone.append(index)
            continue
        primaries[index], backups[index] = living[0], living[1] if len(living) > 1 else NO_BACKUP
    if gone or not servers:
        raise PartsLost(gone, lost)
    servers = (*servers, *(rank for rank in added if rank not in servers))
    if len(servers) > 1 and replicate:
        _add_backups(parts, servers, primaries, backups)
    return Configuration(configuration.epoch + 1, servers, tuple(primaries), tuple(backups))


def _add_backups(parts: Sequence[Sized], servers: Sequence[int], primaries: list[int], backups: list[int]) -> None:
    """Give each part that has no backup one on another server than its primary, by bytes."""
    loads = dict.fromkeys(servers, 0)
    for index, part in enumerate(parts):
        for rank in (primaries[index], backups[index]):
            if rank != NO_BACKUP:
                loads[rank] += part.num_bytes
    for index in sorted(range(len(parts)), key=lambda index: -parts[index].num_bytes):
        if backups[index] == NO_BACKUP:
            others = {rank: load for rank, load in loads.items() if rank != primaries[index]}
            backups[index] = _least_loaded(others)
            loads[backups[index]] += parts[index].num_bytes


def _least_loaded(loads: Mapping[int, int]) -> int:
    return min(loads, key=lambda rank: (loads[rank], rank))
