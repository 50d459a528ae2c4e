"""A worker's own copy of its rows, with columns of any type.

Columns with a number, or a fixed number of numbers, in each row are kept by `Spool`, as arrays.
Text, bytes, vectors, images and ragged lists are kept in Arrow's format: record batches are
appended to an unnamed file, so nothing is left of it however this process ends, and are read from
the mapped file. So sparse vectors are filled with zeros in the minibatches alone, and not at all
where they are asked for as `SparseVectors`.
"""

import mmap
import tempfile
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shards.errors import BadInput
from worker.data.column_values import (
    check_column,
    column_arrays,
    is_leaf_number,
    is_list,
    is_spark_image,
    is_time,
    is_vector,
    objects,
    ragged_column,
    sparse_vectors,
    value_shape,
)
from worker.data.ragged import Ragged, SparseVectors
from worker.data.spool import Column, Spool, write_rows


class ColumnSpool:
    """A table of record batches, appended and taken by row; close it in the end.

    The first batch decides about the columns: an array of numbers, or anything else.
    """

    def __init__(
        self,
        where: str,
        columns: Collection[str] | None = None,
        *,
        ragged: Collection[str] = (),
        folder: str | Path | None = None,
    ) -> None:
        """`where` names the rows in errors. `columns` are kept, all if None; those in `ragged` have
        lists of any length, or vectors of which only the stored values are taken.
        """
        self.rows = 0
        self._where = where
        self._selection = columns
        self._ragged = ragged
        self._folder = folder
        self._open = ExitStack()
        self._fixed: Spool | None = None

    def _begin(self, first: Any) -> None:
        """Decide about the columns by the first batch."""
        where = self._where
        select_columns(first, self._ragged, where)  # each is to be a column
        for field in first.schema:
            check_column(field.type, f"{where}, column {field.name}")
        kinds = {field.name: field.type for field in first.schema}
        ragged = self._ragged
        self._others = [name for name in kinds if name in ragged or not _is_fixed(kinds[name])]
        arrays = column_arrays(first.select([n for n in kinds if n not in self._others]), where)
        for name, array in arrays.items():
            if array.dtype == object:
                raise _other_lengths(f"{where}, column {name}", array, len(array[0]), 0)
        self._columns = {
            name: Column(array.dtype, array.shape[1:]) for name, array in arrays.items()
        }
        self._values = {
            name: value_shape(first[name], f"{where}, column {name}")
            for name in self._others
            if is_vector(kinds[name]) or is_spark_image(kinds[name])
        }
        fixed = self._open.enter_context(Spool(self._columns, self._folder))
        vectors = [name for name in ragged if is_vector(kinds[name])]
        schema = first.select(self._others).schema
        self._other = _ArrowSpool(schema, where, self._folder, vectors)
        self._open.callback(self._other.close)
        self._fixed = fixed

    def append(self, batch: Any) -> None:
        """Append the rows of a record batch; raises BadInput for one that does not fit."""
        batch = select_columns(batch, self._selection, self._where)
        if self._fixed is None:
            self._begin(batch)
        assert self._fixed is not None
        missing = {*self._columns, *self._others} - set(batch.schema.names)
        if missing:
            raise BadInput(self._where, expected=f"a column {min(missing)}", got="none")
        arrays = column_arrays(batch.select(list(self._columns)), self._where)
        for name, column in self._columns.items():
            array = arrays[name]
            if array.dtype == object or array.shape[1:] != column.shape:
                where = f"{self._where}, column {name}"
                raise _other_lengths(where, array, column.shape[0], self.rows)
        for name, shape in self._values.items():
            where = f"{self._where}, column {name}"
            if (got_shape := value_shape(batch[name], where)) != shape:
                expected, got = ("x".join(map(str, extents)) for extents in (shape, got_shape))
                raise BadInput(
                    f"{where}: row {self.rows}",
                    expected=f"{expected} values, as in the first row",
                    got=got,
                )
        if self._others:
            self._other.append(batch.select(self._others))
        if self._columns:
            self._fixed.append(arrays)
        self.rows += batch.num_rows

    def take(self, rows: NDArray[Any]) -> dict[str, Any]:
        """The rows with these numbers, in this order: a column is an array or the ragged kind."""
        assert self._fixed is not None, "nothing to take from"
        fixed: dict[str, Any] = self._fixed.take(rows) if self._columns else {}
        return fixed | (self._other.take(rows) if self._others else {})

    def close(self) -> None:
        """Free the space. Idempotent."""
        self._open.close()


