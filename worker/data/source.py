"""The base class of data sources: rows in files, read by several processes, each its own ranges.

A source names its rows by numbers from 0 to `rows`. `read` yields the rows of one range; the base
class decodes images, checks rows and makes Arrow batches of them. A source is sent to other
processes, so it holds paths and plain values, and opens its files in `read`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ps.logs import logger
from shards.errors import BadInput, quote
from worker.data import image_decoding
from worker.data.arrow_images import Extents
from worker.data.columns import Shape
from worker.data.image_decoding import Undecodable
from worker.data.image_table import BATCH_ROWS, image_batch, image_schema
from worker.data.read_options import ReadOptions

_LOG = logger("worker.data")
_NAMED = 5  # images that cannot be decoded, in a message


class Sample(msgspec.Struct, frozen=True):
    """One row: its label and its image, with what calls it in errors.

    `data` is an array (channels, height, width), uint8 or float32; or an image file, as bytes; or
    Undecodable.
    """

    label: int
    data: NDArray[Any] | bytes | Undecodable
    name: str = ""


class Source(ABC):
    """Rows in files at `path`, as a net wants them. A subclass has `rows` and `read`."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self.path = path
        self.options = options

    @property
    @abstractmethod
    def rows(self) -> int:
        """The number of rows, with those that cannot be decoded."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Iterator[Sample]:
        """The rows with the numbers [start, stop), in order. Raises BadInput."""

    def labels(self) -> Iterator[tuple[str, int]]:
        """The name in errors and the label of each row, where labels cost little."""
        return iter(())

    @property
    def shape(self) -> Shape:
        """(channels, height, width) of every row."""
        return self._first[0]

    @property
    def schema(self) -> Any:
        """The Arrow schema of every batch."""
        return image_schema(self._first[1])

    @property
    def row_shapes(self) -> dict[str, Extents]:
        """The shapes of a row of columns other than images and labels."""
        return {}

    def check(self) -> None:
        """Raise BadInput unless there is a row that can be read, and for labels that do not fit."""
        assert self.schema is not None
        for name, label in self.labels():
            self._check_label(name, label)

    def batches(
        self, rows: int = BATCH_ROWS, start: int = 0, stop: int | None = None
    ) -> Iterator[Any]:
        """Rows [start, stop) in order, as Arrow batches of at most `rows`. Raises BadInput.

        Images that cannot be decoded are left out, and named in a warning at the end.
        """
        stop = self.rows if stop is None else min(stop, self.rows)
        rows_read = self._decode(start, stop)
        while part := list(islice(rows_read, rows)):
            numbers, labels, images = zip(*part, strict=True)
            yield images_as_batch(np.array(numbers), np.array(labels, np.int64), np.stack(images))

    @cached_property
    def _first(self) -> tuple[Shape, Any]:
        """The shape of the first row that can be decoded, and the Arrow type of its pixels."""
        if self.rows == 0:
            raise BadInput(self.path, expected="rows", got="none")
        skipped = _Skipped(self)
        for row in self.read(0, self.rows):
            image = self._image(row, skipped)
            if image is None:
                continue
            channels, height, width = image.shape
            whole = image.dtype == np.uint8
            return (channels, height, width), pa.binary() if whole else pa.list_(pa.float32())
        raise BadInput(
            self.path, expected="images", got="none that can be decoded", hint=skipped.first
        )

    def _decode(self, start: int, stop: int) -> Iterator[tuple[int, int, NDArray[Any]]]:
        """The number, the label and the image of each row that can be decoded."""
        skipped = _Skipped(self)
        for number, row in enumerate(self.read(start, stop), start):
            name = row.name or f"row {number}"
            self._check_label(name, row.label)
            image = self._image(msgspec.structs.replace(row, name=name), skipped)
            if image is None:
                continue
            if image.shape != self.shape:
                raise BadInput(
                    f"{self.path}: {name}",
                    expected=f"an image of {_times(self.shape)}, as the first",
                    got=_times(image.shape),
                    hint="resize all images to one size",
                )
            yield number, row.label, image
        skipped.report(stop - start)

    def _image(self, row: Sample, skipped: "_Skipped") -> NDArray[Any] | None:
        """A row's image, decoded and resized; None if it cannot be decoded."""
        data = row.data
        try:
            if isinstance(data, Undecodable):
                raise data
            if isinstance(data, bytes):
                data = image_decoding.decode(data, self.options.colour)
        except Undecodable as error:
            skipped.add(row.name, str(error))
            return None
        if self.options.resize is not None and data.dtype == np.uint8:
            data = image_decoding.resize(data, *self.options.resize)
        return data

    def _check_label(self, name: str, label: int) -> None:
        classes = self.options.classes
        if classes is not None and not 0 <= label < classes:
            raise BadInput(f"{self.path}: {name}", expected=f"a label in [0, {classes})", got=label)


