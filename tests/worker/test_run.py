"""`worker.run`: functions of one's own on the rows of a Spark DataFrame."""

import datetime as dt
import os
import signal
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from threading import Lock
from typing import Any

import cv2
import numpy as np
import pytest
from pyspark import TaskContext
from pyspark.ml.linalg import Vectors
from safetensors.numpy import load_file, save_file

import ps
import worker
from ps.snapshots.manifest import load_snapshot
from ps.tables import tables_of
from shards.errors import BadInput, GiveUp
from worker.data.parameters_file import read_parameters
from worker.job.function_run import RunOptions, function_job
from worker.spark import task_slots

WANTED = np.array([1.0, -2.0, 3.0], np.float32)
PARAMS = {"slope": np.zeros(3, np.float32), "offset": np.zeros((), np.float32)}
ROWS = 120


@pytest.fixture(scope="module")
def lines(spark: Any) -> Any:
    """Points on a line through WANTED and 5, with a column of lists, one of text, a ragged one."""
    dice = np.random.default_rng(3)
    rows = []
    for row in range(ROWS):
        x = dice.standard_normal(3).astype(np.float32)
        rows.append(
            (row, [float(v) for v in x], float(x @ WANTED + 5), f"row {row}", [1] * (row % 3))
        )
    schema = "id long, x array<float>, y float, name string, words array<int>"
    return spark.createDataFrame(rows, schema).repartition(2).cache()


def gradient(params: Any, batch: Any) -> tuple[float, Any]:
    """The loss of the line at `params`, and its gradient."""
    error = batch["x"] @ params["slope"] + params["offset"] - batch["y"]
    grads = {"slope": batch["x"].T @ error / len(error), "offset": error.mean()}
    return float(error @ error) / (2 * len(error)), grads


def distance(params: Any) -> float:
    """How far the parameters are from the line."""
    return float(np.abs(params["slope"] - WANTED).max() + abs(params["offset"] - 5))


def with_loop(args: Any, ctx: worker.Context) -> None:
    ctx.loop(gradient, args["size"], epochs=args["epochs"], columns=["x", "y"])


def with_steps(args: Any, ctx: worker.Context) -> None:
    """A loop of one's own over the SDK, which checks what it is given."""
    assert ctx.chief == (ctx.rank == 0)
    assert ctx.role == ("chief" if ctx.rank == 0 else "worker")
    context = TaskContext.get()
    assert context is not None
    assert ctx.partition == context.partitionId() == ctx.rank
    assert ctx.worker.name == f"w{ctx.rank}"
    seen: list[int] = []
    for batch in ctx.batches(7, epochs=2, ragged=["words"]):
        assert batch["x"].dtype == np.float32
        assert batch["name"][0] == f"row {batch['id'][0]}"
        assert [len(words) for words in batch["words"]] == [row % 3 for row in batch["id"]]
        seen += batch["id"].tolist()
        with ctx.worker.step(samples=len(batch["y"])) as step:
            step.loss, grads = gradient(step.pull(), batch)
            step.push(grads)
    assert sorted(seen) == sorted(2 * sorted(set(seen))), "each row is in each epoch once"


@pytest.mark.parametrize("strategy", ["downpour:scale=1", "easgd:tau=4", "bsp"])
def test_a_gradient_trains_with_a_strategy(lines: Any, strategy: str, tmp_path: Path) -> None:
    params = ps.Dense.like(PARAMS, rate=0.1)
    trained = worker.run(
        lines,
        with_loop,
        {"size": 10, "epochs": 15},
        params=params,
        strategy=strategy,
        shards_in="processes",
    )
    assert distance(trained.params) < distance(PARAMS) / 5
    assert sum(report.samples for report in trained.outcome.reports) >= 15 * ROWS
    saved = load_file(trained.save(tmp_path / "line.safetensors"))
    assert np.array_equal(saved["slope"], trained.params["slope"])
    with pytest.raises(BadInput, match=r"expected .safetensors, got '.txt'"):
        trained.save(tmp_path / "line.txt")


def with_two_tables(args: Any, ctx: worker.Context) -> None:
    def gradient_of_both(params: Any, batch: Any) -> tuple[float, Any]:
        loss, grads = gradient({"slope": params["slope"], "offset": params["offset"][0]}, batch)
        return loss, {"slope": grads["slope"], "offset": grads["offset"].reshape(1)}

    ctx.loop(gradient_of_both, 10, epochs=25, columns=["x", "y"])


