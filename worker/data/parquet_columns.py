"""Parquet with columns that raw images and labels do not cover: encoded images, and typed columns.

Rows are read in place, in ranges. A net's data layer may name the columns (`ReadOptions.tops`), as
CoSData of CaffeOnSpark does; without names they are an image and its label.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shards.errors import BadInput
from worker.data import arrow_images, image_decoding
from worker.data.column_values import is_binary
from worker.data.columns import LABEL, PIXEL_COLUMNS, ColumnKind, ColumnSpec, Shape
from worker.data.encoded import decode_images
from worker.data.image_table import BATCH_ROWS, ImageSource
from worker.data.parquet import (
    check_label_column,
    decode_dictionaries,
    open_parquet,
    parquet_part,
    row_count,
)
from worker.data.read_options import ReadOptions
from worker.data.source import ColumnSource

_OTHERS = ("id", "encoded", *arrow_images.SHAPE_COLUMNS)


class TableSource(ColumnSource):
    """The rows of Parquet files, in order, with the columns that a net wants."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        self._files = [str(file) for file in parquet_part(path, options.split)]
        self._counts: list[int] = []
        for file in self._files:
            with _open(file) as opened:
                names = opened.schema_arrow.names
                self._counts.append(opened.metadata.num_rows)
                self._check_names(file, names)

    @property
    def rows(self) -> int:
        return sum(self._counts)

    @property
    def shape(self) -> Shape:
        return self._head[0]

    @property
    def schema(self) -> Any:
        return self._head[1].schema

    def check(self) -> None:
        if not self.rows:
            raise BadInput(self.path, expected="rows", got="none")
        assert self.schema is not None

    def batches(
        self, rows: int = BATCH_ROWS, start: int = 0, stop: int | None = None
    ) -> Iterator[Any]:
        stop = self.rows if stop is None else min(stop, self.rows)
        before = 0
        for file, count in zip(self._files, self._counts, strict=True):
            first, last = max(start - before, 0), min(stop - before, count)
            if first < last:
                yield from decode_images(
                    self._raw(file, rows, first, last),
                    self._images,
                    f"{file}: rows {first} to {last}",
                    colour=self.options.colour,
                    resize=self.options.resize,
                    max_skipped=self.options.max_skipped,
                )
            before += count

    def _raw(self, file: str, rows: int, first: int, last: int) -> Iterator[Any]:
        """Rows [first, last) of a file as they are; row groups before them are not read."""
        with _open(file) as opened:
            groups, first_row = list[int](), 0
            ends = np.cumsum(
                [opened.metadata.row_group(n).num_rows for n in range(opened.num_row_groups)]
            )
            groups = [int(n) for n in np.flatnonzero(ends > first)]
            first_row = int(ends[groups[0] - 1]) if groups[0] else 0
            chosen = [n for n in opened.schema_arrow.names if n in self._names or n in _OTHERS]
            for batch in map(decode_dictionaries, opened.iter_batches(rows, groups, chosen)):
                begin, end = max(first - first_row, 0), min(last - first_row, batch.num_rows)
                if begin < end:
                    yield self._check_labels(
                        file, batch.slice(begin, end - begin), first_row + begin
                    )
                first_row += batch.num_rows
                if first_row >= last:
                    return

    def _check_labels(self, file: str, batch: Any, first: int) -> Any:
        """The batch, if its labels fit."""
        if "label" in batch.schema.names and self.options.classes is not None:
            where = f"{file}, column label"
            labels = batch.column("label")
            arrow_images.labels_as_int64(
                labels, where, classes=self.options.classes, first_row=first
            )
        return batch

    @property
    def _names(self) -> tuple[str, ...]:
        return self.options.tops or (*PIXEL_COLUMNS, LABEL.name)

    @property
    def _images(self) -> list[ColumnSpec]:
        """The columns of encoded images."""
        if self.options.tops:
            return [ColumnSpec(name, None, ColumnKind.IMAGE) for name in self.options.encoded]
        encoded = self.options.image_encoded
        return [ColumnSpec(PIXEL_COLUMNS[0], None, ColumnKind.IMAGE, encoded)]

    def _check_names(self, file: str, names: list[str]) -> None:
        if not self.options.tops:
            check_label_column(names, Path(file))
        for name in self.options.tops:
            ColumnSpec(name).find(names, file)

    @cached_property
    def _head(self) -> tuple[Shape, Any]:
        """The shape of the first image, (1, 1, 1) without images, and the first batch."""
        batch = next((batch for batch in self.batches(16) if batch.num_rows), None)
        if batch is None:
            raise BadInput(self.path, expected="rows", got="none with an image that can be decoded")
        shape = arrow_images.read_declared_shape(batch, str(self.path))
        extents = shape or self.options.shape or (1, 1, 1)
        return (extents[0], extents[1], extents[2]), batch


def open_table(path: Path, options: ReadOptions) -> ImageSource:
    """The Parquet data at `path`: raw images with labels, or a `TableSource` of anything else."""
    if options.tops:
        return TableSource(path, options)
    files = parquet_part(path, options.split)
    file = str(next(filter(row_count, files), files[0]))  # Spark writes a file of no rows, too
    with _open(file) as opened:
        names = opened.schema_arrow.names
        if "encoded" in names or options.image_encoded:
            return TableSource(path, options)
        if options.image_encoded is not None:
            return open_parquet(path, options)
        name = next((name for name in PIXEL_COLUMNS if name in names), None)
        if name is not None and is_binary(opened.schema_arrow.field(name).type):
            batch = next(opened.iter_batches(1, columns=[name]), None)
            value = batch.column(0)[0].as_py() if batch is not None and batch.num_rows else None
            if value is not None and image_decoding.looks_encoded(value[:16]):
                return TableSource(path, options)
    return open_parquet(path, options)


@contextmanager
def _open(file: str) -> Iterator[Any]:
    try:
        with pq.ParquetFile(file) as opened:
            yield opened
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        why = str(error).splitlines()[0]
        raise BadInput(file, expected="a whole Parquet file", got=why) from None
