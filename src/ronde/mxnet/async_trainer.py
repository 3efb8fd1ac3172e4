"""A trainer for gluon whose steps are taken by a parameter server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mxnet as mx

from ronde.ps import Optimizer
from ronde.ps.async_training import AsyncTraining


class AsyncTrainer:
    """Parameters of gluon whose steps are taken by a parameter server. Made by all ranks alike; they begin with the
    parameters of the first rank.

        trainer = ronde.mxnet.AsyncTrainer(net.collect_params(), ronde.ps.SGD(lr=0.1), mode="bounded", staleness=4)
        trainer.step(batch_size)

    `params` are initialized parameters, as gluon.Trainer takes them, each on one context. `optimizer` is one of
    ronde.ps. Further options are those of ronde.ps.ParameterServer.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Optimizer,
        *,
        mode: str = "bounded",
        **options: Any,
    ) -> None:
        given: list[Any] = list(params.values() if hasattr(params, "values") else params)
        self._params = [each for each in given if each.grad_req != "null"]
        for each in self._params:
            if len(each.list_data()) > 1:
                raise ValueError(f"the parameter {each.name!r} is on several contexts; a parameter server takes one")
        # Prefixes, as in dense3_weight, have numbers, which differ if one rank has made more blocks than another.
        kinds = [each.name.rpartition("_")[2] for each in self._params]
        arrays = {f"{index} {kinds[index]}": each.data().asnumpy() for index, each in enumerate(self._params)}
        self.training = AsyncTraining(arrays, optimizer, mode=mode, **options)
        """The copies of the parameters on this host; `training.learning_rate` is for schedules."""
        self.server = self.training.server
        """The parameter server: its version, staleness and servers."""
        self._assign(self.training.values)

    def step(self, batch_size: int) -> None:
        """Push the gradients, divided by the size of this rank's batch, and read the parameters for the next step. In
        "async" mode it waits for no other worker."""
        gradients = [each.grad() for each in self._params]
        for each in gradients:
            if each.stype != "default":
                raise ValueError("a gradient is sparse; make the layer with sparse_grad=False")
        self._assign(self.training.exchange([each.asnumpy() / batch_size for each in gradients]))

    def pull(self) -> None:
        """Read the newest parameters, all of one version."""
        self.server.pull()
        self._assign(self.training.values)

    def samples(self, num_samples: int, batch_size: int, *, epoch: int = 0) -> Iterator[Any]:
        """Yield indices of samples to train on, until every sample of the epoch is used exactly once by some worker.
        step() acknowledges those that were yielded before it; those of a lost worker are given to others."""
        yield from self.training.samples(num_samples, batch_size, epoch=epoch)

    def close(self) -> None:
        """Leave, and wait until all workers have. Idempotent."""
        self.training.close()

    def _assign(self, values: Sequence[Any]) -> None:
        for param, value in zip(self._params, values, strict=True):
            data = param.data()
            param.set_data(mx.nd.array(value, ctx=data.context, dtype=data.dtype))
