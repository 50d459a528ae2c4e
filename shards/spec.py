"""The configuration of a shard and of its tables."""

from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec import structs

from cupy_kernels.backends import HOST, Backend
from cupy_kernels.ops.codecs import accumulate
from shards import argument_checks, payloads, pull_encodings, row_codecs
from shards.aggregation import (
    BUFFER,
    CONSTANT,
    DIRECTIONS,
    EACH,
    Average,
    Buffer,
    Merge,
    Quorum,
    StaleLimit,
)
from shards.errors import BadInput
from shards.gradient_guard import Guard
from shards.messages import Kind
from shards.rules import SGD, Decay, Rule, decay_of, row_rule_of, rule_of
from shards.schedules import Fixed, Schedule, schedule_of
from shards.tables import (
    ID_BYTES,
    MAX_PART_BYTES,
    META_WORDS,
    DenseTable,
    KeyRange,
    Layout,
    ShardMap,
    SparseTable,
    Table,
    cut_at_tensors,
    cut_evenly,
)


class TableSpec(msgspec.Struct, frozen=True):
    """A table and how its gradients are applied.

    Defaults: plain SGD at rate 0.01, no weight decay, and a guard that accepts any finite gradient.
    A `rule` may be given by name, a `schedule` as a fixed rate, a `decay` as a number for L2.
    `guard` says which gradients of the table are refused. `pushed` and `pulled` are the kinds in
    which workers are expected to send gradients and request weights; each may choose others. Rows
    of a sparse table travel as plain floats.
    """

    table: Table
    rule: Rule = SGD()
    schedule: Schedule = Fixed(base_rate=0.01)
    decay: Decay = Decay()
    guard: Guard = Guard()
    pushed: Kind = Kind.F4
    pulled: Kind = Kind.F4

    def __post_init__(self) -> None:
        if not isinstance(self.table, DenseTable):
            expected = "a DenseTable or a SparseTable"
            argument_checks.instance("TableSpec: table", self.table, SparseTable, expected)
        argument_checks.instance("TableSpec: guard", self.guard, Guard, "a Guard")
        for field, kinds in (("pushed", row_codecs.PUSHED), ("pulled", row_codecs.PULLED)):
            kind = argument_checks.choice(field, getattr(self, field), Kind)
            if self.is_sparse and kind not in kinds:
                expected = f"one of {', '.join(kinds)}"
                raise argument_checks.wrong(f"table {self.table.name}: {field}", expected, kind)
            structs.force_setattr(self, field, kind)
        rule = row_rule_of if self.is_sparse else rule_of
        for field, checked in (("rule", rule), ("schedule", schedule_of), ("decay", decay_of)):
            structs.force_setattr(self, field, checked(field, getattr(self, field)))

    @property
    def is_sparse(self) -> bool:
        """True if the table has rows by id."""
        return isinstance(self.table, SparseTable)

    @property
    def row_floats(self) -> int:
        """The floats of a sparse table's row: its weights and its slots."""
        assert isinstance(self.table, SparseTable)
        return self.table.dim * (1 + len(self.rule.slot_names))

    def prepare(self, backend: Backend) -> None:
        """Compile the rule and the expected codecs. Raises BadInput as `ShardSpec.prepare` does."""
        if self.is_sparse:
            self.rule.prepare_rows()
            row_codecs.prepare(self.pushed, self.pulled)
            return
        self.rule.prepare(backend)
        payloads.prepare(self.pushed)
        pull_encodings.prepare(self.pulled)


def list_rules(tables: Sequence[TableSpec]) -> tuple[str, ...]:
    """The names of the tables' update rules, in the order of the layout: dense tables first."""
    ordered = sorted(tables, key=lambda table: table.is_sparse)
    return tuple(str(table.rule.__struct_config__.tag) for table in ordered)


def cut_tables(tables: Sequence[TableSpec], merge: Merge, shards: int, epoch: int = 1) -> ShardMap:
    """Cut a job's tables into one range per shard, at the borders of tensors where needed.

    Raises BadInput for more shards than that allows.
    """
    layout, reason = Layout.of(spec.table for spec in tables), _whole_tensors_for(tables, merge)
    if reason is None:
        return cut_evenly(layout, shards, epoch)
    try:
        return cut_at_tensors(layout, shards, epoch)
    except BadInput as error:
        raise BadInput(
            error.what, expected=error.expected, got=error.got, hint=f"{reason} needs them whole"
        ) from None


