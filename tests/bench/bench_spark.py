"""What the SDK costs inside Spark, against the least that does the same.

    python tests/bench/bench_spark.py [--rows 400000] [--rounds 5]

`transform` of `worker.ml`, with a network of NumPy over 64 floats a row, against a `mapInArrow` of
the same network in the fewest lines. Both read the same cached rows and write to nowhere; rounds
take turns, and each figure is the median of its rounds.

Feeding minibatches of rows of 100 floats, in one column and in 100: `ctx.batches` and `ctx.feed` of
`worker.run`, as the task makes them of Spark's record batches; Spark alone, with a task that counts
rows; and a queue of rows as TensorFlowOnSpark has it (tests/support/row_queue.py). The figures that
count are CPU seconds of all processes, Spark's included.

A micro-batch of `worker.stream`: the time from one to the next, where each of two workers takes one
step that costs nothing.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import psutil
import pyarrow as pa

import ps
import worker
from deploy.clusters.java import spark_environment
from tests.bench.report import Goal, goals, save
from tests.support import row_queue
from tests.support.ml_nets import Line
from worker.data.batches import Batches
from worker.data.column_spool import ColumnSpool
from worker.data.feed import RowFeed
from worker.ml.models import FittedNet
from worker.ml.nets import NetSpec
from worker.spark import start_session

WIDTH, OUTPUTS, SHARE = 64, 256, 0.8
FED_FLOATS, FED_ROWS, FED, TIMES = 100, 64, 100_000.0, 20.0
MICRO_BATCHES, MICRO_BATCH_S = 10, 1.0


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
    model = worker.ml.NetRegressorModel(
        FittedNet(spec, weights, {"features": (WIDTH,)}, several=True)
    )
    took: dict[str, list[float]] = {"bare": [], "transform": []}
    with start_session(None, 1, app="bench", env=dict(spark_environment())) as spark:
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


class Took(NamedTuple):
    """Seconds of wall time, and of the CPU time of all processes."""

    wall_s: float
    cpu_s: float


def feeding(rows: int, rounds: int) -> dict[str, Took]:
    """What a row takes in each way to feed minibatches to a task on one slot."""

    def nothing(stream: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield counted(sum(batch.num_rows for batch in stream))

    def batches(stream: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        fed = Batches(stream, ColumnSpool("rows"), FED_ROWS, 1, "w0", epochs=1)
        yield counted(sum(len(next(iter(batch.values()))) for batch in fed))
        fed.close()

    def feed(stream: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        fed, found = RowFeed(stream, "rows"), 0
        while not fed.should_stop():
            found += len(next(iter(fed.next_batch(FED_ROWS).values())))
        yield counted(found)

    few = rows // 20  # of which the queue takes as long
    took: dict[str, list[Took]] = defaultdict(list)
    with start_session(None, 1, app="bench", env=dict(spark_environment())) as spark:
        numbers = [f"float(id % {7 + n})" for n in range(FED_FLOATS)]
        one = f"array({', '.join(numbers)}) AS x"
        df = spark.range(rows, numPartitions=1).selectExpr(one).cache()
        short = spark.range(few, numPartitions=1).selectExpr(one).cache()
        separate = [f"{number} AS x{n}" for n, number in enumerate(numbers)]
        wide = spark.range(rows, numPartitions=1).selectExpr(*separate).cache()
        assert (df.count(), short.count(), wide.count()) == (rows, few, rows)

        def mapped(frame: Any, task: Any) -> Callable[[], int]:
            return lambda: int(frame.mapInArrow(task, "rows long").collect()[0][0])

        cases: dict[str, Callable[[], int]] = {
            "Spark alone": mapped(df, nothing),
            "batches": mapped(df, batches),
            "feed": mapped(df, feed),
            "Spark alone, 100 columns": mapped(wide, nothing),
            "batches, 100 columns": mapped(wide, batches),
            "feed, 100 columns": mapped(wide, feed),
            "queue": lambda: int(short.rdd.mapPartitions(row_queue.fed).collect()[0]),
        }
        for _ in range(rounds + 1):  # the first starts the processes
            for name, counted_rows in cases.items():
                used, started = cpu_s(), time.perf_counter()
                found = counted_rows()
                wall = time.perf_counter() - started
                took[name].append(Took(wall / found, (cpu_s() - used) / found))
    return {
        name: Took(*(median(each) for each in zip(*times[1:], strict=True)))
        for name, times in took.items()
    }


def cpu_s() -> float:
    """The CPU seconds of all processes that this one has started, ended ones included."""
    spent = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            spent += sum(process.cpu_times()[:4])
    return spent


def micro_batches(count: int) -> Took:
    """What one of `count` micro-batches costs, of two workers that take one step."""
    params = {"w": np.zeros(FED_FLOATS, np.float32)}

    def train(args: Any, ctx: worker.Context) -> None:
        for batch in ctx.batches(FED_ROWS, epochs=1):
            with ctx.worker.step(samples=len(batch["x"])) as step:
                step.push({"w": step.pull()["w"]})

    ends: list[Took] = []
    with (
        TemporaryDirectory() as folder,
        start_session(None, 2, app="bench", env=dict(spark_environment())) as spark,
    ):
        rows = [([0.5] * FED_FLOATS,)] * (count * 2 * FED_ROWS)
        df = spark.createDataFrame(rows, "x array<float>").repartition(count)
        df.write.parquet(f"{folder}/rows")
        reader = spark.readStream.schema(df.schema).option("maxFilesPerTrigger", 1)
        with worker.stream(
            reader.parquet(f"{folder}/rows"),
            train,
            params=ps.Dense.like(params),
            checkpoint=f"{folder}/checkpoint",
            workers=2,
            staleness=None,
            shards_in="processes",
            trigger={"availableNow": True},
        ) as stream:
            while len(ends) < count:
                if stream.batches > len(ends):
                    ends.append(Took(time.perf_counter(), cpu_s()))
                time.sleep(0.01)
            stream.wait()
    took = [np.subtract(later, end) for end, later in pairwise(ends)]
    return Took(*np.median(took, axis=0).tolist())


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
    for name, rate in speed.items():
        print(f"{name:26}{rate:12,.0f} rows/s", flush=True)
    fed = feeding(given.rows, given.rounds)
    for name, (wall, cpu) in fed.items():
        print(f"{name:26}{1 / wall:12,.0f} rows/s, a CPU second {1 / cpu:12,.0f}", flush=True)
    batch = micro_batches(MICRO_BATCHES)
    print(f"a micro-batch of one step {batch.wall_s:.2f} s, {batch.cpu_s:.2f} CPU seconds")
    save("spark", {"transform": speed, "feeding": fed, "micro-batch": batch})
    share = speed["transform"] / speed["bare"]
    slower = max(fed["batches"].cpu_s, fed["feed"].cpu_s)
    goals(
        [
            Goal("transform, of a bare mapInArrow", share, SHARE, at_least=True),
            Goal("rows fed a CPU second", 1 / slower, FED, at_least=True),
            Goal("times a queue of rows", fed["queue"].cpu_s / slower, TIMES, at_least=True),
            Goal("a micro-batch of one step", batch.wall_s, MICRO_BATCH_S, "s"),
            Goal("a micro-batch of one step, CPU time", batch.cpu_s, MICRO_BATCH_S, "s"),
        ]
    )


if __name__ == "__main__":
    main()
