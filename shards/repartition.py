"""Repartitioning: a job's state, cut for another number of shards.

Arrays move by key. Everything else describes the whole job, and each new shard gets the same. At a
consistent cut (quiesce.py) all shards agree about every live worker. A worker that died during a
push may have it applied at some shards only; then the furthest progress counts. That push was never
acknowledged, and no part of it is ever applied twice.
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from shards.errors import BadInput
from shards.ledger import Ledger, LedgerEntry
from shards.parameters import SavedProgress, ShardState
from shards.tables import KeyRange, ShardMap

Floats = NDArray[np.float32]


def repartition(
    states: Sequence[ShardState], before: ShardMap, after: ShardMap
) -> list[ShardState]:
    """The same state, cut into one for each shard of `after`; arrays are new.

    Raises BadInput if the two maps do not hold the same keys, or if a state does not hold those of
    its shard.
    """
    held, wanted = _keys(before), _keys(after)
    if held != wanted:
        raise BadInput(f"repartition of table {before.table}: expected keys {held}, got {wanted}")

    for shard, state in enumerate(states):
        _check_whole(state, shard, sum(map(len, before.ranges[shard])))

    def cut(parts: Sequence[Floats]) -> list[Floats]:
        arena = np.zeros(held.stop, np.float32)
        before.join(parts, arena)
        return [np.concatenate(after.cut(arena, shard)) for shard in range(after.shards)]

    saved = _merged([state.saved for state in states])
    weights = cut([state.weights for state in states])
    slots = {name: cut([state.slots[name] for state in states]) for name in states[0].slots}
    return [
        ShardState(
            msgspec.structs.replace(saved, ledger=_copied(saved.ledger)),
            weights[shard],
            {name: parts[shard] for name, parts in slots.items()},
        )
        for shard in range(after.shards)
    ]


def _check_whole(state: ShardState, shard: int, size: int) -> None:
    for what, array in {"weights": state.weights, **state.slots}.items():
        if len(array) != size:
            raise BadInput(
                f"repartition: shard {shard}: expected {size} floats of {what}, got {len(array)}"
            )


def _keys(shard_map: ShardMap) -> KeyRange:
    """The keys of all shards of a map; raises BadInput unless they begin at 0 without gaps."""
    ranges = sorted(keys for ranges in shard_map.ranges for keys in ranges)
    reached = 0
    for keys in ranges:
        if keys.start != reached:
            raise BadInput(f"shard map: expected a range from key {reached}, got {keys}")
        reached = keys.stop
    return KeyRange(0, reached)


def _merged(all_saved: Sequence[SavedProgress]) -> SavedProgress:
    ledgers = [saved.ledger for saved in all_saved]
    workers = {worker for ledger in ledgers for worker in ledger.entries}
    entries = {
        worker: _furthest(ledger.entries[worker] for ledger in ledgers if worker in ledger.entries)
        for worker in sorted(workers)
    }
    floor = max(ledger.floor for ledger in ledgers)
    furthest = max(all_saved, key=lambda saved: saved.version)
    # A buffer that one shard alone has applied holds fewer pushes there; none may be forgotten.
    buffered = max(saved.buffered for saved in all_saved)
    return msgspec.structs.replace(furthest, ledger=Ledger(entries, floor), buffered=buffered)


def _furthest(entries: Iterable[LedgerEntry]) -> LedgerEntry:
    """One worker's merged entry: its newest life, and the furthest that any life has pushed.

    Different shards may know these, because a life may have said hello to one shard only.
    """
    known = list(entries)
    newest = max(known, key=lambda entry: (entry.incarnation, entry.seq))
    furthest = max(known, key=lambda entry: entry.seq)
    return msgspec.structs.replace(
        newest,
        seq=furthest.seq,
        step=furthest.step,
        clock=max(newest.clock, furthest.clock),
        refused=max(entry.refused for entry in known),
        acknowledged=max(entry.acknowledged for entry in known),
    )


def _copied(ledger: Ledger) -> Ledger:
    """A separate ledger for each shard, because a shard changes its own in place."""
    entries = {name: msgspec.structs.replace(entry) for name, entry in ledger.entries.items()}
    return Ledger(entries, ledger.floor)
