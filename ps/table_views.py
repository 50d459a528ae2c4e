"""The arrays of a job's tables within its arena, in the structures that the user gave."""

from collections.abc import Collection, Mapping
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ps.pytree import Structure
from shards import argument_checks
from shards.errors import BadInput
from shards.tables import DenseTable, Layout, SparseTable

Floats = NDArray[np.float32]


class _TableSlices(NamedTuple):
    """Where a table is in the arena: its section, its tensors, and the padding between them."""

    structure: Structure
    section: slice
    tensors: tuple[tuple[str, slice, tuple[int, ...]], ...]
    padding: tuple[slice, ...]


class TableViews:
    """Builds the user's values from an arena, and writes them into one.

    Where each array is in the arena is computed once, because every step needs it.
    """

    def __init__(
        self,
        tables: dict[str, tuple[DenseTable, Structure]],
        sparse: Mapping[str, SparseTable] | None = None,
    ) -> None:
        """`sparse` are the job's sparse tables, which have no place in the arena."""
        self.sparse = dict(sparse or {})
        layout = Layout(tuple(dense for dense, _ in tables.values()), tuple(self.sparse.values()))
        self._slices = {
            name: _slices_of(dense, structure, layout.section(name).start)
            for name, (dense, structure) in tables.items()
        }

    def name(self, table: str | None) -> str:
        """The name of a table, which may be left out for the only one; raises BadInput."""
        if table is None and len(self._slices) == 1:
            (only,) = self._slices
            return only
        if not isinstance(table, str) or table not in self._slices:
            if not self._slices and table not in self.sparse:
                raise BadInput(
                    "table",
                    expected="a job with a dense table",
                    got=f"one with rows alone ({', '.join(self.sparse)})",
                    hint="gather and scatter them",
                )
            error = argument_checks.wrong("table", self._describe_choice(table), table)
            error.table = table if isinstance(table, str) else None
            raise error
        return table

    def _describe_choice(self, table: object) -> str:
        """The tables that could have been meant instead of `table`, for an error."""
        if isinstance(table, str) and table in self.sparse:
            return f"a dense table; {table} is sparse: gather and scatter its rows"
        return f"one of {', '.join(self._slices)}"

    def build(self, table: str | None, arena: Floats) -> Any:
        """A table's value, or without a name the only one's, or a dict of the values of all.

        Sparse tables are not among them.

        Their float32 arrays are views of `arena`.
        """
        if table is None and len(self._slices) > 1:
            return {
                name: slices.structure.build(_tensors(slices, arena))
                for name, slices in self._slices.items()
            }
        slices = self._slices[self.name(table)]
        return slices.structure.build(_tensors(slices, arena))

    def views(self, table: str, arena: Floats) -> Any:
        """A table's writable views of `arena`, in its structure."""
        slices = self._slices[table]
        return slices.structure.views(_tensors(slices, arena))

    def write(self, table: str | None, value: object, arena: Floats) -> None:
        """Write a value into `arena`, and zeros into the padding.

        Raises BadInput naming the table and the array.
        """
        name = self.name(None) if table is None else table
        slices = self._slices[name]
        try:
            slices.structure.write(value, _tensors(slices, arena))
        except BadInput as error:
            named = error.within(f"table {name}")
            named.table = name
            raise named from None
        for gap in slices.padding:
            arena[gap] = 0

    def check_finite(self, tables: Collection[str], arena: Floats) -> None:
        """Raise BadInput naming the table and the array that holds NaN or infinity."""
        # All tables are looked at in one pass: each pass of BLAS may wake threads.
        whole = len(tables) == len(self._slices)
        sections = [arena] if whole else [arena[self._slices[table].section] for table in tables]
        if all(map(_is_finite, sections)):
            return
        for table in self._slices:
            if table in tables:
                self._check_arrays(table, arena)

    def _check_arrays(self, table: str, arena: Floats) -> None:
        for name, values in _tensors(self._slices[table], arena).items():
            if not _is_finite(values.ravel()):
                at = int(np.argmin(np.isfinite(values)))
                fault = f"expected finite values, got {values.ravel()[at]} at {at}"
                error = BadInput(f"table {table}: {name}: {fault}")
                error.table = table
                raise error

    def sections(self, tables: set[str], arena: Floats) -> Floats | dict[str, Floats]:
        """The part of `arena` for each of some tables, or the arena itself if they are all."""
        if len(tables) == len(self._slices) and not self.sparse:
            return arena
        return {name: arena[self._slices[name].section] for name in tables}

    def clear(self, table: str, arena: Floats) -> None:
        """Write zeros into a table's section of `arena`."""
        arena[self._slices[table].section] = 0


def _is_finite(values: Floats) -> bool:
    """Return whether there is neither NaN nor infinity in a flat array."""
    # The product is quick, but of large values it overflows.
    return isfinite(np.dot(values, values)) or bool(np.isfinite(values).all())


def _slices_of(table: DenseTable, structure: Structure, base: int) -> _TableSlices:
    tensors, padding, end = [], [], base
    for tensor, offset in zip(table.tensors, table.offsets, strict=True):
        start = base + offset
        padding.append(slice(end, start))
        end = start + tensor.size
        tensors.append((tensor.name, slice(start, end), tensor.shape))
    padding.append(slice(end, base + table.size))
    gaps = tuple(gap for gap in padding if gap.start < gap.stop)
    return _TableSlices(structure, slice(base, base + table.size), tuple(tensors), gaps)


def _tensors(slices: _TableSlices, arena: Floats) -> dict[str, Floats]:
    tensors: dict[str, Floats] = {}
    for name, part, shape in slices.tensors:  # a loop: until Python 3.12 a comprehension is a call
        tensors[name] = arena[part].reshape(shape)
    return tensors
