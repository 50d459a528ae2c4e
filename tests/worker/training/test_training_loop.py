"""The worker loop, step by step: which weights it computes from, what it pushes, and as what.

The model's gradient is the batch's own number everywhere, in numbers that float32 holds exactly, so
the weights at every step can be written down beforehand.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from ps import AdminClient, Cluster, DenseTable, TensorSpec
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.threads import local_shards
from ps.transport.shard_sockets import Links
from shards.errors import BadInput
from shards.messages import Message, Renew
from shards.schedules import Fixed, Schedule, Step
from shards.tables import KeyRange, segments
from worker.strategies import BSP, Downpour, Strategy
from worker.strategies.base import rate_multipliers
from worker.training import training_loop
from worker.training.model import Batch
from worker.training.step_machine import FragmentTaken, PullWeights, PushReport, TakeFragment
from worker.training.training_loop import Plan, WorkerReport, train_worker

Floats = NDArray[np.float32]

TABLE = DenseTable(
    "weights", (TensorSpec("a", (4,)), TensorSpec("b", (2, 150), lr_mult=2.0, decay_mult=0.0))
)


class Scripted:
    """A model that records its calls, and may fail at one."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.table = TABLE
        self.weights: list[Floats] = []
        self.keys: list[tuple[int, int]] = []
        self._fails_at = fails_at

    def initial(self, seed: int) -> Floats:
        return TABLE.empty()

    def gradient(
        self, weights: Floats, batch: Batch, out: Floats, *, step: int, seed: int
    ) -> float:
        if len(self.weights) == self._fails_at:
            raise RuntimeError("scripted")
        self.weights.append(weights.copy())
        self.keys.append((step, seed))
        value = float(batch["data"][0])
        out[:] = 0
        for view in TABLE.views(out).values():
            view[...] = value
        return 10 * value

    @property
    def seen(self) -> list[float]:
        """At each call, the first weight of tensor a."""
        return [float(weights[0]) for weights in self.weights]


def batches(*values: float, rows: int = 3) -> Iterator[Batch]:
    """Batches of `rows` rows, each made of its value."""
    return iter([{"data": np.full(rows, value, np.float32)} for value in values])


@contextmanager
def shards(bound: int | None = 0, **more: Any) -> Iterator[tuple[Cluster, AdminClient]]:
    """Two shards of SGD at rate 1."""
    specs = shard_specs(TABLE, shards=2, schedule=Fixed(base_rate=1.0), bound=bound, **more)
    with local_shards(specs) as cluster, AdminClient(cluster) as console:
        yield cluster, console


def plan(
    steps: int, strategy: Strategy | None = None, schedule: Schedule | None = None, **more: Any
) -> Plan:
    """A plan at half of the shards' rate, so that a worker's own steps differ from theirs."""
    return Plan(
        steps=steps,
        seed=5,
        strategy=strategy or Downpour(),
        schedule=schedule or Fixed(base_rate=0.5),
        **more,
    )


def live(
    cluster: Cluster, model: Scripted, data: Iterator[Batch], planned: Plan, incarnation: int = 0
) -> WorkerReport:
    # It repeats nothing, however late an answer is: messages are counted.
    with Client(
        cluster, worker="w0", incarnation=incarnation, retry_s=60.0, patience_s=600.0
    ) as client:
        return train_worker(client, model, data, planned, incarnation=incarnation)


def column(console: AdminClient, name: str) -> list[Any]:
    """A column of the records, on which both shards must agree."""
    first, second = console.records()
    assert first[name].tolist() == second[name].tolist()
    return list(first[name].tolist())


def weight(console: AdminClient) -> float:
    """The weight that all of tensor a has; b learns twice as fast."""
    views = TABLE.views(console.read())
    a = float(views["a"][0])
    assert np.unique(views["a"]).tolist() == [a]
    assert np.unique(views["b"]).tolist() == [2 * a]
    return a


