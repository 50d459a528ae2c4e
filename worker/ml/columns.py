"""The columns that a network reads, checked and prepared by Spark itself."""

from collections.abc import Mapping, Sequence
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
    NumericType,
    StructField,
    StructType,
)

from shards.errors import BadInput

_WHERE = "the DataFrame"
_MAX_CLASSES = 1_000_000


class Facts(NamedTuple):
    """What the rows have: their number, the values of a row by input, and the largest class.

    `outputs` is the number of values of a label, 0 for a plain number.
    """

    rows: int
    widths: dict[str, int]
    largest: int
    outputs: int


def check_columns(df: DataFrame, inputs: Sequence[str], *, label: str = "") -> None:
    """Raise BadInput unless `df` has these columns, of types that a network can read."""
    for name in (*inputs, *([label] if label else ())):
        if name not in df.columns:
            raise BadInput(f"{_WHERE}: expected a column {name}, got {', '.join(df.columns)}")
        kind = df.schema[name].dataType
        binary = isinstance(kind, BinaryType) and name != label
        if not (_is_number(kind) or _is_list(kind) or binary):
            raise BadInput(
                f"{_WHERE}, column {name}: expected numbers, lists of numbers or vectors, got"
                f" {kind.simpleString()}"
            )


def split_rows(df: DataFrame, indicator: str) -> tuple[DataFrame, DataFrame | None]:
    """The rows to train on, and those that the column `indicator` marks as tests; "" marks none."""
    if not indicator:
        return df, None
    if indicator not in df.columns:
        raise BadInput(f"{_WHERE}: expected a column {indicator}, got {', '.join(df.columns)}")
    kind = df.schema[indicator].dataType
    if not isinstance(kind, BooleanType):
        raise BadInput(
            f"{_WHERE}, column {indicator}: expected booleans, true for the rows to test on, got"
            f" {kind.simpleString()}"
        )
    tests = F.coalesce(F.col(_quoted(indicator)), F.lit(False))
    return df.filter(~tests), df.filter(tests)


def check_free(df: DataFrame, outputs: Sequence[str]) -> None:
    """Raise BadInput for a column that the model would write over, or write twice."""
    for place, name in enumerate(outputs):
        if name in df.columns:
            raise BadInput(f"{_WHERE}: expected no column {name}, which the model writes, got one")
        if name in outputs[:place]:
            raise BadInput(f"expected names of output columns that differ, got {name} twice")


def as_floats(df: DataFrame, name: str) -> Column:
    """A column as array<float>; raw bytes stay as they are."""
    kind, column = df.schema[name].dataType, F.col(_quoted(name))
    if isinstance(kind, BinaryType):
        return column
    if isinstance(kind, VectorUDT):
        return vector_to_array(column, "float32")
    return column.cast("array<float>") if _is_list(kind) else F.array(column.cast("float"))


def as_label(df: DataFrame, name: str, *, classifies: bool) -> Column:
    """A label as a class, or as one or several values to predict."""
    column = F.col(_quoted(name))
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
        raise BadInput(f"{_WHERE}, column {label}: expected a class, a whole number, got a list")
    columns = [*inputs, *([label] if is_list else [])]
    found = [F.count(F.lit(1))]
    for name in columns:
        values = as_floats(df, name)
        binary = isinstance(df.schema[name].dataType, BinaryType)
        size = F.length(values) if binary else F.size(values)
        wrong = F.lit(False) if binary else F.exists(values, _not_finite)
        found += [F.count_if(values.isNull()), F.min(size), F.max(size), F.count_if(wrong)]
    number = F.col(_quoted(label)).cast("double") if not is_list else F.lit(0.0)
    found += [F.count_if(number.isNull()), F.min(number), F.max(number)]
    found += [F.count_if(number != F.floor(number)), F.count_if(_not_finite(number))]
    row: Any = df.select(*(each.alias(f"c{n}") for n, each in enumerate(found))).first()
    rows, *rest = row
    if not rows:
        raise BadInput(f"{_WHERE}: expected rows, got none")
    for name in columns:
        nulls, least, most, wrong_rows, *rest = rest
        where = f"{_WHERE}, column {name}"
        _refuse(nulls, f"{where}: expected a value in each row, got nulls in {nulls} rows")
        lengths = f"{least} to {most}"
        _refuse(least != most, f"{where}: expected lists of one length, got {lengths} values")
        _refuse(wrong_rows, f"{where}: expected finite numbers, got others in {wrong_rows} rows")
    nulls, least, most, fractions, infinite = rest
    where = f"{_WHERE}, column {label}"
    _refuse(nulls, f"{where}: expected a value in each row, got nulls in {nulls} rows")
    _refuse(infinite, f"{where}: expected finite numbers, got others in {infinite} rows")
    if classifies:
        got = f"from {least:g} to {most:g}" if not fractions else f"fractions in {fractions} rows"
        wrong_labels = fractions or least < 0 or most > _MAX_CLASSES
        _refuse(wrong_labels, f"{where}: expected classes, whole numbers from 0, got {got}")
    widths = dict(zip(columns, (row[2 + 4 * n] for n in range(len(columns))), strict=True))
    outputs = widths.pop(label) if is_list else 0
    return Facts(rows, widths, int(most), outputs)


def with_outputs(df: DataFrame, outputs: Sequence[tuple[str, DataType]]) -> StructType:
    """The schema of `df` and of the columns that a network adds."""
    return StructType([*df.schema.fields, *(StructField(*each) for each in outputs)])


def _is_number(kind: DataType) -> bool:
    return isinstance(kind, NumericType | BooleanType)


def _is_list(kind: DataType) -> bool:
    return isinstance(kind, VectorUDT) or (
        isinstance(kind, ArrayType) and _is_number(kind.elementType)
    )


def _not_finite(number: Column) -> Column:
    return number.isNull() | F.isnan(number) | (F.abs(number) == float("inf"))


def _refuse(wrong: object, line: str) -> None:
    if wrong:
        raise BadInput(line)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