def test_each_table_is_exchanged_by_itself(lines: Any) -> None:
    """Workers on Spark train several dense tables as fragments; too many are refused at once."""
    tables = ps.Tables(
        slope=ps.Dense.like(np.zeros(3), rate=0.1), offset=ps.Dense.like(np.zeros(1), rate=0.1)
    )
    strategy = "decoupled_diloco:h=6,inner_lr=0.1,momentum=0.5,weight_decay=0"
    how: dict[str, Any] = {"shards_in": "processes", "strategy": strategy}
    result = worker.run(lines, with_two_tables, params=tables, **how)
    trained = {"slope": result.params["slope"], "offset": result.params["offset"][0]}
    assert distance(trained) < distance(PARAMS) / 2
    assert sum(report.samples for report in result.outcome.reports) == 25 * ROWS
    line = "h: expected at least 1 step for each of 4 dense tables, got 3"
    many = ps.Tables({f"table{n}": ps.Dense.like(np.zeros(3)) for n in range(4)})
    with pytest.raises(BadInput, match=f"^strategy streaming_diloco: {line}"):
        worker.run(lines, with_two_tables, params=many, strategy="streaming_diloco:h=3")


def test_a_loop_of_ones_own_sees_every_row_once_an_epoch(lines: Any) -> None:
    trained = worker.run(lines, with_steps, params=PARAMS, shards_in="processes", shards=2)
    assert sum(report.samples for report in trained.outcome.reports) == 2 * ROWS
    steps = sum(report.steps for report in trained.outcome.reports)
    assert [status.version for status in trained.outcome.statuses] == [steps, steps]


def failing_once(args: Any, ctx: worker.Context) -> None:
    """Fail in the middle, in the first attempt of one worker."""
    for number, batch in enumerate(ctx.batches(5, epochs=2, columns=["id", "x", "y"])):
        if ctx.chief and number == 6 and not Path(args).exists():
            Path(args).touch()
            raise RuntimeError("the first attempt fails here")
        with ctx.worker.step(samples=len(batch["y"])) as step:
            step.pull()
            step.push({"slope": np.zeros(3), "offset": -float(batch["id"].sum())})


def test_a_retried_task_trains_on_each_row_once_an_epoch(lines: Any, tmp_path: Path) -> None:
    """The sum of what was pushed proves the count: every id twice."""
    table = ps.Dense.like(PARAMS, rate=1.0)
    trained = worker.run(
        lines,
        failing_once,
        str(tmp_path / "failed"),
        params=table,
        strategy="downpour:scale=1",
        staleness=None,
        shards_in="processes",
    )
    assert (tmp_path / "failed").exists()
    assert trained.params["offset"] == 2 * sum(range(ROWS))


def test_training_ends_when_a_test_reaches_the_target(lines: Any) -> None:
    """Workers without an end are stopped, and the parameters are those that were reached."""
    figures = {"distance": distance}
    trained = worker.run(
        lines,
        with_loop,
        {"size": 10, "epochs": None},
        params=ps.Dense.like(PARAMS, rate=0.1),
        shards_in="processes",
        evaluate=worker.Evaluate(
            lambda params: {name: each(params) for name, each in figures.items()},
            every=10,
            until=lambda found: found["distance"] < 0.5,
        ),
    )
    assert not trained.outcome.interrupted
    assert trained.evaluations[-1].figures["distance"] < 0.6


def reading_twice(_args: Any, ctx: worker.Context) -> None:
    ctx.batches(4, epochs=1)
    ctx.feed.next_batch(4)


def of_feed(_args: Any, ctx: worker.Context) -> None:
    rows = 0
    while not ctx.feed.should_stop():
        rows += len(ctx.feed.next_batch(32)["id"])
        with ctx.worker.step(samples=rows) as step:
            step.pull()
    with ctx.worker.step() as step:
        step.pull()
        step.push({"slope": np.zeros(3), "offset": -float(rows)})


