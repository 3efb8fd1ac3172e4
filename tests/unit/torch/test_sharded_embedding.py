"""Embeddings whose tables are on servers, in ranks that are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ronde.comm.world import World
from ronde.torch import AsyncOptimizer, ShardedEmbedding
from tests.conformance.ranks import run_threads

NUM_ROWS, DIM, PADDING, STEPS = 30, 6, 3, 40

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Sparse invariant checks")]


class Model(nn.Module):
    """Sentences of words, some of them padding, and two lookups of one table in a pass."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.out = nn.Linear(2 * DIM, 1)
        with torch.no_grad():
            self.out.weight.copy_(torch.linspace(-1, 1, 2 * DIM))
            self.out.bias.fill_(0.1)

    def forward(self, words: Tensor) -> Tensor:
        first, rest = self.embedding(words[:, :1]), self.embedding(words[:, 1:])
        return torch.sigmoid(self.out(torch.cat([first.mean(1), rest.mean(1)], 1)))


def first_rows() -> Tensor:
    """Of float64: what differs in a sum's order stays far below 1e-6."""
    rows = torch.randn(NUM_ROWS, DIM, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    rows[PADDING] = 0
    return rows


def make_dense() -> Model:
    embedding = nn.Embedding(NUM_ROWS, DIM, padding_idx=PADDING, sparse=True, dtype=torch.float64)
    with torch.no_grad():
        embedding.weight.copy_(first_rows())
    return Model(embedding).double()


def make_sharded() -> Model:
    rows = first_rows().numpy()
    embedding = ShardedEmbedding(
        NUM_ROWS, DIM, padding_idx=PADDING, initializer=lambda numbers, _: rows[numbers], dtype=torch.float64
    )
    model = Model(embedding)
    model.out.double()
    return model


def make_batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    words = torch.randint(0, NUM_ROWS, (8, 5), generator=generator)
    return words, (words.sum(1, keepdim=True) % 2).double()


def make_adam(model: Model) -> list[torch.optim.Optimizer]:
    """PyTorch has Adam for dense gradients, and SparseAdam for sparse ones, which adds eps in another place."""
    tables, others = [*model.embedding.parameters()], [*model.out.parameters()]
    return [torch.optim.SparseAdam(tables, lr=0.02, eps=1e-15), torch.optim.Adam(others, lr=0.02, eps=1e-15)]


OPTIMIZERS: dict[str, tuple[Callable[[Any], list[Any]], Callable[[Any], Any]]] = {
    "sgd": (
        lambda model: [torch.optim.SGD(model.parameters(), lr=0.5)],
        lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
    ),
    "adagrad": (
        lambda model: [torch.optim.Adagrad(model.parameters(), lr=0.1)],
        lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    ),
    "adam": (make_adam, lambda model: torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-15)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sync_training_gives_what_a_dense_embedding_with_sparse_gradients_gives(name: str) -> None:
    """With two backward passes in each step, and a scheduler."""
    make_plain, make = OPTIMIZERS[name]

    def body(world: World) -> None:
        reference, model = make_dense(), make_sharded()
        plain = make_plain(reference)
        optimizer = AsyncOptimizer(make(model), mode="sync", group=world.group)
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 10, 0.5) for each in (*plain, optimizer)]
        for step in range(STEPS):
            for half in range(2):
                words, targets = make_batch(step, 2 * world.rank + half)
                loss = nn.functional.binary_cross_entropy(model(words), targets) / 2
                if not half:
                    optimizer.zero_grad()  # behind the forward pass, as some do
                loss.backward()
            model.embedding.prefetch(make_batch(step + 1, world.rank)[0])  # type: ignore[operator]
            optimizer.step()
            for each in plain:
                each.zero_grad()
            for number in range(4):
                words, targets = make_batch(step, number)
                (nn.functional.binary_cross_entropy(reference(words), targets) / 4).backward()
            for each in (*plain, *schedulers):
                each.step()
        with torch.no_grad():
            rows = model.embedding(torch.arange(NUM_ROWS))
        assert (rows - reference.embedding.weight).abs().max() <= 1e-6
        assert (model.out.weight - reference.out.weight).abs().max() <= 1e-6
        assert (rows[PADDING] == 0).all() and (rows - first_rows()).abs().max() > 0.02
        optimizer.close()

    run_threads(2, body)


@pytest.mark.parametrize("mode", ["bounded", "dynamic", "async"])
def test_every_other_mode_learns_and_goes_on_from_a_checkpoint(mode: str) -> None:
    """Factors of a matrix, in groups of parameters with learning rates of their own."""
    left, right = (np.random.default_rng(seed).standard_normal((size, 2)) for seed, size in ((0, 24), (1, 16)))
    ratings = torch.tensor(left @ right.T, dtype=torch.float32)

    def body(world: World) -> None:
        state = None
        for begun in (0, 12):
            users, items = ShardedEmbedding(24, 4), ShardedEmbedding(16, 4)
            groups: list[dict[str, Any]] = [{"params": users.parameters()}, {"params": items.parameters(), "lr": 0.4}]
            optimizer = AsyncOptimizer(
                torch.optim.Adagrad(groups, lr=0.5), mode=mode, staleness=2, state=state, group=world.group
            )
            before = optimizer.server.version
            for epoch in range(12):
                for indices in optimizer.samples(24 * 16, 16, epoch=epoch):
                    optimizer.zero_grad()
                    row, column = indices // 16, indices % 16
                    loss = ((users(row) * items(column)).sum(1) - ratings[row, column]).square().mean()
                    loss.backward()
                    optimizer.step()
            world.group.barrier()
            optimizer.pull()
            assert optimizer.server.version == before + 12 * 24
            if begun:
                assert before == 12 * 24
                with torch.no_grad():
                    predicted = users(torch.arange(24)) @ items(torch.arange(16)).T
                assert (predicted - ratings).square().mean() < 0.2 * ratings.square().mean()
            state = optimizer.server.state_dict()
            world.group.barrier()
            optimizer.close()

    run_threads(2, body)


def test_mistakes_are_named() -> None:
    with pytest.raises(TypeError, match=r"float32 or float64, got torch\.float16"):
        ShardedEmbedding(3, 2, dtype=torch.float16)
    with pytest.raises(ValueError, match="padding_idx must be a row of the 3, got 3"):
        ShardedEmbedding(3, 2, padding_idx=3)
    embedding = ShardedEmbedding(3, 2, padding_idx=-1)
    assert repr(embedding) == "ShardedEmbedding(3, 2, padding_idx=2)"
    with pytest.raises(ValueError, match=r"is nowhere yet: give its parameters to a ronde\.torch\."):
        embedding(torch.tensor([1]))


def test_a_copy_of_a_module_that_trains_is_one_for_another_optimizer() -> None:
    def body(world: World) -> None:
        model = nn.Sequential(ShardedEmbedding(5, 2), nn.Linear(2, 1))
        optimizer = AsyncOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), group=world.group)
        model(torch.tensor([1, 2])).sum().backward()
        other = copy.deepcopy(model)
        with pytest.raises(ValueError, match="is nowhere yet"):
            other(torch.tensor([1]))
        with torch.no_grad():
            first = model[0](torch.tensor([1]))
        optimizer.step()
        optimizer.close()
        optimizer = AsyncOptimizer(torch.optim.SGD(other.parameters(), lr=1.0), group=world.group)
        with torch.no_grad():
            assert (other[0](torch.tensor([1])) == first).all()
        optimizer.close()

    run_threads(1, body)
