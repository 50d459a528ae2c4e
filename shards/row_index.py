"""The index of a shard's rows: from a 64-bit id to the number of its row's slot.

It is a hash table with linear probing. An id's home cell is at its mixed value's position within
the shard's buckets, so each bucket is a contiguous stretch of cells, and the cells in their order
are nearly in the order of mixed ids. Memory that was never written is empty cells.

The index grows beside the former one: each insertion moves some thousand entries, and lookups ask
both meanwhile, so no push waits for a copy of the whole. No row is ever removed yet.
"""

from collections.abc import Iterator

import numpy as np

from cupy_kernels.ops.rows import Cells, Ids, Slots, find_slots, insert_slots
from shards.buffer_pool import reserve
from shards.tables import BUCKET_BITS, KeyRange

MOST_LOAD = 0.7
_HASH_BITS = 64 - BUCKET_BITS  # of a mixed id, within its bucket
_MOVED = 4096  # cells of the former index that an insertion moves at least


class RowIndex:
    """The slots of ids within a range of buckets; `count` is the number of ids."""

    def __init__(self, buckets: KeyRange) -> None:
        self.count = 0
        self._buckets = buckets
        self._cells = _make_cells(buckets, _HASH_BITS)
        self._former: Cells | None = None
        self._moved = 0  # cells of the former index that are already in the present one

    def find(self, ids: Ids) -> Slots:
        """The slot of each id, -1 where there is none."""
        slots = find_slots(self._cells, ids)
        if self._former is not None:
            (missing,) = np.nonzero(slots < 0)
            if missing.size:
                slots[missing] = find_slots(self._former, ids[missing])
        return slots

    def insert(self, ids: Ids, slots: Slots) -> None:
        """Add distinct ids that it does not have."""
        self.count += len(ids)
        if self.count > MOST_LOAD * len(self._cells.ids):
            self._grow()
        insert_slots(self._cells, ids, slots)
        if self._former is not None:
            self._move(max(_MOVED, 4 * len(ids)))

    def items(self) -> tuple[Ids, Slots]:
        """All ids and their slots, in no particular order."""
        runs = list(self._runs())
        ids, slots = zip(*runs, strict=True)
        return np.concatenate(ids), np.concatenate(slots)

    def _runs(self) -> Iterator[tuple[Ids, Slots]]:
        yield _items(self._cells, 0, len(self._cells.ids))
        if self._former is not None:
            yield _items(self._former, self._moved, len(self._former.ids))

    def _grow(self) -> None:
        if self._former is not None:  # only after a push of more rows than the index has cells
            self._move(len(self._former.ids))
        shift = int(self._cells.shift)
        while self.count > MOST_LOAD * _cell_count(self._buckets, shift):
            shift -= 1
        self._former, self._moved = self._cells, 0
        self._cells = _make_cells(self._buckets, shift)

    def _move(self, cells: int) -> None:
        """Copy the entries of the former index's next `cells` cells; drop it after the last."""
        assert self._former is not None
        stop = min(self._moved + cells, len(self._former.ids))
        insert_slots(self._cells, *_items(self._former, self._moved, stop))
        self._moved = stop
        if stop == len(self._former.ids):
            self._former = None


def _make_cells(buckets: KeyRange, shift: int) -> Cells:
    """Empty cells, each for `1 << shift` mixed ids."""
    size = _cell_count(buckets, shift)
    base = np.uint64(buckets.start << _HASH_BITS)
    return Cells(reserve((size,), np.uint64), reserve((size,), np.uint32), base, np.uint64(shift))


def _items(cells: Cells, start: int, stop: int) -> tuple[Ids, Slots]:
    (occupied,) = np.nonzero(cells.entries[start:stop])
    occupied += start
    return cells.ids[occupied], cells.entries[occupied].astype(np.int64) - 1


def _cell_count(buckets: KeyRange, shift: int) -> int:
    return len(buckets) << (_HASH_BITS - shift)
