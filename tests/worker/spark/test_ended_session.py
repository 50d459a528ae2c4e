"""A Spark session that has ended: stopped by its owner, or with its JVM killed."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import worker
from shards.errors import BadInput, GiveUp
from worker.ml import NetRegressor
from worker.ml.models import FittedNet, NetRegressorModel
from worker.ml.nets import NetSpec
from worker.spark import tasks

NET = "tests.support.ml_nets:Line"
ENDED = ": expected a Spark session that runs, got one that has been stopped or whose JVM has ended"


def train(_args: Any, _ctx: worker.Context) -> None:
    """Never called."""


def test_a_stopped_session_is_refused(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line by everything that reads a DataFrame, before anything is started."""
    df = spark.createDataFrame([([1.0], 1.0)], "features array<float>, label float")
    images = spark.createDataFrame([(b"1234", 1)], "image binary, label long")
    lines = spark.readStream.format("rate").load()
    params = {"slope": np.zeros((1, 1), np.float32)}
    model = worker.CustomModel(lambda: None, 1)  # type: ignore[arg-type,return-value]
    calls: dict[str, Any] = {
        "run: data": lambda: worker.run(df, train, params=params),
        "train: df": lambda: worker.train(images, model=model, max_iter=1),
        "train": lambda: worker.train(spark, model=model, max_iter=1),
        "stream: df": lambda: worker.stream(
            lines, train, params=params, checkpoint="c", workers=1
        ).__enter__(),
        "fit": lambda: NetRegressor(model=NET, modelArgs={"size": 1}).fit(df),
        "transform": lambda: NetRegressorModel(
            FittedNet(NetSpec(NET, {"size": 1}), params, {"features": (1,)})
        ).transform(df),
    }
    monkeypatch.setattr(spark.sparkContext, "_jsc", None)  # as `stop` leaves it
    for what, call in calls.items():
        with pytest.raises(BadInput, match=rf"^{what}{ENDED}"):
            call()


def test_a_jvm_that_is_killed_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named although every later call to the JVM fails, too."""

    def fail(*_: Any) -> Any:
        raise ConnectionRefusedError(111, "Connection refused")

    context = SimpleNamespace(addJobTag=lambda _: None, removeJobTag=fail, cancelJobsWithTag=fail)
    session = SimpleNamespace(sparkContext=context)
    df: Any = SimpleNamespace(_jdf=None, sparkSession=session)
    monkeypatch.setattr(tasks, "map_tasks", lambda *_: SimpleNamespace(collect=fail))
    with pytest.raises(GiveUp, match=r"^Spark's JVM has ended, killed or crashed") as caught:
        tasks.run_tasks(df, lambda *_: iter(()), pa.schema([]), "tag")
    assert caught.value.__suppress_context__
