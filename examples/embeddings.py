"""embeddings.py: recommendations with tables that live on parameter servers only.

    ronde run -np 3 python examples/embeddings.py

Ratings are made from hidden tastes of users and properties of items. The model learns a vector for each user and each
item, and a bias of each, from a part of the ratings, and predicts the others. The tables are cut by rows and are on the
servers (here: in all ranks); a rank holds the rows of its batch and nothing more, and pushes the gradients of those
rows. The baseline knows how well each user and each item was rated on average.
"""

import numpy as np
import torch
from torch import nn

import ronde
import ronde.torch

NUM_USERS, NUM_ITEMS, DIM, NUM_RATINGS = 2000, 800, 8, 60_000
EPOCHS, BATCH = 4, 500

random = np.random.default_rng(0)  # the same on every rank
users = random.integers(0, NUM_USERS, NUM_RATINGS)
items = (NUM_ITEMS * random.random(NUM_RATINGS) ** 2).astype(int)  # some items are popular
tastes, properties = random.normal(size=(NUM_USERS, 3)), random.normal(size=(NUM_ITEMS, 3))
likes = random.normal(size=NUM_ITEMS)[items]
ratings = 3 + 0.5 * likes + 0.6 * (tastes[users] * properties[items]).sum(1) + 0.1 * random.normal(size=NUM_RATINGS)
num_train = NUM_RATINGS * 9 // 10


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        small = ronde.ps.NormalRows(std=0.1)
        self.users = ronde.torch.ShardedEmbedding(NUM_USERS, DIM, initializer=small)
        self.items = ronde.torch.ShardedEmbedding(NUM_ITEMS, DIM, initializer=ronde.ps.NormalRows(std=0.1, seed=1))
        self.biases = ronde.torch.ShardedEmbedding(NUM_ITEMS, 1, initializer=ronde.ps.UniformRows(0.0))
        self.mean = nn.Parameter(torch.tensor([3.0]))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return (self.users(user) * self.items(item)).sum(1) + self.biases(item)[:, 0] + self.mean


def baseline() -> np.ndarray:
    """The mean rating of each item, and by how much each user rates above it."""
    known, rated = slice(None, num_train), ratings[:num_train]
    of_item = np.bincount(items[known], rated, NUM_ITEMS) / np.maximum(
        1, np.bincount(items[known], minlength=NUM_ITEMS)
    )
    rest = rated - of_item[items[known]]
    of_user = np.bincount(users[known], rest, NUM_USERS) / (5 + np.bincount(users[known], minlength=NUM_USERS))
    return of_item[items[num_train:]] + of_user[users[num_train:]]


ronde.init()
torch.set_num_threads(1)
user, item = torch.tensor(users), torch.tensor(items)
rating = torch.tensor(ratings, dtype=torch.float32)
model = Recommender()
optimizer = ronde.torch.AsyncOptimizer(torch.optim.Adagrad(model.parameters(), lr=0.15), mode="bounded", staleness=4)
for epoch in range(EPOCHS):
    batches = optimizer.samples(num_train, BATCH, epoch=epoch)
    for indices in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(user[indices], item[indices]), rating[indices]).backward()
        optimizer.step()
ronde.barrier()  # until all have pushed
optimizer.pull()
if ronde.rank() == 0:
    with torch.no_grad():
        predicted = model(user[num_train:], item[num_train:])
    error = float(nn.functional.mse_loss(predicted, rating[num_train:])) ** 0.5
    by_means = float(np.sqrt(np.mean((baseline() - ratings[num_train:]) ** 2)))
    print(f"root mean squared error {error:.3f} on new ratings, {by_means:.3f} with the means of users and items")
ronde.barrier()
optimizer.close()
