"""The rows of a job's sparse tables, as its shards had them at one moment, in this process.

A run's shards end with it. Its result reads rows from here as a `ps.Reader` reads them from shards:
by id, with first values for an id that nobody has pushed.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.ops.rows import Ids, mix
from ps.reader import MissingRows, RowsToRead
from ps.session.row_requests import GatheredRows
from ps.step_rows import table_of
from shards.repartition import whole_rows
from shards.shard_state import IDS, ROWS, ShardState, array_name
from shards.tables import Layout, ShardMap, SparseTable

Floats = NDArray[np.float32]


class StoredRows:
    """The rows of some sparse tables by id, without their optimiser state; none by default."""

    def __init__(
        self,
        states: Sequence[ShardState] = (),
        layout: Layout | None = None,
        shard_map: ShardMap | None = None,
    ) -> None:
        """`states` are those of all shards of a job, cut as `shard_map` says."""
        self._tables: dict[str, SparseTable] = {}
        self._ids: dict[str, Ids] = {}
        self._mixed: dict[str, Ids] = {}  # by which rows are in order, as in a state
        self._rows: dict[str, Floats] = {}
        if layout is None or shard_map is None:
            return
        for name, arrays in whole_rows(states, layout, shard_map).items():
            table = next(table for table in layout.sparse if table.name == name)
            rows = arrays.get(ROWS, np.zeros((0, table.dim), np.float32))
            # A copy, or the slots would stay in memory.
            self._add(table, arrays[IDS], rows[:, : table.dim].copy())

    @classmethod
    def of_arrays(cls, tables: Sequence[SparseTable], arrays: Mapping[str, NDArray[Any]]) -> Self:
        """The rows of some tables from the `arrays` of stored rows."""
        stored = cls()
        for table in tables:
            ids, rows = (arrays[array_name(table.name, kind)] for kind in (IDS, ROWS))
            stored._add(table, ids, rows)
        return stored

    def _add(self, table: SparseTable, ids: Ids, rows: Floats) -> None:
        name = table.name
        self._tables[name], self._ids[name], self._rows[name] = table, ids, rows
        self._mixed[name] = mix(ids)

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(ids):,} of {name}" for name, ids in self._ids.items())
        return f"StoredRows({counts})"

    @property
    def tables(self) -> tuple[SparseTable, ...]:
        """The tables, as shards know them."""
        return tuple(self._tables.values())

    def ids(self, table: str) -> Ids:
        """The ids of all stored rows of a table, uint64, in no order that means anything."""
        return self._ids[table_of("table", self._tables, table).name].copy()

    def gather(
        self, table: str, ids: Any, *, missing: MissingRows | str = MissingRows.INIT
    ) -> Floats:
        """The rows of ids of a table, float32 (n, dim), in the order of the ids.

        `ids` and `missing` are those of `ps.Reader.gather`. Raises BadInput naming the argument.
        """
        read = RowsToRead.of(self._tables, table, ids, missing)
        described, asked = read.table, read.distinct.ids
        rows = described.init.make_rows(asked, described.dim, described.seed)
        stored_at, mixed = self._mixed[table], mix(asked)
        positions = np.searchsorted(stored_at, mixed)
        stored = np.zeros(len(mixed), np.bool_)
        inside = positions < len(stored_at)
        stored[inside] = stored_at[positions[inside]] == mixed[inside]
        rows[stored] = self._rows[table][positions[stored]]
        return read.build({table: GatheredRows(rows, stored)})

    def arrays(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """The ids and the rows of each table, named TABLE/ids and TABLE/rows, for a file."""
        for name in self._tables:
            yield array_name(name, IDS), self._ids[name]
            yield array_name(name, ROWS), self._rows[name]
