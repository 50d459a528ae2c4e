"""The network "linear" of `worker.ml`, whose first weights are rows of a sparse table.

The row of id n has the weights of value n of the features. A step gathers and changes those of its
minibatch alone, so nothing has the size of the features: not a task, not a shard, not the model.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

import ps
from shards import argument_checks
from shards.errors import BadInput
from worker.data.ragged import SparseVectors
from worker.training.context import Context
from worker.training.layers import (
    Floats,
    Layers,
    StoredValues,
    backward,
    cross_entropy,
    dense_rule,
    forward,
)

LINEAR = "linear"
"""The value of `model` that stands for this network."""
FEATURES, LABEL = "features", "label"
ROWS_TABLE = "features"
"""The table of the first weights, by the index of a value."""

_NET = "net"
_FIRST_VALUES = 0.1  # the deviation of first rows, where hidden layers need them to differ


class FitSettings(msgspec.Struct, frozen=True):
    """The training settings of a network that is not Caffe's."""

    classifies: bool
    batch_size: int
    epochs: int
    seed: int


class Rows(Protocol):
    """Rows by id, of a run's result or of its shards."""

    def gather(self, table: str, ids: Any, *, missing: str) -> Floats:
        """The rows of these ids; `missing` is that of `ps.Reader.gather`."""
        ...


class LinearNet:
    """A linear function of the features; with `hidden`, layers of these sizes and ReLU before it.

    Of two classes it has one output, the score of the second; that of the first is 0. Its loss is
    the cross-entropy of classes, or the mean squared error.
    """

    def __init__(self, args: Mapping[str, Any], sparse: Sequence[str], seed: int) -> None:
        """`args` are `classes` or `outputs`, and `hidden`; raises BadInput for others."""
        argument_checks.check_names("modelArgs", args, ("classes", "hidden", "outputs"))
        self._classes = argument_checks.whole("modelArgs: classes", args.get("classes", 0), 0)
        outputs = argument_checks.whole("modelArgs: outputs", args.get("outputs", 1), 1)
        expected = "sizes of layers, whole numbers from 1"
        hidden = argument_checks.iterable("modelArgs: hidden", args.get("hidden", ()), expected)
        sizes = [argument_checks.whole("modelArgs: hidden", size, 1) for size in hidden]
        self._init = ps.Normal(_FIRST_VALUES) if sizes else ps.Zeros()
        if self._classes:
            outputs = 1 if self._classes <= 2 else self._classes
        self._sparse = sparse
        self._seed = seed
        dice = np.random.default_rng(seed)
        sizes.append(outputs)
        self._layers: Layers = [{"b": np.zeros(sizes[0], np.float32)}]
        self._layers += [
            {
                "w": (dice.standard_normal((before, after)) / np.sqrt(before)).astype(np.float32),
                "b": np.zeros(after, np.float32),
            }
            for before, after in pairwise(sizes)
        ]
        self._rows: Rows | None = None

    def params(self, settings: Mapping[str, Any]) -> ps.Tables:
        """The biases and later layers, and the rows; both with the rule and the rate given."""
        rule, rate = settings["rule"], settings["rate"]
        width = len(self._layers[0]["b"])
        rows = ps.Sparse(width, rule=rule, rate=rate, init=self._init, seed=self._seed)
        net = ps.Dense.like(self._layers, rule=dense_rule(rule), rate=rate)
        return ps.Tables({_NET: net, ROWS_TABLE: rows})

    def train(self, fit: FitSettings, ctx: Context) -> None:
        """Train as the worker of `ctx`."""
        for batch in ctx.batches(fit.batch_size, epochs=fit.epochs, ragged=self._sparse):
            vectors, label = _as_vectors(batch[FEATURES]), batch[LABEL]
            with ctx.worker.step(samples=len(label), gather={ROWS_TABLE: vectors.indices}) as step:
                first, *rest = step.pull(_NET)
                layers = [{"w": step.rows(ROWS_TABLE), **first}, *rest]
                values = forward(layers, StoredValues(vectors))
                step.loss, change = self._find_change(values[-1], label)
                gradients = backward(layers, values, change)
                step.scatter(ROWS_TABLE, gradients[0].pop("w"))
                step.push(_NET, gradients)

    def load(self, params: Mapping[str, Floats], rows: Rows) -> None:
        """Take trained parameters by name, and read rows from `rows`."""
        self._layers = ps.Dense.like(self._layers).structure.build(params)
        self._rows = rows

    def outputs(self, inputs: Mapping[str, Any], layers: Sequence[str]) -> list[NDArray[Any]]:
        """A score for each class, or the values; and hidden layers, which are named 0, 1, ..."""
        if set(inputs) != {FEATURES}:
            raise BadInput(
                f"model {LINEAR}", expected="one column", got=f"inputs {', '.join(inputs)}"
            )
        vectors = _as_vectors(inputs[FEATURES])
        first, *rest = self._layers
        # A row that was never pushed has no effect, whatever its first values in training.
        rows = (
            np.zeros((len(vectors.indices), len(first["b"])), np.float32)
            if self._rows is None
            else self._rows.gather(ROWS_TABLE, vectors.indices, missing="zero")
        )
        values = forward([{"w": rows, **first}, *rest], StoredValues(vectors))
        hidden = {str(number): value for number, value in enumerate(values[1:-1])}
        for name in layers:
            if name not in hidden:
                known = f"layers among {', '.join(hidden) or 'none'}"
                raise BadInput(f"model {LINEAR}", expected=known, got=name)
        return [self._score(values[-1]), *(hidden[name] for name in layers)]

    def _score(self, outputs: Floats) -> Floats:
        """A score for each class, or the values."""
        is_single = bool(self._classes) and outputs.shape[1] == 1
        return np.pad(outputs, ((0, 0), (1, 0))) if is_single else outputs

    def _find_change(self, outputs: Floats, label: NDArray[Any]) -> tuple[float, Floats]:
        """The mean loss of a minibatch, and its gradient at the outputs."""
        if not self._classes:
            error = outputs - label.reshape(outputs.shape)
            return float(np.square(error).mean()), error * np.float32(2 / error.size)
        scores = self._score(outputs)
        targets = (label[:, None] == np.arange(scores.shape[1])).astype(np.float32)
        losses, change = cross_entropy(scores, targets)
        return float(losses.mean()), change[:, -outputs.shape[1] :] / np.float32(len(label))


def _as_vectors(values: Any) -> SparseVectors:
    """The features of some rows without their zeros, which have no effect and need no rows."""
    if isinstance(values, SparseVectors):
        return values.drop_zeros()
    flat = np.asarray(values).reshape(len(values), -1)
    indices, offsets = np.arange(flat.size), np.arange(len(flat) + 1) * flat.shape[1]
    return SparseVectors(indices % flat.shape[1], flat.ravel(), offsets, flat.shape[1]).drop_zeros()
