"""The columns that a network reads, checked and prepared by Spark itself."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    StructType,
)

from shards.errors import BadInput
from shards.plurals import format_count
from worker import spark
from worker.data.column_values import IMAGE_NAMES, check_numbers
from worker.data.columns import ColumnSpec

_WHERE = "the DataFrame"
_MAX_CLASSES = 1_000_000
_MAX_VECTOR = 131_072  # values that a task fills in for a row, half a megabyte


class Facts(NamedTuple):
    """The facts of the rows: their number, the shape of a row by column, and the largest class.

    `outputs` is the number of values of a label, 0 for a plain number.
    """

    rows: int
    shapes: dict[str, tuple[int, ...]]
    largest: int
    outputs: int


def check_columns(df: DataFrame, inputs: Sequence[str], *, label: str = "") -> None:
    """Raise BadInput unless `df` has these columns, of types that a network can read."""
    for name in (*inputs, *([label] if label else ())):
        ColumnSpec(name).find(df.columns, _WHERE)
        where = f"{_WHERE}, column {name}"
        (arrow,) = spark.column_types(df, [name]).values()
        check_numbers(arrow, where)
        leaf, depth = _leaf(df.schema[name].dataType)
        if isinstance(leaf, VectorUDT) and depth:
            raise BadInput(where, expected="a vector a row", got="a list of them: join them")
        if name == label and (depth > 1 or is_pixels(df, name)):
            raise BadInput(
                where,
                expected="a number, a list of numbers or a vector",
                got=df.schema[name].dataType.simpleString(),
            )


def check_width(df: DataFrame, name: str, shape: tuple[int, ...]) -> None:
    """Raise BadInput for a column whose rows, by the schema alone, are not of the trained `shape`.

    Only numbers and the vectors of Spark's own stages say how wide they are. Others are seen by
    the tasks, where a network may take rows of any length.
    """
    is_plain = _leaf(df.schema[name].dataType)[1] == 0 and not is_pixels(df, name)
    width = find_width(df, name) if is_vector(df, name) else 1 if is_plain else None
    if width is not None and width != prod(shape):
        raise BadInput(
            f"transform: {_WHERE}, column {name}",
            expected=f"{prod(shape)} values a row, as in training",
            got=f"{width}: select the same columns as for fit",
        )


def refuse_wide(df: DataFrame, widths: Mapping[str, int | None]) -> None:
    """Raise BadInput for a column of vectors too wide for a network that reads their zeros, too.

    Such are those of a hash space, as of FeatureHasher. `widths` are the sizes by column.
    """
    for name, width in widths.items():
        if is_vector(df, name) and width is not None and width > _MAX_VECTOR:
            raise BadInput(
                f"{_WHERE}, column {name}",
                expected=f"vectors of at most {_MAX_VECTOR} values, because zeros are filled in",
                got=f'{width}: hash into fewer features, or use model="linear", which takes any',
            )


def find_width(df: DataFrame, name: str) -> int | None:
    """The size of each vector of a column, if the stage that made it says so in the schema."""
    attributes = df.schema[name].metadata.get("ml_attr", {})
    return (
        attributes.get("num_attrs") or sum(map(len, attributes.get("attrs", {}).values())) or None
    )


def is_vector(df: DataFrame, name: str) -> bool:
    """Return whether a column holds vectors of Spark ML."""
    return isinstance(df.schema[name].dataType, VectorUDT)


def is_pixels(df: DataFrame, name: str) -> bool:
    """Return whether a column holds bytes: raw pixels, or images of Spark's image schema."""
    kind = df.schema[name].dataType
    return isinstance(kind, BinaryType) or _is_image(kind)


def split_rows(df: DataFrame, indicator: str) -> tuple[DataFrame, DataFrame | None]:
    """The rows to train on, and those that the column `indicator` marks as tests; "" marks none."""
    if not indicator:
        return df, None
    if indicator not in df.columns:
        raise BadInput(_WHERE, expected=f"a column {indicator}", got=", ".join(df.columns))
    kind = df.schema[indicator].dataType
    if not isinstance(kind, BooleanType):
        raise BadInput(
            f"{_WHERE}, column {indicator}",
            expected="booleans, true for the rows to test on",
            got=kind.simpleString(),
        )
    tests = F.coalesce(F.col(_quote(indicator)), F.lit(False))
    return df.filter(~tests), df.filter(tests)


