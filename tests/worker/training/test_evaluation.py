"""The weights of a job are tested while it trains: when, which weights, and what a failure does."""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

import ps
from ps import Cluster, TensorSpec
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.threads import local_shards
from shards.errors import BadInput, GiveUp
from shards.schedules import Fixed
from shards.tables import DenseTable
from tests.support.eventually import eventually
from worker.training.evaluation import (
    BackgroundEvaluator,
    Evaluation,
    EvaluationPlan,
    Target,
    takes_much,
)

DEADLINE_S = 60.0
TABLE = DenseTable("net", (TensorSpec("w", (600,)),))


class Heard:
    """The reports of an evaluator."""

    def __init__(self) -> None:
        self.found: list[Evaluation] = []
        self.told: list[str] = []

    @property
    def iterations(self) -> list[int]:
        return [result.iteration for result in self.found]


def mean(weights: NDArray[np.float32], _: Callable[[], bool]) -> dict[str, float]:
    return {"mean": float(TABLE.views(weights)["w"].mean())}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    specs = shard_specs(TABLE, shards=2, schedule=Fixed(base_rate=1.0), bound=None)
    with local_shards(specs, TABLE.empty()) as cluster:
        yield cluster


def evaluator(
    cluster: Cluster, plan: EvaluationPlan, heard: Heard, begins_at: int = 0
) -> BackgroundEvaluator:
    return BackgroundEvaluator(
        plan,
        cluster,
        begins_at=begins_at,
        last=100,
        on_result=lambda result, _weights: heard.found.append(result),
        notify=heard.told.append,
    )


def look(evaluator: BackgroundEvaluator, iteration: int, heard: Heard) -> None:
    """Call `look`, and wait for the test that it has begun, if any."""
    evaluator.evaluate_if_due(iteration, 64 * iteration)
    evaluator.finish(lambda: False)


def test_every_so_many_iterations(cluster: Cluster) -> None:
    """At the start and at the first look at or behind each multiple; not at the end, where the
    weights are the result. It registers no worker."""
    heard = Heard()
    with evaluator(cluster, EvaluationPlan(mean, every=10), heard) as tests:
        tests.begin(np.full(TABLE.size, 2, np.float32))
        for iteration in (0, 9, 10, 11, 19, 35, 39, 40, 99, 100, 110):
            look(tests, iteration, heard)
        with ps.AdminClient(cluster) as console:
            assert [status.workers for status in console.status()] == [(), ()]
    assert heard.iterations == [0, 10, 35, 40, 99]
    assert [result.samples for result in heard.found] == [64 * n for n in heard.iterations]
    assert heard.found[0].figures == {"mean": 2.0}
    assert tests.results == heard.found


@pytest.mark.parametrize(("begins_at", "expected"), [(0, [10]), (10, []), (12, [])])
def test_a_resumed_job_is_tested_from_where_it_was(
    cluster: Cluster, begins_at: int, expected: list[int]
) -> None:
    """Earlier iterations are not tested again; only a new job tests its initial weights."""
    heard = Heard()
    with evaluator(
        cluster, EvaluationPlan(mean, every=10, at_start=False), heard, begins_at
    ) as tests:
        tests.begin(TABLE.empty())
        for iteration in (10, 13, 19):
            look(tests, iteration, heard)
    assert heard.iterations == expected


def test_it_is_the_weights_of_the_moment(cluster: Cluster) -> None:
    """A test sees all updates pushed before it."""
    heard = Heard()
    with (
        evaluator(cluster, EvaluationPlan(mean, every=1), heard) as tests,
        Client(cluster, worker="w0") as client,
    ):
        for iteration in (1, 2):
            client.pull()
            client.push(np.ones(TABLE.size, np.float32))
            client.flush()
            look(tests, iteration, heard)
    assert [result.figures["mean"] for result in heard.found] == [-1.0, -2.0]


def test_one_runs_at_a_time(cluster: Cluster) -> None:
    """`look` does not wait for a test; a test that falls due meanwhile runs next."""
    heard, free = Heard(), threading.Event()

    def slow(weights: NDArray[np.float32], _: Callable[[], bool]) -> dict[str, float]:
        assert free.wait(DEADLINE_S)
        return {}

    with evaluator(cluster, EvaluationPlan(slow, every=10), heard) as tests:
        for iteration in (10, 20, 30):
            tests.evaluate_if_due(iteration, 0)
        assert heard.iterations == []
        free.set()
        tests.finish(lambda: False)
        look(tests, 31, heard)
    assert heard.iterations == [10, 31]


