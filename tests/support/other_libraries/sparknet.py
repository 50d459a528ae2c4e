"""SparkNet: Caffe's solver on each executor, and a loop in the driver that averages weights.

Executors take turns in this process: `sc.parallelize` gives one element an executor, and a
DataFrame's `foreachPartition` gives each its share of the rows. A solver is Downpour's own.
"""

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.serial_solver import SerialSolver
from worker.caffe.solver import read_solver

Floats = NDArray[np.float32]
BATCH = 50

_executor: ContextVar[int] = ContextVar("executor")


class WorkerStore:
    """A map in each executor, which lives as long as it does."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, str], Any] = {}

    def put(self, name: str, value: Any) -> None:
        self._values[_executor.get(), name] = value

    def get(self, name: str) -> Any:
        return self._values[_executor.get(), name]


class DefaultPreprocessor:
    """Converts a column of a row to a net's input."""

    def __init__(self, schema: Any) -> None:
        self._names = schema.names

    def batch(self, rows: list[Any]) -> dict[str, Any]:
        data = np.array([row.data for row in rows], np.float32)
        return {
            "data": data.reshape(*data.shape, 1, 1),
            "label": np.array([row.label for row in rows]),
        }


class Weights:
    """A collection of weights, here one arena."""

    def __init__(self, arena: Floats) -> None:
        self.arena = arena

    def scalarDivide(self, number: float) -> "Weights":  # noqa: N802  # SparkNet's name
        return Weights(self.arena / np.float32(number))

    @staticmethod
    def add(one: "Weights", other: "Weights") -> "Weights":
        return Weights(one.arena + other.arena)


class CaffeNet:
    """The net of a solver."""

    def __init__(self, solver: SerialSolver, preprocessor: DefaultPreprocessor) -> None:
        self._solver = solver
        self._preprocessor = preprocessor

    def getWeights(self) -> Weights:  # noqa: N802
        return Weights(self._solver.weights.copy())

    def setWeights(self, weights: Weights) -> None:  # noqa: N802
        self._solver.weights = weights.arena.copy()

    def forward(self, rows: Iterator[Any], blobs: list[str]) -> dict[str, Floats]:
        batch = self._preprocessor.batch(list(rows))
        return self._solver.model.forward(self._solver.weights, batch, blobs)


class CaffeSolver:
    """Takes a step with the next rows of a partition."""

    def __init__(self, solver: str, schema: Any, preprocessor: DefaultPreprocessor) -> None:
        self._solver = SerialSolver(read_solver(Path(solver), (4, 1, 1)))
        self._preprocessor = preprocessor
        self.trainNet = CaffeNet(self._solver, preprocessor)

    def step(self, rows: Iterator[Any]) -> None:
        self._solver.step(self._preprocessor.batch(list(islice(rows, BATCH))))


class Executors:
    """An RDD with one element an executor, or the context or DataFrame that makes one."""

    def __init__(self, elements: list[Any], schema: Any = None) -> None:
        self._elements = elements
        self.schema = schema

    def parallelize(self, elements: Any, _slices: int) -> "Executors":
        return Executors(list(elements))

    def collect(self) -> list[Any]:
        return self._elements

    def map(self, function: Callable[[Any], Any]) -> "Executors":
        return Executors([_on(n, function, each) for n, each in enumerate(self._elements)])

    def foreach(self, function: Callable[[Any], Any]) -> None:
        self.map(function)

    def mapPartitions(self, function: Callable[[Any], Any]) -> "Executors":  # noqa: N802
        return self.map(lambda rows: function(iter(rows)))

    foreachPartition = mapPartitions  # noqa: N815

    def reduce(self, function: Callable[[Any, Any], Any]) -> Any:
        return reduce(function, self._elements)


def _on(executor: int, function: Callable[[Any], Any], element: Any) -> Any:
    _executor.set(executor)
    return function(element)


def repartitioned(df: Any, workers: int) -> Executors:
    """A DataFrame of so many partitions."""
    rows = df.collect()
    return Executors([rows[n::workers] for n in range(workers)], df.schema)


MODULES: dict[str, dict[str, Any]] = {
    "sparknet": {
        "CaffeSolver": CaffeSolver,
        "DefaultPreprocessor": DefaultPreprocessor,
        "WeightCollection": Weights,
        "WorkerStore": WorkerStore,
    }
}
