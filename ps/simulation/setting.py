"""What a simulated cluster is made of: values that a scenario file spells out."""

from enum import StrEnum

import msgspec

from ps.durability import Durability
from shards.rules import RULES
from shards.spec import Merge


class Cluster(StrEnum):
    """What kind of cluster is run.

    single: one process a shard, which a restart brings back with its state. compressed: the same,
    with pushes or pulls in fewer bits. logged: the same, each with a log on a disk. replicated: a
    primary and a backup a shard, and a coordinator.
    """

    SINGLE = "single"
    COMPRESSED = "compressed"
    LOGGED = "logged"
    REPLICATED = "replicated"


class Setting(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One cluster and what its workers do. `bound` None is no bound.

    A worker makes `burst` pushes, each of one step, with the weights of one read.
    A step takes a worker `step_s` on average, a message up to `delay_s`. A shard lets messages
    gather for `busy_s` and then takes them together. No fault begins after `quiet_s`. A log keeps
    what its `durability` says, and is left for another when it has grown beyond `log_bytes`. A
    whole state takes `state_s` longer to a backup than other words do. The update `rule` is one of
    shards/rules.py, with the constants that it has by default.
    """

    cluster: Cluster = Cluster.SINGLE
    shards: int = 1
    workers: int = 2
    bound: int | None = None
    steps: int = 8
    in_flight: int = 2
    burst: int = 1
    prefetch: bool = False
    merge: Merge = Merge.EACH
    rule: str = "sgd"
    warm_steps: int = 0
    lease_s: float = 3.0
    step_s: float = 0.4
    delay_s: float = 0.1
    busy_s: float = 0.0
    state_s: float = 0.0
    quiet_s: float = 6.0
    push: str = "none"
    pull: str = "none"
    durability: Durability = Durability.LOGGED
    log_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rule {self.rule!r}: expected one of {', '.join(RULES)}")

    @property
    def slots(self) -> bool:
        """Whether the rule keeps any; then weights no longer show by themselves what they hold."""
        return bool(RULES[self.rule].slot_names)