def test_columns_of_spark_ml_are_numbers(spark: Any) -> None:
    """Vectors, decimals, lists of lists and dates reach the function as arrays of numbers."""
    vectors = [Vectors.dense([1.0, 0.0, 2.0]), Vectors.sparse(3, [1], [5.0])]
    rows = [
        (vectors[row % 2], Decimal(row), [[row, row]], dt.date(2020, 1, 1), float(row))
        for row in range(8)
    ]
    df = spark.createDataFrame(rows, ["v", "decimal", "nested", "day", "y"]).selectExpr(
        "v", "cast(decimal AS decimal(10,2)) AS decimal", "nested", "day", "y"
    )

    def train(args: Any, ctx: worker.Context) -> None:
        for batch in ctx.batches(8, epochs=1):
            assert sorted(map(tuple, batch["v"])) == [(0.0, 5.0, 0.0)] * 4 + [(1.0, 0.0, 2.0)] * 4
            assert batch["decimal"].dtype == np.float64
            assert np.array_equal(batch["decimal"], batch["y"])
            assert np.array_equal(batch["nested"], np.stack([batch["y"]] * 2, 1)[:, None])
            assert batch["day"].dtype == "M8[D]"
            with ctx.worker.step() as step:
                step.push({"slope": -batch["v"].sum(0), "offset": np.float32(0)})

    params = ps.Dense.like(PARAMS, rate=1.0)
    trained = worker.run(df.coalesce(1), train, params=params, shards_in="processes")
    assert trained.params["slope"].tolist() == [4.0, 20.0, 8.0]


def test_the_feed_gives_each_row_once(lines: Any) -> None:
    table = ps.Dense.like(PARAMS, rate=1.0)
    options: dict[str, Any] = {"strategy": "downpour:scale=1", "shards_in": "processes"}
    assert worker.run(lines, of_feed, params=table, **options).params["offset"] == ROWS


def of_two_tables(args: Any, ctx: worker.Context) -> None:
    """Push to one table in every step, to the other in every second; the chief exports."""
    for number, batch in enumerate(ctx.batches(10, epochs=1, columns=["id"])):
        with ctx.worker.step(samples=len(batch["id"])) as step:
            assert step.pull("ids")["sum"].shape == (1,)
            step.push("ids", {"sum": [-float(batch["id"].sum())]})
            if number % 2 == 0:
                step.push("steps", {"even": [-1.0]})
    if ctx.chief:
        assert ctx.path("s3://bucket/net") == "s3://bucket/net"
        ctx.save(args)
    else:
        with pytest.raises(BadInput, match=r"save: expected the chief to export, got worker w1"):
            ctx.save(args)


def test_several_tables_train_and_the_chief_exports(
    lines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each table has a rule and a rate of its own; a relative path begins in this folder."""
    monkeypatch.chdir(tmp_path)
    tables = ps.Tables(
        ids=ps.Dense.like({"sum": np.zeros(1, np.float32)}, rate=1.0),
        steps=ps.Dense.like({"even": np.zeros(1, np.float32)}, rate=0.5),
    )
    options: dict[str, Any] = {"strategy": "downpour:scale=1", "shards_in": "processes"}
    trained = worker.run(
        lines,
        of_two_tables,
        "out/net.safetensors",
        params=tables,
        staleness=None,
        evaluate=lambda params: {"sum": float(params["ids"]["sum"][0])},
        **options,
    )
    assert trained.params["ids"]["sum"] == sum(range(ROWS))
    steps = [report.steps for report in trained.outcome.reports]
    assert trained.params["steps"]["even"] == sum((count + 1) // 2 for count in steps) / 2
    assert trained.evaluations[-1].figures == {"sum": sum(range(ROWS))}
    exported = load_file(tmp_path / "out" / "net.safetensors")
    assert set(exported) == {"ids.sum", "steps.even"}
    saved = load_file(trained.save(tmp_path / "all.safetensors"))
    assert saved["ids.sum"] == trained.params["ids"]["sum"]


def stopping(args: Any, ctx: worker.Context) -> None:
    """The first worker stops after three steps; others would never end."""
    (Path(args) / f"w{ctx.rank}").touch()
    for number, batch in enumerate(ctx.batches(4, columns=["id"])):
        if ctx.rank == 0 and number == 3:
            ctx.stop()
        with ctx.worker.step(samples=len(batch["id"])) as step:
            step.pull()
            step.push({"slope": np.zeros(3), "offset": -1.0 * (ctx.rank == 0)})


def test_a_stop_ends_later_waves_too(spark: Any, tmp_path: Path) -> None:
    """Of six workers in three waves of two, those of the last wave never begin."""
    df = spark.range(0, 600, 1, 6)
    trained = worker.run(
        df,
        stopping,
        str(tmp_path),
        params=ps.Dense.like(PARAMS, rate=1.0),
        strategy="downpour:scale=1",
        staleness=None,
        shards_in="processes",
    )
    assert trained.params["offset"] == 4, "the last batch before the end was trained on"
    assert not trained.outcome.interrupted
    assert not (tmp_path / "w5").exists()


def test_a_path_is_read_by_spark_or_by_the_workers(
    lines: Any, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parquet and TFRecord are read by Spark, images by the tasks; every row is in an epoch."""
    options: dict[str, Any] = {"strategy": "downpour:scale=1", "shards_in": "processes"}
    table = ps.Dense.like(PARAMS, rate=1.0)
    few = lines.select("id").limit(10)
    few.coalesce(1).write.parquet(str(tmp_path / "parquet"))
    spark.dataSource.register(worker.TFRecord)
    few.coalesce(1).write.format("tfrecord").mode("append").save(str(tmp_path / "records"))
    monkeypatch.chdir(tmp_path)
    for place in ("parquet", tmp_path / "records"):
        assert worker.run(place, of_feed, params=table, **options).params["offset"] == 10
    for number in range(6):
        folder = tmp_path / "images" / ("cats" if number % 2 else "dogs")
        folder.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / f"{number}.png"), np.full((4, 4, 3), number, np.uint8))
    trained = worker.run("images", of_feed, params=table, workers=2, **options)
    assert trained.params["offset"] == 6
    (tmp_path / "cut.tfrecord").write_bytes(b"no record")
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("read: .*cut.tfrecord: record 0: expected .* the file is truncated", "cut.tfrecord", {}),
        ("expected a number of `workers`", "images", {}),
        ("at most 6, one a row, got 7", "images", {"workers": 7}),
        ("expected a folder or a file, got nothing there", "nothing", {}),
        ("expected files that end in .parquet or .tfrecord", "s3://", {}),
    ]
    for wanted, data, more in cases:
        with pytest.raises(BadInput, match=wanted):
            worker.run(data, of_feed, params=table, **more, **options)


