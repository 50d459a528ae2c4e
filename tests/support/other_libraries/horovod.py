"""Horovod on Spark: processes that average their gradients, and an estimator for a PyTorch module.

Processes are threads of this one. As in the original, every `step` waits for all of them.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

_place = threading.local()


class Ring:
    """The processes of a run, and the gradients of those that have come to a step."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._given: dict[int, Any] = {}

    def mean(self, gradients: list[Any]) -> list[Any]:
        self._given[_place.rank] = [one.clone() for one in gradients]
        self._barrier.wait()
        found = [sum(parts) / self.size for parts in zip(*self._given.values(), strict=True)]
        self._barrier.wait()
        return found


def run(train: Callable[..., Any], args: tuple[Any, ...] = (), num_proc: int = 1) -> list[Any]:
    ring = Ring(num_proc)

    def process(rank: int) -> Any:
        _place.rank, _place.ring = rank, ring
        return train(*args)

    with ThreadPoolExecutor(num_proc) as pool:
        return list(pool.map(process, range(num_proc)))


class DistributedOptimizer:
    """Averages the gradients over all processes before each step."""

    def __init__(self, optimizer: Any, named_parameters: Any) -> None:
        self._optimizer = optimizer
        self._parameters = [one for _, one in named_parameters]

    def step(self) -> None:
        means = _place.ring.mean([one.grad for one in self._parameters])
        for one, mean in zip(self._parameters, means, strict=True):
            one.grad = mean
        self._optimizer.step()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()


def broadcast_parameters(state: dict[str, Any], root_rank: int) -> None:
    assert root_rank == 0
    for one in state.values():
        one.zero_()  # the same in every process


class TorchEstimator:
    """Trains a module on the rows of a DataFrame."""

    def __init__(
        self,
        *,
        num_proc: int,
        store: Any,
        model: Any,
        optimizer: Any,
        loss: Any,
        input_shapes: list[list[int]],
        feature_cols: list[str],
        label_cols: list[str],
        batch_size: int,
        epochs: int,
    ) -> None:
        self._fit = model, optimizer, loss, batch_size, epochs
        self._columns = *feature_cols, *label_cols

    def fit(self, df: Any) -> "TorchModel":
        import torch

        model, optimizer, loss, size, epochs = self._fit
        columns = zip(*df.select(*self._columns).collect(), strict=True)
        x, y = (torch.tensor(column) for column in columns)
        for _ in range(epochs):
            for start in range(0, len(x), size):
                part = slice(start, start + size)
                optimizer.zero_grad()
                loss(model(x[part])[:, 0], y[part]).backward()
                optimizer.step()
        return TorchModel(model, self._columns[0])


class TorchModel:
    """A trained module, which makes a column."""

    def __init__(self, model: Any, column: str) -> None:
        self._model = model
        self._column = column

    def transform(self, df: Any) -> Any:
        import torch

        rows = df.collect()
        found = self._model(torch.tensor([row[self._column] for row in rows]))
        predicted = [(*row, one.tolist()) for row, one in zip(rows, found, strict=True)]
        names = [*df.columns, f"{df.columns[-1]}__output"]
        return df.sparkSession.createDataFrame(predicted, names)


MODULES: dict[str, dict[str, Any]] = {
    "horovod.spark": {"run": run},
    "horovod.spark.common.store": {"Store": SimpleNamespace(create=lambda folder: folder)},
    "horovod.spark.torch": {"TorchEstimator": TorchEstimator},
    "horovod.torch": {
        "DistributedOptimizer": DistributedOptimizer,
        "broadcast_parameters": broadcast_parameters,
        "init": lambda: None,
        "rank": lambda: _place.rank,
        "size": lambda: _place.ring.size,
    },
}
