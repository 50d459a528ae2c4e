"""What a shard is told at birth."""

from enum import StrEnum

import msgspec

from cupy_kernels.backends import HOST, Backend
from shards import payloads, pull_encodings
from shards.gradient_guard import Guard
from shards.messages import Kind
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
    `guard` says which gradients are not applied. `pushed` and `pulled` are the kinds in which
    workers are expected to send gradients and to want weights; each may choose others.
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
    pushed: Kind = Kind.F4
    pulled: Kind = Kind.F4

    def prepare(self, place: Backend = HOST) -> None:
        """Compile the rule and the codecs that are expected, before the first message waits.

        It takes seconds, in which the first push would be taken for lost, and a primary for dead.
        What else workers choose is compiled when it comes. Raises BadInput for a rule that has no
        kernel where `place` needs one.
        """
        self.rule.prepare(place)
        payloads.prepare(self.pushed)
        pull_encodings.prepare(self.pulled)
