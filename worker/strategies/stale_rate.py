"""The staleness-aware learning rate (Zhang et al. 2016, arXiv 1511.05950).

    each step:  pull w;  g = gradient at w;  push g       the shards: w -= rate / max(1, t) * g

t is the staleness of the push: the updates that its shard applied since the worker read w.
"""

from shards.aggregation import ServerHalf
from worker.strategies.base import Base


class StaleRate(Base, frozen=True, tag="stale_rate", kw_only=True):
    """Push every step; an old gradient counts for less."""

    @property
    def plain(self) -> bool:
        return True

    def server(self, workers: int) -> ServerHalf:
        return ServerHalf(weigh="inverse")
