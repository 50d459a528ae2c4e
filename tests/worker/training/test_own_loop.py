"""A function of the user's own, trained on the SDK's shards with each strategy."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest

import ps
import worker
from shards.errors import BadInput
from worker.strategies import STRATEGIES

WANTED = np.array([1.0, -2.0, 3.0])
START = {"slope": np.zeros(3), "offset": 0.0}
WORKERS = 2


def batches(number: int) -> Iterator[dict[str, Any]]:
    dice = np.random.default_rng(number)
    while True:
        yield {"x": dice.standard_normal((16, 3))}


def gradient(params: Any, batch: Any) -> tuple[float, Any]:
    """The loss of a line through WANTED and 5, and its gradient."""
    x = batch["x"]
    error = x @ (params["slope"] - WANTED) + params["offset"] - 5
    return error @ error / 32, {"slope": x.T @ error / 16, "offset": error.mean()}


# DiLoCo's outer rate and momentum go with hundreds of local steps: with ten large ones async_diloco
# never settles, and the last interleaving decides where it ends. With these, the threads may run in
# any order: the worst of 400 random interleavings ends at 0.03.
SHORT = {
    "diloco": "diloco:h=10",
    "async_diloco": "async_diloco:h=10,inner_lr=0.05,momentum=0.5,weight_decay=0",
    "mla": "mla:h=10,inner_lr=0.05,momentum=0.5,weight_decay=0",
    "heloco": "heloco:h=10,inner_lr=0.05,momentum=0.5,weight_decay=0",
    "streaming_diloco": "streaming_diloco:h=10,inner_lr=0.05,momentum=0.5,weight_decay=0",
    "decoupled_diloco": "decoupled_diloco:h=10,inner_lr=0.05,momentum=0.5,weight_decay=0",
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_trains(name: str) -> None:
    """Two workers lower the distance from the solution to a fifth, with any strategy.

    How fast differs from strategy to strategy, and is not the subject here.
    """
    strategy = SHORT.get(name, name)
    table = ps.Dense.like(START, rate=0.1)
    with worker.start(table, strategy=strategy, workers=WORKERS, on="threads") as job:
        assert job.cluster.bound == STRATEGIES[name].usual_bound

        def train(number: int) -> Any:
            return worker.loop(
                job,
                f"w{number}",
                gradient,
                batches(number),
                steps=600,
                strategy=strategy,
                workers=WORKERS,
            )

        with ThreadPoolExecutor(WORKERS) as pool:
            reports = list(pool.map(train, range(WORKERS)))
        learned = job.read()
    assert [report.steps for report in reports] == [600] * WORKERS
    assert np.abs(learned["slope"] - WANTED).max() < 0.6
    assert abs(learned["offset"] - 5) < 1.0


def test_a_wrong_strategy_is_refused() -> None:
    """The error names the strategy, the option, and the known ones."""
    with pytest.raises(BadInput, match="strategy: expected downpour"):
        worker.start(START, strategy="nope")
    with pytest.raises(BadInput, match=r"strategy diloco.*speed"):
        worker.start(START, strategy="diloco:speed=3")
    with pytest.raises(BadInput, match="pushing every 9 steps needs at least 8, got 4"):
        worker.start(START, strategy="downpour:n_push=9", staleness=4)


def test_another_strategy_than_the_job_s_is_refused() -> None:
    """The two halves belong together, also in a process that knows the job by address only."""
    with worker.start(START, strategy="easgd:tau=2", on="threads") as job:
        other = ps.connect(job.address, token=job.token)
        text = "loop: strategy: expected easgd, as the job was started with, got downpour"
        with pytest.raises(BadInput, match=text):
            worker.loop(other, "w0", gradient, batches(0), steps=1)
        report = worker.loop(other, "w0", gradient, batches(0), steps=4, strategy="easgd:tau=2")
        assert report.steps == 4


def test_other_periods_than_the_job_s_are_refused() -> None:
    """Learners that exchange fragments reckon with each other's options; their order is free."""
    options = "h=20,k=2,speeds=w0/2+w1/1,grace=0.25"
    how: dict[str, Any] = {"workers": 2, "strategy": f"decoupled_diloco:{options}"}
    with worker.start(START, on="threads", **how) as job:
        for changed in ("h=10", "k=1", "overlap=3", "average=mean", "speeds=w0/1"):
            name = changed.partition("=")[0]
            kept = [option for option in options.split(",") if not option.startswith(f"{name}=")]
            other = f"decoupled_diloco:{','.join([changed, *kept])}"
            with pytest.raises(BadInput, match=r"h=20.*, as the job was started with, got"):
                worker.loop(job, "w0", gradient, batches(0), steps=1, **{**how, "strategy": other})
        same = f"decoupled_diloco:{','.join(reversed(options.split(',')))}"
        report = worker.loop(job, "w0", gradient, batches(0), steps=4, **{**how, "strategy": same})
        assert report.steps == 4


def test_another_number_of_workers_than_the_job_s_is_refused() -> None:
    """Strategies scale pushes by it; a job that names no strategy takes any number."""
    with worker.start(START, workers=2, on="threads") as job:
        other = ps.connect(job.address, token=job.token)
        text = "loop: workers: expected 2, as the job was started for, got 1"
        with pytest.raises(BadInput, match=text):
            worker.loop(other, "w0", gradient, batches(0), steps=1)
    with ps.local(START, workers=2) as job:
        assert worker.loop(job, "w0", gradient, batches(0), steps=1).steps == 1


GRADS = {"slope": np.zeros(3), "offset": np.zeros(())}


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (None, "None"),
        (GRADS, "a dict of slope, offset"),
        ((GRADS,), "1 value"),
        ((0.5, GRADS, 3), "3 values"),
        ((GRADS, 0.5), "(gradients, loss)"),
        (0.5, "0.5"),
        (np.zeros(2), "an array of float64 of shape (2,)"),
    ],
)
def test_what_a_gradient_returns_is_checked(returned: Any, got: str) -> None:
    """One line says what was expected, in which order, and what came."""
    with ps.local(START) as job, pytest.raises(BadInput) as caught:
        worker.loop(job, "w0", lambda *_: returned, batches(0), steps=1)
    assert str(caught.value) == f"gradient: expected it to return (loss, gradients), got {got}"


@pytest.mark.parametrize("batch", [1.0, None, {}, {"x": np.array(1.0)}, np.ones(3)])
def test_what_a_batch_is_is_checked(batch: Any) -> None:
    """A batch that is no dict of rows is named by its number; the batches before it count."""
    expected = "batches: batch 4: expected a dict of arrays, a row for each sample, got"
    with ps.local(START) as job:
        wrong = chain(islice(batches(0), 4), [batch])
        with pytest.raises(BadInput, match=expected):
            worker.loop(job, "w0", gradient, wrong, steps=9)
        with job.worker("w0", incarnation=1) as me:
            assert me.clock == 4


def test_one_table_is_expected() -> None:
    """The loop trains jobs with one table; the error names those there are."""
    two = ps.Tables(a=ps.Dense.like(START), b=ps.Dense.like(START))
    with (
        ps.local(two) as job,
        pytest.raises(BadInput, match="expected a job with one dense table, got a, b"),
    ):
        worker.loop(job, "w0", gradient, batches(0), steps=1)
