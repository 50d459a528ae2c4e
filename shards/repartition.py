"""Repartitioning: a job's state, cut for another number of shards.

Arrays of dense tables move by key, rows of sparse tables by bucket. Everything else describes the
whole job, and each new shard gets the same. At a consistent cut (quiesce.py) all shards agree about
every live worker. If a worker died during a push, some shards may have applied it and others not;
then the furthest progress counts. That push was never acknowledged, and no part of it is ever
applied twice.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shards.errors import BadInput
from shards.ledger import Ledger, LedgerEntry
from shards.reports import Reports
from shards.shard_state import (
    IDS,
    WEIGHTS,
    Arrays,
    SavedProgress,
    ShardState,
    array_name,
    check_row_ids,
    of_table,
)
from shards.tables import BUCKETS, KeyRange, Layout, ShardMap, buckets_of

_NO_FLOATS = np.zeros(0, np.float32)


def repartition(
    states: Sequence[ShardState], layout: Layout, before: ShardMap, after: ShardMap
) -> list[ShardState]:
    """Cut a job's state into one for each shard of `after`; arrays are new.

    Raises BadInput if a map does not hold all keys of `layout`, or if a state does not hold those
    of its shard.
    """
    _check_whole("before", before, layout)
    _check_whole("after", after, layout)
    _check_tables(states, layout)
    whole = _join([state.arrays for state in states], layout, before)
    rows = whole_rows(states, layout, before)
    saved = _merge([state.saved for state in states])
    return [
        ShardState(
            msgspec.structs.replace(saved, ledger=_copy_ledger(saved.ledger)),
            {
                # Copied, or each new state would keep the arrays of the whole job in memory.
                array_name(section.table, slot): array[
                    section.keys.start : section.keys.stop
                ].copy()
                for section in layout.sections(keys)
                for slot, array in whole[section.table].items()
            }
            | _cut_rows(rows, buckets),
        )
        for keys, buckets in zip(after.ranges, after.buckets, strict=True)
    ]


def evenly_buffered(progress: Sequence[SavedProgress]) -> bool:
    """Return whether all shards have as many pushes in their buffers, of each shared table.

    Reports to a quorum are never even: their weights and norms are those of one shard's part.
    """
    if any(reports.workers for saved in progress for reports in saved.reports.values()):
        return False
    counts = {(table, count) for saved in progress for table, count in saved.collected.items()}
    tables = {table for table, _ in counts}
    return len(counts) == len(tables) and len({saved.buffered for saved in progress}) == 1


def whole_weights(
    states: Sequence[ShardState], layout: Layout, shard_map: ShardMap
) -> NDArray[np.float32]:
    """The arena of all weights in these states; raises BadInput as `repartition` does."""
    tables = whole_tables(states, layout, shard_map)
    return np.concatenate([*(tables[name][WEIGHTS] for name in layout.names), _NO_FLOATS])


def whole_tables(
    states: Sequence[ShardState], layout: Layout, shard_map: ShardMap
) -> dict[str, Arrays]:
    """The arrays of each dense table, over all its keys; raises BadInput as `repartition` does."""
    _check_whole("snapshot", shard_map, layout)
    return _join([state.arrays for state in states], layout, shard_map)


def _join(states: Sequence[Arrays], layout: Layout, shard_map: ShardMap) -> dict[str, Arrays]:
    whole: dict[str, Arrays] = {name: {} for name in layout.names}
    sizes = {table.name: table.size for table in layout.tables}
    for shard, keys in enumerate(shard_map.ranges):
        for section in layout.sections(keys):
            for slot, array in of_table(states[shard], section.table).items():
                if array.shape != (len(section.keys),):
                    raise BadInput(
                        f"repartition: shard {shard}",
                        expected=f"{len(section.keys)} floats of {array_name(section.table, slot)}",
                        got=array.shape,
                    )
                # A slot that only some shards hold begins at zero in the rest, as a missing slot
                # does.
                empty = np.zeros(sizes[section.table], array.dtype)
                whole[section.table].setdefault(slot, empty)[
                    section.keys.start : section.keys.stop
                ] = array
    return whole


def whole_rows(
    states: Sequence[ShardState], layout: Layout, shard_map: ShardMap
) -> dict[str, Arrays]:
    """The rows of each sparse table, in the order of mixed ids; raises BadInput."""
    joined: dict[str, Arrays] = {}
    for table in layout.sparse:
        shards = [of_table(state.arrays, table.name) for state in states]
        for shard, (arrays, buckets) in enumerate(zip(shards, shard_map.buckets, strict=True)):
            _check_rows(f"repartition: shard {shard}: table {table.name}", arrays, buckets)
        # A shard without rows exports its ids alone, and has no form to compare.
        filled = [arrays for arrays in shards if len(arrays[IDS])]
        forms = [_row_form(arrays) for arrays in filled]
        if any(form != forms[0] for form in forms):
            raise BadInput(
                f"repartition: table {table.name}", expected="the same arrays at each shard"
            )
        names = filled[0].keys() if filled else ()
        joined[table.name] = {IDS: np.zeros(0, np.uint64)} | {
            name: filled[0][name]
            if len(filled) == 1
            else np.concatenate([arrays[name] for arrays in filled])
            for name in names
        }
    return joined


def _check_rows(subject: str, arrays: Arrays, buckets: KeyRange) -> None:
    """Raise BadInput unless these are ids of the shard's buckets, and as long arrays of rows."""
    ids = arrays.get(IDS)
    if ids is None or ids.dtype != np.uint64 or ids.ndim != 1:
        got = "none" if ids is None else f"{ids.dtype} of shape {ids.shape}"
        raise BadInput(subject, expected="ids, uint64 of shape (n,)", got=got)
    for name, array in arrays.items():
        if array.shape[:1] != ids.shape:
            raise BadInput(subject, expected=f"{len(ids)} rows of {name}", got=array.shape)
    check_row_ids(subject, np.ascontiguousarray(ids), buckets)