def _whole_tensors_for(tables: Sequence[TableSpec], merge: Merge) -> str | None:
    """The update rule or average that needs each tensor whole at one shard; None without any."""
    if isinstance(merge, Quorum) and merge.average is Average.RADIAL:
        return f"the {merge.average} average"
    rules = [spec.rule for spec in tables if not spec.is_sparse and spec.rule.whole_tensors]
    return f"update rule {rules[0].__struct_config__.tag}" if rules else None


class ShardSpec(msgspec.Struct, frozen=True):
    """The whole configuration of a shard. The weights come later, by an Install.

    `map` cuts the arena of all tables. `bound` is the staleness bound in steps (None: none).
    `workers` is the expected number of workers; the iteration of the learning-rate schedules is the
    number of steps applied divided by it. `lease_s` is how long a worker may be silent,
    `warm_steps` how many steps one replica takes alone at first. `merge`, `weigh` and `scale` are
    the server's half of a strategy (aggregation.py), `stale` a limit on the staleness of single
    pushes (None: none). With `deltas` pushes are differences of weights, to which neither the
    tensors' multipliers nor the weight decay apply. `build` is that of the job's own processes
    (ps/build_id.py): a log of another build is not replayed.

    `bound` and `rate_factor`, the factor on the rates of all schedules, are the first of the job's
    settings; an operator may change them (live_settings.py). `least_bound` is the smallest bound at
    which no worker waits for itself (None: the strategy has no bound). With `local_rate` workers
    take steps at the job's rate on weights of their own, so the factor cannot change.
    """

    job: str
    shard: int
    tables: tuple[TableSpec, ...]
    map: ShardMap
    bound: int | None
    workers: int
    build: str
    merge: Merge = EACH
    weigh: str = CONSTANT
    stale: StaleLimit | None = None
    scale: float = 1.0
    deltas: bool = False
    lease_s: float = 10.0
    warm_steps: int = 0
    rate_factor: float = 1.0
    least_bound: int | None = 0
    local_rate: bool = False

    def __post_init__(self) -> None:
        """Raise BadInput if the map cuts a tensor that the rule or the merge needs whole."""
        reason = _whole_tensors_for(self.tables, self.merge)
        if reason is None:
            return
        starts = {keys.start for keys in self.map.ranges} - set(self.layout.borders)
        if starts:
            raise BadInput(
                f"job {self.job}: shards",
                expected=f"each tensor whole at one shard, as {reason} needs it",
                got=f"one that is cut at key {min(starts)} of the arena",
                hint="resume with the number of shards and the strategy of before",
            )

    @property
    def layout(self) -> Layout:
        """The job's tables in its arena."""
        return Layout.of(table.table for table in self.tables)

    @property
    def keys(self) -> KeyRange:
        """The range of the arena that this shard owns."""
        return self.map.ranges[self.shard]

    @property
    def buckets(self) -> KeyRange:
        """The buckets of sparse tables that this shard owns."""
        return self.map.buckets[self.shard]

    def slots_of(self, table: TableSpec) -> tuple[str, ...]:
        """The arrays of a table that change in place: the rule's slots, and the buffer."""
        match self.merge:
            case Buffer():
                return (*table.rule.slot_names, BUFFER)
            case Quorum():
                radial = self.merge.average_of(table.table.name) is Average.RADIAL
                return (*table.rule.slot_names, BUFFER, *((DIRECTIONS,) if radial else ()))
        return table.rule.slot_names

    @property
    def frame_floats(self) -> int:
        """The floats of the largest frame that a worker's message to the shard may have."""
        rows = MAX_PART_BYTES // 4 if self.layout.sparse else 0
        return max(len(self.keys), rows)

    @property
    def arrays_bytes(self) -> int:
        """The most bytes that the arrays of the shard's state take."""
        dense = [table for table in self.tables if not table.is_sparse]
        slots = max((len(self.slots_of(table)) + table.rule.versions for table in dense), default=0)
        rows = sum(_rows_bytes(table) for table in self.tables)
        return 4 * len(self.keys) * (1 + slots) + rows

    def prepare(self, backend: Backend = HOST) -> None:
        """Compile the update rules and the expected codecs before the first message arrives.

        Compiling takes seconds, during which the first push would count as lost and a primary as
        dead. Other codecs are compiled at their first use. Raises BadInput if `backend` is a device
        for which a rule has no kernel.
        """
        for table in self.tables:
            table.prepare(backend)
        if isinstance(self.merge, Quorum) and backend == HOST:
            accumulate(np.zeros(1, np.float32), None, np.zeros(1, np.float32))


def _rows_bytes(spec: TableSpec) -> int:
    """The most bytes of a sparse table's state at a shard, which may hold all of its rows."""
    if not isinstance(spec.table, SparseTable):
        return 0
    return spec.table.capacity * (ID_BYTES + 4 * (META_WORDS + spec.row_floats))
