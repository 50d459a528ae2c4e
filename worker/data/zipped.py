"""Several sources read in step, for a net with a data layer for each."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from shards.errors import BadInput
from worker.data.arrow_images import Extents
from worker.data.columns import Shape
from worker.data.image_table import BATCH_ROWS
from worker.data.source import ColumnSource, Source


class LayerSource(NamedTuple):
    """A source, and the tops of the layer that names it: an image and its label, or datasets."""

    source: Source
    tops: tuple[str, ...]

    @property
    def names(self) -> dict[str, str]:
        """The column of the source that each top reads."""
        if self.source.row_shapes:
            return {top: top for top in self.tops}
        return dict(zip(self.tops, ("data", "label"), strict=False))

    @property
    def shapes(self) -> dict[str, Extents]:
        """The shapes of a row of each column that is no label."""
        return self.source.row_shapes or {self.tops[0]: self.source.shape}


class ZippedSource(ColumnSource):
    """The columns of several sources, by the names of tops.

    It has as many rows as the longest source; a shorter one starts over at its end, as Caffe's data
    layers do. A row is left out if one of its images cannot be decoded.
    """

    def __init__(self, members: Sequence[LayerSource]) -> None:
        super().__init__(members[0].source.path, members[0].source.options)
        self._members = tuple(members)
        fields = [
            (top, member.source.schema.field(name).type)
            for member in members
            for top, name in member.names.items()
        ]
        self._schema = pa.schema([("id", pa.int64()), *fields])

    @property
    def rows(self) -> int:
        return max(member.source.rows for member in self._members)

    @property
    def shape(self) -> Shape:
        """The shape of the first source of images; without one, of the first source."""
        sources = [member.source for member in self._members]
        return next((source for source in sources if not source.row_shapes), sources[0]).shape

    @property
    def row_shapes(self) -> dict[str, Extents]:
        return {top: shape for member in self._members for top, shape in member.shapes.items()}

    @property
    def schema(self) -> Any:
        return self._schema

    def check(self) -> None:
        for member in self._members:
            member.source.check()

    def batches(
        self, rows: int = BATCH_ROWS, start: int = 0, stop: int | None = None
    ) -> Iterator[Any]:
        stop = self.rows if stop is None else min(stop, self.rows)
        skipped, most = 0, self.options.max_skipped
        for first in range(start, stop, rows):
            numbers = np.arange(first, min(first + rows, stop))
            table = self._block(numbers)
            skipped += len(numbers) - table.num_rows
            if skipped > most:
                raise BadInput(
                    self.path,
                    expected=f"at most {most} rows with images that cannot be decoded",
                    got=skipped,
                )
            yield from table.combine_chunks().to_batches()

    def _block(self, numbers: Any) -> Any:
        """The rows with these successive numbers, as a table."""
        parts = [_read(member.source, numbers) for member in self._members]
        rows_of_parts = [numbers % member.source.rows for member in self._members]
        indices = [
            {row: index for index, row in enumerate(part["id"].to_pylist())} for part in parts
        ]
        positions = np.array(
            [
                [at.get(row, -1) for row in rows.tolist()]
                for at, rows in zip(indices, rows_of_parts, strict=True)
            ]
        )
        complete = (positions >= 0).all(axis=0)
        columns = {"id": pa.array(numbers[complete])}
        for member, part, chosen in zip(self._members, parts, positions[:, complete], strict=True):
            for top, name in member.names.items():
                columns[top] = part[name].take(pa.array(chosen, pa.int64()))
        return pa.table(columns, schema=self.schema)


def _read(source: Source, numbers: Any) -> Any:
    """The rows of a source with these successive numbers, modulo its length, each once."""
    count, first = len(numbers), int(numbers[0]) % source.rows
    last = first + count
    if count >= source.rows:
        spans = [(0, source.rows)]
    else:
        spans = [(first, min(last, source.rows)), (0, max(last - source.rows, 0))]
    batches = [
        batch
        for start, stop in spans
        if start < stop
        for batch in source.batches(count, start, stop)
    ]
    return pa.Table.from_batches(batches, source.schema)
