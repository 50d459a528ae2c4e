"""Columns of images and labels: from Arrow, as Spark and Parquet have them, to NumPy.

Pixels are raw bytes (`binary`, uint8), or numbers (float32 here): a list, lists of lists or a
vector of Spark ML a row. Labels are whole numbers of any type. No Python loop touches the rows: a
column of equal rows is one view of Arrow's own buffer. A row that does not fit raises an error that
names it, counted from 0 in its stream or file.
"""

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shards.errors import BadInput, quote
from worker.data.column_values import (
    BYTE_MODES,
    column_array,
    describe_unsupported_type,
    exact_decimals,
    is_binary,
    is_leaf_number,
    is_list,
    is_number,
    is_spark_image,
    is_text,
    is_vector,
)
from worker.data.columns import Shape

Extents = tuple[int, ...]
"""The shape of one row as a net takes it: an image's, or any other."""
SHAPE_COLUMNS = ("channels", "height", "width")
_DEEPEST = 3  # lists of lists of lists: channels, rows of pixels, pixels
_FLOATS = pa.list_(pa.float32())
_ENCODED = {b"\x89PNG": "a PNG file", b"\xff\xd8\xff": "a JPEG file", b"RIFF": "a WebP file"}


def pixels_as_arrow(column: Any, where: str, first_row: int = 0) -> Any:
    """A column of pixels as pa.binary() (uint8) or pa.list_(float32); other types are an error."""
    kind = column.type
    check_pixel_type(kind, where)
    _refuse_nulls(column, where, first_row)
    if not is_binary(kind) and not (is_list(kind) and is_number(kind.value_type)):
        column = _flat_lists(column, where)
    try:
        return column.cast(pa.binary() if is_binary(kind) else _FLOATS)
    except pa.ArrowInvalid as error:
        raise BadInput(where, expected=f"numbers that float32 holds: {_line(error)}") from None


def check_pixel_type(kind: Any, where: str) -> None:
    """Raise BadInput unless a column of Arrow type `kind` can hold pixels."""
    leaf, depth = kind, 0
    while is_list(leaf):
        leaf, depth = leaf.value_type, depth + 1
    if is_spark_image(kind) or is_binary(kind) or is_vector(kind):
        return
    if depth > _DEEPEST and is_leaf_number(leaf):
        raise BadInput(
            where,
            expected="lists of at most (channels, height, width)",
            got=f"lists {depth} deep: join them by pyspark.sql.functions.flatten",
        )
    if not depth or not is_leaf_number(leaf) or is_vector(leaf):
        raise _no_pixels(leaf, where)


def read_nested_shape(column: Any) -> Shape | None:
    """The (channels, height, width) that lists of lists state; None for any other column.

    Lists of lists are an image of one channel.
    """
    if not (is_list(column.type) and is_list(column.type.value_type)):
        return None
    first, extents = column[0].as_py(), list[int]()
    while isinstance(first, list):
        extents.append(len(first))
        first = first[0] if first else None
    channels, height, width = [1] * (_DEEPEST - len(extents)) + extents
    return channels, height, width


def _flat_lists(column: Any, where: str) -> Any:
    """Lists of lists, vectors or lists of decimals as one list of float32 a row."""
    values = column_array(column, where)
    if values.dtype == object:
        raise BadInput(
            where,
            expected="lists of lists of one length",
            got="others",
            hint="or join them by pyspark.sql.functions.flatten",
        )
    flat = values.reshape(len(values), -1).astype(np.float32)
    ends = np.arange(len(flat) + 1, dtype=np.int32) * np.int32(flat.shape[1])
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(flat.reshape(-1)))


def _no_pixels(kind: Any, where: str) -> BadInput:
    """The error for a column that cannot hold pixels, whose values are of `kind`."""
    expected = "binary pixels or a list of numbers a row"
    if is_number(kind):
        remedy = "put columns of numbers together by pyspark.sql.functions.array"
        return BadInput(where, expected=expected, got=f"{kind}: {remedy}")
    return describe_unsupported_type(kind, where, expected)


def spark_image(value: Mapping[str, Any], where: str) -> NDArray[np.uint8] | None:
    """The pixels (channels, height, width) of a value of Spark's image schema.

    The channels are in the order blue, green, red there, too, but the innermost axis. None is an
    image that Spark could not read. Raises BadInput, naming `where`, for pixels that are not bytes.
    """
    height, width, channels = (value[name] for name in ("height", "width", "nChannels"))
    if channels < 1:
        return None
    expected, got = height * width * channels, len(value["data"] or b"")
    if value["mode"] not in BYTE_MODES or expected != got:
        raise BadInput(
            where,
            expected=f"an image of {height}x{width}x{channels} bytes",
            got=f"{got} bytes of OpenCV's type {value['mode']}",
        )
    pixels = np.frombuffer(value["data"], np.uint8).reshape(height, width, channels)
    return pixels.transpose(2, 0, 1)


