"""Tests a job's weights while it trains, without slowing the training down.

A thread with its own admin client reads the weights, as an operator and not as a worker, and
computes on one core. A test at a low priority gets what busy workers leave, which may be next to
nothing, and its result comes late. So tests that take little of the cores' time run at the priority
of the workers; so do those that may end a job, for it would train on until then. One test runs at a
time; a test that falls due meanwhile runs next. A failed test is reported, and the training
continues.
"""

import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

import msgspec
import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from ps import AdminClient, Cluster
from ps.closing_context import ClosingContext
from shards import argument_checks
from shards.errors import BadInput, GiveUp

_PATIENCE_S = 30.0  # for large weights over a slow link
_POLL_S = 0.5
_NICER = 10
_SHARE = 0.03  # of the cores' time, that tests may take from the workers

Floats = NDArray[np.float32]
Evaluate = Callable[[Floats, Callable[[], bool]], dict[str, float]]
"""Computes figures of weights. It may end early, with any result, once its second argument returns
true.

It runs in a thread, one call at a time."""


class EvaluationPlan(msgspec.Struct, frozen=True):
    """Figures of a job's weights to compute every `every` iterations, and at first if `at_start`.

    Training ends early once `until`, a function of the figures, is true of a test.
    """

    evaluate: Evaluate
    every: int
    at_start: bool = True
    until: Callable[[dict[str, float]], bool] | None = None


class Target(msgspec.Struct, frozen=True):
    """A figure of a test that ends training once it is at least, or at most, this value."""

    figure: str
    is_least: bool
    value: float

    def __call__(self, figures: dict[str, float]) -> bool:
        """Return whether a test with these figures has reached it."""
        found = figures[self.figure]
        return found >= self.value if self.is_least else found <= self.value

    @staticmethod
    def parse(label: str, text: object) -> "Target":
        """The target in a text such as accuracy>=0.985 or loss<=0.1; raises BadInput."""
        expected = "a figure of the tests and its limit, as accuracy>=0.985 or loss<=0.1"
        given = argument_checks.text(label, text, expected)
        parts = re.fullmatch(r"\s*([^\s<>=]+)\s*([<>])=\s*([-+.\de]+)\s*", given)
        with suppress(ValueError):
            if parts is not None:
                return Target(parts[1], parts[2] == ">", float(parts[3]))
        raise BadInput(label, expected=expected, got=repr(given[:80]))


class Evaluation(msgspec.Struct, frozen=True):
    """The result of a test; `figures` are, for example, {"accuracy": 0.98, "loss": 0.06}.

    The weights were read at `iteration`, when the job had trained on `samples` samples, `seconds`
    after it was started or resumed.
    """

    iteration: int
    samples: int
    seconds: float
    figures: dict[str, float]

    def __str__(self) -> str:
        # Its result comes when the workers have taken steps, so "at iteration 0" would surprise.
        moment = f"at iteration {self.iteration}" if self.iteration else "of the initial weights"
        return f"test {moment}: {in_words(self.figures)}"


def in_words(figures: dict[str, float]) -> str:
    """Figures as text: accuracies in per cent, other values with four digits."""
    return ", ".join(
        f"{name} {value:.2%}" if name.startswith("accuracy") else f"{name} {value:.4g}"
        for name, value in figures.items()
    )


