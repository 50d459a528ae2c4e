"""Rows of sparse tables in a session's messages: ids split over the shards, and rows put together.

The driver asks for distinct ids in ascending order. Each shard gets those in its buckets, in the
same order, and a shard without any gets no part. What the shards answer is put in the order asked.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.ops.rows import Ids
from shards.errors import BadInput
from shards.tables import MAX_PART_BYTES, Layout, ShardMap, SparseTable, buckets_of
from shards.wire_format import Buffer

Floats = NDArray[np.float32]
Positions = NDArray[np.intp]

MAX_TABLES_FULL = 4
"""The sparse tables of which one message may hold the most rows that a table's part has."""


class Gather:
    """The ids of some sparse tables to read in a step: distinct and ascending, by table.

    Two are equal only if they are one object, so that a pull that waited is found again.
    """

    def __init__(self, ids: Mapping[str, Ids]) -> None:
        self.ids = ids


class GatheredRows(NamedTuple):
    """The rows of the ids of a `Gather`, float32 (n, dim), and for each whether it is stored.

    The others have their first values. They may be views of a message, and read-only.
    """

    rows: Floats
    stored: NDArray[np.bool_]


class SplitIds(NamedTuple):
    """Ids of one table, and for each shard the positions of those that it owns.

    `positions` are None for a single shard, which owns them all: nothing has to be copied then.
    """

    table: SparseTable
    ids: Ids
    positions: tuple[Positions, ...] | None

    def count(self, shard: int) -> int:
        """The number of ids that a shard owns."""
        return len(self.ids) if self.positions is None else len(self.positions[shard])

    def of_shard(self, shard: int, values: NDArray[Any]) -> NDArray[Any]:
        """Those of `values`, one for each id, that are of a shard's ids."""
        if self.positions is None:
            return values  # the step's own array: it does not change until the push is acknowledged
        # `take` is quicker than an index, and the positions are within the array.
        return values.take(self.positions[shard], axis=0)

    def copy(self, shard: int, values: NDArray[Any], out: NDArray[Any]) -> None:
        """Copy what `of_shard` returns."""
        if self.positions is None:
            out[...] = values
        else:
            # The default mode would write into a buffer first.
            values.take(self.positions[shard], axis=0, out=out, mode="clip")


def split(layout: Layout, shard_map: ShardMap, ids: Mapping[str, Ids]) -> tuple[SplitIds, ...]:
    """Split the ids of some tables, in the layout's order; raises BadInput.

    A message to a shard has a limit of rows (tables.py).
    """
    tables = [table for table in layout.sparse if table.name in ids]
    splits = tuple(_split_table(table, shard_map, ids[table.name]) for table in tables)
    # Each table has a limit of its own, which many tables together would exceed.
    for shard in range(shard_map.shards):
        message_bytes = sum(part.count(shard) * part.table.row_bytes for part in splits)
        if message_bytes > MAX_TABLES_FULL * MAX_PART_BYTES:
            raise BadInput(
                f"rows of tables {', '.join(table.name for table in tables)}",
                expected=f"at most {MAX_TABLES_FULL * MAX_PART_BYTES} bytes for one shard",
                got=message_bytes,
                hint="take several steps or reads",
            )
    return splits


def _split_table(table: SparseTable, shard_map: ShardMap, ids: Ids) -> SplitIds:
    positions: tuple[Positions, ...] | None = None
    most = len(ids)
    # Of a single shard no id has to be mixed.
    if shard_map.shards > 1:
        starts = [buckets.start for buckets in shard_map.buckets]
        owners = np.searchsorted(starts, buckets_of(ids), "right") - 1
        positions = tuple(np.nonzero(owners == shard)[0] for shard in range(shard_map.shards))
        most = max(map(len, positions))
    if most > table.message_rows:
        raise BadInput(
            f"rows of table {table.name}",
            expected=f"at most {table.message_rows} distinct ids for one shard",
            got=most,
            hint="take several steps or reads",
        )
    return SplitIds(table, ids, positions)


def put_together(
    splits: Sequence[SplitIds], frames_of: Sequence[Sequence[Buffer]]
) -> tuple[tuple[tuple[Buffer, ...], ...], dict[str, GatheredRows]]:
    """Each shard's frames without those of rows, which come last; and the rows of each table."""
    shards = range(len(frames_of))
    # Counted from the end: how many dense frames come before them depends on the shard.
    ends = [
        len(frames) - 2 * sum(bool(part.count(shard)) for part in splits)
        for shard, frames in enumerate(frames_of)
    ]
    dense = tuple(tuple(frames_of[shard][: ends[shard]]) for shard in shards)
    gathered: dict[str, GatheredRows] = {}
    for part in splits:
        pieces: list[GatheredRows] = []
        for shard in shards:
            if part.count(shard):
                start, ends[shard] = ends[shard], ends[shard] + 2
                pieces.append(_read_rows(part.count(shard), *frames_of[shard][start : start + 2]))
        gathered[part.table.name] = _join(part, pieces)
    return dense, gathered


def _read_rows(count: int, values: Buffer, bits: Buffer) -> GatheredRows:
    rows = np.frombuffer(values, np.float32).reshape(count, -1)
    stored = np.unpackbits(np.frombuffer(bits, np.uint8), count=count)
    return GatheredRows(rows, stored.view(np.bool_))  # its bytes are 0 and 1 already


def _join(part: SplitIds, pieces: Sequence[GatheredRows]) -> GatheredRows:
    """The rows of all shards that own any, in the order asked."""
    if part.positions is None and pieces:
        # Where they arrived: in shared memory the view keeps its loan while the step reads it.
        return pieces[0]
    joined = GatheredRows(
        np.empty((len(part.ids), part.table.dim), np.float32), np.zeros(len(part.ids), np.bool_)
    )
    owned = [positions for positions in part.positions or () if len(positions)]
    for positions, piece in zip(owned, pieces, strict=True):
        joined.rows[positions] = piece.rows
        joined.stored[positions] = piece.stored
    return joined