def check_free(df: DataFrame, outputs: Sequence[str]) -> None:
    """Raise BadInput for a column that the model would write over, or write twice."""
    for index, name in enumerate(outputs):
        if name in df.columns:
            raise BadInput(_WHERE, expected=f"no column {name}, which the model writes", got="one")
        if name in outputs[:index]:
            raise BadInput(f"expected names of output columns that differ, got {name} twice")


def as_input(df: DataFrame, column: str, sparse: Collection[str], name: str) -> Column:
    """A column as a network reads its input `name`: vectors as they are if it is in `sparse`."""
    stays = name in sparse and is_vector(df, column)
    return F.col(_quote(column)) if stays else as_floats(df, column)


def as_floats(df: DataFrame, name: str) -> Column:
    """A column as lists of float, as deep as they are; raw bytes and images stay as they are."""
    kind, column = df.schema[name].dataType, F.col(_quote(name))
    if is_pixels(df, name):
        return column
    if isinstance(kind, VectorUDT):
        return vector_to_array(column, "float32")
    _, depth = _leaf(kind)
    nested = f"{'array<' * depth}float{'>' * depth}"
    return column.cast(nested) if depth else F.array(column.cast("float"))


def as_label(df: DataFrame, name: str, *, classifies: bool) -> Column:
    """A label as a class, or as one or several values to predict."""
    column = F.col(_quote(name))
    if classifies:
        return column.cast("long")
    return as_floats(df, name) if _is_list(df.schema[name].dataType) else column.cast("float")


def survey_rows(df: DataFrame, inputs: Mapping[str, str], label: str, *, classifies: bool) -> Facts:
    """Count and check the rows by one Spark job, before anything is trained.

    `inputs` are the names of a network's inputs, by column. Raises BadInput for no rows, nulls,
    lists that differ in length, numbers that are not finite, and labels that are no classes.
    """
    is_list = _is_list(df.schema[label].dataType)
    if classifies and is_list:
        raise BadInput(
            f"{_WHERE}, column {label}", expected="a class, a whole number", got="a list"
        )
    columns = [*inputs, *([label] if is_list else [])]
    extents = {name: _extents(df, name) for name in columns}
    aggregates = [F.count(F.lit(1))]
    for name in columns:
        values = as_input(df, name, columns, name)
        wrong = F.lit(False) if is_pixels(df, name) else _any_not_finite(df, name)
        outside = _any_outside(name) if is_vector(df, name) else F.lit(False)
        aggregates += [F.count_if(values.isNull()), F.count_if(wrong)]
        aggregates += [F.count_if(outside), *extents[name]]
    number = F.col(_quote(label)).cast("double") if not is_list else F.lit(0.0)
    aggregates += [F.count_if(number.isNull()), F.min(number), F.max(number)]
    aggregates += [F.count_if(number != F.floor(number)), F.count_if(_not_finite(number))]
    row: Any = df.select(
        *(aggregate.alias(f"c{n}") for n, aggregate in enumerate(aggregates))
    ).first()
    facts = iter(row)
    rows = next(facts)
    if not rows:
        raise BadInput(_WHERE, expected="rows", got="none")
    shapes = {
        name: _shape(
            facts,
            len(extents[name]) // 2,
            f"{_WHERE}, column {name}",
            image=_is_image(df.schema[name].dataType),
        )
        for name in columns
    }
    nulls, least, most, fractions, infinite = facts
    where = f"{_WHERE}, column {label}"
    _refuse(
        nulls, f"{where}: expected a value in each row, got nulls in {format_count(nulls, 'row')}"
    )
    _refuse(
        infinite, f"{where}: expected finite numbers, got others in {format_count(infinite, 'row')}"
    )
    if classifies:
        got = (
            f"from {least:g} to {most:g}"
            if not fractions
            else f"fractions in {format_count(fractions, 'row')}"
        )
        wrong_labels = fractions or least < 0 or most > _MAX_CLASSES
        _refuse(wrong_labels, f"{where}: expected classes, whole numbers from 0, got {got}")
    outputs = prod(shapes.pop(label)) if is_list else 0
    return Facts(rows, shapes, int(most), outputs)


