"""Callbacks: objects that receive the reports of a run while it trains, and may end it.

    best = worker.KeepBest("accuracy", mode="max", path="best.safetensors")
    stop = worker.EarlyStop("accuracy", mode="max", patience=3)
    trained = worker.run(df, train, params=params, evaluate=test, callbacks=[stop, best])

All calls are made in the process and the thread that called `worker.run`, `worker.train` or `fit`;
workers never wait for a callback. The order of the calls is

    started, (progressed, recorded | evaluated | notice) ..., chosen, ended

`Watch` makes them: it is the observer of the job, and closes the callbacks whatever ends the run.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ps import Cluster, path_checks
from ps.logs import Logger, logger
from shards import argument_checks
from shards.errors import BadInput, DownpourError
from shards.live_settings import describe_settings
from shards.messages import LiveSettings
from shards.shard_status import ShardStatus
from worker.job.option_fields import Options, list_options
from worker.strategies import Strategy
from worker.training.evaluation import Evaluation
from worker.training.figures import UpdateTally
from worker.training.worker_times import TimesTally, count_restarts, goodput

Floats = NDArray[np.float32]
Plain = str | int | float | bool


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a run. `updates` counts the pushes since the last status.

    `iteration` is a step of every worker, `samples` the rows trained on, `seconds` the time since
    the start. `loss` and `staleness` are means over the updates, None where none had any; `rate` is
    the learning rate. `samples_s` is the number of rows a second since the last status. `workers`
    are registered at present. `goodput` is the share of the workers' time so far in useful steps,
    without those of dropped pushes and what a death has cost; None before any was measured.
    """

    iteration: int
    samples: int
    seconds: float
    updates: int
    loss: float | None
    staleness: float | None
    rate: float
    samples_s: float
    workers: int
    goodput: float | None = None


class Parameters:
    """The parameters of a run at some moment. `weights` are a flat float32 array of all of them."""

    def __init__(
        self,
        weights: Floats,
        build: Callable[[Floats], Any],
        write: Callable[[str | Path, Floats], object],
    ) -> None:
        """`build` gives weights the structure that the user gave, `write` writes a file of them."""
        self.weights = weights
        self._build = build
        self._write = write

    @property
    def params(self) -> Any:
        """In the structure that `worker.run` was given; of `worker.train`, the tensors by name."""
        return self._build(self.weights)

    def save(self, path: str | Path) -> None:
        """Write them by name to a .safetensors file."""
        self._write(path, self.weights)


class WatchedRun:
    """The run that a callback watches.

    `settings` are plain values by name: the options of the run, and `args` of `worker.run` where it
    is a dict. `tests` is whether the weights are tested while the run trains. `cluster` is known
    once the run has started.
    """

    cluster: Cluster

    def __init__(self, workers: int, settings: Mapping[str, Plain], *, tests: bool) -> None:
        self.workers = workers
        self.settings = dict(settings)
        self.tests = tests
        self.reason = ""

    @property
    def job(self) -> str:
        """The job's id."""
        return self.cluster.job

    def stop(self, reason: str) -> None:
        """End the run early; the weights of that moment are the result. `reason` is logged."""
        self.reason = (
            self.reason or argument_checks.text("stop: reason", reason, "a text") or "stopped"
        )


class Callback:
    """Receives what a run reports; a subclass overrides what it needs.

    An error in `started` ends the run before it trains; so does BadInput later, with a snapshot
    where `snapshots` says where. After any other error the callback gets no more calls: the
    training is worth more than its report.
    """

    def started(self, run: WatchedRun) -> None:
        """The shards hold their weights, and the workers are about to begin."""

    def progressed(self, status: RunStatus) -> None:
        """The progress of the run, about twice a second."""

    def recorded(self, records: list[NDArray[np.void]]) -> None:
        """The records of the updates since the last call: an array for each shard, a row an update,
        with the columns of `updates.parquet`.
        """

    def evaluated(self, result: Evaluation, parameters: Parameters) -> None:
        """The result of a test, and the parameters that were tested."""

    def notice(self, text: str) -> None:
        """A message for the operator, such as a failed snapshot; it is logged as well."""

    def chosen(self, parameters: Parameters) -> Parameters:
        """The parameters that the run returns, given those that it would; by default the same."""
        return parameters

    def ended(self, parameters: Parameters | None) -> None:
        """The run is over. `parameters` are those that it returns; None if an error ended it."""


class Mode(StrEnum):
    """Which of two values of a metric is better."""

    MAX = "max"
    MIN = "min"