def _row_form(arrays: Arrays) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """The dtype and the shape of a row of each array."""
    return {name: (array.dtype, array.shape[1:]) for name, array in arrays.items()}


def _cut_rows(joined: Mapping[str, Arrays], buckets: KeyRange) -> Arrays:
    """The rows of each sparse table that are in these buckets, as views: rows are not changed."""
    cut: Arrays = {}
    for table, arrays in joined.items():
        low, high = np.searchsorted(buckets_of(arrays[IDS]), (buckets.start, buckets.stop))
        names = arrays if low < high else (IDS,)  # as a shard without rows exports them
        cut |= {array_name(table, name): arrays[name][low:high] for name in names}
    return cut


def _check_tables(states: Sequence[ShardState], layout: Layout) -> None:
    """Raise BadInput for arrays of a table that the job does not have; they would be lost."""
    for shard, state in enumerate(states):
        for name in state.arrays:
            if name.rpartition("/")[0] not in layout.all_names:
                expected = f"arrays of the tables {', '.join(layout.all_names)}"
                raise BadInput(f"repartition: shard {shard}", expected=expected, got=name)


def _check_whole(label: str, shard_map: ShardMap, layout: Layout) -> None:
    """Raise BadInput unless the ranges of a map are the whole arena, in order and without gaps.

    So have to be its ranges of buckets.
    """
    reached = 0
    for keys in shard_map.ranges:
        if keys.start != reached:
            raise BadInput(f"shard map {label}", expected=f"a range from key {reached}", got=keys)
        reached = keys.stop
    if reached != layout.size:
        raise BadInput(
            f"shard map {label}",
            expected=f"keys {KeyRange(0, layout.size)}",
            got=f"up to {reached}",
        )
    reached = 0
    for buckets in shard_map.buckets:
        if buckets.start != reached:
            expected = f"buckets from {reached}"
            raise BadInput(f"shard map {label}", expected=expected, got=buckets)
        reached = buckets.stop
    if reached != BUCKETS:
        raise BadInput(f"shard map {label}", expected=f"{BUCKETS} buckets", got=reached)


def _merge(all_saved: Sequence[SavedProgress]) -> SavedProgress:
    ledgers = [saved.ledger for saved in all_saved]
    workers = {worker for ledger in ledgers for worker in ledger.entries}
    # In one order, so that all new shards have the same bytes.
    entries = {
        worker: _furthest(ledger.entries[worker] for ledger in ledgers if worker in ledger.entries)
        for worker in sorted(workers)
    }
    floor = max(ledger.floor for ledger in ledgers)
    furthest = max(all_saved, key=lambda saved: saved.version)
    # A push counts for a table only at the shards that hold a section of what it changes.
    tables = {name for saved in all_saved for name in saved.updates}
    updates = {name: max(saved.updates.get(name, 0) for saved in all_saved) for name in tables}
    # A shard that alone has applied its buffer counts fewer pushes in it: keep the highest count.
    collected = {name: max(saved.collected.get(name, 0) for saved in all_saved) for name in tables}
    # A change of the settings may have reached some shards only; the new ones must agree.
    changed = [saved.settings for saved in all_saved if saved.settings is not None]
    # The shards numbered their versions apart. The highest may call a report late that is not, and
    # never the other way round; no report is open (`evenly_buffered`).
    last = {
        name: Reports(
            max(saved.reports[name].changed for saved in all_saved if name in saved.reports)
        )
        for name in sorted({name for saved in all_saved for name in saved.reports})
    }
    return msgspec.structs.replace(
        furthest,
        ledger=Ledger(entries, floor),
        updates=updates,
        buffered=max(saved.buffered for saved in all_saved),
        collected=collected,
        settings=max(changed, key=lambda settings: settings.revision, default=None),
        reports=last,
    )


def _furthest(entries: Iterable[LedgerEntry]) -> LedgerEntry:
    """One worker's merged entry: its newest incarnation, and the furthest that any incarnation has
    pushed.

    Different shards may know these, because an incarnation may have said hello to one shard only.
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
        dropped=tuple(sorted({seq for entry in known for seq in entry.dropped})),
    )


def _copy_ledger(ledger: Ledger) -> Ledger:
    """A separate ledger for each shard, because a shard changes its own in place."""
    entries = {name: msgspec.structs.replace(entry) for name, entry in ledger.entries.items()}
    return Ledger(entries, ledger.floor)