@pytest.mark.parametrize(
    ("train", "options", "message"),
    [
        (reading_twice, {}, "expected the rows to be read once in a task"),
        (
            lambda _args, ctx: next(ctx.batches(4, columns=["z"])),
            {},
            "worker w[01]'s rows: expected a column z, got id, x, y, name, words",
        ),
        (lambda _args, ctx: ctx.batches(0), {}, "batches: size: expected a whole number"),
        (3, {}, "run: train: expected a function of args and ctx, got 3"),
        (
            lambda: None,
            {},
            "expected a function of args and ctx, got one with other parameters: too",
        ),
        (lambda _args, ctx: ctx.batches(4, ragged="words"), {}, "batches: ragged: expected a list"),
        (
            lambda _args, ctx: next(ctx.batches(4)),
            {},
            "column words: row .*: expected . values, as",
        ),
        (with_loop, {"stalenes": 2}, "run: expected staleness, or another known name, got 'stalen"),
        (with_loop, {"device": "gpu:99"}, "device gpu:99: expected"),
        (with_loop, {"device": "moon"}, "device: expected auto, cpu, gpu or gpu:N, got 'moon'"),
        (
            with_loop,
            {"logs": "logs"},
            "run: logs: expected a folder for logs only with durability p",
        ),
        (with_loop, {"workers": 500}, "expected at most 120, as the data has 120 rows"),
        (with_loop, {"evaluate": 3}, "run: evaluate: expected a function of the parameters"),
        (with_loop, {"params": {"w": "x"}}, "params"),
        (with_loop, {"strategy": "nothing"}, "strategy: expected one of"),
    ],
)
def test_wrong_input_is_named(lines: Any, train: Any, options: Any, message: str) -> None:
    given = {"params": PARAMS, "shards_in": "processes"} | options
    with pytest.raises((BadInput, GiveUp), match=message):
        worker.run(lines, train, **given)


def test_rounds_of_more_workers_than_slots_are_announced(lines: Any) -> None:
    """They run in waves, and the outcome says how many workers a round can have."""
    trained = worker.run(
        lines,
        with_loop,
        {"size": 10, "epochs": 1},
        params=PARAMS,
        strategy="bsp",
        workers=6,
        shards_in="processes",
    )
    (notice,) = trained.outcome.notices
    slots = task_slots(lines)
    assert notice.startswith(
        "strategy bsp: expected a task slot of Spark for each of the 6 workers of a round, got"
        f" {slots}: a round is the mean of at most {slots}"
    )
    assert len(trained.outcome.reports) == 6


