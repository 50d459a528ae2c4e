"""Every strategy equals a serial NumPy loop of its formula, bit for bit, in any interleaving."""

from typing import Any

import numpy as np
import pytest

from shards.aggregation import Average
from shards.tables import KeyRange, segments
from tests.support import strategy_oracles as oracles
from tests.support.pure_cluster import (
    DECAY,
    RATE,
    TABLE,
    PureCluster,
    bowl,
    start,
)
from worker.strategies import (
    ADAG,
    ASP,
    BSP,
    DCASGD,
    EAMSGD,
    EASGD,
    MLA,
    SSP,
    STRATEGIES,
    AsyncDiLoCo,
    AsyncHeLoCo,
    DecoupledDiLoCo,
    DiLoCo,
    Downpour,
    DynSGD,
    FedBuff,
    LocalSGD,
    Softsync,
    SparkNet,
    StaleRate,
    Strategy,
    StreamingDiLoCo,
)
from worker.strategies.base import rate_multipliers

TENSORS = [run.keys for run in segments(TABLE, KeyRange(0, TABLE.size))]

CASES: dict[str, tuple[Strategy, type[oracles.Oracle], dict[str, Any]]] = {
    "asp": (ASP(), oracles.Scaled, {}),
    "ssp": (SSP(), oracles.Scaled, {}),
    "downpour": (Downpour(n_push=3), oracles.Scaled, {}),
    "downpour, own steps": (Downpour(n_push=2, n_fetch=4), oracles.DownpourOwnSteps, {}),
    "stale_rate": (StaleRate(), oracles.StaleRate, {}),
    "softsync": (Softsync(), oracles.Softsync, {"n": 1}),
    "softsync, n 2": (Softsync(n=2), oracles.Softsync, {"n": 2}),
    "bsp": (BSP(), oracles.Rounds, {}),
    "dynsgd": (DynSGD(window=3), oracles.DynSGD, {}),
    "adag": (ADAG(window=4), oracles.ADAG, {}),
    "dc_asgd": (DCASGD(), oracles.DCASGD, {"adaptive": False}),
    "dc_asgd, adaptive": (DCASGD(adaptive=True), oracles.DCASGD, {"adaptive": True}),
    "easgd": (EASGD(tau=3), oracles.EASGD, {}),
    "eamsgd": (EAMSGD(tau=3), oracles.EAMSGD, {}),
    "sparknet": (SparkNet(tau=4), oracles.SparkNet, {}),
    "local_sgd": (LocalSGD(h=4), oracles.LocalSGD, {}),
    "diloco": (DiLoCo(h=4), oracles.DiLoCo, {}),
    "async_diloco": (AsyncDiLoCo(h=4), oracles.AsyncDiLoCo, {}),
    "mla": (MLA(h=4), oracles.MLA, {}),
    "heloco": (AsyncHeLoCo(h=4), oracles.HeLoCo, {"tensors": TENSORS}),
    "streaming_diloco": (
        StreamingDiLoCo(h=5, overlap=2, average=Average.MEAN),
        oracles.Fragments,
        {},
    ),
    "decoupled_diloco": (
        DecoupledDiLoCo(h=5, overlap=2, average=Average.MEAN),
        oracles.DecoupledFragments,
        {},
    ),
    "fedbuff": (FedBuff(k=4, window=3), oracles.FedBuff, {"k": 4}),
}

ORDERS: dict[str, tuple[int, tuple[int, ...]]] = {
    "one": (1, (0,)),
    "in turn": (3, (0, 1, 2)),
    "backwards": (3, (2, 1, 0)),
    "one is slow": (3, (0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 2)),
    "bursts": (3, (0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 0, 2, 1, 1)),
    "random": (4, tuple(np.random.default_rng(4).integers(0, 4, 97).tolist())),
}


def oracle_of(kind: type[oracles.Oracle], workers: int, options: dict[str, Any]) -> oracles.Oracle:
    decays = TABLE.empty()
    TABLE.views(decays)["a"][:] = 1
    return kind(
        start(),
        bowl,
        rate_multipliers(segments(TABLE, KeyRange(0, TABLE.size)), TABLE.size),
        decays,
        workers=workers,
        rate=RATE,
        decay=DECAY,
        **options,
    )


def test_every_strategy_has_an_oracle() -> None:
    """No strategy is left out."""
    assert {name.partition(",")[0] for name in CASES} == set(STRATEGIES)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", CASES)
def test_a_strategy_equals_its_serial_loop(case: str, order: str) -> None:
    """Two shards and one to four workers make the bits of one NumPy loop over the same events."""
    strategy, kind, options = CASES[case]
    workers, turns = ORDERS[order]
    if isinstance(strategy, Softsync) and strategy.n > workers:
        pytest.skip("n is at most the number of workers")
    bound = 4 if isinstance(strategy, SSP) else None
    cluster = PureCluster(strategy, workers=workers, steps=14, bound=bound)
    got = cluster.run(turns)
    expected = oracle_of(kind, workers, options).repeat(cluster.events)
    assert np.abs(got - start()).max() > 1e-3, "nothing was learnt"
    np.testing.assert_array_equal(got, expected)
