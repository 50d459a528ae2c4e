"""Rows of sparse tables in a session's messages: ids split over the shards, and rows put together.

The driver asks for distinct ids in ascending order. Each shard gets those in its buckets, in the
same order, and a shard without any gets no part. What the shards answer is put in the order asked.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
    """Ids of one table, and for each shard the positions of those that it owns."""

    table: SparseTable
    ids: Ids
    positions: tuple[Positions, ...]

    def of_shard(self, shard: int) -> Ids:
        return self.ids[self.positions[shard]]


def split(layout: Layout, shard_map: ShardMap, ids: Mapping[str, Ids]) -> tuple[SplitIds, ...]:
    """Split the ids of some tables, in the layout's order; raises BadInput.

    A message to a shard has a limit of rows (tables.py).
    """
    tables = [table for table in layout.sparse if table.name in ids]
    splits = tuple(_split_table(table, shard_map, ids[table.name]) for table in tables)
    # Each table has a limit of its own, which many tables together would exceed.
    for shard in range(shard_map.shards):
        message_bytes = sum(len(part.positions[shard]) * part.table.row_bytes for part in splits)
        if message_bytes > MAX_TABLES_FULL * MAX_PART_BYTES:
            raise BadInput(
                f"rows of tables {', '.join(table.name for table in tables)}",
                expected=f"at most {MAX_TABLES_FULL * MAX_PART_BYTES} bytes for one shard",
                got=message_bytes,
                hint="take several steps or reads",
            )
    return splits


def _split_table(table: SparseTable, shard_map: ShardMap, ids: Ids) -> SplitIds:
    if shard_map.shards == 1:  # no id has to be mixed
        positions: tuple[Positions, ...] = (np.arange(len(ids)),)
    else:
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
        len(frames) - 2 * sum(bool(len(part.positions[shard])) for part in splits)
        for shard, frames in enumerate(frames_of)
    ]
    dense = tuple(tuple(frames_of[shard][: ends[shard]]) for shard in shards)
    gathered: dict[str, GatheredRows] = {}
    for part in splits:
        rows = np.empty((len(part.ids), part.table.dim), np.float32)
        stored = np.zeros(len(part.ids), np.bool_)
        for shard in shards:
            where = part.positions[shard]
            if len(where):
                values, bits = frames_of[shard][ends[shard] : ends[shard] + 2]
                ends[shard] += 2
                rows[where] = np.frombuffer(values, np.float32).reshape(len(where), -1)
                unpacked = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(where))
                stored[where] = unpacked.view(np.bool_)  # its bytes are 0 and 1 already
        gathered[part.table.name] = GatheredRows(rows, stored)
    return dense, gathered
