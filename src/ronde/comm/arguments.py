"""The caller's arguments of a collective, checked. What is wrong with them is a ValueError or TypeError that names the
operation, `what`. Used by groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ronde.comm.buffers import ReceiveBuffer, SendBuffer, as_receive_buffer, as_send_buffer
from ronde.comm.call import Memory, even_shares
from ronde.text import escape_surrogates
from ronde.types import CPU


def as_send_buffers(x: object, what: str) -> tuple[list[SendBuffer], bool]:
    """The arrays of an operation, and whether they were given as a list."""
    if not isinstance(x, list | tuple):
        return [as_send_buffer(x, what)], False
    sources = [as_send_buffer(each, what) for each in x]
    if not sources:
        raise ValueError(f"{what}: the list of arrays is empty")
    dtypes = {source.dtype.name.lower() for source in sources}
    if len(dtypes) > 1:
        raise TypeError(f"{what}: the arrays of a list must have one dtype, got {', '.join(sorted(dtypes))}")
    return sources, True


def as_receive_buffers(out: Any, sources: Sequence[SendBuffer], is_list: bool, what: str) -> list[ReceiveBuffer]:
    """Memory for results like the sources; out is None, an array, or a list of arrays as x is."""
    if out is None:
        outs = [None] * len(sources)
    elif is_list and (not isinstance(out, list | tuple) or len(out) != len(sources)):
        raise ValueError(f"{what}: out must be a list of {len(sources)} arrays, as x is")
    else:
        outs = list(out) if is_list else [out]
    return [as_receive_buffer(given, source, what) for given, source in zip(outs, sources, strict=True)]


def is_on_device(x: object) -> bool:
    """Whether this is memory of another device than the CPU, or a list with such."""
    if isinstance(x, list | tuple):
        return any(isinstance(each, Memory) and each.device != CPU for each in x)
    return isinstance(x, Memory) and x.device != CPU


def check_device_memory(sources: Sequence[Any], targets: Sequence[Any], what: str) -> None:
    """TypeError or ValueError unless all is memory of one device and dtype, and each target is as its source."""
    if not all(isinstance(each, Memory) for each in (*sources, *targets)):
        where = next(each.device for each in sources if isinstance(each, Memory) and each.device != CPU)
        raise TypeError(
            f"{what}: x has memory on {where}, so x and out must be ronde.Memory there; ronde allocates none: give "
            "out=, which may be x"
        )
    places = {(each.device, each.dtype) for each in (*sources, *targets)}
    if len(places) > 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for device, dtype in places))
        raise TypeError(f"{what}: all memory must be on one device and have one dtype, got {found}")
    if targets and [target.shape for target in targets] != [source.shape for source in sources]:
        raise ValueError(f"{what}: out must have the shapes of x")


def check_rows(sources: Sequence[SendBuffer], what: str) -> None:
    if any(not source.array.shape for source in sources):
        raise ValueError(f"{what} shares out rows: it needs an array of at least 1 dimension, got a scalar")


def check_equal_rows(sources: Sequence[SendBuffer], what: str) -> int:
    """The number of rows, which all arrays of a list must have."""
    check_rows(sources, what)
    num_rows: list[int] = [source.array.shape[0] for source in sources]
    if len(set(num_rows)) > 1:
        raise ValueError(
            f"{what}: the arrays of a list must have equally many rows, got {', '.join(map(str, num_rows))}"
        )
    return num_rows[0]


def check_splits(splits: object, num_rows: int, size: int, what: str) -> tuple[int, ...]:
    """How many rows each of `size` members gets: as the caller says, or equal shares."""
    if splits is None:
        return even_shares(num_rows, size)
    given = np.asarray(splits)
    if given.shape != (size,) or given.dtype.kind not in "iu" or given.min() < 0:
        raise ValueError(f"{what}: splits must be {size} whole numbers from 0, one per member, got {splits!r}")
    if int(given.sum()) > num_rows:
        raise ValueError(f"{what}: splits ask for {int(given.sum())} rows of an array with {num_rows}")
    return tuple(given.tolist())


def check_name(name: str | None) -> str:
    """The name of an operation; empty without one."""
    if name is None:
        return ""
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a text that is not empty, got {name!r}")
    if not name.isascii() and escape_surrogates(name) != name:
        raise ValueError(f"name must be a text that UTF-8 can hold, got half of a surrogate pair in {name!r}")
    return name if type(name) is str else str.__str__(name)  # as np.str_, which cannot be sent
