"""Sparse tables in `worker.run` and `worker.stream`: rows by id, each push counted once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import ps
import worker
from shards.errors import BadInput, GiveUp
from worker.data.parameters_file import read_parameters

ROWS = 60
SCHEMA = "id long, user long"
TABLES = ps.Tables(
    net=ps.Dense.like({"count": np.zeros(1, np.float32)}, rate=1.0),
    user=ps.Sparse(2, rate=1.0, init=ps.Zeros()),
)
"""Tables in which rate 1 and first values of zero make a row the sum of what was pushed for it."""


@pytest.fixture(scope="module")
def visits(spark: Any) -> Any:
    """Rows with the id of a user: row n is of user n mod 7, who has the id of a large hash."""
    rows = [(row, user_of(row)) for row in range(ROWS)]
    return spark.createDataFrame(rows, SCHEMA).repartition(2).cache()


def user_of(row: int) -> int:
    """A negative id for every other user: the uint64 of the same bits."""
    return (row % 7 + 1) * (1 - 2 * (row % 2)) * 2**40


def sums(epochs: int) -> dict[int, list[float]]:
    """The row of each user after some epochs, by its id as uint64: visits, and numbers of rows."""
    expected: dict[int, list[float]] = {}
    for row in range(ROWS):
        totals = expected.setdefault(user_of(row) % 2**64, [0.0, 0.0])
        totals[0] += epochs
        totals[1] += epochs * row
    return expected


def as_dict(rows: Any) -> dict[int, list[float]]:
    """All stored rows by id, read by `gather`."""
    ids = rows.ids("user")
    return dict(zip(ids.tolist(), rows.gather("user", ids, missing="error").tolist(), strict=True))


def count_visits(args: Any, ctx: worker.Context) -> None:
    """Push what each row counts for; fail once in a `folder`, and for good in a micro-batch."""
    failed = Path(args["folder"]) / "failed"
    for number, batch in enumerate(ctx.batches(8, epochs=args["epochs"])):
        if ctx.chief and number == 1 and not failed.exists():
            failed.touch()
            raise RuntimeError("the first attempt fails here")
        if ctx.chief and ctx.batch is not None and ctx.batch == args.get("fails_in"):
            raise RuntimeError("the stream ends here")
        ids = batch["user"]
        with ctx.worker.step(samples=len(ids), gather={"user": ids}) as step:
            assert step.rows("user").shape == (len(ids), 2)
            step.push("net", {"count": np.full(1, -float(len(ids)), np.float32)})
            counts = np.stack([np.ones(len(ids)), batch["id"]], axis=1)
            step.scatter("user", -counts.astype(np.float32))


OPTIONS: dict[str, Any] = {
    "params": TABLES,
    "strategy": "asp:scale=1",
    "staleness": None,
    "shards_in": "processes",
    "shards": 2,
}


def test_rows_of_a_run_count_once_and_go_on(spark: Any, visits: Any, tmp_path: Path) -> None:
    """A retried task, tests, a resume into fewer shards and a reader agree with a plain count."""
    args = {"folder": str(tmp_path), "epochs": 2}
    place = tmp_path / "snapshots"

    def figures(params: Any, rows: Any) -> dict[str, float]:
        first = rows.gather("user", [user_of(0)], missing="zero")[0]
        return {"total": float(params["count"][0]), "visits": float(first[0])}

    trained = worker.run(visits, count_visits, args, evaluate=figures, snapshots=place, **OPTIONS)
    assert (tmp_path / "failed").exists()
    assert trained.params["count"] == 2 * ROWS
    assert as_dict(trained.rows) == sums(2)
    first = sums(2)[user_of(0)][0]
    assert trained.evaluations[-1].figures == {"total": 2 * ROWS, "visits": first}
    unknown = trained.rows.gather("user", [user_of(0), 5], missing="init")
    assert unknown.tolist() == [sums(2)[user_of(0)], [0.0, 0.0]]
    with pytest.raises(BadInput, match="expected rows that are stored, got 1 of 1 ids"):
        trained.rows.gather("user", [5], missing="error")

    saved = load_file(trained.save(tmp_path / "trained.safetensors"))
    assert saved["count"] == 2 * ROWS
    assert dict(zip(saved["user/ids"].tolist(), saved["user/rows"].tolist(), strict=True)) == (
        sums(2)
    )
    arena = TABLES.layout.empty()
    with pytest.raises(BadInput, match="rows continue by `resume`, from a snapshot, got rows of"):
        read_parameters(tmp_path / "trained.safetensors", TABLES, arena)

    assert trained.outcome.snapshot is not None
    again = worker.run(
        visits, count_visits, args, resume=trained.outcome.snapshot, **{**OPTIONS, "shards": 1}
    )
    assert as_dict(again.rows) == sums(2), "its workers have done their epochs"
    with (
        ps.start(TABLES, resume=trained.outcome.snapshot, on="threads") as job,
        ps.reader(job) as reader,
    ):
        ids = trained.rows.ids("user")
        assert np.array_equal(reader.gather("user", ids), trained.rows.gather("user", ids))
    other = ps.Tables(net=TABLES["net"], user=ps.Sparse(3, init=ps.Zeros()))
    with pytest.raises(BadInput, match=r"sparse tables user\(rows of 2, .*got user\(.* 3"):
        worker.run(
            visits,
            count_visits,
            args,
            resume=trained.outcome.snapshot,
            **{**OPTIONS, "params": other},
        )


def of_one(_params: Any) -> dict[str, float]:
    return {"loss": 0.0}


def of_two(_params: Any, _rows: Any) -> dict[str, float]:
    return {"loss": 0.0}


def scatter_alone(args: Any, ctx: worker.Context) -> None:
    for batch in ctx.batches(8, epochs=1):
        ids = batch["user"]
        with ctx.worker.step(gather={"weights": ids}) as step:
            step.scatter("weights", np.ones((len(ids), 1), np.float32))
    if args == "save" and ctx.chief:
        ctx.save("chief.safetensors")


def test_a_run_of_rows_alone_has_them_as_its_result(visits: Any) -> None:
    """A job without a dense table trains; the function cannot export rows, and is told so."""
    options = {**OPTIONS, "params": ps.Sparse(1, rate=1.0, init=ps.Zeros())}
    trained = worker.run(
        visits, scatter_alone, **options, evaluate=worker.Evaluate(of_two, every=1)
    )
    assert trained.params == {}
    assert not any("failed" in notice for notice in trained.outcome.notices)
    assert trained.rows.gather("weights", [user_of(0)]) == -sums(1)[user_of(0)][0]
    with pytest.raises(GiveUp, match="save: table weights: expected dense tables"):
        worker.run(visits, scatter_alone, "save", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "easgd"}, "table user: expected a strategy that works with rows"),
        ({"strategy": "downpour:n_push=4,n_fetch=4"}, "steps on weights of a worker's own"),
        ({"evaluate": of_one}, "run: evaluate: expected a function of the parameters"),
        (
            {
                "evaluate": of_two,
                "callbacks": [worker.KeepBest("loss", mode="min")],
            },
            "callbacks: KeepBest: expected dense tables",
        ),
    ],
)
def test_a_run_refuses_what_rows_cannot_do(visits: Any, options: Any, message: str) -> None:
    """Each refusal is one line, before anything starts."""
    with pytest.raises(BadInput, match=message):
        worker.run(visits, count_visits, {}, **{**OPTIONS, **options})


def test_rows_of_a_stream_count_once(spark: Any, visits: Any, tmp_path: Path) -> None:
    """A retried task and a stream that fails within a micro-batch and is started again."""
    visits.repartition(4).write.parquet(str(tmp_path / "visits"))
    reader = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 2)
    sdf = reader.parquet(str(tmp_path / "visits"))
    given = {
        **OPTIONS,
        "checkpoint": tmp_path / "checkpoint",
        "workers": 2,
        "trigger": {"availableNow": True},
    }
    args = {"folder": str(tmp_path), "epochs": 1, "fails_in": 1}  # of one worker; the other pushes
    with (
        worker.stream(sdf, count_visits, args, **given) as stream,
        pytest.raises(GiveUp, match="the stream ends here"),
    ):
        stream.wait()
    with worker.stream(sdf, count_visits, {**args, "fails_in": None}, **given) as stream:
        stream.wait()
        assert (tmp_path / "failed").exists()
        assert as_dict(stream.rows) == sums(1)
        saved = load_file(stream.save(tmp_path / "stream.safetensors"))
    assert sorted(saved) == ["count", "user/ids", "user/rows"]
