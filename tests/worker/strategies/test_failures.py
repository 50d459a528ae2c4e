"""Each way in which a strategy is known to fail, shown, and what the project does about it."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from shards.aggregation import ServerHalf
from shards.errors import BadInput
from shards.rules import SGD, Momentum, Nesterov
from tests.support.pure_cluster import TABLE, PureCluster, start
from worker.strategies import (
    ADAG,
    ASP,
    EASGD,
    MLA,
    AsyncDiLoCo,
    AsyncHeLoCo,
    StaleRate,
    Strategy,
)
from worker.strategies.base import Asynchronous
from worker.strategies.outer_momentum import ScaledWindows

Floats = NDArray[np.float32]


def to_zero(_: int, __: int, weights: Floats) -> Floats:
    """The gradient of half the squared distance to zero."""
    return weights.copy()


def still(_: int, __: int, weights: Floats) -> Floats:
    """No gradient at all."""
    return np.zeros_like(weights)


def length(weights: Floats) -> float:
    return float(np.linalg.norm(weights.astype(np.float64)))


class Overshooting(EASGD, frozen=True, tag="overshooting", kw_only=True):
    """EASGD without its check of alpha."""

    def for_workers(self, workers: int) -> "Overshooting":
        return self


def spread(alpha: float, workers: int) -> list[float]:
    """How far the centre moves at each round of exchanges, from workers that start far apart."""
    apart = start()

    def push_apart(worker: int, step: int, weights: Floats) -> Floats:
        # The first step takes each worker to a place of its own; no later one moves it.
        return (worker + 1) * apart if step == 0 else np.zeros_like(weights)

    cluster = PureCluster(
        Overshooting(alpha=alpha, tau=1), workers=workers, steps=40, decay=0.0, gradient=push_apart
    )
    seen = [cluster.weights()]
    version = 0
    while not all(worker.done for worker in cluster.workers):
        for worker in cluster.workers:
            if not worker.done:
                worker.turn()
        if cluster.shards[0].version >= version + workers:
            version = cluster.shards[0].version
            seen.append(cluster.weights())
    return [length(b - a) for a, b in pairwise(seen)]


def test_the_pulls_of_workers_on_the_centre_add_up() -> None:
    """With W * alpha far above 1 the centre overshoots by more at each exchange; the default does
    not, and a setting that would is refused."""
    calm, wild = spread(0.9 / 4, 4), spread(3.0 / 4, 4)
    assert calm[-1] < 1e-3 * max(calm)
    assert wild[-1] > 100 * wild[1]
    line = r"^strategy easgd: alpha: expected at most 0.25 with 4 workers, .* got 0.75$"
    with pytest.raises(BadInput, match=line):
        EASGD(alpha=0.75).for_workers(4)
    assert EASGD().for_workers(4).alpha == 0.9 / 4


class Twice(AsyncDiLoCo, frozen=True, tag="twice", kw_only=True):
    """Async DiLoCo as it is wrong: every delta at full rate, each through the momentum as well."""

    def server(self, workers: int) -> ServerHalf:
        return ServerHalf(rule=Nesterov(self.momentum), rate=self.outer_lr)


def test_a_mean_that_counts_twice() -> None:
    """Deltas at the full rate, and their mean through Nesterov as well, diverge; delayed Nesterov
    converges on the same pushes."""
    reached = []
    for kind in (AsyncDiLoCo, Twice):
        strategy = kind(h=20, inner_lr=0.05, weight_decay=0.0)
        cluster = PureCluster(strategy, workers=4, steps=400, decay=0.0, gradient=to_zero)
        reached.append(length(cluster.run()) / length(start()))
    delayed, twice = reached
    assert delayed < 0.2
    assert twice > 5 * delayed


def trained(strategy: Strategy, workers: int, mu: float, rate: float) -> float:
    """What is left of the distance to the minimum after 30 steps of each worker."""
    cluster = PureCluster(
        strategy,
        workers=workers,
        steps=30,
        rule=Momentum(mu),
        rate=rate,
        decay=0.0,
        gradient=to_zero,
    )
    return length(cluster.run()) / length(start())


def test_the_rate_of_one_worker_with_eight() -> None:
    """One worker learns at a rate at which eight diverge (mxnet#5287); the default scales it."""
    assert trained(ASP(), 1, 0.0, rate=0.2) < 0.01
    assert trained(ASP(scale=1.0), 8, 0.0, rate=0.2) > 1e6
    assert trained(ASP(), 8, 0.0, rate=0.2) < 0.01
    assert trained(StaleRate(), 8, 0.0, rate=0.2) < 0.01


def test_more_windows_than_a_window_has_steps() -> None:
    """Sixteen workers that each push a third of a window diverge at a rate at which three learn;
    the default scales what they push together to one window, and says so."""
    assert trained(ADAG(window=3), 3, 0.0, rate=0.5) < 0.01
    assert trained(ADAG(window=3, scale=1.0), 16, 0.0, rate=0.5) > 1e3
    assert trained(ADAG(window=3), 16, 0.0, rate=0.5) < 0.01
    assert [ADAG().server(workers).scale for workers in (1, 12, 24)] == [1.0, 1.0, 0.5]
    assert ADAG().notices(12, SGD()) == ADAG(scale=1).notices(24, SGD()) == ()
    (notice,) = ADAG().notices(24, SGD())
    assert notice == (
        "strategy adag: each push counts 12/24, because the pushes of 24 workers add up to more"
        " than one window of 12 steps, and a rate tuned for one worker may diverge; adag:scale=1"
        " keeps it as it is"
    )


def test_momentum_on_top_of_asynchrony() -> None:
    """Eight workers learn without momentum at a rate at which they diverge with it, though one
    worker does not; at an eighth of it they learn with it, too."""
    assert trained(ASP(scale=1.0), 8, 0.0, rate=0.05) < 1e-4
    assert trained(ASP(scale=1.0), 1, 0.9, rate=0.05) < 0.3
    assert trained(ASP(scale=1.0), 8, 0.9, rate=0.05) > 1e3
    assert trained(ASP(), 8, 0.9, rate=0.05) < 0.01


def test_what_is_scaled_is_said() -> None:
    """A notice names the factor, the reason and the option that undoes it."""
    scaled, momentum = ASP().notices(8, Momentum(0.9))
    assert scaled == (
        "strategy asp: the rate of each push is divided by 8, the number of workers, because their"
        " pushes add up and a rate tuned for one worker may diverge; asp:scale=1 keeps it as it is"
    )
    assert momentum == (
        "strategy asp: asynchronous workers act as momentum, which that of rule momentum adds to;"
        " if the loss grows, lower one of them"
    )
    assert len(ASP().notices(8, SGD())) == 1
    assert ASP().notices(1, Momentum(0.9)) == ()
    assert ASP(scale=1.0).notices(8, Momentum(0.9)) == (momentum,)


@pytest.mark.parametrize("kind", [*Asynchronous.__subclasses__(), *ScaledWindows.__subclasses__()])
def test_every_asynchronous_strategy_is_scaled(kind: type[Asynchronous | ScaledWindows]) -> None:
    """By default to a W-th, which a notice says; as asked otherwise."""
    assert kind().server(8).scale == 1 / 8
    assert "divided by 8, the number of workers" in kind().notices(8, SGD())[0]
    unscaled = structs.replace(kind(), scale=1)
    assert unscaled.server(8).scale == 1
    assert not any("divided" in notice for notice in unscaled.notices(8, SGD()))


def test_what_replaces_the_rule_of_the_job_is_said() -> None:
    """A strategy with a rule of its own says which, and at what rate."""
    (notice,) = AsyncDiLoCo().notices(4, Momentum(0.9))
    assert notice == (
        "strategy async_diloco: each worker keeps its own rate and steps, and the shards apply what"
        " is pushed by rule delayed_nesterov at rate 0.7, not by the job's rule momentum"
    )


def test_without_a_gradient_nothing_moves() -> None:
    """No strategy drifts: elastic forces and momenta of nothing are nothing."""
    windows: dict[str, Any] = {"h": 2, "weight_decay": 0.0}
    strategies: tuple[Strategy, ...] = (
        EASGD(tau=2),
        AsyncDiLoCo(**windows),
        MLA(**windows),
        AsyncHeLoCo(**windows),
    )
    for strategy in strategies:
        cluster = PureCluster(strategy, workers=2, steps=8, decay=0.0, gradient=still)
        np.testing.assert_array_equal(cluster.run(), start())
        assert TABLE.size == len(start())
