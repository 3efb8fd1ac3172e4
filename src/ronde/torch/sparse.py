"""Sums of sparse tensors: every member's indices and values are gathered, and equal indices added up.

Used by allreduce for sparse COO tensors, such as the gradients of an embedding with sparse=True.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ronde.comm.group import Group
from ronde.errors import Mismatch
from ronde.torch import transport
from ronde.torch.tensors import TensorWork
from ronde.torch.transport import Reduction
from ronde.types import Op, parse_op

__all__ = ["allreduce_sparse"]


def allreduce_sparse(group: Group, x: Tensor, how: Reduction, *, name: str | None, wait: bool) -> Any:
    """The sum or mean of sparse tensors of one shape, coalesced; with wait=False its TensorWork."""
    op = parse_op(how.op)
    if op not in (Op.SUM, Op.MEAN):
        raise ValueError(f"allreduce of sparse tensors knows sum and mean, got {op.name.lower()}; use x.to_dense()")
    x = x.detach().coalesce()
    factor = how.postscale / (group.size if op is Op.MEAN else 1)
    if x.sparse_dim() == 0:
        raise ValueError("allreduce of sparse tensors needs at least one sparse dimension; use x.to_dense()")
    # Before they travel: a member's factor may be its own.
    values = x.values() if how.prescale == 1.0 else x.values() * how.prescale
    parts = [_with_shape(x), values]
    gathered = transport.allgather(group, parts, name=name, wait=wait)
    if not wait:
        assert isinstance(gathered, TensorWork)
        return gathered.then(lambda parts: _add_up(parts, x, factor))
    return _add_up(gathered, x, factor)


def _with_shape(x: Tensor) -> Tensor:
    """One row per index, and ahead of them one with the shape, told apart by being negative: members compare it."""
    shape = torch.tensor([x.shape[: x.sparse_dim()]], dtype=torch.int64, device=x.device)
    return torch.cat([-1 - shape, x.indices().t()])


def _add_up(parts: list[Tensor], x: Tensor, factor: float) -> Tensor:
    rows, values = parts
    is_shape = rows[:, 0] < 0
    shapes = (-1 - rows[is_shape]).tolist()
    if any(shape != shapes[0] for shape in shapes):
        told = "; ".join(f"member {index}: {shape}" for index, shape in enumerate(shapes))
        raise Mismatch(f"allreduce: the sparse tensors differ in shape: {told}")
    if factor != 1.0:
        values = values * factor
    return torch.sparse_coo_tensor(rows[~is_shape].t(), values, x.shape, check_invariants=False).coalesce()
