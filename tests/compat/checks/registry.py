"""The list of checks, and what several of them need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

import horovod.torch as hvd

CHECKS: dict[str, Callable[[], None]] = {}


def check(body: Callable[[], None]) -> Callable[[], None]:
    """Run it on every rank."""
    CHECKS[f"{body.__module__.rpartition('.')[2]}.{body.__name__}"] = body
    return body


@contextmanager
def raises(kind: type[BaseException], words: str = "") -> Iterator[None]:
    """As pytest's, which a job need not import."""
    try:
        yield
    except kind as error:
        assert words in str(error), f"{words!r} is not in {str(error)!r}"
        assert type(error) is kind, f"{kind.__name__} was expected, got {error!r}"
    else:
        raise AssertionError(f"nothing was raised; {kind.__name__} was expected")


def counting(shape: Sequence[int], rank: int, dtype: torch.dtype) -> Tensor:
    """Other numbers on every rank, that all dtypes have."""
    size = torch.Size(shape).numel()
    return (torch.arange(size) % 5 + 1 + rank).reshape(torch.Size(shape)).to(dtype)


def of_all(shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """What every rank has."""
    return [counting(shape, rank, dtype) for rank in range(hvd.size())]
