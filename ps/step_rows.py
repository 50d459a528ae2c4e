"""The rows of sparse tables in a step: the ids that it reads, and the gradients of their rows."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.rows import DistinctIds, Ids, find_distinct, sum_rows
from ps.pytree import plain_array
from ps.session.row_requests import Gather
from shards import argument_checks
from shards.errors import BadInput
from shards.row_frames import RowGradient
from shards.tables import SparseTable

Floats = NDArray[np.float32]

_DTYPES = (np.dtype(np.int64), np.dtype(np.uint64))


class RowsOfStep:
    """The ids of a step by sparse table, and the summed `gradients` of their rows.

    `gather` is what to ask the shards for; None without ids.
    """

    def __init__(
        self, tables: Mapping[str, SparseTable], ids: Mapping[str, Any] | None = None
    ) -> None:
        """Raises BadInput for an unknown table, and for ids of another dtype or shape."""
        if not isinstance(ids, Mapping | None):
            raise argument_checks.wrong("gather", "a dict of ids by table", ids)
        self._tables = tables
        self._distinct = {
            name: find_distinct(ids_of(f"gather: {table_of(tables, name).name}", values))
            for name, values in (ids or {}).items()
        }
        self.gather = (
            Gather({name: distinct.ids for name, distinct in self._distinct.items()})
            if self._distinct
            else None
        )
        self.gradients: dict[str, RowGradient] = {}

    def find(self, table: str) -> DistinctIds:
        """The ids of a table; raises BadInput if the step has none."""
        table_of(self._tables, table)
        if table not in self._distinct:
            raise _about(table, expected="a step with its ids, step(gather={...})", got="none")
        return self._distinct[table]

    def scatter(self, table: str, gradient: Any) -> None:
        """Add up the gradients of the rows of each id; raises BadInput."""
        distinct, dim = self.find(table), self._tables[table].dim
        if table in self.gradients:
            raise _about(table, expected="one scatter in a step", got="a second one")
        shape = len(distinct.inverse), dim
        try:
            rows = plain_array(f"rows of table {table}", gradient)
        except BadInput as error:
            error.table = table
            raise
        if not (shape[0] or rows.size):
            rows = rows.reshape(shape)  # an empty list has one axis
        if rows.dtype != np.float32 or rows.shape != shape:
            got = f"{rows.dtype} of shape {rows.shape}"
            raise _about(table, expected=f"float32 of shape {shape}, a row for each id", got=got)
        summed = sum_rows(distinct, rows)
        if not np.isfinite(summed).all():
            row = int(np.argmin(np.isfinite(summed).all(axis=1)))
            raise _about(
                table,
                expected="finite gradients",
                got=f"NaN or infinity in the row of id {distinct.ids[row]}",
            )
        self.gradients[table] = RowGradient(distinct.ids, summed)


def table_of(tables: Mapping[str, SparseTable], name: object) -> SparseTable:
    """The sparse table of this name; raises BadInput."""
    if isinstance(name, str) and name in tables:
        return tables[name]
    expected = f"one of the sparse tables {', '.join(tables)}" if tables else "no sparse table"
    error = argument_checks.wrong("table", expected, name)
    error.table = name if isinstance(name, str) else None
    raise error


def ids_of(argument: str, value: object) -> Ids:
    """Ids as uint64 of shape (n,): a negative int64 keeps its bits; raises BadInput."""
    expected = "int64 or uint64 of shape (n,)"
    try:
        ids = np.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # rows of different lengths
        raise argument_checks.wrong(argument, expected, value) from None
    if np.ma.is_masked(value):
        hint = "(leave the masked ids out, as value.compressed() does)"
        raise BadInput(argument, expected="ids without a mask", got=f"masked ones {hint}")
    if not ids.size and isinstance(value, list | tuple):
        ids = ids.astype(np.uint64)  # an empty list has no integers to be known by
    if ids.dtype not in _DTYPES or ids.ndim != 1:
        raise BadInput(argument, expected=expected, got=f"{ids.dtype} of shape {ids.shape}")
    return np.ascontiguousarray(ids).view(np.uint64)


def _about(table: str, *, expected: str, got: str) -> BadInput:
    error = BadInput(f"rows of table {table}", expected=expected, got=got)
    error.table = table
    return error