class _ArrowSpool:
    """Record batches in an unnamed file under `folder`, read by row number."""

    def __init__(
        self, schema: Any, where: str, folder: str | Path | None, vectors: Collection[str]
    ) -> None:
        """`vectors` are the columns that are taken as `SparseVectors`."""
        self._schema = schema
        self._where = where
        self._vectors = vectors
        self._folder = Path(folder or tempfile.gettempdir())
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise BadInput(f"spool in {self._folder}: {error.strerror}") from None
        self._rows = 0
        self._firsts: list[int] = []  # of each record batch: the number of its first row
        self._slices: list[slice] = []  # and its bytes in the file
        self._batches: list[Any] = []  # those of them that are mapped into memory

    def append(self, batch: Any) -> None:
        if not batch.schema.equals(self._schema):
            raise BadInput(self._where, expected=f"columns {self._schema}", got=batch.schema)
        start = self._slices[-1].stop if self._slices else 0
        data = batch.serialize()
        write_rows(self._file, start, memoryview(data), self._folder, self._rows)
        self._firsts.append(self._rows)
        self._slices.append(slice(start, start + len(data)))
        self._rows += batch.num_rows

    def take(self, rows: NDArray[Any]) -> dict[str, NDArray[Any] | Ragged | SparseVectors]:
        if len(self._batches) < len(self._slices):
            self._map()
        sources = np.searchsorted(self._firsts, rows, side="right") - 1
        order = np.argsort(sources, kind="stable")
        parts = []
        for source in np.unique(sources):
            indices = rows[order[sources[order] == source]] - self._firsts[source]
            parts.append(self._batches[source].take(pa.array(indices)))
        table = pa.Table.from_batches(parts, self._schema)
        if len(parts) > 1:
            table = table.combine_chunks().take(pa.array(np.argsort(order)))
        return {
            name: (sparse_vectors if name in self._vectors else ragged_column)(
                column, f"{self._where}, column {name}"
            )
            for name, column in zip(table.schema.names, table.columns, strict=True)
        }

    def _map(self) -> None:
        """Map the record batches that have come since the last time."""
        view = pa.py_buffer(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ))
        for extent in self._slices[len(self._batches) :]:
            data = view.slice(extent.start, extent.stop - extent.start)
            self._batches.append(pa.ipc.read_record_batch(data, self._schema))

    def close(self) -> None:
        self._batches.clear()
        self._file.close()


def select_columns(batch: Any, columns: Collection[str] | None, where: str) -> Any:
    """The record batch with these columns only; raises BadInput for one that it lacks."""
    if columns is None:
        return batch
    for name in columns:
        if name not in batch.schema.names:
            got = ", ".join(batch.schema.names)
            raise BadInput(where, expected=f"a column {name}", got=got)
    return batch.select(list(columns))


def join_arrays(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Arrays of one column as one; of objects if some of them are, or if lists differ in length."""
    if len(parts) == 1:
        return parts[0]
    if len({(part.dtype, part.shape[1:]) for part in parts}) == 1:
        return np.concatenate(parts)
    return objects([row for part in parts for row in part])


def _is_fixed(kind: Any) -> bool:
    """Return whether a column holds numbers, or lists of them however deep, kept as arrays."""
    while is_list(kind):
        kind = kind.value_type
    return not is_vector(kind) and (is_leaf_number(kind) or is_time(kind))


def _other_lengths(where: str, array: NDArray[Any], length: int, first_row: int) -> BadInput:
    """The error for a column of lists that differ in length; the first row has `length` values."""
    remedy = "a column of lists that differ needs its name in `ragged`"
    for row, values in enumerate(array, first_row):
        if len(values) != length:
            return BadInput(
                f"{where}: row {row}",
                expected=f"{length} values, as in the first row",
                got=len(values),
                hint=remedy,
            )
    return BadInput(where, expected="lists of lists of one length", got="others", hint=remedy)