def check_label_type(kind: Any, where: str) -> None:
    """Raise BadInput unless a column of Arrow type `kind` can hold labels; text can, too."""
    if not (is_number(kind) or is_text(kind) or pa.types.is_decimal(kind)):
        raise BadInput(where, expected="whole numbers", got=kind)


def pixel_rows(column: Any, where: str, size: int | None = None, first_row: int = 0) -> Any:
    """The pixels of a column as (rows, size) uint8 or float32, a read-only view where it can be.

    Every row must hold `size` finite values, by default as many as the first row. `column` has at
    least one row.
    """
    array = pixels_as_arrow(column, where, first_row)
    ends = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]
    lengths = np.diff(ends)
    size = int(lengths[0]) if size is None else size
    odd = np.flatnonzero(lengths != size)
    if odd.size:
        raise BadInput(_odd_row(array, int(odd[0]), first_row, where, size, int(lengths[odd[0]])))
    if pa.types.is_binary(array.type):
        values = np.frombuffer(array.buffers()[2] or b"", np.uint8)
    else:
        # Without nulls, `flatten` gives the numbers as one plain buffer.
        inner = array.flatten()
        if inner.null_count:
            row = first_row + int(np.flatnonzero(inner.is_null())[0]) // size
            raise BadInput(
                f"{where}: row {row}", expected=f"{size} numbers", got="a null among them"
            )
        numbers = inner.to_numpy(zero_copy_only=True).reshape(len(array), size)
        _refuse_infinite(numbers, where, first_row)
        return numbers
    return values[ends[0] : ends[-1]].reshape(len(array), size)


def number_rows(column: Any, where: str, first_row: int = 0) -> NDArray[np.float32]:
    """A column of numbers as (rows, values) float32.

    A row is a number, a text of one, a list of numbers, a vector, or bytes. Every row must hold as
    many finite values as the first.
    """
    kind = column.type
    if is_number(kind) or is_text(kind) or pa.types.is_decimal(kind):
        _refuse_nulls(column, where, first_row)
        values = _plain(column, where, first_row)
        # Not safe: whole numbers beyond 2^53 are rounded, as float32 rounds all.
        whole = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        numbers: NDArray[np.float32] = whole.astype(np.float32)
        _refuse_infinite(numbers.reshape(-1, 1), where, first_row)
        return numbers.reshape(-1, 1)
    rows: NDArray[np.float32] = pixel_rows(column, where, first_row=first_row).astype(np.float32)
    return rows


def one_row(values: Any) -> Any:
    """A column of one row of pixels from Python values: bytes, numbers, or a vector of Spark ML."""
    if values is None or isinstance(values, bytes | bytearray):
        return pa.array([values], pa.binary())
    if hasattr(values, "toArray"):
        values = values.toArray()
    kind, inner = pa.list_(pa.float64()), values[0] if len(values) else None
    while isinstance(inner, list):
        kind, inner = pa.list_(kind), inner[0] if inner else None
    return pa.array([_floats(values)], kind)


def _floats(values: Any) -> Any:
    """Python numbers of any type as floats, in lists of the same shape."""
    if isinstance(values, list | np.ndarray):
        return [_floats(value) for value in values]
    return None if values is None else float(values)


