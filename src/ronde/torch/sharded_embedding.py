"""ShardedEmbedding: an embedding whose table is on the servers of a parameter server (ronde.ps), not in the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ronde.ps import EmbeddingTable, NormalRows, ParameterServer
from ronde.ps import Optimizer as ServerOptimizer
from ronde.ps.tables.embedding_table import RowInitializer


class ShardedEmbedding(nn.Module):
    """As nn.Embedding, for tables that are large and of which a step uses few rows. The rows are on the servers of an
    AsyncOptimizer, which gets them as it gets the parameters of all other modules.

        embedding = ronde.torch.ShardedEmbedding(1_000_000, 64)
        model = nn.Sequential(embedding, nn.Linear(64, 1))
        optimizer = ronde.torch.AsyncOptimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))

    A forward pass reads the rows that it needs, of the same version as the other parameters, and a step pushes their
    gradients. Rows that a step does not use are not changed, nor are their states. `weight` has no rows; it only stands
    for the table in the list of parameters and in its group of options. The row padding_idx is 0 and stays 0.
    `initializer` gives the first values of rows (ronde.ps.NormalRows, UniformRows, or a pure function of rows and dim);
    by default they are normal with a standard deviation of 1, as those of nn.Embedding. `server_optimizer` is one of
    ronde.ps for this table alone.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        initializer: RowInitializer | None = None,
        server_optimizer: ServerOptimizer | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(f"a ShardedEmbedding is of float32 or float64, got {dtype}")
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx must be a row of the {num_embeddings}, got {padding_idx}")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.weight = nn.Parameter(torch.empty(0, embedding_dim, dtype=dtype))
        self.weight.ronde_embedding = self  # type: ignore[attr-defined]  # how AsyncOptimizer finds it
        self._table = EmbeddingTable(
            num_rows=num_embeddings,
            dim=embedding_dim,
            dtype=str(dtype).removeprefix("torch."),
            initializer=initializer or NormalRows(std=1.0),
            optimizer=server_optimizer,
        )
        self._server: ParameterServer | None = None
        self._name = ""
        self._gradients: dict[int, tuple[Tensor, Tensor]] = {}
        """By identity, the rows of forward passes whose gradients have come: their numbers, and their values."""

    def forward(self, indices: Tensor) -> Tensor:
        """The rows of these numbers, in a tensor with one more dimension."""
        unique, inverse = torch.unique(indices, return_inverse=True)
        rows = self._read(unique)
        if self.padding_idx is not None:
            rows[unique == self.padding_idx] = 0
        if torch.is_grad_enabled() and self.weight.requires_grad:
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(self._make_hook(unique))
        return nn.functional.embedding(inverse, rows)

    def prefetch(self, indices: Tensor) -> None:
        """Ask for the rows of the next step ahead of it. Called before optimizer.step(), with the next batch."""
        self._attached_server().prefetch_rows(self._name, indices.detach().numpy())

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the module has the same rows first, and has to be given to an optimizer of its own.
        return {**self.__dict__, "_server": None, "_gradients": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # PyTorch gives it no types
        self.weight.ronde_embedding = self  # type: ignore[attr-defined]  # PyTorch does not copy it

    # --- for AsyncOptimizer ------------------------------------------------------------------------------------------

    def make_table(self, group: int) -> EmbeddingTable:
        # The table, in a group of parameters.
        table = self._table
        return EmbeddingTable(
            num_rows=table.num_rows,
            dim=table.dim,
            dtype=table.dtype,
            initializer=table.initializer,
            optimizer=table.optimizer,
            group=group,
        )

    def attach(self, server: ParameterServer, name: str) -> None:
        # The server has the table under this name.
        self._server, self._name = server, name

    def stage_gradients(self) -> None:
        # Give the server the gradients of all backward passes since the last step.
        gradients, self._gradients = self._gradients, {}
        server = self._attached_server()
        for numbers, rows in gradients.values():
            assert rows.grad is not None
            if self.padding_idx is not None:
                is_trained = numbers != self.padding_idx
                server.stage_rows(self._name, numbers[is_trained].numpy(), rows.grad[is_trained].numpy())
            else:
                server.stage_rows(self._name, numbers.numpy(), rows.grad.numpy())

    def drop_gradients(self) -> None:
        # As zero_grad() does with those of parameters.
        for _, rows in self._gradients.values():
            rows.grad = None
        self._gradients.clear()

    def _make_hook(self, numbers: Tensor) -> Callable[[Tensor], None]:
        def keep(rows: Tensor) -> None:
            self._gradients[id(rows)] = (numbers, rows)

        return keep

    def _read(self, unique: Tensor) -> Tensor:
        return torch.from_numpy(self._attached_server().rows(self._name, unique.detach().numpy()))

    def _attached_server(self) -> ParameterServer:
        if self._server is None:
            raise ValueError(
                "the table of this ShardedEmbedding is nowhere yet: give its parameters to a "
                "ronde.torch.AsyncOptimizer first"
            )
        return self._server
