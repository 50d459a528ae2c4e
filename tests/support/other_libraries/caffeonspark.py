"""CaffeOnSpark: a solver trained on a source, and blobs of its net as columns.

One device trains, in this process, by Downpour's own solver. The source is a Parquet file of
images.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from tests.support.serial_solver import SerialSolver
from worker.caffe.solver import read_solver
from worker.caffe.weight_files import write_weights

BATCH = 64
SHAPE = (1, 28, 28)


class Config(SimpleNamespace):
    """What the options of the command line say."""

    def __init__(self, sc: Any) -> None:
        super().__init__(sc=sc)


class DataSource:
    """The rows of the net's data layer."""

    def __init__(self, sc: Any) -> None:
        assert sc

    def getSource(self, conf: Config, is_train: bool) -> Any:  # noqa: N802  # CaffeOnSpark's name
        rows = pq.read_table("digits.parquet")
        images = np.stack([np.frombuffer(one, np.uint8) for one in rows["image"].to_pylist()])
        return SimpleNamespace(
            conf=conf, data=images.reshape(-1, *SHAPE), label=rows["label"].to_numpy()
        )


class CaffeOnSpark:
    """Trains a solver's net, and computes with it."""

    def __init__(self, sc: Any) -> None:
        self._sc = sc

    def train(self, source: Any) -> None:
        solver = self._solver = SerialSolver(read_solver(Path(source.conf.protoFile), SHAPE))
        for step in range(solver.solver.max_iter):
            places = np.arange(step * BATCH, (step + 1) * BATCH) % len(source.label)
            solver.step({"data": source.data[places], "label": source.label[places]})
        path = Path(source.conf.modelPath.removeprefix("file:"))
        write_weights(path, solver.model.net, solver.weights)

    def features(self, source: Any) -> Any:
        from pyspark.sql import SparkSession

        columns = {"data": source.data, "label": source.label}
        blobs = source.conf.features
        found = self._solver.model.forward(self._solver.weights, columns, blobs)
        rows = [
            (f"{row}", *(found[blob][row].ravel().tolist() for blob in blobs), float(label))
            for row, label in enumerate(source.label)
        ]
        session = SparkSession.builder.getOrCreate()
        return session.createDataFrame(rows, ["SampleID", *blobs, source.conf.label])


MODULES: dict[str, dict[str, Any]] = {
    "caffeonspark": {
        "CaffeOnSpark": CaffeOnSpark,
        "Config": Config,
        "DataSource": DataSource,
    }
}