def test_every_step_is_fetched_and_pushed() -> None:
    """By default each step computes from the shards' weights, its predecessor's push in them."""
    model = Scripted()
    with shards() as (cluster, console):
        report = live(cluster, model, batches(1, 2, 4, 8), plan(4))
        assert model.seen == [0, -1, -3, -7]
        assert weight(console) == -15
        records = np.stack(console.records())
    assert model.keys == [(0, 5), (1, 5), (2, 5), (3, 5)]
    for name, values in {
        "seq": [1, 2, 3, 4],
        "clock": [1, 2, 3, 4],
        "steps": [1] * 4,
        "samples": [3] * 4,
        "read_version": [0, 1, 2, 3],
        "staleness": [0] * 4,
        "loss": [10.0, 20.0, 40.0, 80.0],
    }.items():
        assert records[name].tolist() == [values, values], name
    assert (report.worker, report.incarnation, report.steps, report.samples) == ("w0", 0, 4, 12)
    assert report.duplicates == 0
    parts = (report.compute_s, report.data_s, report.waited_s, report.network_s, report.serialise_s)
    assert min(parts) >= 0
    assert sum(parts) <= report.seconds


def test_n_push_sums_gradients() -> None:
    """Three steps travel as one push of their sum and their mean loss; the rest as a last one."""
    model = Scripted()
    with shards(bound=2) as (cluster, console):
        live(cluster, model, batches(1, 2, 3, 4, 5, 6, 7), plan(7, Downpour(n_push=3)))
        assert model.seen == [0, 0, 0, -6, -6, -6, -21]
        assert weight(console) == -28
        records = console.records()[0]
    assert records["steps"].tolist() == [3, 3, 1]
    assert records["clock"].tolist() == [3, 6, 7]
    assert records["samples"].tolist() == [9, 9, 3]
    assert records["loss"].tolist() == [20.0, 50.0, 70.0]
    assert records["read_version"].tolist() == [0, 1, 2]


def test_n_fetch_steps_on_its_own_weights() -> None:
    """Between fetches a worker's own copy takes each gradient at the plan's rate, times lr_mult."""
    model = Scripted()
    with shards(bound=2) as (cluster, console):
        live(cluster, model, batches(1, 2, 3, 4, 5), plan(5, Downpour(n_fetch=3)))
        assert model.seen == [0, -0.5, -1.5, -6, -8]
        assert weight(console) == -15
        assert column(console, "read_version") == [0, 0, 0, 3, 3]
    for weights in model.weights:
        views = TABLE.views(weights)
        assert np.unique(views["b"]).tolist() == [2 * float(views["a"][0])]
        views["a"][:] = views["b"][:] = 0
        assert not weights.any(), "the padding stays zero"


def test_its_own_rate_follows_the_schedule() -> None:
    """Step k between fetches is taken at the schedule's rate of k."""
    model = Scripted()
    halving = Step(base_rate=1.0, gamma=0.5, step_size=1)
    with shards(bound=3) as (cluster, _):
        live(cluster, model, batches(1, 1, 1, 1), plan(4, Downpour(n_fetch=4), halving))
    assert model.seen == [0, -1, -1.5, -1.75]


def test_a_push_names_the_version_of_its_oldest_gradient() -> None:
    """A fetch between two pushes makes the next push no younger, and the one after as old as it."""
    model = Scripted()
    with shards(bound=3) as (cluster, console):
        live(cluster, model, batches(*range(1, 9)), plan(8, Downpour(n_push=2, n_fetch=3)))
        # Fetched before steps 0, 3 and 6, at versions 0, 1 and 3; pushed after 1, 3, 5 and 7.
        assert column(console, "read_version") == [0, 0, 1, 3]
        assert weight(console) == -36
    assert model.seen == [0, -0.5, -1.5, -3, -5, -7.5, -21, -24.5]


def test_prefetched_weights_are_one_step_older() -> None:
    """Prefetched weights are requested before the step's own push, so they lack it."""
    model = Scripted()
    with shards(bound=1) as (cluster, console):
        live(cluster, model, batches(1, 2, 4, 8), plan(4, prefetch=True))
        assert model.seen == [0, 0, -1, -3]
        assert [status.pulls for status in console.status()] == [4, 4], "none after the last step"
        assert weight(console) == -15
        assert column(console, "read_version") == [0, 0, 1, 2]


class Beside(Scripted):
    """The scripted model as one that computes on a device: a gradient is there when finished."""

    def __init__(self) -> None:
        super().__init__()
        self.device = "beside:0"
        self.calls: list[str] = []
        self._under_way: list[tuple[Floats, Floats, float]] = []

    def allocate(self, size: int) -> Floats:
        return np.zeros(size, np.float32)

    def begin(self, weights: Floats, batch: Batch, out: Floats, *, step: int, seed: int) -> None:
        self.calls.append(f"begin {step}")
        gradient = np.empty_like(out)
        loss = super().gradient(weights, batch, gradient, step=step, seed=seed)
        out.fill(np.nan)
        self._under_way.append((out, gradient, loss))

    def finish(self) -> float:
        out, gradient, loss = self._under_way.pop(0)
        self.calls.append("finish")
        out[:] = gradient
        return loss

    def gradient(
        self, weights: Floats, batch: Batch, out: Floats, *, step: int, seed: int
    ) -> float:
        self.begin(weights, batch, out, step=step, seed=seed)
        return self.finish()


