"""Running statistics, such as those of a batch normalisation, under every strategy.

A buffer is not trained: a model returns what to subtract from it, and it follows the batches. Here
each batch's statistic is the same, so that a buffer must approach it, and hardly pass it.
"""

import numpy as np
import pytest
from msgspec.structs import replace

from ps import DenseTable, TensorSpec
from tests.support.pure_cluster import PureCluster
from worker.strategies import STRATEGIES, Downpour, FedBuff, Strategy
from worker.strategies.base import Floats

TABLE = DenseTable(
    "net", (TensorSpec("w", (40,)), TensorSpec("running", (8,), 0.0, 0.0, buffer=True))
)
WANTED, KEEP = 4.0, 0.9
WORKERS = 4

_SHORT = {"h": 20, "window": 20, "tau": 5}


def averaged(_: int, __: int, weights: Floats) -> Floats:
    """No gradient, and one step of an exponential mean of what every batch has."""
    gradient = TABLE.empty()
    running = TABLE.views(weights)["running"]
    TABLE.views(gradient)["running"][:] = np.float32(1 - KEEP) * (running - np.float32(WANTED))
    return gradient


def strategies() -> dict[str, Strategy]:
    """Each strategy, with windows so long that a worker's own buffer nearly arrives in one."""
    found: dict[str, Strategy] = {}
    for name, kind in STRATEGIES.items():
        known = {field: n for field, n in _SHORT.items() if field in kind.__struct_fields__}
        found[name] = replace(kind(), **known)
    return found | {
        "downpour, own steps": Downpour(n_push=20, n_fetch=20),
        "downpour, rare fetches": Downpour(n_fetch=20),
        "fedbuff, small": FedBuff(k=1, window=20),
    }


@pytest.mark.parametrize("name", strategies())
def test_a_buffer_follows_the_batches(name: str) -> None:
    """At the shards it approaches the batches' value, and swings beyond it by a tenth at most."""
    begin = TABLE.empty()
    cluster = PureCluster(
        strategies()[name],
        workers=WORKERS,
        steps=400,
        decay=0.0,
        gradient=averaged,
        table=TABLE,
        begin=begin,
    )
    seen = [0.0]
    while not all(one.done for one in cluster.workers):
        for one in cluster.workers:
            if not one.done:
                one.turn()
        seen.append(float(TABLE.views(cluster.weights())["running"].max()))
    assert max(seen) <= 1.1 * WANTED
    assert abs(seen[-1] - WANTED) <= 0.1 * WANTED
