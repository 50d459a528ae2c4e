"""Elephas: a compiled Keras model, trained on the partitions of an RDD.

Workers take turns in this process. As in the original, each `fit`s on its rows from the server's
weights and sends the difference, which the server subtracts.
"""

from typing import Any

import numpy as np


def to_simple_rdd(sc: Any, features: Any, labels: Any) -> Any:
    return sc.parallelize(list(zip(features, labels, strict=True)))


class SparkModel:
    """The model on the driver, and its training."""

    def __init__(
        self, model: Any, mode: str = "asynchronous", frequency: str = "epoch", num_workers: int = 2
    ) -> None:
        assert mode in ("asynchronous", "hogwild")
        assert frequency == "epoch"
        self.master_network = model
        self._workers = num_workers

    def fit(
        self, rdd: Any, epochs: int, batch_size: int, verbose: int, validation_split: float
    ) -> None:
        model, rows = self.master_network, rdd.collect()
        for _ in range(epochs):
            for worker in range(self._workers):
                x, y = map(np.array, zip(*rows[worker :: self._workers], strict=True))
                taught = len(x) - int(validation_split * len(x))
                model.fit(x[:taught], y[:taught], batch_size, verbose=verbose)


MODULES: dict[str, dict[str, Any]] = {
    "elephas.spark_model": {"SparkModel": SparkModel},
    "elephas.utils.rdd_utils": {"to_simple_rdd": to_simple_rdd},
}
