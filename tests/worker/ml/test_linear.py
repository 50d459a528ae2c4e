"""The network "linear": first weights as rows by feature, against plain NumPy."""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pyspark.errors import PythonException
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.linalg import SparseVector

import ps
import worker
from shards.errors import BadInput
from tests.support.ml_nets import train_and_die
from worker.data.ragged import SparseVectors
from worker.ml.linear import FitSettings, LinearNet
from worker.ml.nets import by_name

pytestmark = pytest.mark.timeout(900)

SIZE = 2**24 + 1
ROWS, BATCH, RATE = 60, 8, 0.3


def draw(seed: int, classes: int) -> tuple[list[dict[int, float]], np.ndarray[Any, Any]]:
    """Vectors as dicts, one of them empty and some with a zero that is stored, and their labels."""
    dice = np.random.default_rng(seed)
    ids = np.concatenate([[0, SIZE - 1], dice.integers(0, SIZE, 18)])
    values = np.maximum(dice.standard_normal((ROWS, 5)), -0.5) + 0.5
    rows = [
        dict(zip(map(int, dice.choice(ids, 5, replace=False)), map(float, of_row), strict=True))
        for of_row in values
    ]
    return [{}, *rows[1:]], dice.integers(0, classes, ROWS)


def as_vectors(rows: list[dict[int, float]]) -> SparseVectors:
    """The dicts as the batches of a task have vectors."""
    indices = np.array([index for row in rows for index in sorted(row)], np.int64)
    values = np.array([row[index] for row in rows for index in sorted(row)])
    return SparseVectors(indices, values, np.cumsum([0, *map(len, rows)]), SIZE)


class Oracle:
    """Logistic regression over a dict of weights, in float64, by the formulas of the rules."""

    def __init__(self, rule: str, classes: int) -> None:
        outputs = 1 if classes == 2 else classes
        self.rule, self.outputs = rule, outputs
        self.weights: dict[int, Any] = defaultdict(lambda: np.zeros(outputs))
        self.slots: dict[int, Any] = defaultdict(lambda: np.zeros((2, outputs)))
        self.bias, self.sums = np.zeros(outputs), np.zeros(outputs)

    def score(self, row: dict[int, float]) -> Any:
        return self.bias + sum(value * self.weights[index] for index, value in row.items())

    def step(self, rows: list[dict[int, float]], labels: Any) -> None:
        changes: dict[int, Any] = defaultdict(lambda: np.zeros(self.outputs))
        of_bias = np.zeros(self.outputs)
        for row, label in zip(rows, labels, strict=True):
            scores = self.score(row)
            if self.outputs == 1:
                change = 1 / (1 + np.exp(-scores)) - label
            else:
                change = np.exp(scores) / np.exp(scores).sum() - (np.arange(self.outputs) == label)
            of_bias += change / len(rows)
            for index, value in row.items():
                if value:
                    changes[index] += value * change / len(rows)
        for index, gradient in changes.items():
            self.update(index, gradient)
        if self.rule == "sgd":
            self.bias -= RATE * of_bias
        else:
            self.sums += of_bias**2
            self.bias -= RATE * of_bias / (np.sqrt(self.sums) + 1e-8)

    def update(self, index: int, gradient: Any) -> None:
        weight, slot = self.weights[index], self.slots[index]
        if self.rule == "sgd":
            weight -= RATE * gradient
        elif self.rule == "ftrl":
            z, n = slot
            before, n_new = np.sqrt(n), n + gradient**2
            z += gradient - (np.sqrt(n_new) - before) / RATE * weight
            n[:] = n_new
            weight[:] = -z / ((1.0 + np.sqrt(n)) / RATE)
        else:
            squares = gradient**2
            slot[0] += squares.mean() if self.rule == "row_adagrad" else squares
            weight -= RATE * gradient / (np.sqrt(slot[0]) + 1e-8)


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "row_adagrad", "ftrl"])
@pytest.mark.parametrize("classes", [2, 3])
def test_steps_are_those_of_an_oracle(rule: str, classes: int) -> None:
    """Rows, bias and scores after some epochs equal plain NumPy's; other rows are not stored."""
    rows, labels = draw(1, classes)
    net, oracle = LinearNet({"classes": classes}, ["features"], 1), Oracle(rule, classes)
    tables = net.params({"rule": rule, "rate": RATE})
    order = [range(first, min(first + BATCH, ROWS)) for first in range(0, ROWS, BATCH)] * 3

    def batches(*_args: Any, **_options: Any) -> Iterator[dict[str, Any]]:
        for part in order:
            chosen = [rows[row] for row in part]
            yield {"features": as_vectors(chosen), "label": labels[list(part)]}
            oracle.step(chosen, labels[list(part)])

    with ps.local(tables, shards=2) as job, job.worker("w0") as me:
        context: Any = SimpleNamespace(batches=batches, worker=me)
        net.train(FitSettings(classifies=True, batch_size=BATCH, epochs=3, seed=1), context)
        me.flush()
        with job.reader() as reader:
            trained = LinearNet({"classes": classes}, ["features"], 2)
            trained.load(by_name(tables, reader.pull("net")), reader)
            (scores,) = trained.outputs({"features": as_vectors(rows)}, [])
            seen = {index for row in rows for index, value in row.items() if value}
            assert sum(shard.rows["features"] for shard in job.status()) == len(seen)
            ids = np.array(sorted(seen))
            weights = reader.gather("features", ids, missing="error")
    expected = np.array([oracle.score(row) for row in rows])
    np.testing.assert_allclose(weights, [oracle.weights[index] for index in ids], atol=2e-5)
    np.testing.assert_allclose(scores[:, -expected.shape[1] :], expected, atol=2e-4)


