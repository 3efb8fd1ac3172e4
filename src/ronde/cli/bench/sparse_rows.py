"""A step that uses few rows of a large table, for `ronde bench ps`: what each rank of the job runs, in turn with the
whole table as a parameter of ronde, and with a server of torch.distributed.rpc for rows, as its users write it.

The last rank is the server, the others are workers. A step reads random rows and pushes gradients of the same rows; the
server takes the step of SGD. Ronde asks for the rows of the next step ahead of it (prefetch_rows). With RPC these are
two calls: one with the numbers of the rows, which returns them, and one with the numbers and the gradients. Nobody
waits for another worker.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import ronde
from ronde.cli.bench.rpc_parameter_server import LR, RPC_TIMEOUT_S, WARM_UP, call_method
from ronde.net.addresses import find_free_ports
from ronde.ps import SGD, EmbeddingTable, ParameterServer, UniformRows

DIM = 64
ROWS_PER_STEP = 1000
MAX_DENSE_ROUNDS = 3
"""Of the whole table, which takes long."""
ROWS, DENSE, RPC_ROWS = "rows", "whole table", "RPC rows"


class RpcTable:
    """The object of the server rank whose methods workers call."""

    _instance: RpcTable | None = None
    _instance_lock = threading.Lock()

    def __init__(self, num_rows: int) -> None:
        import torch

        self._lock = threading.Lock()
        self._table = torch.zeros(num_rows, DIM)

    @classmethod
    def get(cls, num_rows: int) -> RpcTable:
        """The one of this process."""
        with cls._instance_lock:
            if cls._instance is None:
                cls._instance = cls(num_rows)
            return cls._instance

    def pull(self, rows: Any) -> Any:
        with self._lock:
            return self._table[rows]

    def push(self, rows: Any, gradients: Any) -> None:
        with self._lock:
            self._table.index_add_(0, rows, gradients, alpha=-LR)


def time_rows(num_rows: int, rounds: int, with_rpc: bool) -> dict[str, tuple[list[float], float]]:
    """Runs on each rank: by way, how long each step of a worker took, and how many bytes this rank has sent in a step
    of all workers, as far as ronde counts them."""
    ronde.init()
    rank, last = ronde.rank(), ronde.size() - 1
    workers = ronde.add_group(range(last))
    results: dict[str, tuple[list[float], float]] = {}
    tables = {"t": EmbeddingTable(num_rows=num_rows, dim=DIM, initializer=UniformRows(0.0))}
    options: dict[str, Any] = {"mode": "async", "servers": [last], "workers": range(last)}
    gradients = np.ones((ROWS_PER_STEP, DIM), np.float32)
    random = np.random.default_rng(rank)

    def time_steps(name: str, do: Callable[[], object], rounds: int, server: ParameterServer | None) -> None:
        times: list[float] = []
        ronde.barrier()
        begun_bytes = _count_bytes()
        for number in range(rounds + WARM_UP if rank != last else 0):
            workers.barrier()
            began_s = time.monotonic()
            do()
            if number >= WARM_UP:
                times.append(time.monotonic() - began_s)
        if server is not None:
            server.close()
        ronde.barrier()
        results[name] = (times, (_count_bytes() - begun_bytes) / (rounds + WARM_UP))

    by_rows = ParameterServer({}, SGD(lr=LR), tables=tables, **options)

    batches = [random.integers(0, num_rows, ROWS_PER_STEP)]

    def step_rows() -> None:
        rows, following = batches.pop(), random.integers(0, num_rows, ROWS_PER_STEP)
        by_rows.rows("t", rows)
        by_rows.stage_rows("t", rows, gradients)
        by_rows.prefetch_rows("t", following)
        by_rows.step([])
        batches.append(following)

    time_steps(ROWS, step_rows, rounds, by_rows)
    whole, whole_gradient = (np.zeros((num_rows, DIM), np.float32) for _ in range(2))
    dense = ParameterServer([whole], SGD(lr=LR), **options)
    time_steps(DENSE, lambda: dense.step([whole_gradient]), min(rounds, MAX_DENSE_ROUNDS), dense)
    if with_rpc:
        _time_rpc(num_rows, lambda do: time_steps(RPC_ROWS, do, rounds, None))
    ronde.shutdown()
    return results


def _time_rpc(num_rows: int, time_steps: Callable[[Callable[[], object]], None]) -> None:
    import torch
    from torch.distributed import rpc

    warnings.filterwarnings("ignore", category=UserWarning, module="torch")  # of its own use of process groups
    torch.set_num_threads(1)
    rank, last = ronde.rank(), ronde.size() - 1
    port = ronde.objects.broadcast(find_free_ports("127.0.0.1", 1)[0])
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=RPC_TIMEOUT_S)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=last + 1, rpc_backend_options=options)
    remote = rpc.remote(f"rank{last}", RpcTable.get, args=(num_rows,)) if rank != last else None
    gradients = torch.ones(ROWS_PER_STEP, DIM)

    def step() -> None:
        assert remote is not None
        rows = torch.randint(0, num_rows, (ROWS_PER_STEP,))
        rpc.rpc_sync(remote.owner(), call_method, args=(RpcTable.pull, remote, rows))
        rpc.rpc_sync(remote.owner(), call_method, args=(RpcTable.push, remote, rows, gradients))

    time_steps(step)
    rpc.shutdown()


def _count_bytes() -> int:
    """Bytes of arrays and headers that this rank has sent to others so far."""
    return sum(row.bytes for row in ronde.metrics().rows if row.kind == "post")
