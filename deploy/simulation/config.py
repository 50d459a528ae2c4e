"""The configuration of a simulated cluster, as it appears in a scenario file."""

from typing import Literal

import msgspec

from deploy.simulation_kinds import ClusterConfig
from ps.durability import Durability
from shards.aggregation import EACH, Buffer, Merge, Quorum, Round, StaleLimit
from shards.rules import ROW_RULES, RULES

FIRST, SECOND = "sim", "more"
"""The names of the tables."""

LONGEST_S = 0.1  # the longest step that a worker reports; so any grace is short


class SimulationConfig(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One cluster and its training plan. `bound` None means no bound.

    A worker makes `burst` pushes, each of one step, with the weights of one read. A step takes
    `step_s` seconds on average, a message up to `delay_s`. A shard collects messages for `busy_s`
    seconds and then processes them together. No fault begins after `quiet_s`. `durability` is the
    level of the logs; a log is replaced by a new one when it exceeds `log_bytes`. A whole state
    takes `state_s` seconds longer to a backup than other messages, and travels in pieces of
    `piece_bytes`. The update `rule` is one of shards/rules.py, with its default constants. With a
    `second` rule the job has a second table, and two pushes of three leave one of the tables out.
    With a rule for `rows` it has a sparse table, of which most pushes change some rows; they travel
    as `row_push` and `row_pull` say.
    `backups` is the number of backup workers of a round, `buffer` that of the pushes in a buffer. A
    push with a staleness above `stale_after` is applied at a lower rate, or dropped with
    `stale_drop` (StaleLimit). `changes_rate`: an operator may change the rate.
    """

    cluster: ClusterConfig = ClusterConfig.SINGLE
    shards: int = 1
    workers: int = 2
    bound: int | None = None
    steps: int = 8
    in_flight: int = 2
    burst: int = 1
    prefetch: bool = False
    merge: Literal["each", "round", "buffer", "quorum"] = "each"
    backups: int = 0
    buffer: int = 2
    quorum: int = 1
    stale_after: int | None = None
    stale_drop: bool = False
    changes_rate: bool = False
    rule: str = "sgd"
    second: str = ""
    rows: str = ""
    row_push: Literal["none", "bf16", "int8"] = "none"
    row_pull: Literal["none", "bf16"] = "none"
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
    piece_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for rule in self.rules.values():
            if rule not in RULES:
                raise ValueError(f"rule {rule!r}: expected one of {', '.join(RULES)}")
        if self.rows and self.rows not in ROW_RULES:
            raise ValueError(f"rows {self.rows!r}: expected one of {', '.join(ROW_RULES)}")

    @property
    def rules(self) -> dict[str, str]:
        """The rule of each table."""
        return {FIRST: self.rule} | ({SECOND: self.second} if self.second else {})

    @property
    def merging(self) -> Merge:
        """The rule by which the shards merge pushes."""
        match self.merge:
            case "round":
                return Round(self.backups)
            case "buffer":
                return Buffer(self.buffer)
            case "quorum":
                return Quorum(self.quorum, overlap=2, grace=1)
        return EACH

    @property
    def stale(self) -> StaleLimit | None:
        """The limit on the staleness of single pushes."""
        return None if self.stale_after is None else StaleLimit(self.stale_after, self.stale_drop)

    @property
    def slots(self) -> bool:
        """True if weights alone do not show which pushes they hold.

        They do not if a rule keeps slots, if a push may leave a table out, if pushes wait in a
        buffer, if a round drops some, if stale ones count for less, or if the rate changes.
        """
        return bool(
            RULES[self.rule].slot_names
            or self.backups
            or self.second
            or self.merge in ("buffer", "quorum")
            or self.stale_after
            or self.changes_rate
        )

    def tables_of_push(self, seq: int) -> tuple[str, ...]:
        """The tables in push `seq` of any worker; a report is on one of them."""
        tables = tuple(self.rules)
        if self.merge == "quorum":
            return (tables[seq % len(tables)],)
        return tables[seq % 3 - 1 : seq % 3] if len(tables) > 1 and seq % 3 else tables