def loss_of(outputs: Any, labels: Any, classes: int) -> float:
    """The mean squared error, or the cross-entropy of scores, in float64."""
    scores = outputs.astype(np.float64)
    if not classes:
        return float(np.square(scores[:, 0] - labels).mean())
    powers = np.exp(scores)
    return float(-np.log(powers[np.arange(len(labels)), labels] / powers.sum(1)).mean())


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_gradients_with_hidden_layers(classes: int) -> None:
    """A small step changes the loss by minus its length squared, over the rate."""
    rows, labels = draw(2, max(2, classes))
    args = {"hidden": [4, 3], **({"classes": classes} if classes else {})}
    net, trained, rate = LinearNet(args, ["features"], 1), LinearNet(args, [], 1), 1e-2
    tables = net.params({"rule": "sgd", "rate": rate})
    vectors = as_vectors(rows)
    states, losses = [], []
    with ps.local(tables) as job, job.worker("w0") as me, job.reader() as reader:

        def batches(*_args: Any, **_options: Any) -> Iterator[dict[str, Any]]:
            for _ in range(3):
                yield {"features": vectors, "label": labels}
                me.flush()
                params = by_name(tables, reader.pull("net"))
                trained.load(params, reader)
                losses.append(
                    loss_of(trained.outputs({"features": vectors}, [])[0], labels, classes)
                )
                weights = reader.gather("features", np.unique(vectors.indices), missing="zero")
                arrays = [weights, *params.values()]
                states.append(np.concatenate([array.ravel() for array in arrays]))

        context: Any = SimpleNamespace(batches=batches, worker=me)
        net.train(FitSettings(classifies=classes > 0, batch_size=ROWS, epochs=3, seed=1), context)
    for (before, after), (first, second) in zip(pairwise(states), pairwise(losses), strict=True):
        expected = -np.square(after - before).sum() / rate
        np.testing.assert_allclose(second - first, expected, rtol=0.1)


def test_rows_of_a_hash_space_in_spark(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fit equals the oracle though its worker is killed, and stores no other rows.

    The model is saved and loaded, predicts by id, and takes vectors of the trained size alone.
    """
    mark = tmp_path / "died"
    monkeypatch.setattr("worker.ml.estimators.train_net", partial(train_and_die, str(mark)))
    rows, labels = draw(3, 2)
    pairs = [(SparseVector(SIZE, row), int(label)) for row, label in zip(rows, labels, strict=True)]
    df = spark.createDataFrame(pairs, ["features", "label"]).coalesce(1).cache()
    estimator = worker.ml.NetClassifier(
        model="linear",
        rule="adagrad",
        stepSize=RATE,
        batchSize=BATCH,
        epochs=2,
        workers=1,
        options={"shuffle": False, "lease_s": 3.0},
    )
    model: Any = Pipeline(stages=[estimator]).fit(df)
    assert mark.exists()
    oracle = Oracle("adagrad", 2)
    order = np.tile(np.arange(ROWS), 2)
    for part in np.split(order, range(BATCH, len(order), BATCH)):
        oracle.step([rows[row] for row in part], labels[part])
    ids = np.array(sorted({index for row in rows for index, value in row.items() if value}))
    stored = model.stages[0].rows
    assert sorted(stored.ids("features").tolist()) == ids.tolist()
    weights = np.array([oracle.weights[index] for index in ids])
    np.testing.assert_allclose(stored.gather("features", ids), weights, atol=2e-5)

    model.write().overwrite().save(f"{tmp_path}/model")
    assert sum(file.stat().st_size for file in (tmp_path / "model").rglob("*")) < 100_000
    loaded: Any = PipelineModel.load(f"{tmp_path}/model")
    unseen = SparseVector(SIZE, {3: 5.0, int(ids[0]): 2.0})
    more = df.union(spark.createDataFrame([(unseen, 0)], ["features", "label"]))
    scores = [row.rawPrediction.toArray() for row in loaded.transform(more).collect()]
    expected = [oracle.score(row)[0] for row in rows]
    expected.append(float(oracle.bias[0] + 2 * oracle.weights[ids[0]][0]))
    np.testing.assert_allclose(scores, [[0.0, score] for score in expected], atol=2e-4)

    wide = spark.createDataFrame([(SparseVector(SIZE + 1, {SIZE: 1.0}), 0)], ["features", "label"])
    line = f"expected {SIZE} values, as in training, got {SIZE + 1} values"
    with pytest.raises(PythonException, match=line):
        loaded.transform(wide).collect()
    broken = SparseVector(5, {1: 1.0})
    broken.indices[0] = 5
    with pytest.raises(BadInput, match=r"expected indices from 0 and below the size .* in 1 row$"):
        estimator.fit(spark.createDataFrame([(broken, 0)], ["features", "label"]))
