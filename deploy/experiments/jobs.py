"""One training job of an experiment, and the two halves of it that a strategy names."""

import msgspec
from msgspec import structs

from deploy.experiments.cluster import ClusterModel
from ps.job_spec import shard_specs
from shards.aggregation import StaleLimit
from shards.rules import SGD, Rule
from shards.schedules import Fixed
from shards.spec import ShardSpec, TableSpec
from shards.tables import DenseTable, Layout
from worker.strategies import Strategy
from worker.training.step_machine import Plan

ENDLESS = 1 << 30
"""Steps of a plan that does not end by itself: the experiment decides when."""

_LEASE_S = 1e6  # nothing renews it, and nothing lets it run out


class SimulatedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job of the simulator: strategy, rule and cluster.

    The strategy must have its defaults for this number of workers (`for_workers`). `rule` and
    `rate` hold where the strategy brings none of its own; `bound` is the staleness bound in steps,
    and `stale` limits the staleness of single pushes. Each worker takes `steps` steps. The table is
    cut into `fragments` tables (fragment_cut.py).
    """

    strategy: Strategy
    cluster: ClusterModel
    rate: float
    seed: int
    rule: Rule = SGD()
    bound: int | None = None
    stale: StaleLimit | None = None
    steps: int = ENDLESS
    fragments: int = 1

    @property
    def real_bound(self) -> int | None:
        """The bound of the shards: 0 where the workers move in step."""
        return 0 if self.strategy.synchronous else self.bound

    def plan(self) -> Plan:
        """The plan of each worker."""
        return Plan(
            steps=self.steps,
            seed=self.seed,
            strategy=self.strategy,
            schedule=Fixed(base_rate=self.rate),
            workers=self.cluster.workers,
        )

    def specs(self, tables: DenseTable | Layout) -> list[ShardSpec]:
        """The specs of the shards; raises BadInput if the strategy does not allow the bound, or
        this number of tables."""
        described = tables.tables if isinstance(tables, Layout) else (tables,)
        self.strategy.check(self.real_bound, prefetch=False)
        self.strategy.check_fragments(len(described))
        half = structs.replace(self.strategy.server(self.cluster.workers), stale=self.stale)
        rule, rate, _ = half.settings(self.rule, Fixed(base_rate=self.rate), self.plan().decay)
        return shard_specs(
            [TableSpec(table, rule, rate) for table in described],
            shards=self.cluster.shards,
            bound=self.real_bound,
            workers=self.cluster.workers,
            merge=half,
            lease_s=_LEASE_S,
            warm_steps=self.strategy.warm_up,
            name="experiment",
        )
