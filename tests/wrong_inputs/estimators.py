"""Wrong counts and rates of the estimators: refused where they are given, or as a fit begins."""

from collections.abc import Iterator
from functools import partial
from math import inf, nan
from typing import Any

import numpy as np

import worker.ml
from tests.wrong_inputs.rows import Row
from worker.sklearn import DownpourClassifier

_X, _Y = np.eye(4), np.arange(4) % 2
_NO_COUNTS: tuple[Any, ...] = (0, -1, 1.5, nan, inf, "2", True, None, [1])
_NO_RATES: tuple[Any, ...] = (-0.1, nan, inf, "fast", True, None)
_OF_SKLEARN = {
    **dict.fromkeys(("batch_size", "epochs", "workers", "shards"), _NO_COUNTS),
    "hidden": (0, -1, 1.5, nan, "2", True, None, [0], [4, 1.5]),
    "rate": _NO_RATES,
    "decay": _NO_RATES,
    "staleness": (-1, 1.5, nan, "2", True),
}
_OF_SPARK = {
    **dict.fromkeys(
        ("batchSize", "epochs", "workers", "shards", "maxIter", "testEvery"), _NO_COUNTS
    ),
    "stepSize": _NO_RATES,
}


def rows() -> Iterator[Row]:
    """A row for each wrong value of each parameter."""
    for name, values in _OF_SKLEARN.items():
        for value in values:
            fit = partial(_fit, {name: value})
            yield Row("SDK", f"DownpourClassifier {name}={value!r}", fit, f"^{name}: expected")
    for name, values in _OF_SPARK.items():
        for value in values:
            make = partial(worker.ml.NetClassifier, **{name: value})
            if value is not None:  # Spark leaves out a parameter that is None
                yield Row("SDK", f"NetClassifier {name}={value!r}", make, f"^{name}: expected")


def _fit(options: dict[str, Any]) -> object:
    return DownpourClassifier(**options).fit(_X, _Y)
