"""What a shard is told at birth."""

from enum import StrEnum

import msgspec

from shards.guard import Guard
from shards.rules import Decay, Rule
from shards.schedules import Schedule
from shards.tables import DenseTable, ShardMap


class Merge(StrEnum):
    """How pushes meet the weights: each as it comes, or a round of all workers as their mean."""

    EACH = "each"
    ROUND = "round"


class ShardSpec(msgspec.Struct, frozen=True):
    """All that a shard is told. The weights come later, by an Install.

    `bound` is the staleness bound (None: none), `workers` how many the learning-rate schedule
    expects: its iteration is the number of steps applied divided by it. `lease_s` is how long a
    worker's silence is tolerated, `warm_steps` how many steps one replica takes alone at first;
    `guard` says which gradients are not applied.
    """

    job: str
    shard: int
    table: DenseTable
    map: ShardMap
    rule: Rule
    schedule: Schedule
    decay: Decay
    bound: int | None
    workers: int
    build: str
    merge: Merge = Merge.EACH
    lease_s: float = 10.0
    warm_steps: int = 0
    guard: Guard = Guard()