def test_a_failure_is_reported_and_ends_nothing(cluster: Cluster) -> None:
    """After a failed test the next one runs as usual."""
    heard, fails = Heard(), [True]

    def once(weights: NDArray[np.float32], stopped: Callable[[], bool]) -> dict[str, float]:
        if fails.pop():
            raise GiveUp("the file is gone")
        return {}

    with evaluator(cluster, EvaluationPlan(once, every=10), heard) as tests:
        look(tests, 10, heard)
        assert heard.told == ["a test of the weights failed: the file is gone; training continues"]
        fails.append(False)
        look(tests, 20, heard)
    assert heard.iterations == [20]


def test_whoever_is_in_a_hurry_does_not_wait(cluster: Cluster) -> None:
    """`close` stops a test under way, and discards its result."""
    heard, began, saw = Heard(), threading.Event(), threading.Event()

    def endless(weights: NDArray[np.float32], stopped: Callable[[], bool]) -> dict[str, float]:
        began.set()
        eventually(stopped, because="the test is stopped")
        saw.set()
        return {}

    with evaluator(cluster, EvaluationPlan(endless, every=10), heard) as tests:
        tests.evaluate_if_due(10, 0)
        assert began.wait(60), "a test that is still reading the weights ends without computing"
        tests.finish(lambda: True)
    assert saw.is_set()
    assert heard.found == []


def test_only_the_test_has_a_low_priority(cluster: Cluster) -> None:
    """Threads of BLAS that a fork has ended do not start again with the priority of a test."""
    square, own = np.ones((300, 300)), os.getpriority(os.PRIO_PROCESS, 0)

    def multiply(weights: NDArray[np.float32], _: Callable[[], bool]) -> dict[str, float]:
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) > own
        return {"product": float((square @ square)[0, 0])}

    heard, before = Heard(), threads()
    # With a function to call, Popen forks, as at the start of Spark.
    subprocess.run(["true"], check=True, preexec_fn=lambda: None)
    with evaluator(cluster, EvaluationPlan(multiply, every=10), heard) as tests:
        look(tests, 10, heard)
    assert heard.told == []
    eventually(
        lambda: all(priority <= own for name, priority in threads().items() if name not in before),
        because="no thread but that of the test had another priority",
    )


def test_a_test_that_ends_the_job_has_no_low_priority(cluster: Cluster) -> None:
    """The workers would train on while it waits for a core."""

    def measure(_: NDArray[np.float32], __: Callable[[], bool]) -> dict[str, float]:
        return {"priority": os.getpriority(os.PRIO_PROCESS, threading.get_native_id())}

    heard, own = Heard(), os.getpriority(os.PRIO_PROCESS, 0)
    plan = EvaluationPlan(measure, every=10, until=lambda _: False)
    with evaluator(cluster, plan, heard) as tests:
        look(tests, 10, heard)
    assert [result.figures for result in heard.found] == [{"priority": own}]


def threads() -> dict[int, int]:
    """The threads of this process with their priorities."""
    found = {}
    for entry in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            found[int(entry.name)] = os.getpriority(os.PRIO_PROCESS, int(entry.name))
    return found


def test_a_result_in_words() -> None:
    """Accuracies are percentages; every figure has its name."""
    result = Evaluation(400, 51200, 3.5, {"accuracy": 0.9731, "loss": 0.08412, "accuracy#1": 0.5})
    assert str(result) == "test at iteration 400: accuracy 97.31%, loss 0.08412, accuracy#1 50.00%"
    assert str(replace(result, iteration=0)).startswith("test of the initial weights: accuracy 97")


@pytest.mark.parametrize(
    ("cpu_s", "interval_s", "cores", "much"),
    [
        (None, 1000.0, 64, True),  # nobody knows what the first costs
        (0.5, 10.0, 2, False),
        (0.7, 10.0, 2, True),
        (0.7, 10.0, 4, False),
    ],
)
def test_cheap_tests_run_as_workers_do(
    cpu_s: float | None, interval_s: float, cores: int, much: bool
) -> None:
    """Tests have a low priority unless they are known to take little of the cores' time."""
    assert takes_much(cpu_s, interval_s, cores) is much


def test_targets() -> None:
    """A figure, its side and its limit are read from text."""
    assert Target.parse("until", " loss#1<=1e-3 ") == Target("loss#1", False, 0.001)
    assert Target.parse("until", "accuracy >= .5") == Target("accuracy", True, 0.5)


@pytest.mark.parametrize(
    "text", ["", "accuracy", "accuracy>0.9", "accuracy>=", "a b>=1", "a>=1e", 3]
)
def test_what_is_no_target(text: object) -> None:
    """An error shows what a target looks like."""
    with pytest.raises(
        BadInput, match=r"until.*expected a figure .* as accuracy>=0.985 or loss<=0.1"
    ):
        Target.parse("until", text)