def labels_as_int64(
    column: Any, where: str, *, classes: int | None = None, first_row: int = 0
) -> NDArray[np.int64]:
    """Labels, whole numbers of any type, as (rows,) int64.

    With `classes`, each must be in [0, classes).
    """
    check_label_type(column.type, where)
    _refuse_nulls(column, where, first_row)
    column = _plain(column, where, first_row)
    try:
        labels: NDArray[np.int64] = column.cast(pa.int64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        values = column.to_numpy(zero_copy_only=False)
        # A value of 2^63 or more may be whole and still not fit.
        row = int(np.flatnonzero((values != np.trunc(values)) | ~(abs(values) < 2.0**63))[0])
        raise BadInput(
            f"{where}: row {first_row + row}", expected="a whole number", got=values[row]
        ) from None
    if classes is not None:
        check_labels(labels, where, classes, first_row)
    return labels


def check_labels(labels: NDArray[Any], where: str, classes: int, first_row: int = 0) -> None:
    """Raise BadInput for a label outside [0, classes)."""
    outside = (labels < 0) | (labels >= classes)
    if outside.any():
        row = int(np.flatnonzero(outside)[0])
        raise BadInput(
            f"{where}: row {first_row + row}",
            expected=f"a label in [0, {classes})",
            got=labels[row],
        )


def row_shape(
    flat: NDArray[Any], where: str, declared: Sequence[int] | None = None, *, image: bool = False
) -> Shape:
    """(channels, height, width) of the rows in `flat`, (rows, size) uint8 or float32.

    The shape is `declared`, if given. Otherwise bytes are a square image, of one channel (784
    values are 1x28x28) or of three, and so are other numbers for a net that needs an `image`. For
    any other net numbers are a vector, size x 1 x 1.
    """
    size = flat.shape[1]
    binary = flat.dtype == np.uint8
    start = flat[0, :4].tobytes() if binary else b""
    if declared is not None:
        channels, height, width = (int(extent) for extent in declared)
        if min(channels, height, width) < 1 or channels * height * width != size:
            raise BadInput(
                where,
                expected=(
                    f"{channels}x{height}x{width} = {channels * height * width} values a row"
                ),
                got=f"{size}{_name_encoding(start)}",
            )
        return channels, height, width
    if size and not (binary or image):
        return size, 1, 1
    square = _square(size)
    if square is None:
        raise BadInput(
            where,
            expected="a square image, or columns channels, height, width that say otherwise",
            got=f"{size} values a row{_name_encoding(start)}",
        )
    return square


def _square(size: int) -> Shape | None:
    for channels in (1, 3):
        side = isqrt(size // channels)
        if size and channels * side * side == size:
            return channels, side, side
    return None


def read_declared_shape(batch: Any, where: str, first_row: int = 0) -> tuple[int, ...] | None:
    """The shape that a batch's channels, height and width columns give; None without them.

    Raises BadInput unless it is the same in all rows.
    """
    names = batch.schema.names
    if not all(name in names for name in SHAPE_COLUMNS):
        return None
    extents = []
    for name in SHAPE_COLUMNS:
        values = labels_as_int64(batch.column(name), f"{where}, column {name}", first_row=first_row)
        odd = np.flatnonzero(values != values[0])
        if odd.size:
            raise BadInput(
                f"{where}, column {name}: row {first_row + int(odd[0])}",
                expected=f"{values[0]} as in the rows before",
                got=values[odd[0]],
            )
        extents.append(int(values[0]))
    return tuple(extents)


def _plain(column: Any, where: str, first_row: int) -> Any:
    """A column of numbers, of decimals or of texts of numbers, as plain numbers."""
    if is_text(column.type):
        return _parse_numbers(column, where, first_row)
    if pa.types.is_decimal(column.type):
        return pa.array(exact_decimals(column, where))
    return column


def _parse_numbers(column: Any, where: str, first_row: int) -> Any:
    """The numbers that texts hold, as float64; as in Spark's cast, spaces around them are cut."""
    texts = pc.utf8_trim_whitespace(column)
    try:
        return texts.cast(pa.float64())
    except pa.ArrowInvalid:
        for row, text in enumerate(texts):
            try:
                text.cast(pa.float64())
            except pa.ArrowInvalid:
                raise BadInput(
                    f"{where}: row {first_row + row}", expected="a number", got=quote(text.as_py())
                ) from None
        raise


def _refuse_infinite(numbers: NDArray[np.float32], where: str, first_row: int) -> None:
    """Raise BadInput naming the first NaN or infinity.

    In training it would look like a learning rate that is too high.
    """
    finite = np.isfinite(numbers)
    if not finite.all():
        row, position = (int(index[0]) for index in np.nonzero(~finite))
        raise BadInput(
            f"{where}: row {first_row + row}",
            expected="finite numbers that float32 holds",
            got=f"{numbers[row, position]} at position {position}",
        )


def _refuse_nulls(column: Any, where: str, first_row: int) -> None:
    if column.null_count:
        row = first_row + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise BadInput(f"{where}: row {row}", expected="a value", got="null")


def _odd_row(array: Any, row: int, first_row: int, where: str, size: int, got: int) -> str:
    start = array[row].as_py()[:4] if pa.types.is_binary(array.type) else b""
    text = f"{where}: row {first_row + row}: expected {size} values, got {got}"
    return text + _name_encoding(start)


def _name_encoding(start: bytes) -> str:
    for magic, name in _ENCODED.items():
        if start.startswith(magic):
            return f": {name}, and only raw pixels are read"
    return ""


def _line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
