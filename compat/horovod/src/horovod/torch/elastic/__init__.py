"""`hvd.elastic`: training that goes on when processes are lost and hosts come and go, as Horovod promises it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from horovod.common.elastic import run_fn
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState
from horovod.torch.mpi_ops import rejoin
from horovod.torch.optimizer import reset_optimizers

__all__ = ["ElasticSampler", "TorchState", "run"]

R = TypeVar("R")


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorate a training function whose first argument is a State.

    It is called with the state of rank 0. When processes are lost it is called again with the state of the last commit;
    when hosts have changed, with the state as it is. New processes come in at this call, so nothing collective may be
    done before it.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    rejoin()
    reset_optimizers()
