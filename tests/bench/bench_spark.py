"""What the SDK costs inside Spark, against the least that does the same.

    python tests/bench/bench_spark.py [--rows 400000] [--rounds 5]

`transform` of `worker.ml`, with a network of NumPy over 64 floats a row, against a `mapInArrow` of
the same network in the fewest lines. Both read the same cached rows and write to nowhere; rounds
take turns, and each figure is the median of its rounds.

Feeding minibatches of rows of 100 floats: `ctx.batches` and `ctx.feed` of `worker.run`, as the task
makes them of Spark's record batches, and a queue of rows as TensorFlowOnSpark has it
(tests/support/row_queue.py).
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
from tests.support import row_queue
from tests.support.ml_nets import Line
from worker.feed import ColumnBatches, RowFeed
from worker.ml.models import FittedNet
from worker.ml.nets import NetSpec
from worker.spark import start_session

WIDTH, OUTPUTS, SHARE = 64, 256, 0.8
FED_FLOATS, FED_ROWS, FED, TIMES = 100, 64, 100_000.0, 20.0


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


def feeding(rows: int, rounds: int) -> dict[str, float]:
    """Rows a second of each way to feed minibatches, of a task on one core."""

    def batches(stream: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        fed = ColumnBatches(stream, FED_ROWS, 1, "w0", epochs=1)
        yield counted(sum(len(batch["x"]) for batch in fed))
        fed.close()

    def feed(stream: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        fed, found = RowFeed(stream, "rows"), 0
        while not fed.should_stop():
            found += len(fed.next_batch(FED_ROWS)["x"])
        yield counted(found)

    took: dict[str, list[float]] = {"batches": [], "feed": [], "queue": []}
    few = rows // 20  # of which the queue takes as long
    with start_session(None, 1, app="bench", env=dict(java_environment())) as spark:
        values = ", ".join(f"float(id % {7 + n})" for n in range(FED_FLOATS))
        df = spark.range(rows, numPartitions=1).selectExpr(f"array({values}) AS x").cache()
        short = spark.range(few, numPartitions=1).selectExpr(f"array({values}) AS x").cache()
        assert (df.count(), short.count()) == (rows, few)
        for _ in range(rounds + 1):  # the first starts the processes
            for name, read in (
                ("batches", lambda: df.mapInArrow(batches, "rows long").collect()[0][0]),
                ("feed", lambda: df.mapInArrow(feed, "rows long").collect()[0][0]),
                ("queue", lambda: short.rdd.mapPartitions(row_queue.fed).collect()[0]),
            ):
                started = time.perf_counter()
                found = read()
                took[name].append((time.perf_counter() - started) / found)
    return {name: 1 / median(times[1:]) for name, times in took.items()}


def counted(rows: int) -> pa.RecordBatch:
    """A record batch of one number."""
    return pa.RecordBatch.from_pylist([{"rows": rows}])


def main() -> None:
    """Measure, and hold the figures against the goals."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    speed = transform(given.rows, given.rounds)
    fed = feeding(given.rows, given.rounds)
    for name, rate in (speed | fed).items():
        print(f"{name:10} {rate:12,.0f} rows/s")
    save("spark", {"transform": speed, "feeding": fed})
    share = speed["transform"] / speed["bare"]
    slower = min(fed["batches"], fed["feed"])
    goals(
        [
            Goal("transform, of a bare mapInArrow", share, SHARE, at_least=True),
            Goal("rows a second fed", slower, FED, at_least=True),
            Goal("times a queue of rows", slower / fed["queue"], TIMES, at_least=True),
        ]
    )


if __name__ == "__main__":
    main()
