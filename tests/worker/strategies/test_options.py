"""Strategies by name with options, their defaults by the number of workers, and refusals."""

import pytest

from shards.errors import BadInput
from tests.support.pure_cluster import PureCluster
from worker.strategies import (
    ASP,
    BSP,
    DCASGD,
    EASGD,
    SSP,
    STRATEGIES,
    AsyncDiLoCo,
    DiLoCo,
    Downpour,
    Softsync,
    Strategy,
    strategy_of,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("diloco", DiLoCo()),
        ("DiLoCo:h=50,outer_lr=0.5", DiLoCo(h=50, outer_lr=0.5)),
        ("bsp:b=2", BSP(b=2)),
        ("dc_asgd:adaptive=true,strength=1", DCASGD(adaptive=True, strength=1.0)),
        ("downpour:n_push=3,scale=1", Downpour(n_push=3, scale=1.0)),
        ("async_diloco:n=4", AsyncDiLoCo(n=4)),
        ("async_diloco:speeds=a-0/1+b/2", AsyncDiLoCo(speeds={"a-0": 1.0, "b": 2.0})),
        ("easgd:alpha=0.1", EASGD(alpha=0.1)),
    ],
)
def test_a_strategy_in_a_text(text: str, expected: Strategy) -> None:
    """A name, and options after a colon; what is not given has its default."""
    assert strategy_of("strategy", text) == expected


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("sgd", "strategy: expected downpour, bsp, .*, or a strategy such as BSP.., got 'sgd'"),
        ("bsp:h=3", "strategy bsp: unknown option 'h'; its options are b"),
        ("mla:h=x", "strategy mla: h: expected `int`, got `str`, 'x'"),
        (
            "decoupled_diloco:average=median",
            "strategy decoupled_diloco: average: expected mean or radial, got 'median'",
        ),
        ("stale_rate:h=3", "strategy stale_rate: unknown option 'h'; it has no options"),
        ("diloco:h", "strategy diloco: h: expected h=VALUE once, got h"),
        ("diloco:h=3,h=4", "strategy diloco: h: expected h=VALUE once, got h=4"),
        ("diloco:h=few", "strategy diloco: h: expected `int`, got `str`, 'few'"),
        (
            "async_diloco:b=1",
            "strategy async_diloco: unknown option 'b'; its options are h, .*",
        ),
        ("async_diloco:speeds=a", "strategy async_diloco: .*speeds.*"),
        ("diloco:h=0", "strategy diloco: h: expected 1 to 16384, got 0"),
        ("easgd:alpha=-1", "strategy easgd: alpha: expected more than 0, got -1"),
        ("sparknet:momentum=1", r"strategy sparknet: .*momentum: expected \[0, 1\), got 1"),
    ],
)
def test_a_wrong_text_is_one_line(text: str, line: str) -> None:
    """It names strategy and option, and what is known."""
    with pytest.raises(BadInput, match=f"^{line}$"):
        strategy_of("strategy", text)


@pytest.mark.parametrize(
    ("strategy", "bound", "line"),
    [
        (ASP(), 3, "strategy asp: expected no staleness bound, got 3"),
        (SSP(), None, "strategy ssp: expected a staleness bound, got no bound"),
        (DiLoCo(), 1, "strategy diloco: expected staleness bound 0, got 1"),
    ],
)
def test_a_bound_that_does_not_fit(strategy: Strategy, bound: int | None, line: str) -> None:
    """A strategy names the bound that it needs."""
    with pytest.raises(BadInput, match=f"^{line}$"):
        strategy.check(bound, prefetch=False)


@pytest.mark.parametrize("kind", STRATEGIES.values())
def test_the_usual_bound_fits(kind: type[Strategy]) -> None:
    """A job that names no bound can run every strategy with its defaults."""
    kind().check(kind.usual_bound, prefetch=False)


def test_options_for_too_few_workers() -> None:
    """More backup workers, or more groups of gradients, than there are workers."""
    with pytest.raises(BadInput, match=r"^strategy bsp: b: expected fewer than 3 .*got 3$"):
        BSP(b=3).for_workers(3)
    with pytest.raises(BadInput, match=r"^strategy softsync: n: expected at most 2.* got 3$"):
        Softsync(n=3).for_workers(2)


def test_a_slow_worker_takes_fewer_steps() -> None:
    """Steps by speed: h * v / v_max, one at least; each window is one tick of the clock."""
    strategy = AsyncDiLoCo(h=8, speeds={"w0": 10.0, "w1": 5.0, "w2": 1.0})
    steps = [strategy.for_worker(f"w{number}").h for number in range(4)]
    assert steps == [8, 4, 1, 8]
    cluster = PureCluster(strategy, workers=3, steps=16)
    cluster.run((0, 1, 2))
    rows = cluster.records()
    for number, taken in enumerate(steps[:3]):
        mine = rows[rows["worker"] == b"w%d" % number]
        assert mine["steps"].tolist() == [taken] * (16 // taken)
        assert mine["clock"].tolist() == list(range(1, 16 // taken + 1))