def _shape(facts: Iterator[Any], axes: int, where: str, *, image: bool) -> tuple[int, ...]:
    """The shape of each row of a column, from what the survey has found of it; raises BadInput."""
    nulls, wrong, outside = next(facts), next(facts), next(facts)
    bounds = [(next(facts), next(facts)) for _ in range(axes)]
    _refuse(
        nulls, f"{where}: expected a value in each row, got nulls in {format_count(nulls, 'row')}"
    )
    _refuse(
        image and bounds[0][0] < 1,
        f"{where}: expected images, got some that Spark could not read: read them with"
        ' .option("dropInvalid", True)',
    )
    kind = "images of one size" if image else "lists of one length"
    for least, most in bounds:
        _refuse(least != most, f"{where}: expected {kind}, got {least} to {most} values")
    _refuse(wrong, f"{where}: expected finite numbers, got others in {format_count(wrong, 'row')}")
    _refuse(
        outside,
        f"{where}: expected indices from 0 and below the size of a vector, got others in"
        f" {format_count(outside, 'row')}",
    )
    return tuple(int(least or 0) for least, _ in bounds)


def _extents(df: DataFrame, name: str) -> list[Column]:
    """The least and the largest extent of the rows of a column, for each of its axes."""
    kind, values = df.schema[name].dataType, as_floats(df, name)
    if isinstance(kind, VectorUDT):
        parts = _vector_parts(name)
        width = F.coalesce(parts["size"], F.size(parts["values"]))
        return [F.min(width), F.max(width)]
    if _is_image(kind):
        extents = [values[field] for field in ("nChannels", "height", "width")]
        return [bound(extent) for extent in extents for bound in (F.min, F.max)]
    size = F.length(values) if isinstance(kind, BinaryType) else F.size(values)
    bounds = [F.min(size), F.max(size)]
    for _ in range(_leaf(kind)[1] - 1):
        sizes = F.transform(values, F.size)
        bounds += [F.min(F.array_min(sizes)), F.max(F.array_max(sizes))]
        values = F.flatten(values)
    return bounds


def _any_not_finite(df: DataFrame, name: str) -> Column:
    """True for a row with a number that is not finite, or a null at any depth."""
    values = _vector_parts(name)["values"] if is_vector(df, name) else as_floats(df, name)
    present = values.isNotNull()
    for _ in range(_leaf(df.schema[name].dataType)[1] - 1):
        values = F.flatten(values)  # null where one of the lists is
    return present & F.coalesce(F.exists(values, _not_finite), F.lit(True))


def _any_outside(name: str) -> Column:
    """True for a sparse vector with an index that it has no value for."""
    parts = _vector_parts(name)
    return F.coalesce(
        F.exists(parts["indices"], lambda index: (index < 0) | (index >= parts["size"])),
        F.lit(False),
    )


def _vector_parts(name: str) -> Column:
    """A vector as the struct that it is kept as, without its zeros; `size` is null if dense."""
    return F.unwrap_udt(F.col(_quote(name)))


def _leaf(kind: DataType) -> tuple[DataType, int]:
    """The type of the values in lists, however deep, and how deep they are."""
    depth = 0
    while isinstance(kind, ArrayType):
        kind, depth = kind.elementType, depth + 1
    return kind, depth


def _is_list(kind: DataType) -> bool:
    return isinstance(kind, VectorUDT | ArrayType)


def _is_image(kind: DataType) -> bool:
    return isinstance(kind, StructType) and set(kind.names) >= IMAGE_NAMES


def _not_finite(number: Column) -> Column:
    return number.isNull() | F.isnan(number) | (F.abs(number) == float("inf"))


def _refuse(wrong: object, line: str) -> None:
    if wrong:
        raise BadInput(line)


def _quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