class _ByMetric(Callback):
    """Base of the callbacks that compare the tests by one figure."""

    def __init__(self, metric: str, mode: str, min_change: float) -> None:
        name = type(self).__name__
        self.metric = argument_checks.name(f"{name}: metric", metric)
        self.mode = argument_checks.choice(f"{name}: mode", mode, Mode)
        self.min_change = argument_checks.number(f"{name}: min_change", min_change)
        if not self.min_change >= 0:
            raise argument_checks.wrong(f"{name}: min_change", "at least 0", min_change)
        self.best: Evaluation | None = None

    def check_tested(self, run: WatchedRun) -> None:
        """Raise BadInput for a run without tests."""
        if not run.tests:
            raise BadInput(
                type(self).__name__,
                expected="a run that tests its weights while it trains",
                got=(
                    "one without: give worker.run `evaluate`, worker.Caffe "
                    "`test_data`, an estimator `validationIndicatorCol`"
                ),
            )

    def started(self, run: WatchedRun) -> None:
        """Forget the tests of an earlier run."""
        self.best = None

    def is_better(self, result: Evaluation) -> bool:
        """Return whether a test is better than the best before it by more than `min_change`."""
        if self.metric not in result.figures:
            known = ", ".join(result.figures) or "none"
            raise BadInput(
                f"{type(self).__name__}: metric",
                expected=f"one of the figures {known}",
                got=self.metric,
            )
        value = result.figures[self.metric]
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = value - self.best.figures[self.metric]
        return (gain if self.mode is Mode.MAX else -gain) > self.min_change


class EarlyStop(_ByMetric):
    """Ends a run when a figure of its tests no longer improves.

    `metric` names the figure, `mode` is "max" or "min". After `patience` tests in a row none of
    which is better than the best by more than `min_change`, the run ends; NaN is never better.
    `best` is the best `Evaluation`.
    """

    def __init__(
        self, metric: str, *, mode: str, patience: int = 5, min_change: float = 0.0
    ) -> None:
        super().__init__(metric, mode, min_change)
        self.patience = argument_checks.whole("EarlyStop: patience", patience, 1)
        self._since = 0

    def started(self, run: WatchedRun) -> None:
        """Begin to count."""
        super().started(run)
        self._run, self._since = run, 0

    def evaluated(self, result: Evaluation, parameters: Parameters) -> None:
        """Count the tests without a gain."""
        if self.is_better(result):
            self.best, self._since = result, 0
            return
        self._since += 1
        if self._since >= self.patience:
            self._run.stop(f"{self.metric} has not improved in {self._since} tests")


class KeepBest(_ByMetric):
    """Has a run return the parameters of its best test, in place of the last ones.

    `metric` names the figure, `mode` is "max" or "min"; that of the final parameters counts, too.
    With `path`, a place or URI that ends in .safetensors, each better set of parameters is written
    there at once. `best` is the best `Evaluation`.
    """

    def __init__(self, metric: str, *, mode: str, path: str | Path | None = None) -> None:
        super().__init__(metric, mode, 0.0)
        self.path = None if path is None else path_checks.place("KeepBest: path", path)
        self._parameters: Parameters | None = None

    def started(self, run: WatchedRun) -> None:
        """Forget the parameters of an earlier run."""
        super().started(run)
        self._parameters = None

    def evaluated(self, result: Evaluation, parameters: Parameters) -> None:
        """Keep the parameters if they are the best."""
        if self.is_better(result):
            self.best, self._parameters = result, parameters
            if self.path is not None:
                parameters.save(self.path)

    def chosen(self, parameters: Parameters) -> Parameters:
        """The best that were tested."""
        return self._parameters or parameters


_watching: set[int] = set()
_lock = threading.Lock()


