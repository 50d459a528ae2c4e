"""Ratings by rows: asynchronous workers against one process, for two kinds of models.

    make experiment E=ratings DATA=ml-100k.inter

The file has a user, an item and a rating in each line, after a line of names or none; a tenth of
the lines is tested. MovieLens 100k is recbole/dataset_example/ml-100k/ml-100k.inter in the wheel of
recbole.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deploy.examples import ratings_torch
from tests.bench.report import Goal, goals

WORKERS = 4
MOST_WORSE = 0.01


def read_ratings(path: Path) -> tuple[Any, Any]:
    """The ratings to train on and those to test, as users, items and ratings."""
    lines = path.read_text().splitlines()
    rows = [line.split()[:3] for line in lines[not lines[0][0].isdigit() :]]
    shuffled = np.random.default_rng(0).permutation(np.array(rows, np.float64))
    columns = shuffled[:, 0].astype(np.int64), shuffled[:, 1].astype(np.int64)
    tensors = [torch.from_numpy(part) for part in (*columns, shuffled[:, 2].astype(np.float32))]
    tested = len(rows) // 10
    return [part[tested:] for part in tensors], [part[:tested] for part in tensors]


def fit_in_one_process(kind: Any, ratings: Any, tested: Any, epochs: int) -> float:
    """The same model with PyTorch's own layers and optimiser."""
    torch.manual_seed(1)
    model = kind()
    for name, trained_ids, tested_ids in zip(("user", "item"), ratings, tested, strict=False):
        count = 1 + int(max(trained_ids.max(), tested_ids.max()))
        layer = torch.nn.Embedding(count, getattr(model, name).embedding_dim)
        torch.nn.init.normal_(layer.weight, 0, 0.2)
        setattr(model, name, layer)
    rows = [model.user.weight, model.item.weight]
    others = [
        parameter
        for name, parameter in model.named_parameters()
        if name not in ("user.weight", "item.weight")
    ]
    optimizer = torch.optim.Adagrad([{"params": rows, "lr": 0.1}, {"params": others, "lr": 0.05}])
    for users, items, values in ratings_torch.shuffle(ratings, epochs, 0):
        optimizer.zero_grad()
        ratings_torch.loss_of(model, users, items, values).backward()
        optimizer.step()
    return ratings_torch.root_mean_square(model, tested)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--epochs", type=int, default=6)
    options = arguments.parse_args()
    ratings, tested = read_ratings(options.data)
    checked = []
    for kind in (ratings_torch.Factors, ratings_torch.Towers):
        alone = fit_in_one_process(kind, ratings, tested, options.epochs)
        together = ratings_torch.fit(ratings, tested, kind, WORKERS, options.epochs)
        print(f"{kind.__name__}: one process {alone:.4f}, {WORKERS} workers {together:.4f}")
        title = f"{kind.__name__}: error more than that of one process"
        checked.append(Goal(title, together - alone, MOST_WORSE, ""))
    goals(checked)


if __name__ == "__main__":
    main()
