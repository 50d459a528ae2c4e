"""A job: what its shards are told, and how the whole is described to workers."""

import secrets
from collections.abc import Sequence
from math import inf

import msgspec

from ps.build import build_id
from ps.cluster import Access, Cluster
from ps.protocol.compression import Compression
from shards.errors import BadInput
from shards.guard import Guard
from shards.rules import SGD, Decay, Rule
from shards.schedules import Fixed, Schedule
from shards.spec import Merge, ShardSpec
from shards.tables import DenseTable, cut_evenly


def shard_specs(
    table: DenseTable,
    *,
    shards: int = 1,
    rule: Rule | None = None,
    schedule: Schedule | None = None,
    decay: Decay | None = None,
    bound: int | None = None,
    workers: int = 1,
    merge: Merge = Merge.EACH,
    lease_s: float = 10.0,
    warm_steps: int = 0,
    guard: Guard | None = None,
    compression: Compression | None = None,
    name: str = "job",
) -> list[ShardSpec]:
    """The specs of a new job's shards, its table cut evenly among them.

    Defaults: plain SGD at rate 0.01, no weight decay, no staleness bound, and a guard that lets in
    any gradient that is finite. `compression` is what workers are expected to choose, so that
    shards compile it before they come; by default plain floats. The job's id is `name` and a random
    part that a stranger cannot guess. Raises BadInput for numbers that make no sense.
    """
    for what, value, least in (("shards", shards, 1), ("workers", workers, 1), ("bound", bound, 0)):
        if value is not None and value < least:
            raise BadInput(f"{what}: expected at least {least}, got {value}")
    if not 0 < lease_s < inf:
        raise BadInput(f"lease_s: expected more than 0 s, and finite, got {lease_s:g}")
    if merge is Merge.ROUND and bound != 0:
        got = "none" if bound is None else bound
        raise BadInput(f"bound: expected 0, at which pushes are merged in rounds, got {got}")
    if guard is not None and not (guard.max_norm or inf) > 0:
        raise BadInput(f"guard: expected a max_norm above 0, got {guard.max_norm:g}")
    if guard is not None and guard.quarantine_after < 1:
        raise BadInput(f"guard: expected quarantine_after 1 or more, got {guard.quarantine_after}")
    expected = compression or Compression()
    job, shard_map = f"{name}-{secrets.token_hex(8)}", cut_evenly(table, shards)
    return [
        ShardSpec(
            job=job,
            shard=shard,
            table=table,
            map=shard_map,
            rule=rule or SGD(),
            schedule=schedule or Fixed(base_rate=0.01),
            decay=decay or Decay(),
            bound=bound,
            workers=workers,
            build=build_id(),
            merge=merge,
            lease_s=lease_s,
            warm_steps=warm_steps,
            guard=guard or Guard(),
            pushed=expected.pushed,
            pulled=expected.pull,
        )
        for shard in range(shards)
    ]


def successors(specs: Sequence[ShardSpec], shards: int) -> list[ShardSpec]:
    """The specs of other shards of the same job, for it to move to (resharding.py).

    Raises BadInput for more shards than the table can be cut into.
    """
    first = specs[0]
    shard_map = cut_evenly(first.table, shards, epoch=first.map.epoch + 1)
    return [msgspec.structs.replace(first, shard=shard, map=shard_map) for shard in range(shards)]


def describe(
    specs: Sequence[ShardSpec], endpoints: Sequence[str], access: Access | None = None
) -> Cluster:
    """The cluster that these shards form once they listen at `endpoints`.

    `access` lets in, where they speak CURVE.
    """
    first = specs[0]
    return Cluster(
        job=first.job,
        table=first.table,
        map=first.map,
        endpoints=tuple(endpoints),
        bound=first.bound,
        build=first.build,
        access=access,
    )
