"""HDF5 files with a dataset for each top of a net; the first axis is that of the rows.

A source is one file, or, as in Caffe, a text file that lists files. Rows are read in slices.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from shards.errors import BadInput, quote
from worker.data.arrow_images import Extents
from worker.data.columns import Shape
from worker.data.image_table import BATCH_ROWS
from worker.data.read_options import ReadOptions
from worker.data.source import ColumnSource
from worker.data.text_files import first_lines, locate, read_lines

_MAX_VALUES = 1 << 27  # of a row, and of a chunk
_MAX_LIST_BYTES = 1 << 28
_SUFFIXES = (".h5", ".hdf5", ".hdf")
_SIGNATURE = b"\x89HDF\r\n"  # and two bytes more


class Hdf5Source(ColumnSource):
    """Rows of several datasets, which every file has under the same names."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        self._files = [str(file) for file in _files(path)]
        self._counts: list[int] = []
        self._shapes: dict[str, Extents] = {}
        for file in self._files:
            self._look(file)

    @property
    def rows(self) -> int:
        return sum(self._counts)

    @property
    def shape(self) -> Shape:
        row = self._shapes.get("data") or next(iter(self._shapes.values()))
        channels, height, width = (*row, 1, 1, 1)[:3]
        return channels, height, width

    @property
    def row_shapes(self) -> dict[str, Extents]:
        return self._shapes

    @property
    def schema(self) -> Any:
        numbers = pa.list_(pa.float32())
        return pa.schema([("id", pa.int64()), *((name, numbers) for name in self._shapes)])

    def check(self) -> None:
        if not self.rows:
            raise BadInput(self.path, expected="rows", got="none")

    def batches(
        self, rows: int = BATCH_ROWS, start: int = 0, stop: int | None = None
    ) -> Iterator[Any]:
        stop = self.rows if stop is None else min(stop, self.rows)
        before = 0
        for file, count in zip(self._files, self._counts, strict=True):
            first, last = max(start - before, 0), min(stop - before, count)
            with _open(file) as opened:
                for begin in range(first, last, rows):
                    end = min(begin + rows, last)
                    yield self._batch(file, opened, before, begin, end)
            before += count

    def _batch(self, file: str, opened: Any, before: int, begin: int, end: int) -> Any:
        columns = [pa.array(np.arange(before + begin, before + end))]
        for name in self._shapes:
            try:
                values = opened[name][begin:end].reshape(end - begin, -1).astype(np.float32)
            except (OSError, RuntimeError, ValueError, KeyError) as error:
                raise BadInput(f"{file}: dataset {name}: cannot be read: {_line(error)}") from None
            if not np.isfinite(values).all():
                row = begin + int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
                raise BadInput(f"{file}: dataset {name}: row {row}", expected="finite numbers")
            ends = np.arange(end - begin + 1, dtype=np.int32) * np.int32(values.shape[1])
            columns.append(pa.ListArray.from_arrays(pa.array(ends), pa.array(values.reshape(-1))))
        return pa.record_batch(columns, schema=self.schema)

    def _look(self, file: str) -> None:
        """Check the datasets of a file, and count its rows."""
        with _open(file) as opened:
            names = self.options.tops or tuple(opened)
            shapes_by_name = {name: _dataset(file, opened, name) for name in names}
        if not shapes_by_name:
            raise BadInput(file, expected="datasets", got="none")
        counts = {name: shape[0] for name, shape in shapes_by_name.items()}
        if len(set(counts.values())) > 1:
            raise BadInput(file, expected="datasets with the same number of rows", got=counts)
        shapes = {name: shape[1:] for name, shape in shapes_by_name.items()}
        if self._shapes and shapes != self._shapes:
            raise BadInput(file, expected=f"rows of {self._shapes}, as before", got=shapes)
        self._shapes = shapes
        self._counts.append(next(iter(counts.values())))


def is_hdf5(path: Path) -> bool:
    """Return whether a file is HDF5, or lists such files."""
    if not path.is_file():
        return False
    if _has_signature(path) or path.suffix.lower() in _SUFFIXES:
        return True
    names = first_lines(path, 1)
    named = locate(names[0], path.parent) if names else None
    return bool(names) and (names[0].lower().endswith(_SUFFIXES) or _has_signature(named))


def _files(path: Path) -> list[Path]:
    """The file at `path`, or the files that it lists, by their paths from there or from here."""
    if _has_signature(path) or path.suffix.lower() in _SUFFIXES:
        return [path]
    files = list[Path]()
    for number, line in enumerate(read_lines(path, _MAX_LIST_BYTES), 1):
        name = line.strip()
        if not name or name.startswith("#"):
            continue
        named = locate(name, path.parent)
        if named is None:
            folders = dict.fromkeys((path.parent.absolute(), Path.cwd()))
            raise BadInput(
                f"{path}:{number}",
                expected="the name of an HDF5 file",
                got=f"{quote(name)}, which is not in {' or '.join(map(str, folders))}",
            )
        files.append(named)
    return files


def _has_signature(path: Path | None) -> bool:
    if path is None:
        return False
    with path.open("rb") as file:
        return file.read(len(_SIGNATURE)) == _SIGNATURE


def _open(file: str) -> Any:
    import h5py

    try:
        return h5py.File(file, "r")
    except (OSError, RuntimeError) as error:
        raise BadInput(file, expected=f"a whole HDF5 file: {_line(error)}") from None


def _dataset(file: str, opened: Any, name: str) -> tuple[int, ...]:
    """The shape of a dataset that can be read safely; raises BadInput."""
    import h5py

    where = f"{file}: dataset {name}"
    try:
        link = opened.get(name, getlink=True)
        dataset = opened[name] if isinstance(link, h5py.HardLink) else None
        if dataset is None or not isinstance(dataset, h5py.Dataset):
            known = ", ".join(list(opened)[:8]) or "none"
            raise BadInput(where, expected=f"a dataset of the file, which has {known}")
        shape, kind, chunk = dataset.shape, dataset.dtype.kind, dataset.chunks
        elsewhere = dataset.is_virtual or dataset.external
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{where}: cannot be read: {_line(error)}") from None
    if not shape or kind not in "biuf":
        raise BadInput(where, expected="numbers with an axis of rows", got=f"{kind} {shape}")
    if elsewhere:
        raise BadInput(where, expected="values in this file", got="a link to another")
    if prod(shape[1:]) > _MAX_VALUES or prod(chunk or ()) > _MAX_VALUES:
        raise BadInput(where, expected=f"at most {_MAX_VALUES} values a row and a chunk")
    return tuple(int(size) for size in shape)


def _line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
