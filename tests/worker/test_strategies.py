"""Strategies are values that answer the worker loop's questions, and refuse what cannot work."""

import threading
from collections.abc import Iterator
from itertools import repeat

import msgspec
import numpy as np
import pytest

from ps import AdminClient
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.threads import local_shards
from shards.aggregation import EACH, ROUND, Buffer, Merge, Round
from shards.errors import BadInput
from shards.messages import MAX_STEPS
from shards.schedules import Fixed
from shards.tables import RateRun
from tests.support.ones_job import TABLE, Ones, counted
from worker.strategies import (
    BSP,
    EAMSGD,
    EASGD,
    STRATEGIES,
    AsyncDiLoCo,
    DiLoCo,
    Downpour,
    DynSGD,
    FedBuff,
    Local,
    Softsync,
    Strategy,
    strategy_named,
)
from worker.training.model import Batch
from worker.training.training_loop import Plan, train_worker

ALL: list[Strategy] = [
    *(kind() for kind in STRATEGIES.values()),
    Downpour(n_push=3, n_fetch=5, warm_steps=7, scale=0.5),
    BSP(b=2),
    AsyncDiLoCo(h=50, n=3, speeds={"w1": 0.5}),
    EAMSGD(alpha=0.1, momentum=0.5),
]


def test_the_registry_names_each_strategy() -> None:
    """A name gives its class, and the class's values say that name when they travel."""
    for name, kind in STRATEGIES.items():
        assert strategy_named(name) is kind
        assert msgspec.to_builtins(kind())["strategy"] == name
    with pytest.raises(BadInput, match=r"^strategy: expected one of adag, .*, got 'sgd'$"):
        strategy_named("sgd")


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("strategy", ALL)
def test_shards_know_the_smallest_bound(strategy: Strategy, prefetch: bool) -> None:
    """The smallest bound that a job may begin with is the one that shards later accept."""

    def allowed(bound: int) -> bool:
        try:
            strategy.check(bound, prefetch)
        except BadInput:
            return False
        return True

    if prefetch and not strategy.plain:
        return
    least = strategy.for_shards(2, prefetch=prefetch).least_bound
    assert least == next(filter(allowed, range(20)), None)


@pytest.mark.parametrize("strategy", ALL)
def test_strategies_travel(strategy: Strategy) -> None:
    """As JSON and back each is the same value of the same class."""
    back = msgspec.json.decode(msgspec.json.encode(strategy), type=Strategy)
    assert back == strategy
    assert type(back) is type(strategy)


@pytest.mark.parametrize(
    ("strategy", "fetches", "pushes", "warm_up", "merge"),
    [
        (Downpour(), range(12), range(12), 0, EACH),
        (Downpour(n_push=4), range(12), [3, 7, 11], 0, EACH),
        (Downpour(n_fetch=5, warm_steps=3), [0, 5, 10], range(12), 3, EACH),
        (Downpour(n_push=2, n_fetch=3), [0, 3, 6, 9], [1, 3, 5, 7, 9, 11], 0, EACH),
        (BSP(), range(12), range(12), 0, ROUND),
        (BSP(b=2), range(12), range(12), 0, Round(2)),
        (DynSGD(), [0, 5, 10], [4, 9], 0, EACH),
        (DiLoCo(h=6), [0, 6], [5, 11], 0, ROUND),
        (EASGD(tau=4), [], [3, 7, 11], 0, EACH),
        (FedBuff(k=3, window=4), [0, 4, 8], [3, 7, 11], 0, Buffer(3)),
        (Softsync(n=2), range(12), range(12), 0, Buffer(2)),
    ],
)
def test_when_a_worker_fetches_and_pushes(
    strategy: Strategy, fetches: list[int], pushes: list[int], warm_up: int, merge: Merge
) -> None:
    """Over twelve steps: before which ones it fetches, after which ones it pushes."""
    assert [step for step in range(12) if strategy.fetches(step)] == list(fetches)
    assert [step for step in range(12) if strategy.pushes(step)] == list(pushes)
    assert (strategy.warm_up, strategy.server(4).merge) == (warm_up, merge)


@pytest.mark.parametrize(
    ("field", "value", "values"),
    [
        ("n_push", 0, f"1 to {MAX_STEPS}"),
        ("n_fetch", -3, "at least 1"),
        ("warm_steps", -1, "at least 0"),
    ],
)
def test_downpour_refuses_numbers_that_make_no_sense(field: str, value: int, values: str) -> None:
    """By name, however it is made."""
    line = rf"^{field}: expected {values}, got {value}$"
    with pytest.raises(BadInput, match=line):
        Downpour(**{field: value})
    with pytest.raises(BadInput, match=line):
        msgspec.structs.replace(Downpour(), **{field: value})


