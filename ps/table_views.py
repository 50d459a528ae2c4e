"""The arrays of a job's tables within its arena, in the structures that the user gave."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps.structures import Structure
from shards import arguments
from shards.errors import BadInput
from shards.tables import DenseTable, Layout

Floats = NDArray[np.float32]


class TableViews:
    """Builds the user's values from an arena, and writes them into one."""

    def __init__(self, tables: dict[str, tuple[DenseTable, Structure]]) -> None:
        self._tables = tables
        self._layout = Layout(tuple(dense for dense, _ in tables.values()))

    @property
    def first(self) -> str:
        """The name of the first table."""
        return next(iter(self._tables))

    def build(self, table: str | None, arena: Floats) -> Any:
        """A table's value; its float32 arrays are views of `arena`."""
        dense, structure = self._table(table)
        return structure.build(dense.views(self._layout.split(arena)[dense.name]))

    def build_all(self, arena: Floats) -> Any:
        """The value of the only table, or a dict of the values of all."""
        if len(self._tables) == 1:
            return self.build(None, arena)
        return {name: self.build(name, arena) for name in self._tables}

    def views(self, table: str | None, arena: Floats) -> Any:
        """A table's writable views of `arena`, in its structure."""
        dense, structure = self._table(table)
        return structure.views(dense.views(self._layout.split(arena)[dense.name]))

    def write(self, table: str | None, value: object, arena: Floats) -> None:
        """Write a value into `arena`; raises BadInput naming the table and the array."""
        dense, structure = self._table(table)
        try:
            structure.write(value, dense.views(self._layout.split(arena)[dense.name]))
        except BadInput as error:
            named = BadInput(f"table {dense.name}: {error}")
            named.table = dense.name
            raise named from None

    def _table(self, name: str | None) -> tuple[DenseTable, Structure]:
        names = ", ".join(self._tables)
        if name is None:
            if len(self._tables) > 1:
                raise BadInput(f"table: expected the name of one of {names}, got none")
            name = self.first
        if name not in self._tables:
            raise BadInput(f"table: expected one of {names}, got {arguments.shown(name)}")
        return self._tables[name]
