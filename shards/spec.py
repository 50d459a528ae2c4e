"""The configuration of a shard."""

import msgspec

from cupy_kernels.backends import HOST, Backend
from shards import payloads, pull_encodings
from shards.aggregation import BUFFER, CONSTANT, EACH, Buffer, Merge
from shards.gradient_guard import Guard
from shards.messages import Kind
from shards.rules import Decay, Rule
from shards.schedules import Schedule
from shards.tables import DenseTable, ShardMap


class ShardSpec(msgspec.Struct, frozen=True):
    """The whole configuration of a shard. The weights come later, by an Install.

    `bound` is the staleness bound in steps (None: none). `workers` is the expected number of
    workers; the learning-rate schedule's iteration is the number of steps applied divided by it.
    `lease_s` is how long a worker may be silent, `warm_steps` how many steps one replica takes
    alone at first; `guard` says which gradients are refused. `merge`, `weigh` and `scale` are the
    server's half of a strategy (aggregation.py); with `deltas` pushes are differences of weights,
    to which neither the tensors' multipliers nor the weight decay apply. `pushed` and `pulled` are
    the kinds in which workers are expected to send gradients and request weights; each may choose
    others.
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
    merge: Merge = EACH
    weigh: str = CONSTANT
    scale: float = 1.0
    deltas: bool = False
    lease_s: float = 10.0
    warm_steps: int = 0
    guard: Guard = Guard()
    pushed: Kind = Kind.F4
    pulled: Kind = Kind.F4

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The arrays that change in place with every update: the rule's slots, and the buffer."""
        buffer = (BUFFER,) if isinstance(self.merge, Buffer) else ()
        return (*self.rule.slot_names, *buffer)

    def prepare(self, place: Backend = HOST) -> None:
        """Compile the update rule and the expected codecs before the first message arrives.

        Compiling takes seconds, during which the first push would count as lost and a primary as
        dead. Other codecs are compiled at their first use. Raises BadInput if `place` is a device
        for which the rule has no kernel.
        """
        self.rule.prepare(place)
        payloads.prepare(self.pushed)
        pull_encodings.prepare(self.pulled)
