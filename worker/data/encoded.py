"""Encoded images in Arrow batches, such as a DataFrame's: decoded before anything else reads them.

A row's image is encoded if its column `encoded` says so; without that column, if the net does; or
else if its bytes begin like a PNG, JPEG or WebP file. Rows with an image that cannot be decoded are
left out, up to a limit, and named in a warning.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ps.logs import logger
from shards.errors import BadInput
from worker.data import image_decoding
from worker.data.arrow_images import SHAPE_COLUMNS, spark_image
from worker.data.column_values import is_binary, is_spark_image, is_vector
from worker.data.columns import ColumnKind, ColumnSpec
from worker.data.image_decoding import Undecodable
from worker.data.read_options import MAX_SKIPPED

_LOG = logger("worker.data")
_COLOURS = {1: False, 3: True}  # by the number of channels that a net wants


def decode_images(
    batches: Iterable[Any],
    columns: Sequence[ColumnSpec],
    where: str,
    *,
    colour: bool | None = None,
    resize: tuple[int, int] | None = None,
    max_skipped: int = MAX_SKIPPED,
) -> Iterator[Any]:
    """The batches with the images of `columns` as raw pixels; other batches are not changed.

    `where` names the rows in errors. Images are decoded to grey or `colour`, by default to the
    number of channels in the column's shape, and then resized to (height, width).
    """
    images = [column for column in columns if column.kind is ColumnKind.IMAGE]
    first_row, skipped = 0, list[int]()
    reader = _Reader(where, colour, resize, skipped)
    for batch in batches:
        rows, before = batch.num_rows, batch
        for column in images:
            if rows:
                batch = _decode(batch, column, reader, first_row)
        if batch is not before:  # Its readers may decode what is not: the column says that it is.
            batch = batch.append_column("encoded", pa.array([False] * batch.num_rows))
        if len(skipped) > max_skipped:
            raise BadInput(
                where,
                expected=f"at most {max_skipped} images that cannot be decoded",
                got=f"{len(skipped)}, the last in row {skipped[-1]}",
            )
        first_row += rows
        yield batch
    if skipped:
        shown = ", ".join(map(str, skipped[:5])) + (" and more" if len(skipped) > 5 else "")
        _LOG.warning(
            "%s: skipped %d of %d rows with images that cannot be decoded: %s",
            where, len(skipped), first_row, shown,
        )  # fmt: skip


class _Reader(NamedTuple):
    """The way to decode images, and the rows with images that could not be."""

    where: str
    colour: bool | None
    resize: tuple[int, int] | None
    skipped: list[int]

    def image(self, value: bytes, shape: tuple[int, ...] | None) -> image_decoding.Pixels:
        """An image of the net's shape, if it is known; raises Undecodable."""
        channels = _COLOURS.get(shape[0]) if shape is not None else None
        image = image_decoding.decode(value, self.colour if self.colour is not None else channels)
        return image if self.resize is None else image_decoding.resize(image, *self.resize)


def _decode(batch: Any, column: ColumnSpec, reader: _Reader, first_row: int) -> Any:
    where = reader.where
    name = column.find(batch.schema.names, where)
    values = batch.column(name)
    if is_spark_image(values.type):
        return _unpack(batch, name, column.shape, reader, first_row)
    if is_vector(values.type):
        return batch
    plain = not pa.types.is_struct(values.type)
    if not plain:
        values = _field(values, where, name)
    if not is_binary(values.type):
        return batch
    shape = column.shape if column.shape is not None and len(column.shape) == 3 else None
    if "encoded" in batch.schema.names:
        if plain and not pc.any(batch.column("encoded")).as_py():
            return batch
    elif not _is_encoded(values[0].as_py(), shape, column.encoded):
        return batch
    data: list[bytes | None] = values.to_pylist()
    encoded = _mark_encoded(batch, data, shape, column.encoded)
    rows, pixels, shapes = list[int](), list[bytes | None](), list[tuple[int, ...]]()
    for row, (value, is_encoded) in enumerate(zip(data, encoded, strict=True)):
        if is_encoded and value is not None:
            try:
                image = reader.image(value, shape)
            except Undecodable:
                reader.skipped.append(first_row + row)
                continue
            _check(image.shape, shapes[0] if shapes else shape, f"{where}: row {first_row + row}")
            shapes.append(image.shape)
            value = image.tobytes()
        rows.append(row)
        pixels.append(value)
    return _with_pixels(batch, name, rows, pixels, shapes)


def _unpack(
    batch: Any, name: str, shape: tuple[int, ...] | None, reader: _Reader, first_row: int
) -> Any:
    """The images of a column of Spark's image schema; one that Spark could not read is skipped."""
    rows, pixels, shapes = list[int](), list[bytes | None](), list[tuple[int, ...]]()
    expected = shape if shape is not None and len(shape) == 3 else None
    for row, value in enumerate(batch.column(name).to_pylist()):
        content = None
        if value is not None:
            where = f"{reader.where}: row {first_row + row}"
            image = spark_image(value, where)
            if image is None:
                reader.skipped.append(first_row + row)
                continue
            _check(image.shape, shapes[0] if shapes else expected, where)
            shapes.append(image.shape)
            content = image.tobytes()
        rows.append(row)
        pixels.append(content)
    return _with_pixels(batch, name, rows, pixels, shapes)


def _with_pixels(
    batch: Any,
    name: str,
    rows: Sequence[int],
    pixels: Sequence[bytes | None],
    shapes: Sequence[tuple[int, ...]],
) -> Any:
    """The rows `rows` of a batch with these pixels, all of the first of the `shapes`."""
    names = [
        column for column in batch.schema.names if column not in {name, "encoded", *SHAPE_COLUMNS}
    ]
    arrays = {column: batch.column(column).take(pa.array(rows, pa.int64())) for column in names}
    arrays[name] = pa.array(pixels, pa.binary())
    if shapes:
        for extent, shape_column in zip(shapes[0], SHAPE_COLUMNS, strict=True):
            arrays[shape_column] = pa.array([extent] * len(rows), pa.int32())
    return pa.RecordBatch.from_pydict(arrays)


def _mark_encoded(
    batch: Any, data: Sequence[bytes | None], shape: tuple[int, ...] | None, stated: bool | None
) -> list[bool]:
    if "encoded" in batch.schema.names:
        return [bool(value) for value in batch.column("encoded").to_pylist()]
    return [_is_encoded(value, shape, stated) for value in data]


def _is_encoded(value: bytes | None, shape: tuple[int, ...] | None, stated: bool | None) -> bool:
    """Return whether bytes are an image file; raw pixels have their size, but may begin alike."""
    if stated is not None:
        return stated
    if value is None or (shape is not None and len(value) == prod(shape)):
        return False
    return image_decoding.looks_encoded(value[:16])


def _field(values: Any, where: str, name: str) -> Any:
    """The image of a column with the image and its size, as CaffeOnSpark has them."""
    if "image" not in [field.name for field in values.type]:
        raise BadInput(f"{where}, column {name}", expected="a field image", got=values.type)
    images = pc.struct_field(values, "image")
    if not pa.types.is_list(images.type):
        return images
    # A list of signed bytes, as Scala has them.
    rows = [np.array(row or [], np.int8).tobytes() for row in images.to_pylist()]
    return pa.array(rows, pa.binary())


def _check(shape: tuple[int, ...], expected: tuple[int, ...] | None, where: str) -> None:
    if expected is not None and shape != expected:
        raise BadInput(
            where,
            expected=f"an image of {'x'.join(map(str, expected))}",
            got=f"{'x'.join(map(str, shape))}: give all images one size first",
        )
