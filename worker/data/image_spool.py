"""A worker's own copy of the rows of a net: images, labels and numbers, decoded as they arrive."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from numpy.typing import NDArray

from worker.data.arrow_columns import read_columns
from worker.data.columns import DATA, LABEL, ColumnSpec
from worker.data.spool import Column, Spool


class ImageSpool:
    """A table of the columns that a net reads; the first batch determines the shape of all rows.

    `columns` are by default `data` or `image` (binary: uint8 pixels; or a list of numbers:
    float32), and `label` (whole numbers). An image's shape is that of its column; without it, what
    the columns channels, height and width say; without these, a square image for bytes and
    (n, 1, 1) for a list of n numbers. With `classes`, labels outside [0, classes) are refused.
    `where` names the rows in errors; `folder` (None: TMPDIR) has the file of the copy.
    """

    def __init__(
        self,
        where: str,
        columns: Sequence[ColumnSpec] = (),
        *,
        classes: int | None = None,
        folder: str | Path | None = None,
    ) -> None:
        self._where = where
        self._columns = columns or (DATA, LABEL)
        self._classes = classes
        self._folder = folder
        self._spool: Spool | None = None

    @property
    def rows(self) -> int:
        """The rows so far."""
        return self._spool.rows if self._spool else 0

    def append(self, batch: Any) -> None:
        """Append the rows of a record batch; raises BadInput for one that does not fit."""
        arrays = read_columns(
            batch, self._columns, self._where, first_row=self.rows, classes=self._classes
        )
        if self._spool is None:
            layout = {name: Column(array.dtype, array.shape[1:]) for name, array in arrays.items()}
            self._columns = [
                msgspec.structs.replace(column, shape=layout[column.name].shape)
                for column in self._columns
            ]
            self._spool = Spool(layout, self._folder)
        self._spool.append(arrays)

    def take(self, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """The rows with these numbers, in this order, as new arrays."""
        assert self._spool is not None, "nothing to take from"
        return self._spool.take(rows)

    def close(self) -> None:
        """Free the space. Idempotent."""
        if self._spool is not None:
            self._spool.close()
