"""Fully connected layers with ReLU between them, in NumPy: outputs, losses and gradients.

A layer has weights `w`, (inputs, outputs), and a bias `b`, (outputs,). Inputs are arrays, sparse
matrices of SciPy, or `StoredValues` of vectors whose first weights are rows of a sparse table.
"""

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

import ps
from shards.rules import Rule, row_rule_of
from worker.data.ragged import SparseVectors

Floats = NDArray[np.float32]
Layers = list[dict[str, Any]]


class StoredValues:
    """Vectors as a matrix (rows, stored values), of which each column has a single value.

    Its product with a row of weights for each stored value is that of the vectors with all weights.
    The rows that a step gathers are such: each for one id, which may repeat.
    """

    def __init__(self, vectors: SparseVectors) -> None:
        self._vectors = vectors
        self._values = vectors.values.astype(np.float32)[:, None]

    def __matmul__(self, weights: Floats) -> Floats:
        """The sums (rows, outputs) of weights (stored values, outputs); of an empty vector 0."""
        sums = np.zeros((len(self._vectors), weights.shape[1]), np.float32)
        begins = self._vectors.offsets[:-1]
        stores = begins < self._vectors.offsets[1:]
        if stores.any():  # those that store nothing would repeat the sum of the next vector
            sums[stores] = np.add.reduceat(self._values * weights, begins[stores])
        return sums

    @property
    def T(self) -> "TransposedValues":  # noqa: N802  # NumPy's name
        """The matrix with its axes exchanged."""
        return TransposedValues(self._values, self._vectors.row_numbers)


class TransposedValues:
    """`StoredValues` with the axes exchanged."""

    def __init__(self, values: Floats, row_numbers: NDArray[np.int64]) -> None:
        self._values = values
        self._row_numbers = row_numbers

    def __matmul__(self, change: Floats) -> Floats:
        """The gradients (stored values, outputs) of the weights of each stored value."""
        return self._values * change[self._row_numbers]


class FeatureRows:
    """Rows of numbers for some features, by index; all others have none."""

    def __init__(self, features: NDArray[np.int64], rows: NDArray[Any]) -> None:
        """`features` are distinct and in ascending order."""
        self.features = features
        self.rows = rows

    def __repr__(self) -> str:
        return f"FeatureRows({len(self.features):,} rows of {self.rows.shape[1]})"

    def take(self, features: NDArray[Any], others: NDArray[Any]) -> NDArray[Any]:
        """The rows of some features, and those of `others` for features without; writes there."""
        positions = np.searchsorted(self.features, features)
        inside = positions < len(self.features)
        present = inside.copy()
        present[inside] = self.features[positions[inside]] == features[inside]
        others[present] = self.rows[positions[present]]
        return others

    def merge(self, features: NDArray[np.int64], rows: NDArray[Any]) -> "FeatureRows":
        """These rows with those of some features in place of their own."""
        stays = ~np.isin(self.features, features)
        merged = np.concatenate([self.features[stays], features])
        order = np.argsort(merged)
        joined = np.concatenate([self.rows[stays], rows])
        return FeatureRows(merged[order], joined[order])


def forward(layers: Layers, inputs: Any) -> list[Any]:
    """The inputs, what each hidden layer makes of them, and the scores."""
    values = [inputs]
    for number, layer in enumerate(layers, 1):
        outputs = values[-1] @ layer["w"] + layer["b"]
        values.append(np.maximum(outputs, 0) if number < len(layers) else outputs)
    return values


def backward(layers: Layers, values: list[Any], change: Floats) -> Layers:
    """The gradients of the layers; `values` are those of `forward`, `change` that at the scores."""
    gradients: Layers = []
    for number in reversed(range(len(layers))):
        before = values[number]
        gradients.append({"w": before.T @ change, "b": change.sum(0)})
        if number:
            change = (change @ layers[number]["w"].T) * (before > 0)
    return gradients[::-1]


def softmax(scores: Floats) -> Floats:
    """The probability of each class, from scores (rows, classes)."""
    raised = np.exp(scores - scores.max(1, keepdims=True))
    return cast(Floats, raised / raised.sum(1, keepdims=True))


def cross_entropy(scores: Floats, targets: Floats) -> tuple[Floats, Floats]:
    """Each row's loss (rows,), and its gradient at the scores; `targets` are 1 at the classes."""
    chances = softmax(scores)
    losses = -np.log(np.maximum((chances * targets).sum(1), 1e-30))
    return cast(Floats, losses), chances - targets


def dense_rule(rule: Rule | str) -> Rule:
    """The rule of the dense arrays beside rows of this rule: Adagrad where it takes rows alone."""
    chosen = row_rule_of("rule", rule)
    return chosen if chosen.dense else ps.Adagrad()
