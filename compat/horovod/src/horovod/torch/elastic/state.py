"""TorchState: models, optimizers, samplers and plain values that are saved, restored and sent together."""

from __future__ import annotations

import copy
from typing import Any

import torch

from horovod.common.elastic import ObjectState
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from horovod.torch.mpi_ops import rank


class StateHandler:
    """Saves, restores and sends one object of a TorchState. Subclasses do so for one type."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep the object's state for restore()."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the state of the last save()."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take the state of rank 0. Collective."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Go on with another object."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """An object with state_dict() and load_state_dict()."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved_state = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self._saved_state)


class ModelStateHandler(_StateDictHandler):
    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(_StateDictHandler):
    def restore(self) -> None:
        # load_state_dict() keeps the tensors that it is given, and the next step would change them.
        self.value.load_state_dict(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(_StateDictHandler):
    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


HandlerRegistry = list[tuple[type, type[StateHandler]]]

_handler_registry: HandlerRegistry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> HandlerRegistry:
    """Return the types with a handler of their own; the first that fits counts."""
    return _handler_registry


def set_handler_registry(registry: HandlerRegistry) -> None:
    global _handler_registry
    _handler_registry = registry


class TorchState(ObjectState):
    """State of a PyTorch training: each keyword becomes an attribute.

    Models, optimizers and ElasticSamplers are saved and sent as what they are; everything else is a plain value, which
    is saved without a copy. sync() also saves, so that a process that has just come can restore what it got.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {**kwargs, "model": model, "optimizer": optimizer}
        self._handlers: dict[str, StateHandler] = {}
        for name, value in given.items():
            handler = next((handler for kind, handler in _handler_registry if isinstance(value, kind)), None)
            if handler is not None:
                object.__setattr__(self, name, value)
                self._handlers[name] = handler(value)
        plain = {name: value for name, value in given.items() if name not in self._handlers}
        super().__init__(broadcast_object, rank, **plain)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()
        for handler in self._handlers.values():
            handler.save()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_handlers", ()):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)