@pytest.mark.parametrize("model", [Scripted, Beside])
def test_a_prefetching_step_is_one_message(
    model: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push and the request for weights that follows it go to each shard together."""
    said: list[str] = []
    send = Links.send_together

    def record(links: Links, shard: int, messages: Sequence[tuple[Message, Any]]) -> None:
        if shard == 1 and not any(isinstance(message, Renew) for message, _ in messages):
            said.append(" ".join(type(message).__name__ for message, _ in messages))
        send(links, shard, messages)

    monkeypatch.setattr(Links, "send_together", record)
    with shards(bound=1) as (cluster, _):
        with Client(cluster, worker="w0", retry_s=60.0, patience_s=600.0) as client:
            said.clear()
            train_worker(client, model(), batches(1, 2, 4, 8), plan(4, prefetch=True))
        assert said == ["Pull", "Pull", "Push Pull", "Push Pull", "Push", "Push", "Leave"]


@pytest.mark.parametrize("steps", [1, 4, 9])
def test_a_device_goes_ahead_with_prefetched_weights(steps: int) -> None:
    """A step begins before the last one is finished and pushed; and yet every step's weights,
    versions and records are those of the same plan without a device."""
    seen, records = [], []
    values = [2**step for step in range(steps)]
    for model in (Scripted(), Beside()):
        with shards(bound=1) as (cluster, console):
            report = live(cluster, model, batches(*values[:4]), plan(steps, prefetch=True))
            seen.append((model.seen, model.keys, weight(console), report.samples, report.steps))
            names = ["seq", "clock", "steps", "samples", "read_version", "loss"]
            records.append([column(console, name) for name in names])
    assert seen[0] == seen[1]
    assert records[0] == records[1]
    assert isinstance(model, Beside)
    assert report.device == "beside:0"
    begun = [f"begin {step}" for step in range(min(steps, 4))]
    ahead = [call for name in begun[1:] for call in (name, "finish")]
    assert model.calls == [begun[0], *ahead, "finish"]


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        (Downpour(), {}),
        (Downpour(n_push=2), {"prefetch": True}),
        (Downpour(), {"prefetch": True, "clip": 1e9}),
    ],
    ids=["no prefetch", "n_push", "clip"],
)
def test_a_device_otherwise_takes_step_after_step(strategy: Strategy, more: dict[str, Any]) -> None:
    """Where a step waits for the last one's push, or the host works on its gradient."""
    model, same = Beside(), Scripted()
    for each in (model, same):
        with shards(bound=3) as (cluster, console):
            live(cluster, each, batches(1, 2, 4), plan(3, strategy, **more))
            assert weight(console) == -7
    assert model.seen == same.seen
    assert model.calls == ["begin 0", "finish", "begin 1", "finish", "begin 2", "finish"]


def test_iter_size_averages_batches() -> None:
    """A step is the mean over `iter_size` batches, each with a random key of its own."""
    model = Scripted()
    with shards() as (cluster, console):
        report = live(cluster, model, batches(1, 3, 5, 9), plan(2, iter_size=2))
        assert model.seen == [0, 0, -2, -2]
        assert weight(console) == -9
        assert column(console, "loss") == [20.0, 70.0]
    assert [key for key, _ in model.keys] == [0, 1, 2, 3]
    assert (report.steps, report.samples) == (2, 12)


@pytest.mark.parametrize(
    ("iter_size", "values", "expected"),
    [(1, (4,), -0.5), (1, (0.25,), -0.25), (2, (1, 3), -0.25)],
    ids=["beyond", "within", "clipped, then divided"],
)
def test_clip_bounds_the_norm(iter_size: int, values: Sequence[float], expected: float) -> None:
    """The sum over batches is scaled to the norm, as in Caffe before it is divided."""
    length = np.sqrt(TABLE.parameters)  # of a gradient of ones
    with shards() as (cluster, console):
        planned = plan(1, iter_size=iter_size, clip=0.5 * length)
        live(cluster, Scripted(), batches(*values), planned)
        assert TABLE.views(console.read())["a"] == pytest.approx(expected, rel=1e-6)


def test_data_that_ends() -> None:
    """The loop ends with the data, gradients owed are pushed, and the worker leaves."""
    with shards(bound=3) as (cluster, console):
        report = live(cluster, Scripted(), batches(1, 2, 4), plan(100, Downpour(n_push=2)))
        assert weight(console) == -7
        assert column(console, "steps") == [2, 1]
        assert {w.standing for s in console.status() for w in s.workers} == {"left"}
    assert (report.steps, report.samples) == (3, 9)


def test_no_data_at_all() -> None:
    """Nothing is fetched and nothing pushed."""
    with shards() as (cluster, console):
        report = live(cluster, Scripted(), batches(), plan(5))
        assert [(status.pulls, status.pushes) for status in console.status()] == [(0, 0)] * 2
    assert (report.steps, report.samples) == (0, 0)


def test_a_second_incarnation_continues_after_the_last_push() -> None:
    """After an incarnation that ends with two steps owed, the next one takes them again."""
    planned, first, second = plan(7, Downpour(n_push=3)), Scripted(fails_at=5), Scripted()
    values = (1, 2, 3, 4, 5, 6, 7)
    with shards(bound=2) as (cluster, console):
        with pytest.raises(RuntimeError, match="scripted"):
            live(cluster, first, batches(*values), planned)
        report = live(cluster, second, batches(*values[3:]), planned, incarnation=1)
        assert weight(console) == -28
        records = np.stack(console.records())
    assert records["seq"].tolist() == [[1, 2, 3]] * 2
    assert records["incarnation"].tolist() == [[0, 1, 1]] * 2
    assert first.seen == [0, 0, 0, -6, -6]
    assert second.seen == [-6, -6, -6, -21]
    assert [key for key, _ in second.keys] == [3, 4, 5, 6]
    assert (report.incarnation, report.steps) == (1, 4)


def test_a_finished_plan_has_nothing_left() -> None:
    """An incarnation that starts at the plan's end takes no step."""
    model = Scripted()
    with shards() as (cluster, console):
        live(cluster, Scripted(), batches(1, 2), plan(2))
        report = live(cluster, model, batches(4), plan(2), incarnation=1)
        assert weight(console) == -3
    assert (report.steps, model.seen) == (0, [])


def test_what_would_wait_for_ever_is_refused() -> None:
    """The plan is checked against the cluster's own bound before the first step."""
    model = Scripted()
    with shards(bound=0) as (cluster, _):
        for strategy, prefetch in ((Downpour(n_push=2), False), (Downpour(), True), (BSP(), True)):
            with pytest.raises(BadInput, match=r"staleness bound.*got 0|bsp: expected"):
                live(cluster, model, batches(1), plan(1, strategy, prefetch=prefetch))
    assert model.seen == []


def test_to_join_takes_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late report is late by steps of the length that they have since the first weights came."""
    clock = {"now": 0.0}
    monkeypatch.setattr("worker.training.training_loop.time.monotonic", lambda: clock["now"])

    class FakeClient:
        seq, best_prefetch, late_s = 0, 1, 0.0
        times = SimpleNamespace(compute_s=0.0, data_s=0.0)
        weights, versions = TABLE.empty(), (1,)

        def pull(self, _: int) -> "FakeClient":
            clock["now"] += 50.0
            return self

        def take(self, *_: object, wait: bool) -> "FakeClient":
            return self

        def push(self, *_: object, **__: object) -> None:
            self.late_s = 7.5

    steps = SimpleNamespace(plan=None, compute_s=0.0, data_s=0.0)
    driver = training_loop.ClientDriver(cast(Any, FakeClient()), cast(Any, steps))
    driver.carry_out(PullWeights(0))
    clock["now"] += 6.0
    driver.carry_out(PushReport({}, (1,), 3, 3, 0.0, 3, 3, 1))
    taken = driver.carry_out(TakeFragment("a", 1, wait=True))
    assert isinstance(taken, FragmentTaken)
    assert taken.late == 4  # of 2 s


def test_rate_multipliers_cover_the_tensors() -> None:
    """Each float of a tensor has its lr_mult, and the padding nothing."""
    expected = TABLE.empty()
    TABLE.views(expected)["a"][:] = 1
    TABLE.views(expected)["b"][:] = 2
    runs = segments(TABLE, KeyRange(0, TABLE.size))
    np.testing.assert_array_equal(rate_multipliers(runs, TABLE.size), expected)
