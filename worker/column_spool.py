"""A worker's own copy of its rows, with columns of any type.

Columns with a number, or a fixed number of numbers, in each row are kept by `Spool`, as arrays.
Text, bytes, times and ragged lists are kept in Arrow's format: record batches are appended to an
unnamed file, so nothing is left of it however this process ends, and are read from the mapped file.
"""

import mmap
import tempfile
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shards.errors import BadInput
from worker.spool import Column, Spool, write_rows


class ColumnSpool:
    """A table of record batches, appended and taken by row; close it in the end.

    The first batch decides about the columns: an array of numbers, or anything else.
    """

    def __init__(
        self,
        first: Any,
        where: str,
        *,
        ragged: Collection[str] = (),
        folder: str | Path | None = None,
    ) -> None:
        """`where` names the rows in errors; `ragged` are columns of lists of any length."""
        self.rows = 0
        arrays = column_arrays(first, where, ragged)
        for name, array in arrays.items():
            if name not in ragged and array.dtype == object and _has_numbers(first, name):
                raise _other_lengths(f"{where}, column {name}", array, len(array[0]), 0)
        fixed = {
            name: Column(array.dtype, array.shape[1:])
            for name, array in arrays.items()
            if array.dtype != object
        }
        self._columns = fixed
        self._others = [name for name in arrays if name not in fixed]
        self._where = where
        with ExitStack() as stack:
            self._fixed = Spool(fixed, folder)
            stack.callback(self._fixed.close)
            self._other = _ArrowSpool(first.select(self._others).schema, where, folder)
            stack.callback(self._other.close)
            self._open = stack.pop_all()

    def append(self, batch: Any) -> None:
        """Append the rows of a record batch; raises BadInput for one that does not fit."""
        missing = {*self._columns, *self._others} - set(batch.schema.names)
        if missing:
            raise BadInput(f"{self._where}: expected a column {min(missing)}, got none")
        arrays = column_arrays(batch.select(list(self._columns)), self._where)
        for name, column in self._columns.items():
            array = arrays[name]
            if array.dtype == object or array.shape[1:] != column.shape:
                where = f"{self._where}, column {name}"
                raise _other_lengths(where, array, column.shape[0], self.rows)
        if self._others:
            self._other.append(batch.select(self._others))
        if self._columns:
            self._fixed.append(arrays)
        self.rows += batch.num_rows

    def take(self, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """The rows with these numbers, in this order, as an array a column (`column_arrays`)."""
        fixed = self._fixed.take(rows) if self._columns else {}
        return fixed | (self._other.take(rows) if self._others else {})

    def close(self) -> None:
        """Free the space. Idempotent."""
        self._open.close()


class _ArrowSpool:
    """Record batches in an unnamed file under `folder`, read by row number."""

    def __init__(self, schema: Any, where: str, folder: str | Path | None) -> None:
        self._schema = schema
        self._where = where
        self._folder = Path(folder or tempfile.gettempdir())
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise BadInput(f"spool in {self._folder}: {error.strerror}") from None
        self._rows = 0
        self._firsts: list[int] = []  # of each record batch: the number of its first row
        self._places: list[slice] = []  # and its bytes in the file
        self._batches: list[Any] = []  # those of them that are mapped into memory

    def append(self, batch: Any) -> None:
        if not batch.schema.equals(self._schema):
            raise BadInput(f"{self._where}: expected columns {self._schema}, got {batch.schema}")
        start = self._places[-1].stop if self._places else 0
        data = batch.serialize()
        write_rows(self._file, start, memoryview(data), self._folder, self._rows)
        self._firsts.append(self._rows)
        self._places.append(slice(start, start + len(data)))
        self._rows += batch.num_rows

    def take(self, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        if len(self._batches) < len(self._places):
            self._map()
        sources = np.searchsorted(self._firsts, rows, side="right") - 1
        order = np.argsort(sources, kind="stable")
        parts = []
        for source in np.unique(sources):
            wanted = rows[order[sources[order] == source]] - self._firsts[source]
            parts.append(self._batches[source].take(pa.array(wanted)))
        found = pa.Table.from_batches(parts, self._schema)
        if len(parts) > 1:
            found = found.combine_chunks().take(pa.array(np.argsort(order)))
        return column_arrays(found, self._where, self._schema.names)

    def _map(self) -> None:
        """Map the record batches that have come since the last time."""
        view = pa.py_buffer(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ))
        for place in self._places[len(self._batches) :]:
            data = view.slice(place.start, place.stop - place.start)
            self._batches.append(pa.ipc.read_record_batch(data, self._schema))

    def close(self) -> None:
        self._batches.clear()
        self._file.close()


def column_arrays(rows: Any, where: str, ragged: Collection[str] = ()) -> dict[str, NDArray[Any]]:
    """The columns of an Arrow table or record batch as NumPy arrays, one element a row.

    A column of numbers or of booleans becomes an array of its type, (rows,); one of lists of
    numbers, all of one length, an array (rows, length). Other columns become arrays of objects:
    text, bytes, times and structs as Python values, and lists that differ in length, or that
    `ragged` names, as an array each. Raises BadInput, naming `where` and the column, for a null.
    """
    return {
        name: _array(rows.column(place), f"{where}, column {name}", name in ragged)
        for place, name in enumerate(rows.schema.names)
    }


def _array(column: Any, where: str, ragged: bool = False) -> NDArray[Any]:
    """One column as an array."""
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else column.combine_chunks()
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise BadInput(f"{where}: expected a value in each row, got a null in row {row} of a batch")
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _lists(column, where, ragged)
    if pa.types.is_fixed_size_list(kind):
        _refuse_null_values(column.flatten(), where, lambda place: place // kind.list_size)
        values = _array(column.flatten(), where)
        return values.reshape(len(column), kind.list_size, *values.shape[1:])
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        found: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return found
    return _objects(column.to_pylist())


def _lists(column: Any, where: str, ragged: bool) -> NDArray[Any]:
    """A column of lists: (rows, length) if all are of one length, else an array of arrays."""
    offsets = column.offsets.to_numpy()
    inner = column.values.slice(offsets[0], offsets[-1] - offsets[0])
    _refuse_null_values(
        inner, where, lambda place: int(np.searchsorted(offsets, offsets[0] + place, "right")) - 1
    )
    values = _array(inner, where)
    lengths = np.diff(offsets)
    if len(lengths) and not ragged and (lengths == lengths[0]).all():
        return values.reshape(len(column), int(lengths[0]), *values.shape[1:])
    return _objects(np.split(values, offsets[1:-1] - offsets[0]))


def _refuse_null_values(values: Any, where: str, row_of: Callable[[int], int]) -> None:
    """Raise BadInput for a null in a list; `row_of` is the row of a value of the column."""
    if values.null_count:
        place = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        raise BadInput(
            f"{where}: expected lists without nulls, got a null in row {row_of(place)} of a batch"
        )


def joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Arrays of one column as one; of objects if some of them are, or if lists differ in length."""
    if len(parts) == 1:
        return parts[0]
    if len({(part.dtype, part.shape[1:]) for part in parts}) == 1:
        return np.concatenate(parts)
    return _objects([row for part in parts for row in part])


def _objects(values: list[Any]) -> NDArray[Any]:
    """An array of objects, one a row, also where all are sequences of one length."""
    found = np.empty(len(values), object)
    for row, value in enumerate(values):
        found[row] = value
    return found


def _is_list(kind: Any) -> bool:
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(kind) for is_kind in kinds)


def _has_numbers(rows: Any, name: str) -> bool:
    """Whether a column is one of lists of numbers, however deep."""
    kind = rows.schema.field(name).type
    if not _is_list(kind):
        return False
    while _is_list(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


def _other_lengths(where: str, array: NDArray[Any], length: int, first_row: int) -> BadInput:
    """The error for a column of lists that differ in length; the first row has `length` values."""
    remedy = "a column of lists that differ needs its name in `ragged`"
    for row, values in enumerate(array, first_row):
        if len(values) != length:
            return BadInput(
                f"{where}: row {row}: expected {length} values, as in the first row, got"
                f" {len(values)}; {remedy}"
            )
    return BadInput(f"{where}: expected lists of lists of one length, got others; {remedy}")
