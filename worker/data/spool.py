"""A worker's own copy of its rows: appended while they stream in, then read by index.

Later epochs read it instead of asking Spark again. Each column is one file of fixed-size rows,
memory-mapped for reading. The files have no name: they are created unlinked (or unlinked at once,
if the file system cannot do that), and no other user can read them. However this process ends, even
by kill -9, the kernel frees the space and no files are left behind.

Rows are written with `write`, never through the map: a full disk then raises an error here instead
of a signal that ends the process.
"""

import mmap
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from shutil import disk_usage
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ps.closing_context import ClosingContext
from shards.errors import BadInput


class Column(NamedTuple):
    """The type of a column: each row is an array of this `shape` and `dtype`."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Spool(ClosingContext):
    """An append-only table of fixed-shape columns in unnamed files under `folder`.

    `folder` None means the system's temporary folder (TMPDIR). Close it, or use it as a context
    manager.
    """

    def __init__(self, columns: Mapping[str, Column], folder: str | Path | None = None) -> None:
        self.columns = dict(columns)
        self.rows = 0
        self._folder = Path(folder or tempfile.gettempdir())
        self._arrays: dict[str, NDArray[Any]] = {}
        self._mapped = 0
        with ExitStack() as stack:
            try:
                self._files = {
                    name: stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
                    for name in columns
                }
            except OSError as error:
                raise BadInput(f"spool in {self._folder}: {error.strerror}") from None
            self._open_files = stack.pop_all()

    def append(self, rows: Mapping[str, NDArray[Any]]) -> None:
        """Append rows: an array for each column, all of equal length, each of the column's dtype.

        Raises BadInput if the disk is full; the rows added before stay readable.
        """
        (count,) = {len(rows[name]) for name in self.columns}
        for name, column in self.columns.items():
            array = np.ascontiguousarray(rows[name])
            assert array.dtype == column.dtype, f"column {name}: {array.dtype}"
            assert array.shape[1:] == column.shape, f"column {name}: {array.shape}"
            self._write(name, array.reshape(-1).view(np.uint8).data)
        self.rows += count

    def take(self, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """The rows with these numbers, in this order, as new arrays."""
        assert self.rows, "nothing to take from"
        if self._mapped < self.rows:
            self._map()
        return {name: array[rows] for name, array in self._arrays.items()}

    def close(self) -> None:
        """Free the space. Idempotent."""
        self._arrays.clear()
        self._open_files.close()

    def _write(self, name: str, data: memoryview) -> None:
        write_rows(
            self._files[name],
            self.rows * self.columns[name].row_bytes,
            data,
            self._folder,
            self.rows,
        )

    def _map(self) -> None:
        for name, column in self.columns.items():
            length = self.rows * column.row_bytes
            if not length:  # the rows are empty lists, and no file without content can be mapped
                self._arrays[name] = np.empty((self.rows, *column.shape), column.dtype)
                continue
            view = mmap.mmap(self._files[name].fileno(), length, access=mmap.ACCESS_READ)
            flat = np.frombuffer(view, column.dtype)
            self._arrays[name] = flat.reshape(self.rows, *column.shape)
        self._mapped = self.rows


def write_rows(file: Any, offset: int, data: memoryview, folder: Path, rows: int) -> None:
    """Write data behind the first `rows` rows, over what a failed append may have left there.

    Raises BadInput naming the folder if its disk is full.
    """
    file.seek(offset)
    while data:
        try:
            written = file.write(data)
        except OSError as error:
            free = disk_usage(folder).free if folder.is_dir() else 0
            raise BadInput(
                f"spool in {folder}: {error.strerror}",
                expected=f"room for {len(data)} bytes more after {rows} rows",
                got=f"{free} free (TMPDIR names the folder)",
            ) from None
        data = data[written:]