def ranges(rows: int, parts: int, part: int, most: int = 16) -> list[tuple[int, int]]:
    """The ranges of rows [start, stop) that a part of all reads: every parts-th of equal blocks.

    Each part gets up to `most` blocks from all over the data, so that it has rows of all classes
    where rows are sorted by them. All parts have the same number of blocks; sizes differ by one.
    """
    share = max(1, min(most, rows // max(parts, 1)))
    blocks = parts * share
    cuts = [block * rows // blocks for block in range(blocks + 1)]
    chosen = [(cuts[block], cuts[block + 1]) for block in range(part, blocks, parts)]
    return [(start, stop) for start, stop in chosen if start < stop]


def part_rows(source: Source, parts: int, part: int) -> Iterator[Any]:
    """The rows of one part of a source, as Arrow batches."""
    for start, stop in ranges(source.rows, parts, part):
        yield from source.batches(start=start, stop=stop)


class ColumnSource(Source):
    """Rows of several columns, which a subclass reads as batches alone."""

    def read(self, start: int, stop: int) -> Iterator[Sample]:
        raise NotImplementedError("rows of several columns are read as batches")


class _Skipped:
    """The images that one reader of a source has skipped."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._names: list[str] = []
        self.first = ""  # the first image, and what is wrong with it

    def add(self, name: str, why: str) -> None:
        """Count an image; raises BadInput if there are too many."""
        most = self._source.options.max_skipped
        self._names.append(name)
        self.first = self.first or f"{quote(name, 300)}: {why}"
        if len(self._names) > most:
            raise BadInput(
                f"{self._source.path}: {name}: {why}; expected at most {most} images that cannot be"
                f" decoded, got {len(self._names)}"
            )

    def report(self, rows: int) -> None:
        """Log how many there were, and which."""
        if self._names:
            more = len(self._names) - _NAMED
            names = ", ".join(quote(name) for name in self._names[:_NAMED])
            names += f" and {more} more" if more > 0 else ""
            _LOG.warning(
                "%s: skipped %d of %d images, which cannot be decoded: %s; the first, %s",
                self._source.path, len(self._names), rows, names, self.first,
            )  # fmt: skip


def images_as_batch(ids: NDArray[np.int64], labels: NDArray[np.int64], images: NDArray[Any]) -> Any:
    """A batch of `image_schema` of images (rows, c, h, w), uint8 or float32."""
    rows, channels, height, width = images.shape
    ends = np.arange(rows + 1, dtype=np.int32) * np.int32(channels * height * width)
    flat = np.ascontiguousarray(images).reshape(-1)
    if images.dtype == np.uint8:
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(flat)]
        pixels = pa.Array.from_buffers(pa.binary(), rows, buffers)
    else:
        pixels = pa.ListArray.from_arrays(pa.array(ends), pa.array(flat.astype(np.float32)))
    return image_batch(image_schema(pixels.type), ids, labels, (channels, height, width), pixels)


def _times(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
