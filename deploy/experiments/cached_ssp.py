"""SSP with reads through a worker's cache, as Ho et al. 2013 have it: an experiment's strategy.

    each step:  read w: the cached copy if it has all updates of clocks before c - s, else pull
                g = gradient at w;  push g;  the copy moves by the worker's own update, too

The copy is as new as the slowest worker's clock was when it was pulled. Downpour's `ssp` pulls at
each step, so its reads are never older than a step, however large the bound. A pull here tells the
worker the slowest clock, which no message of the real protocol has: so only the simulator runs it,
without links, over which the clock would arrive late. Own updates since the pull count as stale.
"""

import numpy as np

from deploy.experiments.cluster import ClusterModel
from shards.errors import BadInput
from worker.strategies import SSP
from worker.strategies.base import Floats
from worker.training.step_machine import WeightsPulled


class CachedSSP(SSP, frozen=True, tag="cached_ssp", kw_only=True):
    """SSP with workers that pull only when their copy is older than the bound."""

    def check_simulated(self, cluster: ClusterModel, rule: str) -> None:
        """Raise BadInput for links, for several shards, and for a rule with a state."""
        name = f"strategy {self.name}"
        if cluster.link or cluster.links or cluster.shards > 1:
            raise BadInput(name, expected="one shard without links", got="others")
        if rule.partition(":")[0] not in ("sgd", "proximal"):
            raise BadInput(name, expected="rule sgd or proximal", got=rule)


class WorkerCache:
    """A worker's copy of the weights under the bound `bound`."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._slowest = 0
        self._copy: WeightsPulled | None = None

    def keep(self, pulled: WeightsPulled, slowest: int) -> None:
        """Keep what was pulled when the slowest worker was at this clock."""
        self._copy, self._slowest = pulled, slowest

    def read(self, clock: int) -> WeightsPulled | None:
        """The copy, if a step at this clock may see it."""
        return self._copy if clock - self._bound <= self._slowest else None

    def apply_own(self, gradient: Floats, rate: float) -> None:
        """Let the worker see its own update; the step's array stays as it is."""
        if self._copy is not None:
            weights = self._copy.weights - np.float32(rate) * gradient
            self._copy = self._copy._replace(weights=weights)
