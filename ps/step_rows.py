"""The rows of sparse tables in a step: the ids that it reads, and the gradients of their rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.ops.rows import DistinctIds, Ids, find_distinct, sum_rows
from ps.pytree import plain_array
from ps.session.row_requests import Gather
from shards import argument_checks
from shards.errors import BadInput
from shards.row_frames import RowGradient
from shards.tables import SparseTable

Floats = NDArray[np.float32]

MAX_PREFETCHED = 64
"""The most steps whose weights or rows a worker may have requested ahead."""
_DTYPES = (np.dtype(np.int64), np.dtype(np.uint64))


class RowsOfStep:
    """The ids of a step by sparse table, and the summed `gradients` of their rows.

    `gather` is what to ask the shards for; None without ids.
    """

    def __init__(
        self,
        tables: Mapping[str, SparseTable],
        ids: Mapping[str, Any] | None = None,
        requested: "RowsOfStep | None" = None,
    ) -> None:
        """Raises BadInput for an unknown table, and for ids of another dtype or shape.

        `requested` are the rows that were requested ahead: of the same ids, `gather` is theirs.
        """
        if not isinstance(ids, Mapping | None):
            raise argument_checks.wrong("gather", "a dict of ids by table", ids)
        self._tables = tables
        known = {} if requested is None else requested._distinct
        self._distinct: dict[str, DistinctIds] = {
            table_of("gather", tables, name).name: _distinct_of(
                ids_of(f"gather: {name}", values), known.get(name)
            )
            for name, values in (ids or {}).items()
        }
        self.gather: Gather | None = None
        if requested is not None and self._reads_as(requested):
            self.gather = requested.gather  # the object itself, by which its answer is known
        elif self._distinct:
            self.gather = Gather({name: part.ids for name, part in self._distinct.items()})
        self.gradients: dict[str, RowGradient] = {}

    def _reads_as(self, other: "RowsOfStep") -> bool:
        """Return whether both read the same ids of the same tables."""
        return self._distinct.keys() == other._distinct.keys() and all(
            np.array_equal(part.ids, other._distinct[name].ids)
            for name, part in self._distinct.items()
        )

    def find(self, table: str) -> DistinctIds:
        """The ids of a table; raises BadInput if the step has none."""
        table_of("table", self._tables, table)
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
        if rows.shape != shape:
            expected = f"shape {shape}, a row for each id"
            raise _about(table, expected=expected, got=f"shape {rows.shape}")
        with np.errstate(over="ignore"):  # infinity is named below
            summed = sum_rows(distinct, rows.astype(np.float32, copy=False))
        if not np.isfinite(summed).all():
            row = int(np.argmin(np.isfinite(summed).all(axis=1)))
            raise _about(
                table,
                expected="finite gradients",
                got=f"NaN or infinity in the row of id {distinct.ids[row]}",
            )
        self.gradients[table] = RowGradient(distinct.ids, summed)


class RequestedRows:
    """The rows that a worker has requested ahead, by the clock of the step that will read them."""

    def __init__(self, tables: Mapping[str, SparseTable]) -> None:
        self._tables = tables
        self._rows: dict[int, RowsOfStep] = {}

    def find(self, clock: int) -> RowsOfStep | None:
        """The rows that were requested for a step."""
        return self._rows.get(clock)

    def request(
        self, clock: int, gather: object, send: Callable[[int, Gather | None], object]
    ) -> None:
        """Request rows for the step at `clock`, or for the one after the last requested.

        `send` takes the step's clock and what to ask for. Raises BadInput as `RowsOfStep` does, and
        for more than MAX_PREFETCHED steps.
        """
        self._rows = {at: rows for at, rows in self._rows.items() if at >= clock}
        clock = max([clock - 1, *self._rows]) + 1
        if len(self._rows) >= MAX_PREFETCHED:
            raise BadInput(
                "prefetch", expected=f"at most {MAX_PREFETCHED} steps ahead", got="one more"
            )
        if not isinstance(gather, Mapping):
            raise argument_checks.wrong("gather", "a dict of ids by table", gather)
        rows = RowsOfStep(self._tables, gather)
        send(clock, rows.gather)
        self._rows[clock] = rows


def _distinct_of(ids: Ids, known: DistinctIds | None) -> DistinctIds:
    """The distinct ids: `known` where it is of just these, since comparing is quicker."""
    if known is not None and np.array_equal(known.ids[known.inverse], ids):
        return known
    return find_distinct(ids)


def table_of(argument: str, tables: Mapping[str, SparseTable], name: object) -> SparseTable:
    """The sparse table of this name; raises BadInput, naming the argument."""
    if isinstance(name, str) and name in tables:
        return tables[name]
    known = f"one of the sparse tables {', '.join(tables)}"
    expected = known if tables else "a job with a sparse table"
    error = argument_checks.wrong(argument, expected, name)
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
    if isinstance(value, list | tuple) and ids.dtype.kind in "fO":
        ids = _ids_of_list(argument, value, ids)
    if ids.dtype not in _DTYPES or ids.ndim != 1:
        raise BadInput(argument, expected=expected, got=f"{ids.dtype} of shape {ids.shape}")
    return np.ascontiguousarray(ids).view(np.uint64)


def _ids_of_list(argument: str, numbers: Sequence[Any], array: NDArray[Any]) -> NDArray[Any]:
    """The ids of a list that NumPy makes no array of integers; `array` where they are not whole.

    An empty list is such a one, and one with integers on both sides of 2**63.
    """
    if not all(isinstance(number, int | np.integer) for number in numbers):
        return array
    for number in numbers:
        if not -(2**63) <= number < 2**64:
            raise BadInput(argument, expected=f"ids from {-(2**63)} to {2**64 - 1}", got=number)
    return np.array([int(number) % 2**64 for number in numbers], np.uint64)


def _about(table: str, *, expected: str, got: str) -> BadInput:
    error = BadInput(f"rows of table {table}", expected=expected, got=got)
    error.table = table
    return error
