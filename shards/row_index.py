"""The index of a shard's rows: from a 64-bit id to the number of its row's slot.

It is a hash table with linear probing. An id's home cell is at its mixed value's position within
the shard's buckets, so each bucket is a contiguous stretch of cells, and the cells in their order
are nearly in the order of mixed ids. A cell holds an id and its slot plus one; zero is an empty
cell, so memory that was never written is empty.

The index grows beside the former one: each insertion moves some thousand entries, and lookups ask
both meanwhile, so no push waits for a copy of the whole. No row is ever removed yet.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.rows import Ids, mix
from shards.tables import BUCKET_BITS, KeyRange

Slots = NDArray[np.int64]
"""The slot of each id, or -1 for an id without a row."""

MOST_LOAD = 0.7
_HASH_BITS = 64 - BUCKET_BITS  # of a mixed id, within its bucket
_MOVED = 4096  # cells of the former index that an insertion moves at least


class RowIndex:
    """The slots of ids within a range of buckets; `count` is the number of ids."""

    def __init__(self, buckets: KeyRange) -> None:
        self.count = 0
        self._buckets = buckets
        self._cells = _Cells(buckets, _HASH_BITS)
        self._former: _Cells | None = None
        self._moved = 0  # cells of the former index that are already in the present one

    def find(self, ids: Ids, mixed: Ids) -> Slots:
        """The slot of each id, -1 where there is none; `mixed` are the mixed ids."""
        slots = self._cells.find(ids, mixed)
        if self._former is not None:
            (missing,) = np.nonzero(slots < 0)
            if missing.size:
                slots[missing] = self._former.find(ids[missing], mixed[missing])
        return slots

    def insert(self, ids: Ids, mixed: Ids, slots: Slots) -> None:
        """Add distinct ids that it does not have."""
        self.count += len(ids)
        if self.count > MOST_LOAD * self._cells.size:
            self._grow()
        self._cells.insert(ids, mixed, slots)
        if self._former is not None:
            self._move(max(_MOVED, 4 * len(ids)))

    def items(self) -> tuple[Ids, Slots]:
        """All ids and their slots, in no particular order."""
        runs = list(self._runs())
        ids, slots = zip(*runs, strict=True)
        return np.concatenate(ids), np.concatenate(slots)

    def _runs(self) -> Iterator[tuple[Ids, Slots]]:
        yield self._cells.items(0, self._cells.size)
        if self._former is not None:
            yield self._former.items(self._moved, self._former.size)

    def _grow(self) -> None:
        if self._former is not None:  # only after a push of more rows than the index has cells
            self._move(self._former.size)
        shift = self._cells.shift
        while self.count > MOST_LOAD * _cell_count(self._buckets, shift):
            shift -= 1
        self._former, self._moved = self._cells, 0
        self._cells = _Cells(self._buckets, shift)

    def _move(self, cells: int) -> None:
        """Copy the entries of the former index's next `cells` cells; drop it after the last."""
        assert self._former is not None
        stop = min(self._moved + cells, self._former.size)
        ids, slots = self._former.items(self._moved, stop)
        self._cells.insert(ids, mix(ids), slots)
        self._moved = stop
        if stop == self._former.size:
            self._former = None


class _Cells:
    """The cells of one index; a cell spans `1 << shift` mixed ids."""

    def __init__(self, buckets: KeyRange, shift: int) -> None:
        self.shift = shift
        self.size = _cell_count(buckets, shift)
        self._base = np.uint64(buckets.start << _HASH_BITS)
        # Zeroed by the system when they are first written: what is never written takes no memory.
        self._ids = np.zeros(self.size, np.uint64)
        self._entries = np.zeros(self.size, np.uint32)  # slot + 1

    def find(self, ids: Ids, mixed: Ids) -> Slots:
        cells = self._homes(mixed)
        entries = self._entries[cells]
        same = self._ids[cells] == ids
        slots = np.where(same, entries, 0).astype(np.int64) - 1
        # An empty cell ends the search, and so does the id itself.
        (searching,) = np.nonzero(~same & (entries != 0))
        cells = cells[searching]
        while searching.size:
            cells = self._next(cells)
            entries = self._entries[cells]
            same = self._ids[cells] == ids[searching]
            slots[searching[same]] = entries[same].astype(np.int64) - 1
            more = ~same & (entries != 0)
            searching, cells = searching[more], cells[more]
        return slots

    def insert(self, ids: Ids, mixed: Ids, slots: Slots) -> None:
        cells, entries = self._homes(mixed), (slots + 1).astype(np.uint32)
        while ids.size:
            (free,) = np.nonzero(self._entries[cells] == 0)
            # Several may want one cell. One of them gets it, whichever NumPy writes last, and the
            # others look further, as they do from an occupied cell.
            self._entries[cells[free]] = entries[free]
            won = free[self._entries[cells[free]] == entries[free]]
            self._ids[cells[won]] = ids[won]
            more = np.ones(ids.size, np.bool_)
            more[won] = False
            ids, entries, cells = ids[more], entries[more], self._next(cells[more])

    def items(self, start: int, stop: int) -> tuple[Ids, Slots]:
        (occupied,) = np.nonzero(self._entries[start:stop])
        occupied += start
        return self._ids[occupied], self._entries[occupied].astype(np.int64) - 1

    def _homes(self, mixed: Ids) -> NDArray[np.int64]:
        return ((mixed - self._base) >> np.uint64(self.shift)).view(np.int64)

    def _next(self, cells: NDArray[np.int64]) -> NDArray[np.int64]:
        cells = cells + 1
        cells[cells == self.size] = 0
        return cells


def _cell_count(buckets: KeyRange, shift: int) -> int:
    return len(buckets) << (_HASH_BITS - shift)
