"""A saved state for a job that resumes with another number of shards."""

from collections.abc import Sequence

from msgspec import structs

from cupy_kernels.backends import HOST
from shards.buffer_pool import Buffers
from shards.live_settings import unify_settings
from shards.repartition import evenly_buffered, repartition
from shards.shard_part import ShardPart
from shards.shard_state import ShardState
from shards.spec import ShardSpec
from shards.tables import ShardMap


def resume_states(
    states: Sequence[ShardState], before: ShardMap, spec: ShardSpec
) -> Sequence[ShardState]:
    """The `states` that were saved with the map `before`, one for each shard of `spec.map`.

    Shards save one by one, so their buffers may hold different numbers of pushes. A new shard with
    keys of several of them could not count these, and would update some keys without a gradient, as
    after a reshard (ps/session/admin_plans.py). So each of them is applied first, by the rule of
    the job that resumes. What an operator has changed of the settings stays changed. Raises
    BadInput as `repartition` does.
    """
    states = unify_settings(states, spec)
    if before.ranges == spec.map.ranges:
        return states
    if not evenly_buffered([state.saved for state in states]):
        states = [_apply_buffer(state, shard, before, spec) for shard, state in enumerate(states)]
    return repartition(states, spec.layout, before, spec.map)


def _apply_buffer(state: ShardState, shard: int, before: ShardMap, spec: ShardSpec) -> ShardState:
    """The state of a shard after it has applied what its buffer holds."""
    spec_before = structs.replace(spec, shard=shard, map=before)
    part = ShardPart(spec_before, 0, Buffers, HOST)
    part.restore(state)
    part.updates.apply_buffer()
    return part.copy()
