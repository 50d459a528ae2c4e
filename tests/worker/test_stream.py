"""`worker.stream`: each micro-batch of a Spark stream counts exactly once."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import ps
import worker
from shards.errors import BadInput, GiveUp
from tests.support.eventually import eventually

WANTED = np.array([1.0, -2.0, 3.0], np.float32)
PARAMS = {"slope": np.zeros(3, np.float32), "offset": np.zeros((), np.float32)}
ROWS, FILES = 240, 6
SCHEMA = "id long, x array<float>, y float"


@pytest.fixture(scope="module")
def files(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parquet files of points on a plane."""
    folder = tmp_path_factory.mktemp("stream")
    points = np.random.default_rng(3).standard_normal((ROWS, 3)).astype(np.float32)
    rows = [(row, x.tolist(), float(x @ WANTED + 5)) for row, x in enumerate(points)]
    spark.createDataFrame(rows, SCHEMA).repartition(FILES).write.parquet(str(folder / "points"))
    return folder / "points"


def points(spark: Any, files: Path) -> Any:
    """A stream of two files a micro-batch."""
    reader = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 2)
    return reader.parquet(str(files))


def options(checkpoint: Path, rate: float = 1.0) -> dict[str, Any]:
    return {
        "params": ps.Dense.like(PARAMS, rate=rate),
        "checkpoint": checkpoint,
        "workers": 2,
        "strategy": "downpour:scale=1",
        "staleness": None,
        "shards_in": "processes",
        "trigger": {"availableNow": True},
    }


def gradient(params: Any, batch: Any) -> tuple[float, Any]:
    error = batch["x"] @ params["slope"] + params["offset"] - batch["y"]
    grads = {"slope": batch["x"].T @ error / len(error), "offset": error.mean()}
    return float(error @ error) / (2 * len(error)), grads


def regression(args: Any, ctx: worker.Context) -> None:
    """Train; fail for good in the middle of a micro-batch, if that is wanted."""
    batches = 0

    def counted(params: Any, batch: Any) -> tuple[float, Any]:
        nonlocal batches
        batches += 1
        if ctx.batch == args["fails_in"] and batches > 3:
            raise RuntimeError("the stream ends here")
        return gradient(params, batch)

    ctx.loop(counted, 5, epochs=8)


def test_a_regression_continues_in_the_middle_of_a_stream(
    spark: Any, files: Path, tmp_path: Path
) -> None:
    """The stream is stopped by an error within its second micro-batch, and started again."""
    given = options(tmp_path / "checkpoint", rate=0.05)
    with worker.stream(points(spark, files), regression, {"fails_in": 1}, **given) as stream:
        with pytest.raises(GiveUp, match="the stream ends here"):
            stream.wait()
        assert stream.batches == 1
        first = stream.params
    with worker.stream(points(spark, files), regression, {"fails_in": None}, **given) as stream:
        assert np.array_equal(stream.params["slope"], first["slope"]), "it begins where it ended"
        stream.wait()
        assert stream.batches == FILES / 2
        found = stream.params
        saved = load_file(stream.save(tmp_path / "plane.safetensors"))
    assert np.abs(found["slope"] - WANTED).max() + abs(found["offset"] - 5) < 0.2
    assert np.array_equal(saved["slope"], found["slope"])


def ids(args: Any, ctx: worker.Context) -> None:
    """Push the sum of the ids in two epochs; be killed once, fail once for good, as is wanted."""
    for number, batch in enumerate(ctx.batches(5, epochs=2, columns=["id"])):
        once = Path(args["folder"]) / "killed"
        if ctx.batch == 1 and ctx.chief and number == 3 and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if (ctx.batch, number) == (args["fails_in"], 2):
            raise RuntimeError("the stream ends here")
        with ctx.worker.step(samples=len(batch["id"])) as step:
            step.pull()
            step.push({"slope": np.zeros(3), "offset": -float(batch["id"].sum())})
        if ctx.batch == args.get("stops_in"):
            ctx.stop()


def test_every_row_of_a_stream_counts_once(spark: Any, files: Path, tmp_path: Path) -> None:
    """The sum of what was pushed proves it: each step is applied once through kill -9 of a Python
    worker, a stream that fails in the middle, and a micro-batch that Spark repeats because it has
    no record of its end.
    """
    checkpoint = tmp_path / "checkpoint"
    given = options(checkpoint)
    args = {"folder": str(tmp_path), "fails_in": 2}
    with worker.stream(points(spark, files), ids, args, **given) as stream:
        with pytest.raises(GiveUp, match="the stream ends here"):
            stream.wait()
        assert stream.batches == 2
        two = float(stream.params["offset"])
    assert (tmp_path / "killed").exists()
    for record in (checkpoint / "spark" / "commits").glob("*1*"):  # as if Spark had died before it
        record.unlink()
    args["fails_in"] = None
    with worker.stream(points(spark, files), ids, args, **given) as stream:
        assert stream.params["offset"] == two
        assert stream.wait(60.0)
        assert stream.batches == 3
        assert stream.params["offset"] == 2 * sum(range(ROWS))


def test_a_stop_is_a_normal_end_of_a_query(spark: Any, files: Path, tmp_path: Path) -> None:
    """Spark has no error to log: after `ctx.stop`, and after `stop` in a micro-batch; and each row
    counts once all the same, that of a micro-batch that Spark had begun when it was stopped too.
    """
    args = {"folder": str(tmp_path), "fails_in": None, "stops_in": 0}
    given = options(tmp_path / "c")
    with worker.stream(points(spark, files), ids, args, **given) as stream:
        assert stream.wait()
        assert stream.batches == 1
    assert stream._query.exception() is None
    del args["stops_in"]
    given["checkpoint"] = tmp_path / "d"
    with worker.stream(points(spark, files), ids, args, **given) as stream:
        eventually(stream._batches._lock.locked, because="a micro-batch is under way")
        stream.stop()
        assert stream.batches == 1
    assert stream._query.exception() is None
    with worker.stream(points(spark, files), ids, args, **given) as stream:
        assert stream.wait()
        assert stream.params["offset"] == 2 * sum(range(ROWS))
    with (
        pytest.raises(BadInput, match="it was made with workers 2, got 3"),
        worker.stream(points(spark, files), ids, args, **options(tmp_path / "c") | {"workers": 3}),
    ):
        pass


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"workers": 0}, "stream: workers: expected at least 1"),
        ({"strategy": "eamsgd"}, "without a state of its workers"),
        ({"compress": "int8"}, "stream: strategy downpour: expected one without compressed pushes"),
        ({"durability": "logged"}, "stream: durability: expected memory or replicated"),
    ],
)
def test_wrong_options_are_named(
    spark: Any, files: Path, tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with (
        pytest.raises(BadInput, match=message),
        worker.stream(points(spark, files), ids, {}, **options(tmp_path) | more),
    ):
        pass


def test_a_frame_that_does_not_stream_is_refused(spark: Any, tmp_path: Path) -> None:
    with (
        pytest.raises(BadInput, match="expected a streaming DataFrame, got another"),
        worker.stream(spark.range(3), ids, {}, **options(tmp_path)),
    ):
        pass


def test_a_function_of_other_parameters_is_refused(spark: Any, files: Path, tmp_path: Path) -> None:
    """Before the stream starts, as in `worker.run`."""
    message = "stream: train: expected a function of args and ctx, got one with other parameters"

    def train() -> None:
        """It takes nothing."""

    given: Any = train
    with (
        pytest.raises(BadInput, match=message),
        worker.stream(points(spark, files), given, {}, **options(tmp_path)),
    ):
        pass
