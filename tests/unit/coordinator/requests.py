"""Requests of ranks for named operations, as the tests of the coordinator send them."""

from __future__ import annotations

from ronde.net.messages import AnnounceOperations, OperationRequest
from ronde.types import DType, OperationKind


def allreduce(name: str, *shapes: tuple[int, ...], group: int = 0, **options: object) -> OperationRequest:
    return OperationRequest(group, name, OperationKind.ALLREDUCE, DType.FLOAT32, shapes or ((4,),), **options)  # type: ignore[arg-type]


def announce(name: str, group: int = 0) -> AnnounceOperations:
    return AnnounceOperations((allreduce(name, group=group),))
