"""Parquet files of images and labels, for `open_source`.

The footers and the label column are read when the source is opened; pixels are streamed. Errors
number rows from 0 within their file.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shards.errors import BadInput
from worker.data import arrow_images
from worker.data.columns import LABEL, Shape, pixel_column
from worker.data.image_table import BATCH_ROWS, image_batch, image_schema, listing
from worker.data.read_options import VALIDATION, ReadOptions, Split


@dataclass(frozen=True)
class ParquetSource:
    """Files with images of one shape, read in order."""

    files: tuple[Path, ...]
    rows: int
    shape: Shape
    pixels: Any
    classes: int | None

    @property
    def schema(self) -> Any:
        return image_schema(self.pixels)

    def batches(self, rows: int = BATCH_ROWS) -> Iterator[Any]:
        before = 0
        for path in self.files:
            for first, batch in _read(path, rows):
                yield self._normal(path, first, before + first, batch)
            before += row_count(path)

    def _normal(self, path: Path, first: int, number: int, batch: Any) -> Any:
        names = batch.schema.names
        name = pixel_column(names, str(path))
        where = f"{path}, column {name}"
        pixels = arrow_images.pixels_as_arrow(batch.column(name), where, first)
        arrow_images.pixel_rows(pixels, where, int(np.prod(self.shape)), first)
        declared = _read_shape(batch, name, path, first)
        if declared not in {None, self.shape}:
            raise BadInput(f"{path}: row {first}", expected=f"images of {self.shape}", got=declared)
        if pixels.type != self.pixels:
            raise BadInput(where, expected=f"{self.pixels} as in the first file", got=pixels.type)
        labels = _labels(path, batch, first, self.classes)
        ids = np.arange(number, number + len(batch))
        if "id" in names:
            ids = arrow_images.labels_as_int64(
                batch.column("id"), f"{path}, column id", first_row=first
            )
        return image_batch(self.schema, ids, labels, self.shape, pixels)


def parquet_files(path: Path) -> tuple[Path, ...]:
    """The Parquet file at `path`, or those of a folder and its subfolders, sorted by name.

    By Spark's convention, names that begin with `_` or `.` are not data.
    """
    if path.is_file():
        return (path,)
    files = (file for file in path.rglob("*.parquet") if file.is_file())
    return tuple(
        sorted(f for f in files if not any(p[0] in "_." for p in f.relative_to(path).parts))
    )


def is_parquet(path: Path) -> bool:
    """Return whether there is a Parquet file at `path`, or in the folder there."""
    if path.is_dir():
        return bool(parquet_files(path))
    if path.suffix == ".parquet":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def open_parquet(path: Path, options: ReadOptions) -> ParquetSource:
    """The training or test part of the Parquet data at `path`; footers and labels are checked."""
    classes = options.classes
    files = tuple(file for file in parquet_part(path, options.split) if row_count(file))
    if not files:
        raise BadInput(path, expected="rows", got="Parquet files without any")
    shape, pixels = _first_image(files[0], options.shape, options.image)
    for file in files:
        for first, batch in _read(file, 1 << 16, ["label"]):
            _labels(file, batch, first, classes)
    return ParquetSource(files, sum(map(row_count, files)), shape, pixels, classes)


def parquet_part(path: Path, split: Split) -> tuple[Path, ...]:
    """The files of a split: those below a folder, or with a name, that begins with its name.

    Undivided data is `train`. Raises BadInput if the split is missing.
    """
    parts = parquet_parts(path) or {"train": parquet_files(path)}
    if parts.get(split):
        return parts[split]
    got = listing(path) if path.is_dir() else "one file"
    raise BadInput(
        path,
        expected=f"a subfolder {split} or files {split}*.parquet for the {split} data",
        got=got,
    )


def parquet_parts(path: Path) -> dict[Split, tuple[Path, ...]]:
    """The files of each part of a divided folder; empty for other data."""
    parts: dict[Split, list[Path]] = {"train": [], "test": []}
    validation = []
    for file in parquet_files(path) if path.is_dir() else ():
        name = file.relative_to(path).parts[0].lower()
        for part, files in parts.items():
            if name.startswith(part):
                files.append(file)
        if VALIDATION.match(name):
            validation.append(file)
    if parts["train"] and not parts["test"]:
        parts["test"] = validation
    return {part: tuple(files) for part, files in parts.items() if files}


def check_label_column(names: Sequence[str], path: Path) -> None:
    """Raise BadInput unless a file with columns of these names has one of labels."""
    stated = next((part for part in path.parts if part.startswith(f"{LABEL.name}=")), None)
    if stated is not None and LABEL.name not in names:
        raise BadInput(
            path,
            expected="a column label",
            got=f"a folder of partitionBy, {stated}",
            hint="read it with Spark, and pass the DataFrame to worker.train",
        )
    LABEL.find(names, str(path))


def decode_dictionaries(batch: Any) -> Any:
    """The record batch with plain values in columns that are kept as dictionaries.

    Those are the categories of pandas and polars, of which Parquet keeps the Arrow type.
    """
    arrays = [
        column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(arrays, batch.schema.names)


def _first_image(path: Path, shape: Sequence[int] | None, image: bool) -> tuple[Shape, Any]:
    """The shape of the first row, and the Arrow type of its pixels after conversion."""
    _, batch = next(_read(path, 1))
    name = pixel_column(batch.schema.names, str(path))
    where = f"{path}, column {name}"
    pixels = arrow_images.pixels_as_arrow(batch.column(name), where)
    flat = arrow_images.pixel_rows(pixels, where)
    declared = _read_shape(batch, name, path)
    if declared is None and shape is not None and np.prod(shape) == flat.shape[1]:
        declared = tuple(shape)
    return arrow_images.row_shape(flat, where, declared, image=image), pixels.type


def _read_shape(batch: Any, name: str, path: Path, first: int = 0) -> tuple[int, ...] | None:
    """The shape that a batch states in its columns, or by lists of lists in the column `name`."""
    declared = arrow_images.read_declared_shape(batch, str(path), first)
    return declared or arrow_images.read_nested_shape(batch.column(name))


def _labels(path: Path, batch: Any, first: int, classes: int | None) -> Any:
    where = f"{path}, column label"
    column = batch.column("label")
    return arrow_images.labels_as_int64(column, where, classes=classes, first_row=first)


def row_count(path: Path) -> int:
    """The rows of a file, by its footer; raises BadInput."""
    with _readable(path):
        return int(pq.read_metadata(path).num_rows)


def _read(
    path: Path, rows: int, selection: Sequence[str] | None = None
) -> Iterator[tuple[int, Any]]:
    """Each record batch of a file with its first row's number; unknown columns are left out."""
    with _readable(path), pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        check_label_column(names, path)
        pixels = pixel_column(names, str(path))
        known = {"id", "label", pixels, *arrow_images.SHAPE_COLUMNS}
        chosen = [name for name in names if name in (selection or known)]
        first = 0
        for batch in file.iter_batches(batch_size=rows, columns=chosen):
            yield first, decode_dictionaries(batch)
            first += len(batch)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        why = str(error).splitlines()[0]
        raise BadInput(path, expected="a whole Parquet file", got=why) from None
