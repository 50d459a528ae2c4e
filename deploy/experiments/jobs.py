"""One training job of an experiment, and the two halves of it that a strategy names."""

import msgspec
from msgspec import structs

from deploy.experiments.cluster import ClusterModel
from deploy.experiments.rate_schedules import FIXED, schedule_over
from ps.job_spec import shard_specs
from shards.aggregation import ServerHalf, StaleLimit
from shards.rules import SGD, Decay, Rule
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
    cut into `fragments` tables (fragment_cut.py). The rate follows `schedule` (rate_schedules.py)
    over a run of `gradients`.
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
    decay: float = 0.0
    schedule: str = FIXED
    gradients: int = 0

    @property
    def real_bound(self) -> int | None:
        """The bound of the shards: 0 where the workers move in step."""
        return 0 if self.strategy.synchronous else self.bound

    def plan(self, worker: int | None = None) -> Plan:
        """The plan of one worker, or of a worker of mean speed."""
        share = 1 / self.cluster.workers if worker is None else self.cluster.share_of(worker)
        return Plan(
            steps=self.steps,
            seed=self.seed,
            strategy=self.strategy,
            schedule=schedule_over(self.schedule, self.rate, round(self.gradients * share)),
            workers=self.cluster.workers,
            decay=Decay(self.decay),
        )

    def specs(self, tables: DenseTable | Layout) -> list[ShardSpec]:
        """The specs of the shards; raises BadInput if the strategy does not allow the bound, or
        this number of tables."""
        described = tables.tables if isinstance(tables, Layout) else (tables,)
        self.strategy.check(self.real_bound, prefetch=False)
        self.strategy.check_fragments(len(described))
        return self.specs_of([self.describe(table) for table in described])

    @property
    def half(self) -> ServerHalf:
        """The part of the strategy that the shards carry out."""
        return structs.replace(self.strategy.server(self.cluster.workers), stale=self.stale)

    def describe(self, table: DenseTable) -> TableSpec:
        """A table with the rule, rate and decay by which the shards apply its pushes."""
        plan = self.plan()
        return TableSpec(table, *self.half.settings(self.rule, plan.schedule, plan.decay))

    def specs_of(self, tables: list[TableSpec]) -> list[ShardSpec]:
        """The specs of the shards of these tables."""
        return shard_specs(
            tables,
            shards=self.cluster.shards,
            bound=self.real_bound,
            workers=self.cluster.workers,
            merge=self.half,
            lease_s=_LEASE_S,
            warm_steps=self.strategy.warm_up,
            name="experiment",
        )
