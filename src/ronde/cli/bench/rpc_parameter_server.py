"""A parameter server of torch.distributed.rpc, as its users write it, for `ronde bench ps`: what each rank of the job
runs, beside a parameter server of ronde on the same ranks.

A process that has called init_rpc() keeps a core busy from then on, also while it waits (TensorPipe polls). So half of
ronde's steps are measured before, and half after, when shutdown() has ended that; the two ways of RPC take turns.
The last rank is the server, the others are workers. Per parameter: as in PyTorch's tutorial on parameter servers, a
worker calls remote methods of the server's object for each parameter, one to give its gradient and one to get its
values. Flat: one call per step takes all gradients in one tensor and returns all values in another. Both take the step
of SGD in the call that brings the gradient, under a lock, and wait for no other worker, as "async" mode does.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import ronde
from ronde.net.addresses import find_free_ports
from ronde.ps import SGD, ParameterServer

LR = 0.1
NUM_TENSORS = 60
"""As many parameters as a small convolutional network has, large and small ones."""
WARM_UP = 3
RPC_TIMEOUT_S = 120.0
FLAT = "flat RPC"
RONDE, PER_PARAMETER = "ronde", "RPC per parameter"
WAYS = (RONDE, FLAT, PER_PARAMETER)


def choose_shapes(num_bytes: int) -> list[int]:
    """Elements of each parameter: every second one is a bias, of a hundredth of the others."""
    large = max(1, round(num_bytes / 4 / (NUM_TENSORS / 2 * 1.01)))
    return [large if index % 2 == 0 else max(1, large // 100) for index in range(NUM_TENSORS)]


class RpcServer:
    """The object of the server rank whose methods workers call."""

    _instance: RpcServer | None = None
    _instance_lock = threading.Lock()

    def __init__(self, sizes: Sequence[int]) -> None:
        import torch

        self._lock = threading.Lock()
        self._parameters = [torch.zeros(size) for size in sizes]
        self._flat = torch.zeros(sum(sizes))

    @classmethod
    def get(cls, sizes: Sequence[int]) -> RpcServer:
        """The one of this process."""
        with cls._instance_lock:
            if cls._instance is None:
                cls._instance = cls(sizes)
            return cls._instance

    def push_gradient(self, index: int, gradient: Any) -> None:
        with self._lock:
            self._parameters[index].add_(gradient, alpha=-LR)

    def pull_parameter(self, index: int) -> Any:
        with self._lock:
            return self._parameters[index].clone()

    def step(self, gradient: Any) -> Any:
        with self._lock:
            self._flat.add_(gradient, alpha=-LR)
            return self._flat.clone()


def call_method(method: Callable[..., Any], server: Any, *arguments: Any) -> Any:
    """Call a method of the object that an RRef stands for, as the tutorial does. Runs on the server."""
    return method(server.local_value(), *arguments)


def time_parameter_servers(num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Runs on each rank: by way, how long each step of a worker took. Empty on the server."""
    import torch

    warnings.filterwarnings("ignore", category=UserWarning, module="torch")  # of its own use of process groups
    ronde.init()
    torch.set_num_threads(1)
    rank, last = ronde.rank(), ronde.size() - 1
    sizes = choose_shapes(num_bytes)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    workers = ronde.add_group(range(last))

    def take_turns(ways: Mapping[str, Callable[[], object]], rounds: int) -> None:
        """Only on workers, which begin each step together."""
        for number in range(rounds + WARM_UP):
            for way, do in ways.items():
                workers.barrier()
                began_s = time.monotonic()
                do()
                if number >= WARM_UP:
                    times[way].append(time.monotonic() - began_s)

    values = [np.zeros(size, np.float32) for size in sizes]
    arrays = [np.ones(size, np.float32) for size in sizes]
    server = ParameterServer(values, SGD(lr=LR), mode="async", servers=[last], workers=range(last))
    for turn in range(2):
        if rank != last:
            take_turns({RONDE: lambda: server.step(arrays)}, (rounds + 1) // 2)
        ronde.barrier()
        if turn == 0:
            _time_rpc(sizes, [torch.from_numpy(each) for each in arrays], lambda ways: take_turns(ways, rounds))
    server.close()
    ronde.shutdown()
    return times


def _time_rpc(
    sizes: list[int], gradients: list[Any], take_turns: Callable[[Mapping[str, Callable[[], object]]], None]
) -> None:
    """`gradients` are tensors of PyTorch."""
    import torch
    from torch.distributed import rpc

    rank, last = ronde.rank(), ronde.size() - 1
    port = ronde.objects.broadcast(find_free_ports("127.0.0.1", 1)[0])
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=RPC_TIMEOUT_S)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=last + 1, rpc_backend_options=options)
    if rank != last:
        parameters = [torch.zeros(size) for size in sizes]
        remote = rpc.remote(f"rank{last}", RpcServer.get, args=(sizes,))

        def step_flat() -> None:
            flat = torch.cat(gradients)
            new = rpc.rpc_sync(remote.owner(), call_method, args=(RpcServer.step, remote, flat))
            for parameter, piece in zip(parameters, new.split(sizes), strict=True):
                parameter.copy_(piece)

        def step_per_parameter() -> None:
            for index, gradient in enumerate(gradients):
                rpc.rpc_sync(remote.owner(), call_method, args=(RpcServer.push_gradient, remote, index, gradient))
            for index, parameter in enumerate(parameters):
                new = rpc.rpc_sync(remote.owner(), call_method, args=(RpcServer.pull_parameter, remote, index))
                parameter.copy_(new)

        take_turns({FLAT: step_flat, PER_PARAMETER: step_per_parameter})
        del remote
    rpc.shutdown()
