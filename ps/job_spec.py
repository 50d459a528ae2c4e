"""Builds the specs of a job's shards, and the cluster description for its workers."""

import secrets
from collections.abc import Mapping, Sequence

import msgspec

from ps.build_id import build_id
from ps.cluster import Access, Cluster
from ps.session.compression import Compression, by_table
from shards import argument_checks
from shards.aggregation import EACH, Merge, Round, ServerHalf, merge_of
from shards.errors import BadInput
from shards.gradient_guard import Guard
from shards.rules import SGD, Decay, Rule, decay_of, rule_of
from shards.schedules import Schedule, schedule_of
from shards.spec import ShardSpec, TableSpec, cut_tables
from shards.tables import DenseTable

_NAME_BYTES = 100  # an id has 128


def shard_specs(
    tables: DenseTable | Sequence[TableSpec],
    *,
    shards: int = 1,
    rule: Rule | str | None = None,
    schedule: Schedule | float | None = None,
    decay: Decay | float | None = None,
    bound: float | None = None,
    workers: int = 1,
    merge: Merge | ServerHalf | str = EACH,
    lease_s: float = 10.0,
    warm_steps: int = 0,
    guard: Guard | None = None,
    name: str = "job",
) -> list[ShardSpec]:
    """The specs of a new job's shards, with the arena of its tables cut evenly among them.

    `tables` is one table, for which `rule`, `schedule`, `decay` and `guard` are given here, or
    several TableSpecs, which have their own. Defaults: plain SGD at rate 0.01, no weight decay, no
    staleness bound, and a guard that accepts any finite gradient. A `rule` may be a name, such as
    "adam", with its defaults; a `schedule` a number, a fixed rate; a `decay` a number, L2; a
    `bound` of None or inf is none. `merge` says how pushes are merged, or is all that a strategy
    asks of the shards but its rule and rate, which are arguments here (shards/aggregation.py). The
    job's id is `name` and a random part that a stranger cannot guess. Raises BadInput for invalid
    numbers.
    """
    if isinstance(tables, DenseTable):
        table_spec = TableSpec(
            tables,
            SGD() if rule is None else rule_of("rule", rule),
            schedule_of("schedule", 0.01 if schedule is None else schedule),
            Decay() if decay is None else decay_of("decay", decay),
            Guard()
            if guard is None
            else argument_checks.instance("guard", guard, Guard, "a Guard"),
        )
        described: tuple[TableSpec, ...] = (table_spec,)
    else:
        expected = "a DenseTable or a list of TableSpec"
        described = tuple(
            argument_checks.instance("tables", table, TableSpec, expected)
            for table in argument_checks.items("tables", tables, expected)
        )
        if (rule, schedule, decay, guard) != (None,) * 4:
            raise BadInput("tables", expected="rule, schedule, decay and guard in each TableSpec")
    shards, workers = (
        argument_checks.whole("shards", shards, 1),
        argument_checks.whole("workers", workers, 1),
    )
    steps = argument_checks.staleness_bound("bound", bound)
    half = merge if isinstance(merge, ServerHalf) else ServerHalf(merge=merge_of("merge", merge))
    if isinstance(half.merge, Round) and steps != 0:
        got = "none" if steps is None else steps
        raise BadInput("bound", expected="0, at which pushes are merged in rounds", got=got)
    job = f"{argument_checks.name('name', name, _NAME_BYTES)}-{secrets.token_hex(8)}"
    shard_map = cut_tables(described, half.merge, shards)
    for table_spec in described:
        if table_spec.is_sparse:
            half.check_rows(table_spec.table.name)
    return [
        ShardSpec(
            job=job,
            shard=shard,
            tables=described,
            map=shard_map,
            bound=steps,
            workers=workers,
            build=build_id(),
            merge=half.merge,
            weigh=half.weigh,
            stale=half.stale,
            scale=half.scale,
            deltas=half.deltas,
            lease_s=argument_checks.seconds("lease_s", lease_s),
            warm_steps=argument_checks.whole("warm_steps", warm_steps, 0),
            rate_factor=half.rate_factor,
            least_bound=half.least_bound,
            local_rate=half.local_rate or half.deltas,
        )
        for shard in range(shards)
    ]


def expect_compression(
    specs: Sequence[ShardSpec],
    compression: Compression | str | Mapping[str, Compression | str] | None,
) -> list[ShardSpec]:
    """The specs of shards that compile in advance what this choice of the workers needs.

    It is one for all dense tables, or one for each table by name.
    """
    first = check_specs(specs)[0]
    expected = by_table(compression, first.layout)
    tables = tuple(
        msgspec.structs.replace(
            table,
            pushed=expected[table.table.name].push_kind,
            pulled=expected[table.table.name].pull,
        )
        for table in first.tables
    )
    return [msgspec.structs.replace(spec, tables=tables) for spec in specs]


def check_specs(specs: Sequence[ShardSpec]) -> Sequence[ShardSpec]:
    """The specs, checked to be a non-empty list of ShardSpec; raises BadInput."""
    expected = "the list that shard_specs returns"
    if not isinstance(specs, list | tuple) or not specs:
        raise argument_checks.wrong("specs", expected, specs)
    for spec in specs:
        argument_checks.instance("specs", spec, ShardSpec, expected)
    return specs


def _endpoints(endpoints: Sequence[str]) -> tuple[str, ...]:
    expected = "a list of addresses, one per shard"
    if not isinstance(endpoints, list | tuple):
        raise argument_checks.wrong("endpoints", expected, endpoints)
    return tuple(argument_checks.text("endpoints", endpoint, expected) for endpoint in endpoints)


def reshard_specs(specs: Sequence[ShardSpec], shards: int) -> list[ShardSpec]:
    """The specs of other shards for the same job to be resharded to (resharding.py).

    Raises BadInput for more shards than the tables can be cut into.
    """
    first = check_specs(specs)[0]
    shard_map = cut_tables(first.tables, first.merge, shards, first.map.epoch + 1)
    return [msgspec.structs.replace(first, shard=shard, map=shard_map) for shard in range(shards)]


def make_cluster(
    specs: Sequence[ShardSpec], endpoints: Sequence[str], access: Access | None = None
) -> Cluster:
    """The cluster that these shards form once they listen at `endpoints`.

    `access` holds the secret keys that admit clients, where the shards speak CURVE.
    """
    first = check_specs(specs)[0]
    return Cluster(
        job=first.job,
        layout=first.layout,
        map=first.map,
        endpoints=_endpoints(endpoints),
        bound=first.bound,
        access=access,
        max_norms={
            table.table.name: table.guard.max_norm
            for table in first.tables
            if table.guard.max_norm is not None
        },
    )