class Watch:
    """Calls the callbacks of one run; an observer of its job (worker/job/outcome.py)."""

    def __init__(
        self,
        callbacks: Iterable[Callback],
        run: WatchedRun,
        parameters: Callable[[Floats], Parameters],
    ) -> None:
        self._callbacks = list(callbacks)
        self._run = run
        self._parameters = parameters
        self._logger: Logger = logger("worker")
        self._began = time.monotonic()
        self._last = 0.0, 0
        self._times = TimesTally()
        self._result: Parameters | None = None
        self._over = False

    def started(self, cluster: Cluster, restored: list[int] | None) -> None:
        """Start each callback; the first error ends the run."""
        self._run.cluster = cluster
        self._logger = logger("worker", job=cluster.job)
        self._began = time.monotonic()
        for callback in self._callbacks:
            callback.started(self._run)

    def progressed(self, statuses: list[ShardStatus], records: list[NDArray[np.void]]) -> bool:
        """Pass the status on; true once a callback has asked for the end of the run."""
        first, pushed = statuses[0], records[0][records[0]["dropped"] == 0]
        figures = UpdateTally.of([pushed])
        seconds = time.monotonic() - self._began
        before_s, before = self._last
        self._times.add(records, count_restarts(statuses), seconds)
        status = RunStatus(
            iteration=first.steps // self._run.workers,
            samples=first.samples,
            seconds=seconds,
            updates=figures.rows,
            loss=figures.loss_mean,
            staleness=figures.staleness_mean,
            rate=first.rate,
            samples_s=max(0.0, (first.samples - before) / max(seconds - before_s, 1e-9)),
            workers=len(first.workers),
            goodput=goodput([*self._times.times_s.values()]),
        )
        self._last = seconds, first.samples
        self._call("progressed", status)
        self._call("recorded", records)
        return bool(self._run.reason)

    def evaluated(self, result: Evaluation, weights: Floats) -> None:
        """Pass the result of a test on, with the parameters that were tested."""
        self._call("evaluated", result, self._parameters(weights))

    def resharded(self, cluster: Cluster) -> None:
        """Later reports come from other shards."""
        self._run.cluster = cluster

    def settings_changed(self, settings: LiveSettings) -> None:
        """Log what an operator has changed, and pass it on as a notice."""
        self.notice(describe_settings(settings))

    def notice(self, text: str) -> None:
        """Log a message for the operator, and pass it on."""
        self._logger.warning("%s", text)
        self._call("notice", text)

    def finish(self, weights: Floats, last: Sequence[Evaluation]) -> Parameters:
        """Return the run's parameters, which callbacks may replace; `last` tests `weights`.

        From here on no error of a callback is raised, because it would lose the result.
        """
        self._over = True
        if self._run.reason:
            self._logger.info("the run ended early: %s", self._run.reason)
        for result in last:
            self.evaluated(result, weights)
        self._result = self._parameters(weights)
        for callback in tuple(self._callbacks):
            with self._survives(callback):
                self._result = callback.chosen(self._result)
        return self._result

    def end(self) -> None:
        """The run is over: with a result, or by an error."""
        self._over = True
        self._call("ended", self._result)

    def _call(self, method: str, *arguments: object) -> None:
        for callback in tuple(self._callbacks):
            with self._survives(callback):
                getattr(callback, method)(*arguments)

    @contextmanager
    def _survives(self, callback: Callback) -> Iterator[None]:
        """Drop the callback if it fails, unless with BadInput while the run trains."""
        try:
            yield
        except Exception as error:
            if isinstance(error, BadInput) and not self._over:
                raise
            self._callbacks.remove(callback)
            name = type(callback).__name__
            line = str(error) if isinstance(error, DownpourError) else repr(error)
            self._logger.warning("callback %s failed, and gets no more calls: %s", name, line)


@contextmanager
def watching(
    callbacks: Iterable[Callback],
    run: WatchedRun,
    parameters: Callable[[Floats], Parameters],
) -> Iterator[Watch]:
    """A watch of one run; the callbacks are ended with the context, whatever ends it.

    Raises BadInput for a callback that watches another run already, and for one that compares the
    tests of a run without any.
    """
    observers = tuple(callbacks)
    for callback in observers:
        if isinstance(callback, _ByMetric):
            callback.check_tested(run)  # before anything is started
    with _lock:
        for callback in observers:
            if id(callback) in _watching:
                raise BadInput(
                    "callbacks",
                    expected=f"a {type(callback).__name__} for each of two runs at a time",
                    got="one for both",
                )
        _watching.update(map(id, observers))
    watch = Watch(observers, run, parameters)
    try:
        yield watch
    finally:
        with _lock:
            _watching.difference_update(map(id, observers))
        watch.end()


def check_callbacks(label: str, value: object) -> tuple[Callback, ...]:
    """A list of callbacks as a tuple; raises BadInput for anything else."""
    expected = "a list of objects of subclasses of worker.Callback"
    callbacks = argument_checks.items(label, value, expected)
    for callback in callbacks:
        argument_checks.instance(label, callback, Callback, expected)
    return callbacks


def settings_of(options: Options, more: object = None) -> dict[str, Plain]:
    """The options that are set as plain values, and those of the dict `more` as `args.NAME`."""
    values = {name: getattr(options, name) for name in list_options(type(options))}
    if isinstance(more, Mapping):
        values |= {f"args.{name}": value for name, value in more.items()}
    plain = {name: _plain(value) for name, value in values.items() if value is not None}
    return {name: value for name, value in plain.items() if value is not None}


def _plain(value: object) -> Plain | None:
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, str | int | float | bool):
        return value
    return str(value) if isinstance(value, Path | Strategy) else None
