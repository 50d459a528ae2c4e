"""What the SDK costs inside Spark, against the least that does the same.

    python tests/bench/bench_spark.py [--rows 400000] [--rounds 5]

`transform` of `worker.ml`, with a network of NumPy over 64 floats a row, against a `mapInArrow` of
the same network in the fewest lines. Both read the same cached rows and write to nowhere; rounds
take turns, and each figure is the median of its rounds.
"""

import argparse
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

import worker
from deploy.java import java_environment
from tests.bench.report import Goal, goals, save
from tests.support.ml_nets import Line
from worker.ml.models import FittedNet
from worker.ml.nets import NetSpec
from worker.spark import start_session

WIDTH, OUTPUTS, SHARE = 64, 256, 0.8


def bare(weights: dict[str, Any]) -> Any:
    """The function of a `mapInArrow` that adds the output's sum; no other checks, no names."""
    net = Line(WIDTH, OUTPUTS)

    def predict(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            x = batch.column(1).flatten().to_numpy().reshape(batch.num_rows, WIDTH)
            found = net.outputs(weights, {"features": x})
            offsets = np.arange(0, found.size + 1, OUTPUTS, dtype=np.int32)
            lists = pa.ListArray.from_arrays(offsets, found.ravel().astype(np.float64))
            yield pa.RecordBatch.from_arrays(
                [*batch.columns, lists], names=[*batch.schema.names, "prediction"]
            )

    return predict


def transform(rows: int, rounds: int) -> dict[str, float]:
    """Rows a second, of each."""
    dice = np.random.default_rng(1)
    weights = {"slope": dice.standard_normal((WIDTH, OUTPUTS), np.float32)}
    spec = NetSpec("tests.support.ml_nets:Line", {"size": WIDTH, "outputs": OUTPUTS})
    model = worker.ml.NetRegressorModel(FittedNet(spec, weights, several=True))
    took: dict[str, list[float]] = {"bare": [], "transform": []}
    with start_session(None, 1, app="bench", env=dict(java_environment())) as spark:
        values = ", ".join(f"float(id % {7 + n})" for n in range(WIDTH))
        df = spark.range(rows, numPartitions=2).selectExpr("id", f"array({values}) AS features")
        df = df.cache()
        df.count()
        schema = "id long, features array<float>, prediction array<double>"
        for _ in range(rounds + 1):  # the first starts the processes
            for name, made in (
                ("bare", df.mapInArrow(bare(weights), schema)),
                ("transform", model.copy().transform(df)),
            ):
                started = time.perf_counter()
                made.write.format("noop").mode("overwrite").save()
                took[name].append(time.perf_counter() - started)
    return {name: rows / median(times[1:]) for name, times in took.items()}


def main() -> None:
    """Measure, and hold the figures against the goals."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    speed = transform(given.rows, given.rounds)
    for name, rate in speed.items():
        print(f"{name:10} {rate:12,.0f} rows/s")
    save("spark", {"transform": speed})
    share = speed["transform"] / speed["bare"]
    goals([Goal("transform, of a bare mapInArrow", share, SHARE, at_least=True)])


if __name__ == "__main__":
    main()
