"""Three clouds of points in a DataFrame, and an estimator that tells them apart."""

from typing import Any

import numpy as np

import worker

ROWS = 240
INPUTS = ["a", "b", "c"]
CLASSES = "id long, a double, b double, c double, label int"


def points() -> list[tuple[Any, ...]]:
    """Rows of CLASSES."""
    dice = np.random.default_rng(7)
    labels = np.arange(ROWS) % 3
    places = dice.standard_normal((ROWS, 3)) + 4 * np.eye(3)[labels]
    return [(n, *map(float, place), int(labels[n])) for n, place in enumerate(places)]


def classifier(**params: Any) -> Any:
    """A small network of NumPy for them."""
    given = {
        "model": "deploy.examples.numpy_net:Perceptron",
        "modelArgs": {"size": 3, "classes": 3},
        "epochs": 6,
        "batchSize": 10,
        "stepSize": 0.3,
    }
    return worker.ml.NetClassifier(**(given | params))


def right(df: Any, column: str) -> float:
    """The share of rows whose class `column` has."""
    return float(df.filter(f"`{column}` = label").count() / ROWS)
