"""A factorisation machine for yes or no, in NumPy: a row of weights and factors for each feature.

The score of a sample is a bias, the weights of its features, and the products of the factors of
each pair of them (Rendle 2010).
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ps

DIM = 8
Array = NDArray[Any]


def describe_tables() -> ps.Tables:
    """A bias, and rows of a weight and DIM factors by the id of a feature."""
    how: dict[str, Any] = {"rule": ps.Adagrad(), "rate": 0.1}
    return ps.Tables(
        net=ps.Dense.like({"bias": np.float32(0)}, **how),
        feature=ps.Sparse(1 + DIM, init=ps.Normal(0.1), seed=1, **how),
    )


def score(bias: Array, rows: Array) -> Array:
    """The scores (n,) of samples with rows (n, features, 1 + DIM)."""
    factors = rows[:, :, 1:]
    pairs = factors.sum(1) ** 2 - (factors**2).sum(1)
    return np.asarray(bias + rows[:, :, 0].sum(1) + pairs.sum(1) / 2)


def train(job: ps.Job, name: str, ids: Array, labels: Array, epochs: int) -> None:
    """One worker, on its samples: ids (n, features) and labels (n,) of 0 and 1."""
    with job.worker(name) as me:
        for batch in np.array_split(np.tile(np.arange(len(ids)), epochs), epochs * len(ids) // 64):
            with me.step(samples=len(batch), gather={"feature": ids[batch].ravel()}) as step:
                bias = step.pull("net")["bias"]
                rows = step.rows("feature").reshape(*ids[batch].shape, 1 + DIM)
                chance = 1 / (1 + np.exp(-score(bias, rows)))
                error = (chance - labels[batch]).astype(np.float32)[:, None, None]
                factors = rows[:, :, 1:]
                others = factors.sum(1, keepdims=True) - factors
                change = error * np.concatenate([np.ones_like(rows[:, :, :1]), others], axis=2)
                step.loss = float(
                    -np.log(np.maximum(np.abs(1 - labels[batch] - chance), 1e-30)).mean()
                )
                step.push("net", {"bias": error.mean()})
                step.scatter("feature", change.reshape(-1, 1 + DIM) / np.float32(len(batch)))


def fit(ids: Array, labels: Array, tested: Array, workers: int = 2, epochs: int = 10) -> Array:
    """Train with threads as workers, and return the scores of the tested samples."""
    with ps.local(describe_tables(), workers=workers, shards=2) as job:
        with ThreadPoolExecutor(workers) as pool:
            parts = [(ids[n::workers], labels[n::workers]) for n in range(workers)]
            for done in [
                pool.submit(train, job, f"w{n}", *part, epochs) for n, part in enumerate(parts)
            ]:
                done.result()
        with job.reader() as reader:
            rows = reader.gather("feature", tested.ravel()).reshape(*tested.shape, 1 + DIM)
            return score(reader.pull("net")["bias"], rows)
