"""Ratings of items by users, in PyTorch: matrix factorisation and two towers over rows by id."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.nn import Linear, Module, Parameter, ReLU, Sequential

import ps
import worker
import worker.torch

BATCH = 128
STRATEGY = "asp:scale=1"  # pushes add up; Adagrad keeps their sum small


class Factors(Module):  # type: ignore[misc]  # PyTorch is not checked
    """A rating: a mean, a bias of the user and of the item, and the product of their rows."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        rows: dict[str, Any] = {"rule": ps.Adagrad(), "rate": 0.1, "init": ps.Normal(0.2)}
        self.user = worker.torch.Embedding("user", 1 + dim, seed=1, **rows)
        self.item = worker.torch.Embedding("item", 1 + dim, seed=2, **rows)
        self.mean = Parameter(torch.zeros(()))

    def forward(self, users: Any, items: Any) -> Any:
        user, item = self.user(users), self.item(items)
        self.penalty = 0.02 * (user.square() + item.square()).sum(1).mean()
        return self.mean + user[:, 0] + item[:, 0] + self.compare(user[:, 1:], item[:, 1:])

    def compare(self, user: Any, item: Any) -> Any:
        return (user * item).sum(1)


class Towers(Factors):
    """The product is of the rows after a residual block each, one for users and one for items."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__(dim)
        self.user_tower = Sequential(Linear(dim, 32), ReLU(), Linear(32, dim))
        self.item_tower = Sequential(Linear(dim, 32), ReLU(), Linear(32, dim))

    def compare(self, user: Any, item: Any) -> Any:
        return super().compare(user + self.user_tower(user), item + self.item_tower(item))


def shuffle(ratings: Any, epochs: int, seed: int) -> Iterator[Any]:
    """Batches of users, items and ratings."""
    dice = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randperm(len(ratings[0]), generator=dice).split(BATCH):
            yield [column[rows] for column in ratings]


def loss_of(model: Any, users: Any, items: Any, ratings: Any) -> Any:
    return (model(users, items) - ratings).square().mean() + model.penalty


def train(job: ps.Job, model: Any, number: int, workers: int, ratings: Any, epochs: int) -> None:
    """Train as one of the workers, on its part of the ratings."""
    part = [column[number::workers] for column in ratings]
    how: dict[str, Any] = {"strategy": STRATEGY, "workers": workers}
    with worker.torch.join(job, f"w{number}", model, **how) as opt:
        for users, items, values in shuffle(part, epochs, number):
            opt.gather({"user": users, "item": items})
            loss = loss_of(model, users, items, values)
            loss.backward()
            opt.step(loss=loss, samples=len(values))
            opt.zero_grad()


def fit(
    ratings: Any, tested: Any, kind: Any = Factors, workers: int = 2, epochs: int = 10
) -> float:
    """Train with threads as workers, and return the error of the model for the tested ratings."""
    tables = worker.torch.tables(kind(), rule=ps.Adagrad(), rate=0.05)
    how: dict[str, Any] = {"strategy": STRATEGY, "workers": workers, "shards": 2}
    with worker.start(tables, on="threads", **how) as job:
        with ThreadPoolExecutor(workers) as pool:
            for done in [
                pool.submit(train, job, kind(), number, workers, ratings, epochs)
                for number in range(workers)
            ]:
                done.result()
        with ps.reader(job) as reader:
            model = worker.torch.attach(kind(), reader)
            return root_mean_square(worker.torch.load(model, reader.pull("net")), tested)


def root_mean_square(model: Any, ratings: Any) -> float:
    """The root mean square error of a model."""
    users, items, values = ratings
    with torch.no_grad():
        return float((model(users, items) - values).square().mean().sqrt())


def draw_ratings(count: int, seed: int) -> Any:
    """Ratings of 80 items by 100 users of hidden tastes, with ids of 64 bits."""
    dice = np.random.default_rng(seed)
    tastes, kinds = (np.random.default_rng(size).normal(0, 0.7, (size, 3)) for size in (100, 80))
    users, items = dice.integers(0, 100, count), dice.integers(0, 80, count)
    values = 3 + (tastes[users] * kinds[items]).sum(1) + dice.normal(0, 0.1, count)
    columns = users * 2**40, items - 2**62, values.astype(np.float32)
    return [torch.from_numpy(column) for column in columns]
