"""AsyncOptimizer: an optimizer of PyTorch whose steps a parameter server takes (ronde.ps)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.ps import SGD, Adagrad, Adam, AdamW, EmbeddingTable, GradientNoise, ParameterServer, RMSProp
from ronde.ps import Optimizer as ServerOptimizer
from ronde.torch.sharded_embedding import ShardedEmbedding

KNOWN: dict[type[Optimizer], tuple[Callable[..., ServerOptimizer], tuple[str, ...]]] = {
    torch.optim.SGD: (SGD, ("momentum", "dampening", "weight_decay", "nesterov")),
    torch.optim.Adam: (Adam, ("betas", "eps", "weight_decay")),
    torch.optim.AdamW: (AdamW, ("betas", "eps", "weight_decay")),
    torch.optim.Adagrad: (Adagrad, ("lr_decay", "weight_decay", "eps")),
    torch.optim.RMSprop: (RMSProp, ("alpha", "eps", "weight_decay", "momentum", "centered")),
}
"""PyTorch's optimizers: what servers have in their place, and the options that both know."""
NOT_KNOWN = ("maximize", "amsgrad", "differentiable", "initial_accumulator_value")
"""Options of PyTorch's that servers do not have."""


class AsyncOptimizer(Optimizer):
    """The same optimizer, whose steps are taken by a parameter server: step() pushes the gradients and reads the
    parameters. Made by all ranks alike; they begin with the parameters of the first rank.

    It takes SGD, Adam, AdamW, Adagrad and RMSprop of PyTorch, or, as `server_optimizer`, one of ronde.ps for the
    parameters of any. Their state is on the servers. Learning rates are read from `param_groups` in every step, so
    schedulers work. `mode`, `staleness`, `servers`, `workers`, `replicate` and `clip_norm` are those of
    ronde.ps.ParameterServer, and so are `delay_compensation`, `compression` and `state`; `noise` is a
    ronde.ps.GradientNoise. The rows of a ShardedEmbedding are read and pushed as they are used.

    With `overlap`, gradients are sent while the backward pass runs. Then a step has one backward pass, and nothing may
    change gradients after it; an error says so. Parameters without a gradient are pushed with zeros.

    With `module`, the model that has the parameters, step() does not wait: parameters are read while the forward pass
    runs, and each layer waits for its own before its forward(). Code that uses parameters outside of a forward() calls
    finish_step() before.

    Parameters that are frozen (requires_grad is False) when it is made are not trained. For those that are to be
    trained later, or are added, make another AsyncOptimizer.
    """

    _is_made = False
    """Whether its parameters are those that servers know."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        mode: str = "bounded",
        staleness: int = 4,
        noise: GradientNoise | None = None,
        server_optimizer: ServerOptimizer | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        overlap: bool = False,
        module: nn.Module | None = None,
        group: Group | None = None,
        **options: Any,  # of ParameterServer
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"AsyncOptimizer takes an optimizer of PyTorch, got {type(optimizer).__name__}")
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._is_made = True
        given = {id(parameter): name for name, parameter in named_parameters or ()}
        self._frozen: list[tuple[str, Tensor]] = []
        """Parameters that were frozen when this object was made, with their names."""
        self._named: dict[str, Tensor] = {}
        self._embeddings: dict[str, ShardedEmbedding] = {}
        tables: dict[str, EmbeddingTable] = {}
        groups: dict[str, int] = {}
        for number, param_group in enumerate(self.param_groups):
            for index, parameter in enumerate(param_group["params"]):
                name = given.get(id(parameter), f"{number}.{index}")
                if not parameter.requires_grad:
                    self._frozen.append((name, parameter))
                    continue
                embedding = getattr(parameter, "ronde_embedding", None)
                if embedding is not None:
                    self._embeddings[name], tables[name] = embedding, embedding.make_table(number)
                    continue
                self._named[name] = parameter
                groups[name] = number
        for name, parameter in self._named.items():
            if parameter.dtype not in (torch.float32, torch.float64):
                raise TypeError(
                    f"parameter {name} is {parameter.dtype}; servers train float32 and float64. Keep parameters in "
                    "float32, compute in torch.autocast, and give compression='bfloat16' or 'float16' to send less"
                )
        arrays = {name: parameter_array(name, parameter) for name, parameter in self._named.items()}
        self._learns_lr = server_optimizer is None
        """Whether the learning rates of param_groups count."""
        self.server = ParameterServer(
            arrays,
            server_optimizer or make_server_optimizer(optimizer),
            mode=mode,
            staleness=staleness,
            noise=noise,
            groups=groups,
            tables=tables,
            group=group,
            **options,
        )
        """The parameter server: its version, staleness and servers."""
        for name, embedding in self._embeddings.items():
            embedding.attach(self.server, name)
        self._staged: dict[str, tuple[int, int]] = {}
        """By name, gradients that were sent in the backward pass: the identity of the tensor, and its version."""
        self._hooks: list[RemovableHandle] = []
        if overlap:
            for name, parameter in self._named.items():
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._make_hook(name)))
        self._is_lazy = module is not None
        """Whether layers wait for their own parameters."""
        if module is not None:
            self._add_forward_hooks(module)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Push the gradients, and read the parameters for the next step. In "async" mode it waits for no other worker.
        Return what the closure returns, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ValueError(
                    f"parameter {name} was frozen when AsyncOptimizer was made, so the servers do not train it; close "
                    "this AsyncOptimizer and make another one"
                )
        lrs = [float(each["lr"]) for each in self.param_groups] if self._learns_lr else []
        for embedding in self._embeddings.values():
            embedding.stage_gradients()
        staged, self._staged = self._staged, {}
        if not staged and not self._is_lazy:
            self.server.step([_gradient_array(parameter) for parameter in self._named.values()], lrs=lrs)
            return loss
        for name, parameter in self._named.items():
            gradient = parameter.grad
            if name in staged:
                if gradient is None or staged[name] != (id(gradient), gradient._version):
                    raise ValueError(
                        f"the gradient of {name} has changed since it was sent in the backward pass; make "
                        "AsyncOptimizer with overlap=False to clip or accumulate gradients"
                    )
                continue
            self.server.stage(name, _gradient_array(parameter))
        self.server.start_step(lrs=lrs)
        if not self._is_lazy:
            self.server.finish_step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """It is refused: servers train the parameters that there were when this object was made."""
        if self._is_made:
            raise ValueError(
                "parameters cannot be added to an AsyncOptimizer, whose servers would not train them; close it and "
                "make another one with all parameters"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """It is refused, because the state is on the servers: see ronde.ps.ParameterServer.state_dict() and save()."""
        raise ValueError(
            "the state of an AsyncOptimizer is on the servers: one rank calls optimizer.server.state_dict(), or "
            "optimizer.server.save(folder), and AsyncOptimizer(…, state=…) goes on from there"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """It is refused: give `state` when this object is made."""
        raise ValueError(
            "the state of an AsyncOptimizer is on the servers: give AsyncOptimizer(…, state=…) what "
            "optimizer.server.state_dict() or ronde.ps.load_checkpoint() has returned"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as PyTorch's optimizers do, also those of rows of a ShardedEmbedding."""
        super().zero_grad(set_to_none)
        for embedding in self._embeddings.values():
            embedding.drop_gradients()

    def finish_step(self) -> None:
        """Wait until the parameters are those of the last step, all of one version."""
        self.server.finish_step()

    def samples(self, num_samples: int, batch_size: int, *, epoch: int = 0) -> Iterator[Tensor]:
        """Yield indices of samples to train on, until every sample of the epoch is used exactly once by some worker.
        step() acknowledges those that were yielded before it; those of a lost worker are given to others."""
        for indices in self.server.samples(num_samples, batch_size, epoch=epoch):
            yield torch.from_numpy(indices)

    def pull(self) -> int:
        """Read the newest parameters, all of one version. Return the version: the number of updates."""
        return self.server.pull()

    def close(self) -> None:
        """Leave, and wait until all workers have. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.server.close()

    def _add_forward_hooks(self, module: nn.Module) -> None:
        """Let each layer wait for its parameters, also those that layers share."""
        names = {id(parameter): name for name, parameter in self._named.items()}
        found: set[str] = set()
        for layer in module.modules():
            own = [names[id(each)] for each in layer.parameters(recurse=False) if id(each) in names]
            if own:
                self._hooks.append(layer.register_forward_pre_hook(partial(self._wait_for_layer, own)))
                found.update(own)
        missing = [name for name in self._named if name not in found]
        if missing:
            raise ValueError(f"module does not have the parameter {missing[0]}, so nobody would wait for it")

    def _wait_for_layer(self, names: Sequence[str], *_: object) -> None:
        for name in names:
            self.server.wait_for(name)

    def _make_hook(self, name: str) -> Callable[[Tensor], None]:
        def send(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            if name in self._staged:
                raise ValueError(
                    f"the gradient of {name} came twice before step(); make AsyncOptimizer with overlap=False to have "
                    "several backward passes in a step"
                )
            self._staged[name] = (id(gradient), gradient._version)
            self.server.stage(name, _gradient_array(parameter))

        return send


def make_server_optimizer(optimizer: Optimizer) -> ServerOptimizer:
    """What servers do in the place of an optimizer of PyTorch. The groups of parameters keep their options."""
    known = KNOWN.get(type(optimizer))
    if known is None:
        names = ", ".join(each.__name__ for each in KNOWN)
        raise TypeError(
            f"AsyncOptimizer knows {names}, got {type(optimizer).__name__}; give a server_optimizer, such as "
            "ronde.ps.LAMB"
        )
    make, names_of_options = known
    options: list[Mapping[str, Any]] = []
    for param_group in optimizer.param_groups:
        unknown = [name for name in NOT_KNOWN if param_group.get(name)]
        if unknown:
            raise ValueError(f"servers do not have the option {unknown[0]} of {type(optimizer).__name__}")
        options.append({name: param_group[name] for name in names_of_options})
    lr = float(optimizer.param_groups[0]["lr"])
    first = max(options, key=lambda each: make(lr=lr, **each).num_states)
    others = {number: each for number, each in enumerate(options) if each != first}
    return make(lr=lr, groups=others, **first)


def parameter_array(name: str, parameter: Tensor) -> Array:
    """The memory of a parameter as an array."""
    if parameter.device.type != "cpu":
        raise TypeError(f"parameter {name} is on {parameter.device}; a parameter server takes those on the CPU")
    if parameter.dtype == torch.bfloat16:
        raise TypeError(f"parameter {name} is torch.bfloat16, which NumPy does not have; keep parameters in float32")
    array: Array = parameter.detach().numpy()
    return array


def _gradient_array(parameter: Tensor) -> Array:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    array: Array = gradient.detach().numpy()
    return array