@pytest.mark.parametrize(
    ("strategy", "bound", "prefetch", "line"),
    [
        (Downpour(n_push=3), 1, False, "pushing every 3 steps needs at least 2, got 1"),
        (
            Downpour(n_push=3),
            2,
            True,
            "pushing every 3 steps with prefetch needs at least 3, got 2",
        ),
        (
            Downpour(n_fetch=3),
            1,
            False,
            "every 1 steps and fetching every 3 needs at least 2, got 1",
        ),
        (Downpour(n_push=4, n_fetch=6), 6, False, "every 4 steps and .* 6 needs at least 7, got 6"),
        (Downpour(), 0, True, "pushing every 1 steps with prefetch needs at least 1, got 0"),
        (
            Downpour(n_fetch=2),
            None,
            True,
            "before every step, got downpour, which pulls every 2 steps",
        ),
        (BSP(), 1, False, "strategy bsp: expected staleness bound 0, got 1"),
        (BSP(), None, False, "expected staleness bound 0, got no bound"),
        (BSP(), 0, True, "expected no prefetch, got prefetch"),
    ],
)
def test_what_would_wait_for_ever(
    strategy: Strategy, bound: int | None, prefetch: bool, line: str
) -> None:
    """A bound without room for the steps not pushed yet, or not defined, is refused."""
    with pytest.raises(BadInput, match=f"{line}$"):
        strategy.check(bound, prefetch)


@pytest.mark.parametrize(
    ("strategy", "bound", "prefetch"),
    [
        (Downpour(), 0, False),
        (Downpour(), 1, True),
        (Downpour(n_push=3), 2, False),
        (Downpour(n_push=3), 3, True),
        (Downpour(n_push=4, n_fetch=4), 3, False),
        (Downpour(n_push=2, n_fetch=3), 3, False),
        (Downpour(n_push=4, n_fetch=6, warm_steps=4), 7, False),
        (Downpour(n_push=7, n_fetch=2), None, False),
        (BSP(), 0, False),
    ],
)
def test_the_least_bound_lets_everyone_finish(
    strategy: Strategy, bound: int | None, prefetch: bool
) -> None:
    """With the smallest bound that `check` allows three workers take all their steps."""
    strategy.check(bound, prefetch)
    steps, rate = 13, Fixed(base_rate=1.0)
    plan = Plan(steps=steps, seed=1, strategy=strategy, schedule=rate, prefetch=prefetch)
    specs = shard_specs(
        TABLE,
        shards=2,
        bound=bound,
        workers=3,
        schedule=rate,
        merge=strategy.server(3).merge,
        warm_steps=strategy.warm_up,
    )
    ended: list[int] = []

    def live(name: str) -> None:
        with Client(cluster, worker=name) as client:
            ended.append(train_worker(client, Ones(), endless(), plan).steps)

    with local_shards(specs) as cluster, AdminClient(cluster) as console:
        threads = [threading.Thread(target=live, args=(f"w{number}",)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ended == [steps] * 3
        if strategy.server(3).merge == EACH:
            assert counted(console.read()) == {-3.0 * steps}
        if bound is not None:
            assert max(status.max_clock_gap for status in console.status()) <= bound + 1


def endless() -> Iterator[Batch]:
    return repeat({"data": np.zeros((1, 1), np.float32)})


def test_downpour_pushes_the_sum_of_its_gradients() -> None:
    """The first gradient is kept, the others are added to it; a fetch for every step leaves the
    weights alone, a rarer one moves them."""
    runs = (RateRun(0, 1, 1.0, 1.0), RateRun(1, 2, 2.0, 1.0))
    for n_fetch, moved in ((1, [0, 0, 0]), (2, [-2, -4, 0])):
        pulled = np.zeros(3, np.float32)
        local = Local(pulled, pulled, (4, 5), segments=runs)
        first = np.ones(3, np.float32)
        strategy = Downpour(n_push=2, n_fetch=n_fetch)
        for gradient in (first, 3 * first):
            strategy.local_step(local, gradient, 0.5)
            local.steps += 1
        pushed = strategy.contribution(local)
        assert pushed is first
        assert pushed.tolist() == [4, 4, 4]
        assert local.weights.tolist() == moved
        assert not pulled.any()
