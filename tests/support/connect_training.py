"""`worker.train` over Spark Connect: `python -m tests.support.connect_training SPARK RAY FOLDER`.

In a process of its own, for one has one Spark session at a time. Prints one line of JSON.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import worker
from deploy.clusters import ray_cluster
from shards.errors import BadInput
from tests.support.clusters import MESSAGE_BYTES
from tests.support.tiny_job import image_table
from worker import spark


def train(url: str, ray: str, folder: Path) -> dict[str, object]:
    """Train tiny's net in `folder` and save its weights there; returns what was seen."""
    with (
        ray_cluster.connect(ray, cpus=2),
        spark.start_session(url, 2, app="over connect", env={}) as session,
    ):
        df = session.createDataFrame(image_table(200))
        model = worker.Caffe(folder / "solver.prototxt")
        try:
            worker.train(df, model=model)
        except BadInput as error:
            refused = str(error)
        trained = worker.train(df, model=model, shards=2, workers=3, staleness=2, max_iter=60)
        weights = trained.save(folder / "weights.caffemodel")
        means = worker.test(df, solver=folder / "solver.prototxt", weights=weights)
        rows = worker.features(df, net=folder / "net.prototxt", weights=weights, blobs=["ip1"])
        seen = rows.count()
        large = np.arange(2 * MESSAGE_BYTES // 4, dtype=np.float32)
        shared = sums_in_tasks(df, large)
    return {
        "means": means,
        "features": seen,
        "shared": shared,
        "sums": [float(large.sum(dtype=np.float64))] * len(shared),
        "refused": refused,
        "steps": sorted(report.steps for report in trained.outcome.reports),
        "versions": [status.version for status in trained.outcome.statuses],
        "gap": max(status.max_clock_gap for status in trained.outcome.statuses),
    }


def sums_in_tasks(df: spark.DataFrame, values: NDArray[np.float32]) -> list[float]:
    """The sum of shared values, as each task over `df` computes it."""
    load = spark.share(df, values)

    def task(batches: Iterator[Any], *_: Any) -> Iterator[Any]:
        for _batch in batches:
            pass
        yield pa.record_batch([pa.array([float(load().sum(dtype=np.float64))])], ["sum"])

    schema = pa.schema([("sum", pa.float64())])
    return [row[0] for row in spark.run_tasks(df, task, schema, "sums")]


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
