"""Builds the specs of a job's shards, and the cluster description for its workers."""

import secrets
from collections.abc import Sequence

import msgspec

from ps.cluster import Access, Cluster
from ps.compatibility import build_id
from ps.session.compression import Compression, compression_of
from shards import arguments
from shards.aggregation import EACH, Merge, Round, ServerHalf, merge_of
from shards.errors import BadInput
from shards.gradient_guard import Guard
from shards.rules import SGD, Decay, Rule, decay_of, rule_of
from shards.schedules import Schedule, schedule_of
from shards.spec import ShardSpec
from shards.tables import DenseTable, cut_evenly

_NAME_BYTES = 100  # an id has 128


def shard_specs(
    table: DenseTable,
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
    """The specs of a new job's shards, with its table cut evenly among them.

    Defaults: plain SGD at rate 0.01, no weight decay, no staleness bound, and a guard that accepts
    any finite gradient. A `rule` may be a name, such as "adam", with its defaults; a `schedule` a
    number, a fixed rate; a `decay` a number, L2; a `bound` of None or inf is none. `merge` says how
    pushes are merged, or is all that a strategy asks of the shards but its rule and rate, which are
    arguments here (shards/aggregation.py). The job's id is `name` and a random part that a stranger
    cannot guess. Raises BadInput for invalid numbers.
    """
    table = arguments.instance("table", table, DenseTable, "a DenseTable")
    shards, workers = arguments.whole("shards", shards, 1), arguments.whole("workers", workers, 1)
    steps = arguments.bound("bound", bound)
    half = merge if isinstance(merge, ServerHalf) else ServerHalf(merge=merge_of("merge", merge))
    if isinstance(half.merge, Round) and steps != 0:
        got = "none" if steps is None else steps
        raise BadInput(f"bound: expected 0, at which pushes are merged in rounds, got {got}")
    if guard is not None:
        guard = arguments.instance("guard", guard, Guard, "a Guard")
    job = f"{arguments.name('name', name, _NAME_BYTES)}-{secrets.token_hex(8)}"
    shard_map = cut_evenly(table, shards)
    return [
        ShardSpec(
            job=job,
            shard=shard,
            table=table,
            map=shard_map,
            rule=SGD() if rule is None else rule_of("rule", rule),
            schedule=schedule_of("schedule", 0.01 if schedule is None else schedule),
            decay=Decay() if decay is None else decay_of("decay", decay),
            bound=steps,
            workers=workers,
            build=build_id(),
            merge=half.merge,
            weigh=half.weigh,
            scale=half.scale,
            deltas=half.deltas,
            lease_s=arguments.seconds("lease_s", lease_s),
            warm_steps=arguments.whole("warm_steps", warm_steps, 0),
            guard=guard or Guard(),
        )
        for shard in range(shards)
    ]


def expect_compression(
    specs: Sequence[ShardSpec], compression: Compression | str | None
) -> list[ShardSpec]:
    """The specs of shards that compile in advance what this choice of the workers needs."""
    expected = compression_of("compression", compression)
    return [
        msgspec.structs.replace(spec, pushed=expected.pushed, pulled=expected.pull)
        for spec in check_specs(specs)
    ]


def check_specs(specs: Sequence[ShardSpec]) -> Sequence[ShardSpec]:
    """The specs, checked to be a non-empty list of ShardSpec; raises BadInput."""
    expected = "the list that ps.shard_specs returns"
    if not isinstance(specs, list | tuple) or not specs:
        raise arguments.wrong("specs", expected, specs)
    for spec in specs:
        arguments.instance("specs", spec, ShardSpec, expected)
    return specs


def _endpoints(endpoints: Sequence[str]) -> tuple[str, ...]:
    expected = "a list of addresses, one a shard"
    if not isinstance(endpoints, list | tuple):
        raise arguments.wrong("endpoints", expected, endpoints)
    return tuple(arguments.text("endpoints", endpoint, expected) for endpoint in endpoints)


def resharded_specs(specs: Sequence[ShardSpec], shards: int) -> list[ShardSpec]:
    """The specs of other shards for the same job to be resharded to (resharding.py).

    Raises BadInput for more shards than the table can be cut into.
    """
    first = check_specs(specs)[0]
    shard_map = cut_evenly(first.table, shards, epoch=first.map.epoch + 1)
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
        table=first.table,
        map=first.map,
        endpoints=_endpoints(endpoints),
        bound=first.bound,
        build=first.build,
        access=access,
    )