def test_a_run_continues_another_and_starts_from_a_file(
    lines: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A snapshot has all of the state; a file has arrays by name, and others keep their values."""
    options: dict[str, Any] = {"shards_in": "processes", "strategy": "downpour:scale=1"}
    table = ps.Dense.like(PARAMS, rate=1.0)
    first = worker.run(lines, of_feed, params=table, snapshots=tmp_path, **options)
    again = worker.run(lines, of_feed, params=table, resume=first.outcome.snapshot, **options)
    assert again.params["offset"] == 2 * ROWS
    save_file(
        {"offset": np.full((), 7, np.float32), "more": np.ones(2)}, tmp_path / "a.safetensors"
    )
    with caplog.at_level("INFO", "downpour.worker"):
        tuned = worker.run(
            lines, of_feed, params=table, weights=tmp_path / "a.safetensors", **options
        )
    assert tuned.params["offset"] == 7 + ROWS
    assert "copied offset; left at their first values: slope; not used: more" in caplog.text


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"other": np.ones(1, np.float32)}, "expected arrays among slope, offset, got other"),
        (
            {"slope": np.ones(4, np.float32)},
            r"slope: expected float32 of shape \(3,\), got float32",
        ),
        ({"slope": np.ones(3)}, r"slope: expected float32 of shape \(3,\), got float64 of \(3,\)"),
        (None, r"weights .*a.safetensors: cannot be read: "),
    ],
)
def test_a_file_of_other_arrays_is_refused(arrays: Any, message: str, tmp_path: Path) -> None:
    """In one line, and nothing of it is copied."""
    place = tmp_path / "a.safetensors"
    if arrays is None:
        place.write_bytes(b"no such format")
    else:
        save_file(arrays, place)
    tables = tables_of(PARAMS)
    with pytest.raises(BadInput, match=message):
        read_parameters(place, tables, np.zeros(256, np.float32))
    with pytest.raises(BadInput, match=r"expected .safetensors, got '.bin'"):
        read_parameters(tmp_path / "a.bin", tables, np.zeros(256, np.float32))


def test_each_table_travels_as_it_describes() -> None:
    """The option `compress` of the run replaces what the tables say."""
    tables = ps.Tables(a=ps.Dense.like(PARAMS, compression="int8"), b=ps.Dense.like(PARAMS))
    for compress, wanted in (
        ("none", {"a": ps.Compression.parse("int8"), "b": ps.Compression()}),
        ("bf16", ps.Compression.parse("bf16")),
    ):
        options = RunOptions(params=tables, compress=compress)
        job = function_job(with_loop, None, tables, options, 2)
        assert job.compression == wanted
        assert job.keeps_own_state
    plain = ps.Tables(a=ps.Dense.like(PARAMS))
    assert not function_job(with_loop, None, plain, RunOptions(params=plain), 2).keeps_own_state


def test_a_function_that_cannot_be_sent_is_named(lines: Any) -> None:
    with pytest.raises(BadInput, match=r"run: args: expected what can be sent.*'_thread.lock'"):
        worker.run(lines, with_loop, Lock(), params=PARAMS)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt in this process, as in a user's."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


def interrupting(args: Any, ctx: worker.Context) -> None:
    """Train without end; the chief presses Ctrl-C for the driver in its third step."""
    for number, batch in enumerate(ctx.batches(10, columns=["x", "y"])):
        if ctx.chief and number == 3:
            os.kill(args["driver"], signal.SIGINT)
        with ctx.worker.step(samples=len(batch["y"])) as step:
            step.loss, grads = gradient(step.pull(), batch)
            step.push(grads)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_raises_with_the_result(lines: Any, tmp_path: Path) -> None:
    """The exception holds the parameters so far, which a snapshot has, too."""
    options: dict[str, Any] = {"params": PARAMS, "shards_in": "processes"}
    args = {"driver": os.getpid()}
    with pytest.raises(
        KeyboardInterrupt, match=r"^Ctrl-C after \d+ steps of all workers: "
    ) as info:
        worker.run(lines, interrupting, args, snapshots=tmp_path, **options)
    assert isinstance(info.value, worker.Interrupted)
    result: Any = info.value.result
    assert str(info.value).endswith(f"; resume from {result.outcome.snapshot}")
    manifest, _ = load_snapshot(result.outcome.snapshot)
    assert manifest.steps >= 3
    assert distance(result.params) < distance(PARAMS)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_returns_the_result_on_request(lines: Any) -> None:
    returned = worker.run(
        lines,
        interrupting,
        {"driver": os.getpid()},
        params=PARAMS,
        shards_in="processes",
        on_interrupt="return",
    )
    assert returned.outcome.interrupted
    assert returned.outcome.statuses[0].steps >= 3


def crashing(args: Any, ctx: worker.Context) -> None:
    """End the process as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_python_worker_is_named(lines: Any) -> None:
    """The error says that the process of a worker was killed, and where to look."""
    with pytest.raises(GiveUp, match=r"Python worker of Spark exited .*: see whether .* memory"):
        worker.run(lines, crashing, params=PARAMS, shards_in="processes")
