"""What training makes of a DataFrame before it starts anything, over Spark for real."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import worker
from deploy.clusters.java import spark_environment
from shards.errors import BadInput, GiveUp
from tests.support.bare_python import bare_python
from tests.support.eventually import eventually
from tests.support.ones_job import Broken, Silent, counted, ones_job, rows
from tests.support.quick_start import import_path
from worker import spark as door
from worker.job.runner import run_job
from worker.job.training_job import Job
from worker.spark import tasks
from worker.spark.dataframe_checks import deal_rows, first_shape

ROOT = Path(__file__).parents[2]


def sizes(df: Any) -> list[int]:
    """The rows of each partition."""
    return [part.rows for part in door.survey(df)]


def refusal(df: Any, job: Job) -> str:
    """The line with which the job refuses the DataFrame."""
    with pytest.raises(BadInput) as caught:
        run_job(df, job)
    return str(caught.value)


def in_one(spark: Any, count: int, partitions: int) -> Any:
    """Rows that are all in one of the partitions, as a Parquet file of one row group is read."""
    from pyspark.sql.functions import lit

    df = spark.createDataFrame(rows(count)).repartition(partitions, lit(0))
    assert sorted(sizes(df)) == [0] * (partitions - 1) + [count]
    return df


def test_every_worker_trains_where_one_partition_has_all_rows(spark: Any) -> None:
    """A DataFrame with as many partitions as workers is dealt where some of them are empty."""
    outcome = run_job(in_one(spark, 40, 2), ones_job(steps=10, workers=2))
    assert counted(outcome.weights) == {-20.0}
    assert [(r.worker, r.steps) for r in outcome.reports] == [("w0", 10), ("w1", 10)]
    assert outcome.notices == ()


@pytest.mark.parametrize(
    ("count", "partitions", "workers"), [(5, 4, 5), (7, 7, 6), (3, 1, 3), (20, 5, 3), (1000, 3, 8)]
)
def test_rows_are_dealt_evenly(spark: Any, count: int, partitions: int, workers: int) -> None:
    """Every worker has rows, however few there are and wherever they were; none is lost."""
    df = spark.createDataFrame(rows(count)).repartition(partitions)
    found = sizes(deal_rows(df, workers))
    assert len(found) == workers
    assert sum(found) == count
    assert min(found) >= 1
    assert max(found) <= 2 * min(found) + 1


def test_partitions_are_counted_without_dealing_the_rows(spark: Any) -> None:
    tracker = spark.sparkContext.statusTracker()
    df = spark.createDataFrame(rows(40)).repartition(3)
    jobs = tracker.getJobIdsForGroup()
    assert door.partition_count(df) == 3
    assert tracker.getJobIdsForGroup() == jobs
    assert door.partition_count(df.coalesce(2)) == 2 == len(sizes(df.coalesce(2)))


def test_partitions_that_fit_are_kept(spark: Any) -> None:
    """A DataFrame with rows in as many partitions as workers stays as it is; with `even`, only if
    the partitions are of about one size."""
    from pyspark.sql.functions import col

    even = spark.createDataFrame(rows(40)).repartition(2)
    assert deal_rows(even, 2, even=True) is even
    numbered = spark.createDataFrame(
        [(0 if row < 30 else 1, bytes(4), row) for row in range(40)],
        "label long, data binary, id long",
    )
    skewed = numbered.repartitionByRange(2, col("label"))
    assert sorted(sizes(skewed)) == [10, 30]
    assert deal_rows(skewed, 2) is skewed
    assert sizes(deal_rows(skewed, 2, even=True)) == [20, 20]


def test_data_without_rows_for_each_worker(spark: Any) -> None:
    """It is refused before a shard is started, with the numbers of both."""
    few = spark.createDataFrame(rows(3))
    job = ones_job(steps=10, workers=5)
    assert refusal(few, job) == (
        "workers: expected at most 3, as the data has 3 rows and each worker needs one, got 5"
    )
    assert refusal(few.where("label > 5"), job) == "the DataFrame: expected rows, got none"


def test_columns_are_checked_by_their_types(spark: Any) -> None:
    """What the schema shows is refused without running a task."""
    from pyspark.ml.linalg import MatrixUDT
    from pyspark.sql.types import LongType, StructField, StructType

    matrices = StructType([StructField("label", LongType()), StructField("data", MatrixUDT())])
    for schema, line in (
        (
            "label binary, data binary",
            "the DataFrame, column label: expected whole numbers, got bi",
        ),
        ("label long, data string", "the DataFrame, column data: expected binary pixels or a list"),
        ("label long, data array<string>", "data: expected binary pixels or a list of numbers"),
        ("label long, pixels binary", "the DataFrame: expected a column data or image, got label,"),
        ("data binary", "the DataFrame: expected a column label, got data"),
        (matrices, "list of numbers a row, got a matrix of Spark ML: give its values as a list"),
        ("label long, data struct<a: int>", "got a struct of a: select its fields as columns"),
        ("label long, data map<string, int>", "got a map: take its values by pyspark.sql.func"),
        ("label long, data date", "convert it by pyspark.sql.functions.unix_timestamp"),
        ("label long, data array<decimal(38,18)>", "got decimal128(38, 18): cast it to double"),
        ("label long, data float", "together by pyspark.sql.functions.array"),
        (
            f"label long, data {'array<' * 4}float{'>' * 4}",
            "got lists 4 deep: join them by pyspark.sql.functions.flatten",
        ),
    ):
        assert line in refusal(spark.createDataFrame([], schema), ones_job(steps=1, workers=1))


def test_nulls_are_refused_before_anything_starts(spark: Any) -> None:
    """A null label, image, list or number in a list is named with its column by the job that counts
    the rows: no shard starts."""
    from pyspark.ml.linalg import Vectors, VectorUDT
    from pyspark.sql.functions import udf
    from pyspark.sql.types import LongType, StructField, StructType

    vectors = StructType([StructField("label", LongType()), StructField("data", VectorUDT())])
    fine, two = bytes(4), [1.0, 2.0]
    for schema, values, line in (
        ("label long, data binary", [(0, fine), (None, fine)], "label: {} in 1 row"),
        ("label long, image binary", [(0, fine), (1, None), (0, None)], "image: {} in 2 rows"),
        ("label double, data binary", [(None, fine)], "label: {} in 1 row"),
        ("label long, data array<double>", [(0, two), (0, [1.0, None])], "data: {} in 1 row"),
        ("label long, data array<float>", [(0, two), (0, None)], "data: {} in 1 row"),
        ("label long, data array<int>", [(0, [-7, 7]), (0, [None, -7])], "data: {} in 1 row"),
        ("label long, data array<decimal(5,2)>", [(0, [None])], "data: {} in 1 row"),
        ("label long, data array<array<float>>", [(0, [two]), (0, [[None]])], "data: {} in 1 row"),
        ("label long, data array<array<float>>", [(0, [two]), (0, [None])], "data: {} in 1 row"),
        (vectors, [(0, Vectors.dense(two)), (0, None)], "data: {} in 1 row"),
    ):
        text = "expected a value in each row, got nulls"
        named = f"the DataFrame, column {line.format(text)}; leave such rows out, as by df.dropna("
        df = spark.createDataFrame(values, schema)
        assert refusal(df, ones_job(steps=1, workers=1)).startswith(named)
    others = spark.createDataFrame([(0, fine, None)], "label long, data binary, remark string")
    (part,) = [part for part in door.survey(others, ["label", "data"]) if part.rows]
    assert part.nulls == [0, 0], "a column that is not the net's may hold nulls"
    computed = others.withColumn("label", udf(lambda _: None, "long")("label"))
    (part,) = [part for part in door.survey(computed, ["label", "data"]) if part.rows]
    assert part.nulls == [0, 0], "a function of Python is left to the workers' tasks"


def test_a_name_of_two_columns(spark: Any) -> None:
    """A column of the net that the DataFrame has twice is refused by name."""
    df = spark.createDataFrame([(0, 1, bytes(4))], "label long, other long, data binary")
    twice = df.withColumnRenamed("other", "label")
    line = "the DataFrame: expected one column label, got 2 of this name"
    assert refusal(twice, ones_job(steps=1, workers=1)) == line
    pixels = df.withColumnRenamed("other", "data")
    with pytest.raises(BadInput, match=r"^the DataFrame: expected one column data, got 2 of"):
        first_shape(pixels, None, image=False)


def test_a_vector_of_features(spark: Any) -> None:
    """A list of numbers is a vector, unless the net needs an image or columns say a shape."""

    def shape(size: int, image: bool = False, stated: Any = None, **extents: int) -> Any:
        df = spark.createDataFrame(
            [(1, [0.5] * size, *extents.values())],
            "label long, data array<double>" + "".join(f", {name} int" for name in extents),
        )
        return first_shape(df, stated, image=image)

    assert [shape(size) for size in (14, 100, 101)] == [(14, 1, 1), (100, 1, 1), (101, 1, 1)]
    assert shape(100, image=True) == (1, 10, 10)
    assert shape(12, channels=3, height=2, width=2) == (3, 2, 2)
    assert shape(12, stated=(1, 3, 4)) == (1, 3, 4)
    assert shape(12, stated=(1, 4, 4)) == (12, 1, 1), "the net says what it expected"
    with pytest.raises(BadInput, match=r"data: expected a square image, .* got 101 values"):
        shape(101, image=True)


def test_the_shape_that_lists_of_lists_and_vectors_state(spark: Any) -> None:
    """Lists of lists are images; vectors, dense or sparse, and lists of decimals are vectors."""
    from pyspark.ml.linalg import Vectors

    def shape(value: Any, kind: str = "") -> Any:
        schema = f"label long, data {kind}" if kind else ["label", "data"]
        return first_shape(spark.createDataFrame([(1, value)], schema), None, image=False)

    assert shape([[[0.5] * 4] * 3] * 2, "array<array<array<float>>>") == (2, 3, 4)
    assert shape([[0.5] * 4] * 3, "array<array<double>>") == (1, 3, 4)
    assert shape([Decimal("0.5")] * 3, "array<decimal(5,2)>") == (3, 1, 1)
    assert shape(Vectors.dense([1.0, 2.0])) == (2, 1, 1)
    assert shape(Vectors.sparse(5, [1], [2.0])) == (5, 1, 1)


VECTORS = """
layer { name: "rows" type: "MemoryData" top: "data" top: "label"
        memory_data_param { batch_size: 8 } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
        inner_product_param { num_output: 2 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


@pytest.mark.parametrize(("size", "of_spark"), [(14, True), (100, False)])
def test_training_on_vectors(spark: Any, tmp_path: Path, size: int, of_spark: bool) -> None:
    """Features of any number are learned from, by a net without convolutions.

    They are lists, or vectors of Spark ML, of which every second is sparse.
    """
    from pyspark.ml.linalg import Vectors

    (tmp_path / "net.prototxt").write_text(VECTORS)
    solver = tmp_path / "solver.prototxt"
    solver.write_text('net: "net.prototxt" base_lr: 0.5 max_iter: 30')
    signs = [1.0 if row % 2 else -1.0 for row in range(60)]
    rows: list[tuple[int, Any]] = [(int(sign > 0), [sign] * size) for sign in signs]
    schema: Any = "label long, data array<double>"
    if of_spark:
        makes = (Vectors.dense, lambda values: Vectors.sparse(size, range(size), values))
        rows = [(label, makes[n % 2](values)) for n, (label, values) in enumerate(rows)]
        schema = ["label", "data"]
    df = spark.createDataFrame(rows, schema)
    trained = worker.train(df, model=worker.Caffe(solver), workers=2, shards_in="processes")
    assert len(trained.outcome.reports) == 2
    scores = trained.weights[: 2 * size].reshape(2, size).sum(axis=1)
    assert scores[1] > 0 > scores[0]


def test_a_row_that_is_no_number(spark: Any) -> None:
    """The error is the data's, and names the column and the row."""
    numbers = [[0.0, 1.0]] * 9 + [[0.0, float("nan")]]
    df = spark.createDataFrame([(0, row) for row in numbers], "label long, data array<double>")
    assert refusal(df.coalesce(1), ones_job(steps=10, workers=1)).startswith(
        "worker w0's rows, column data: row 9: expected finite numbers that float32 holds, got nan"
    )


def test_bad_input_is_final_at_the_first_attempt(spark: Any, tmp_path: Path) -> None:
    """What a task has refused is known while Spark tries it again."""
    released = tmp_path / "released"

    def task(batches: Any, partition: int, attempt: int, gpus: Any) -> Any:
        try:
            (tmp_path / "first").touch(exist_ok=False)
        except FileExistsError:
            eventually(released.exists, because="the first failure is seen", within_s=120)
            return iter(())
        raise BadInput("row 7: expected a number, got none")

    df = spark.createDataFrame(rows(4)).coalesce(1)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(door.run_tasks, df, task, pa.schema([("x", pa.int64())]), "final-test")
        failure = eventually(
            lambda: door.final_failure(df, "final-test") or job.done(),
            because="the failure is final",
        )
        released.touch()
        assert job.result() == []
    assert (type(failure), str(failure)) == (BadInput, "row 7: expected a number, got none")


def test_an_error_that_a_task_repeats_is_final(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many attempts Spark may make; other errors, and deaths, are not counted."""
    monkeypatch.setattr(tasks, "_MOST_RAISED", 2)
    released = tmp_path / "released"

    def task(batches: Any, partition: int, attempt: int, gpus: Any) -> Any:
        before = len(list(tmp_path.iterdir()))
        (tmp_path / str(before)).touch()
        if before < 3:
            raise GiveUp("ValueError: mine (loop.py:3)" if before else "ValueError: another")
        eventually(released.exists, because="the repetition is seen", within_s=120)
        return iter(())

    df = spark.createDataFrame(rows(4)).coalesce(1)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(door.run_tasks, df, task, pa.schema([("x", pa.int64())]), "repeats-test")
        failure = eventually(
            lambda: door.final_failure(df, "repeats-test") or job.done(),
            because="the failure is final",
        )
        assert len(list(tmp_path.iterdir())) >= 3
        released.touch()
        assert job.result() == []
    message = "a Spark task failed for good: ValueError: mine (loop.py:3)"
    assert (type(failure), str(failure)) == (GiveUp, message)


def test_a_model_that_raises(spark: Any) -> None:
    """The error names the file and line of the model; a note holds the traceback."""
    with pytest.raises(
        GiveUp, match=r"RuntimeError: the model broke \(ones_job\.py:\d+ in"
    ) as caught:
        run_job(spark.createDataFrame(rows(40)).coalesce(1), ones_job(Broken, steps=40, workers=1))
    assert 'raise RuntimeError("the model broke")' in "\n".join(caught.value.__notes__)


def test_a_model_without_a_loss(spark: Any) -> None:
    """What its method should have returned is named, with its class."""
    job = ones_job(Silent, steps=40, workers=1)
    assert refusal(spark.createDataFrame(rows(40)), job).startswith(
        "model Silent: the loss that `gradient` returns: expected a number, got None"
    )


# --- the Python of the tasks --------------------------------------------------------------------


def test_another_python(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lacks packages is refused by name, with what to set, before anything is started."""
    python = bare_python(tmp_path / "bin")
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
    line = refusal(spark.createDataFrame(rows(40)), ones_job(steps=1, workers=1))
    assert f"Spark's Python ({python}) has no module '" in line
    assert f"set PYSPARK_PYTHON before the session starts, here to {sys.executable}" in line


def test_the_python_of_a_users_function(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a function of the user's own runs in a Python that lacks packages, the error of its
    task names the variable to set: the rows are counted without the function."""
    from pyspark.sql.functions import udf

    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(bare_python(tmp_path / "bin")))
    frame = spark.createDataFrame(rows(40)).coalesce(1)
    frame = frame.withColumn("label", udf(lambda label: label, "long")("label"))
    monkeypatch.undo()
    with pytest.raises(GiveUp, match=r"No module named .* set PYSPARK_PYTHON before the session"):
        run_job(frame, ones_job(steps=1, workers=1))


@pytest.mark.parametrize(
    ("part", "line"),
    [
        (
            door.PartitionRows(
                1, "/there/python", "", "ModuleNotFoundError: No module named 'zmq'"
            ),
            "Spark's Python (/there/python) cannot run a worker, ModuleNotFoundError: No module",
        ),
        (
            door.PartitionRows(1, "/there/python", "0123456789abcdef", ""),
            "got 0123456789abcdef: install the same version in both places, or ship this one",
        ),
    ],
    ids=["package", "build"],
)
def test_a_python_that_cannot_run_workers(part: door.PartitionRows, line: str) -> None:
    """It lacks packages, or has another build of ours."""
    with pytest.raises(BadInput) as caught:
        door.check_python(part)
    assert line in str(caught.value)


PROGRAM = """
import json
import sys

import worker
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[2,4]").getOrCreate()
trained = worker.train(
    spark.read.parquet("data/train.parquet"),
    model=worker.Caffe("solver.prototxt"), workers=2, max_iter=3, shards_in="processes",
)
print(json.dumps([report.worker for report in trained.outcome.reports]))
"""


@pytest.mark.slow
def test_a_program_in_an_environment_that_is_not_activated(tmp_path: Path) -> None:
    """`.venv/bin/python program.py` trains, whatever `python3` comes first on PATH."""
    from tests.support import tiny_job

    tiny_job.write_job(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    python = bare_python(tmp_path / "bin")
    env = {name: value for name, value in os.environ.items() if name != "PYSPARK_PYTHON"}
    env["JAVA_HOME"] = spark_environment()["JAVA_HOME"]
    env |= {"PATH": f"{python.parent}:{os.environ['PATH']}"} | import_path(ROOT)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["w0", "w1"]