class BackgroundEvaluator(ClosingContext):
    """Tests the weights of one job; a context manager.

    `results` are the results so far. No test begins at iteration `last` or later: those weights are
    the job's result, and the caller tests them. `on_result` is called with each result and the
    weights tested, `notify` with each message for the operator, both in the thread that calls
    `look`. `cpu_s` are the CPU seconds that the tests have taken.
    """

    def __init__(
        self,
        plan: EvaluationPlan,
        cluster: Cluster,
        *,
        begins_at: int,
        last: int,
        on_result: Callable[[Evaluation, Floats], None],
        notify: Callable[[str], None],
    ) -> None:
        self.results: list[Evaluation] = []
        self._plan = plan
        self._cluster = cluster
        self._last = last
        self._on_result = on_result
        self._notify = notify
        self._began = time.monotonic()
        self._next = self._next_after(begins_at)
        self._stopped = threading.Event()
        self._under_way: Future[tuple[Evaluation, Floats]] | None = None
        # A thread cannot take back a low priority, so each priority has a thread of its own.
        self._usual = ThreadPoolExecutor(1, "tests")
        self._nice = ThreadPoolExecutor(1, "nice-tests", initializer=_be_nice)
        self.cpu_s = 0.0
        self._last_cpu_s: float | None = None  # of the last test that has ended
        self._submitted = self._began

    def begin(self, weights: Floats) -> None:
        """Test the initial weights of a new job, if the plan says so."""
        if self._plan.at_start:
            self._submit(0, 0, lambda: weights)

    def evaluate_if_due(self, iteration: int, samples: int) -> None:
        """Report the last test if it is over, and begin a test if one is due; does not wait."""
        if self._under_way is not None and self._under_way.done():
            self._report()
        if self._under_way is not None or not self._next <= iteration < self._last:
            return
        self._next = self._next_after(iteration)
        self._submit(iteration, samples, self._read)

    def follow(self, cluster: Cluster) -> None:
        """Test the weights of these shards from now on."""
        self._cluster = cluster

    @property
    def has_reached_target(self) -> bool:
        """True if a test has met the plan's condition for the end of training."""
        until = self._plan.until
        return until is not None and any(until(result.figures) for result in self.results[-1:])

    def finish(self, hurried: Callable[[], bool]) -> None:
        """Wait for the test under way, and report it; stop waiting once `hurried` returns true."""
        while self._under_way is not None and not hurried():
            if wait([self._under_way], _POLL_S).done:
                self._report()

    def close(self) -> None:
        """Stop the test under way, and discard its result."""
        self._stopped.set()
        self._usual.shutdown()
        self._nice.shutdown()

    def _next_after(self, iteration: int) -> int:
        return (iteration // self._plan.every + 1) * self._plan.every

    def _submit(self, iteration: int, samples: int, weights: Callable[[], Floats]) -> None:
        # A fork, such as that of Spark's start, ends the threads of OpenBLAS; the next call starts
        # them again, with the priority of its own thread, which they keep for the whole process.
        with threadpool_limits(1):
            pass
        now = time.monotonic()
        costly = takes_much(self._last_cpu_s, now - self._submitted)
        self._submitted = now
        pool = self._nice if costly and self._plan.until is None else self._usual
        self._under_way = pool.submit(self._test, iteration, samples, weights)

    def _read(self) -> Floats:
        with AdminClient(self._cluster, patience_s=_PATIENCE_S, check=self._check) as admin:
            return admin.read()

    def _check(self) -> None:
        """Raise GiveUp once the test was stopped, which ends a read of the weights."""
        if self._stopped.is_set():
            raise GiveUp("the test was stopped")

    def _test(
        self, iteration: int, samples: int, weights: Callable[[], Floats]
    ) -> tuple[Evaluation, Floats]:
        began = time.thread_time()
        read, seconds = weights(), time.monotonic() - self._began
        # More BLAS threads would only take cores from the workers.
        with threadpool_limits(1):
            figures = self._plan.evaluate(read, self._stopped.is_set)
        self._last_cpu_s = time.thread_time() - began
        self.cpu_s += self._last_cpu_s
        return Evaluation(iteration, samples, seconds, figures), read

    def _report(self) -> None:
        under_way, self._under_way = self._under_way, None
        assert under_way is not None
        try:
            tested, weights = under_way.result()
        except Exception as error:  # noqa: BLE001  # the user's function may raise anything
            self._notify(f"a test of the weights failed: {error}; training continues")
        else:
            self.results.append(tested)
            self._on_result(tested, weights)


def takes_much(cpu_s: float | None, interval_s: float, cores: int | None = None) -> bool:
    """Return whether a test of `cpu_s` CPU seconds (None: unknown) each `interval_s` costs much.

    That is more than 3 % of the time of the `cores`, by default those of this machine.
    """
    cores = os.cpu_count() or 1 if cores is None else cores
    return cpu_s is None or cpu_s > _SHARE * interval_s * cores


def _be_nice() -> None:
    """Give this thread a low priority, on systems with a priority for each thread."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICER)
