"""Callbacks: what is called when, what ends a run, and which parameters it returns."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import ps
import worker
from shards.errors import BadInput, GiveUp
from shards.shard_status import ShardStatus
from shards.update_records import RECORD
from worker.callbacks.base import Watch, watching
from worker.training.evaluation import Evaluation

TWO_WORKERS = 2
CLUSTER: Any = SimpleNamespace(job="j1")


class Log(worker.Callback):
    """Keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def started(self, run: worker.WatchedRun) -> None:
        self.calls.append(("started", run.job, run.settings))

    def progressed(self, status: worker.RunStatus) -> None:
        self.calls.append(status)

    def evaluated(self, result: Evaluation, parameters: worker.Parameters) -> None:
        self.calls.append((result.figures, parameters.params))

    def ended(self, parameters: worker.Parameters | None) -> None:
        self.calls.append(("ended", None if parameters is None else parameters.params))


class Failing(worker.Callback):
    """Raises when it hears of a test."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.calls = 0

    def evaluated(self, result: Evaluation, parameters: worker.Parameters) -> None:
        self.calls += 1
        raise self.error


def parameters(weights: Any) -> worker.Parameters:
    return worker.Parameters(weights, lambda arena: {"w": float(arena[0])}, lambda *_: None)


def run(*, tests: bool = True) -> worker.WatchedRun:
    return worker.WatchedRun(TWO_WORKERS, {"shards": 1}, tests=tests)


def result_of(number: int, **figures: float) -> Evaluation:
    return Evaluation(number, 10 * number, float(number), figures)


def status(steps: int, samples: int) -> ShardStatus:
    return ShardStatus(0, steps, steps, samples, 0.5, 0, 0, 0, 0, 0, 0, 0, 0, ())


def follow(watch: Watch, metric: str, values: list[float]) -> int:
    """Pass tests with these values on; returns how many until a callback ends the run."""
    watch.started(CLUSTER, None)
    for number, value in enumerate(values, 1):
        watch.evaluated(result_of(number, **{metric: value}), np.full(1, number, np.float32))
        if watch.progressed([status(number, number)], [np.zeros(0, RECORD)]):
            return number
    return 0


def test_the_order_and_the_content_of_the_calls() -> None:
    """Losses and staleness are means over the pushes that were not dropped."""
    log = Log()
    records = np.zeros(3, RECORD)
    records["loss"], records["staleness"], records["dropped"] = [1, 3, 9], [0, 1, 9], [0, 0, 1]
    with watching([log], run(), parameters) as watch:
        watch.started(CLUSTER, None)
        assert not watch.progressed([status(4, 40)], [records])
        watch.evaluated(result_of(2, accuracy=0.5), np.ones(1, np.float32))
        last = watch.finish(np.full(1, 2, np.float32), [result_of(4, accuracy=0.6)])
    started, progress, first, second, ended = log.calls
    assert started[0] == "started"
    assert started[2] == {"shards": 1}
    assert (progress.iteration, progress.samples, progress.updates) == (2, 40, 2)
    assert (progress.loss, progress.staleness, progress.rate) == (2.0, 0.5, 0.5)
    assert first == ({"accuracy": 0.5}, {"w": 1.0})
    assert second == ({"accuracy": 0.6}, {"w": 2.0})
    assert ended == ("ended", {"w": 2.0})
    assert last.params == {"w": 2.0}


@pytest.mark.parametrize(
    ("mode", "values", "stopped_at", "best"),
    [
        ("max", [0.5, 0.7, 0.6, 0.65, 0.9], 4, 2),
        ("max", [0.5, 0.6, 0.55, 0.7], 0, 4),
        ("max", [0.5, 0.505, 0.509, 0.6], 3, 1),  # gains of 0.01 or less are none
        ("max", [math.nan, math.nan, 0.5], 2, None),
        ("min", [3.0, 2.0, math.nan, 2.5], 4, 2),
    ],
)
def test_early_stop(mode: str, values: list[float], stopped_at: int, best: int | None) -> None:
    """A run ends after two tests in a row without a gain, and never before."""
    stop = worker.EarlyStop("figure", mode=mode, patience=2, min_change=0.01)
    for _ in range(2):  # a second run begins from nothing
        with watching([stop], run(), parameters) as watch:
            assert follow(watch, "figure", values) == stopped_at
        assert (None if stop.best is None else stop.best.iteration) == best


def test_the_best_parameters_are_returned_and_written(tmp_path: Path) -> None:
    """Those of the best test, whatever callback comes first; the last test counts as well."""
    written: list[Any] = []
    keep = worker.KeepBest("loss", mode="min", path=tmp_path / "best.safetensors")
    log = Log()

    def saved(weights: Any) -> worker.Parameters:
        return worker.Parameters(
            weights, lambda arena: {"w": float(arena[0])}, lambda *given: written.append(given)
        )

    for last, wanted in ((5.0, 2.0), (0.5, 9.0)):
        written.clear()
        with watching([log, keep], run(), saved) as watch:
            follow(watch, "loss", [3.0, 1.0, math.nan, 2.0])
            found = watch.finish(np.full(1, 9, np.float32), [result_of(9, loss=last)])
        assert found.params == {"w": wanted}
        assert log.calls[-1] == ("ended", {"w": wanted})
        assert [float(arena[0]) for _, arena in written] == [1.0, 2.0, 9.0][: len(written)]
        assert written[-1] == (keep.path, found.weights)


def test_an_error_of_a_callback_costs_its_calls_and_not_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """BadInput ends a run while it trains; after its end no error may lose the result."""
    log = Log()
    for error in (GiveUp("the disk is full"), RuntimeError("a defect")):
        failing = Failing(error)
        with watching([failing, log], run(), parameters) as watch:
            assert follow(watch, "figure", [1.0, 2.0]) == 0
            watch.finish(np.ones(1, np.float32), [])
        assert failing.calls == 1
        assert f"callback Failing failed, and gets no more calls: {error}"[:40] in caplog.text
    wrong = Failing(BadInput("no such figure"))
    with (
        pytest.raises(BadInput, match="no such figure"),
        watching([wrong, log], run(), parameters) as watch,
    ):
        follow(watch, "figure", [1.0])
    assert log.calls[-1] == ("ended", None)
    with watching([wrong], run(), parameters) as watch:
        watch.started(CLUSTER, None)
        result = watch.finish(np.ones(1, np.float32), [result_of(1, figure=1.0)])
    assert result.params == {"w": 1.0}


def test_a_callback_watches_one_run_at_a_time() -> None:
    stop = worker.EarlyStop("figure", mode="max")
    with (
        watching([stop], run(), parameters),
        pytest.raises(BadInput, match="expected a EarlyStop for each of two runs at a time"),
        watching([stop], run(), parameters),
    ):
        pass
    with watching([stop], run(), parameters):
        pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: worker.EarlyStop("", mode="max"), "EarlyStop: metric: expected a name"),
        (lambda: worker.EarlyStop("a", mode="more"), "EarlyStop: mode: expected max or min"),
        (lambda: worker.EarlyStop("a", mode="max", patience=0), "EarlyStop: patience: expected"),
        (lambda: worker.EarlyStop("a", mode="max", min_change=-1), "min_change: expected at least"),
        (lambda: worker.KeepBest("a", mode="max", path=3), "KeepBest: path: expected"),  # type: ignore[arg-type]
        (lambda: worker.run(None, None, params=[]), "train: expected a function"),
        (lambda: worker.run("x", print, params=[], callbacks=3), "callbacks: expected a list"),  # type: ignore[call-overload]
        (lambda: worker.run("x", print, params=[], callbacks=[3]), "of worker.Callback, got 3"),  # type: ignore[list-item]
    ],
)
def test_wrong_arguments_are_named(make: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make()


def test_a_figure_that_no_test_has() -> None:
    stop = worker.EarlyStop("accuracy", mode="max")
    stop.started(run())
    with pytest.raises(BadInput, match="expected one of the figures loss, top5, got accuracy"):
        stop.evaluated(result_of(1, loss=1.0, top5=0.5), parameters(np.ones(1)))


def test_a_run_without_tests_is_refused_before_it_starts() -> None:
    """No shard and no task is started for what compares tests where there are none."""
    for each in (worker.EarlyStop("a", mode="max"), worker.KeepBest("a", mode="max")):
        with (
            pytest.raises(BadInput, match="expected a run that tests its weights"),
            watching([each], run(tests=False), parameters),
        ):
            pytest.fail("the run has begun")


def train(_args: Any, ctx: worker.Context) -> None:
    def gradient(params: Any, batch: Any) -> tuple[float, Any]:
        return 1.0, {"w": np.ones((), np.float32)}

    ctx.loop(gradient, 10)  # without end


def test_a_run_stops_early_and_returns_the_best(spark: Any, tmp_path: Path) -> None:
    """The parameters fall for ever; the best test is the one nearest to -3."""
    place = tmp_path / "best.safetensors"
    keep = worker.KeepBest("distance", mode="min", path=place)
    log = Log()
    trained = worker.run(
        spark.range(0, 100, 1, 2),
        train,
        {"note": "as it is"},
        params=ps.Dense.like({"w": np.zeros((), np.float32)}, rate=0.01),
        shards_in="processes",
        strategy="downpour:scale=1",
        evaluate=worker.Evaluate(lambda params: {"distance": abs(params["w"] + 3)}, every=2),
        callbacks=[worker.EarlyStop("distance", mode="min", patience=3), keep, log],
    )
    assert keep.best is not None
    assert keep.best.figures["distance"] == min(
        each.figures["distance"] for each in trained.evaluations
    )
    assert abs(trained.params["w"] + 3) == keep.best.figures["distance"]
    assert load_file(place)["w"] == trained.params["w"]
    assert not trained.outcome.interrupted
    assert log.calls[0][2] | {"args.note": "as it is", "shards": 1} == log.calls[0][2]
    assert log.calls[-1] == ("ended", trained.params)
