"""Checks of a DataFrame before training starts: its columns, its Python, its rows.

Every worker trains on one partition. A worker without rows would never register, and the schedule
would run at the pace of the remaining workers. So partitions are counted first, and rows are
redistributed if a worker would have none.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from math import prod

from shards.errors import BadInput
from shards.plurals import format_count
from worker import spark
from worker.data import arrow_images, image_decoding
from worker.data.arrow_images import SHAPE_COLUMNS, row_shape
from worker.data.column_values import column_array
from worker.data.columns import DATA, LABEL, ColumnKind, ColumnSpec, Shape, pixel_column
from worker.data.read_options import ReadOptions
from worker.data.stored_table import StoredTable

_SKEWED = 2  # the largest allowed ratio of rows between two partitions


def check_columns(
    df: spark.DataFrame | StoredTable, columns: Sequence[ColumnSpec] = ()
) -> list[str]:
    """The names in `df` of the columns, by default data and label.

    Raises BadInput unless it has each of them once, of a type that fits.
    """
    where = "the DataFrame"
    names = df.schema.names if isinstance(df, StoredTable) else df.columns
    column_by_name = {column.find(names, where): column for column in columns or (DATA, LABEL)}
    if isinstance(df, StoredTable):
        kinds = {name: df.schema.field(name).type for name in column_by_name}
    else:
        kinds = spark.column_types(df, column_by_name)
    for name, column in column_by_name.items():
        if column.kind is ColumnKind.IMAGE:
            arrow_images.check_pixel_type(kinds[name], f"{where}, column {name}")
        elif column.kind is ColumnKind.LABEL:
            arrow_images.check_label_type(kinds[name], f"{where}, column {name}")
    return list(column_by_name)


def first_shape(
    df: spark.DataFrame, stated: Shape | None, *, image: bool, encoded: bool | None = None
) -> Shape:
    """(channels, height, width) of the rows of `df`, by its first row.

    It is the shape in the columns; else the shape that the net has `stated`, if the row has as many
    values; else the default of worker/data/arrow_images.py. `image` is whether the net needs an
    image, and `encoded` whether it says that images are encoded.
    """
    where = "the DataFrame"
    name = pixel_column(df.columns, where)
    declared = set(SHAPE_COLUMNS) <= set(df.columns)
    row = df.select(name, *(SHAPE_COLUMNS if declared else ())).head()
    if row is None:
        raise BadInput(where, expected="rows", got="none")
    if set(getattr(row[0], "__fields__", ())) >= {"nChannels", "data"}:
        first = arrow_images.spark_image(row[0].asDict(), f"{where}, column {name}: row 0")
        if first is not None:
            channels, height, width = first.shape
            return channels, height, width
        if stated is not None:
            return stated
        raise BadInput(f"{where}, column {name}", expected="an image in the first row", got="none")
    if isinstance(row[0], bytes | bytearray) and encoded is not False:
        shape_in_image = _decode_shape(bytes(row[0]), stated, certain=encoded is True)
        if shape_in_image is not None:
            return shape_in_image
    values, *extents = row
    if any(value is None for value in extents):
        got = ", ".join(map(str, extents))
        raise BadInput(where, expected="channels, height and width in the first row", got=got)
    pixels = arrow_images.one_row(values)
    flat = arrow_images.pixel_rows(pixels, f"{where}, column {name}")
    shape = extents or arrow_images.read_nested_shape(pixels)
    if shape is None and stated is not None and prod(stated) == flat.shape[1]:
        return stated
    return row_shape(flat, f"{where}, column {name}", shape, image=image)


def read_row_shapes(df: spark.DataFrame, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The shape of a row of each of these columns, by the first row: that of a list, or ()."""
    where = "the DataFrame"
    for name in names:
        ColumnSpec(name).find(df.columns, where)
    row = df.select(*names).head()
    if row is None:
        raise BadInput(where, expected="rows", got="none")
    return {
        name: _value_shape(value, f"{where}, column {name}")
        for name, value in zip(names, row, strict=True)
    }


def shapes_of(
    df: spark.DataFrame, options: ReadOptions
) -> tuple[Shape | None, dict[str, tuple[int, ...]]]:
    """The (channels, height, width) of a row's image, and the shapes of columns by name.

    A net that reads columns by name has no images but those that it states.
    """
    if options.tops:
        return options.shape, read_row_shapes(df, options.tops)
    encoded = options.image_encoded
    return first_shape(df, options.shape, image=options.image, encoded=encoded), {}


def _value_shape(value: object, where: str) -> tuple[int, ...]:
    """The shape of a list, of lists of lists or of a vector; () for any other value."""
    if not isinstance(value, list) and not hasattr(value, "toArray"):
        return ()
    return column_array(arrow_images.one_row(value), where).shape[1:]


def _decode_shape(data: bytes, stated: Shape | None, *, certain: bool) -> Shape | None:
    """The shape of an image file; None for raw pixels, or for an image that is damaged.

    `certain` is whether it is known not to be raw pixels.
    """
    raw = not image_decoding.looks_encoded(data[:16]) or (stated and len(data) == prod(stated))
    if raw and not certain:
        return None
    with suppress(image_decoding.Undecodable):
        colour = {1: False, 3: True}.get(stated[0]) if stated else None
        channels, height, width = image_decoding.decode(data, colour).shape
        return channels, height, width
    return stated


def check_pythons(
    df: spark.TaskInput, columns: Sequence[str] = (), *, loopback: bool = False
) -> list[spark.PartitionRows]:
    """Raise BadInput unless the Python that Spark runs over `df` can run workers.

    And for a null in one of `columns`, and, with `loopback`, for an executor on another host than
    this. Returns what each partition has, which a small Spark job counts; nothing for numbered
    tasks in the Python of this process, which need no such job.
    """
    if isinstance(df, spark.NumberedTasks):
        if spark.runs_this_python(df):
            return []
        df = df.frame
    parts = spark.survey(df, columns)
    for part in parts:
        spark.check_python(part)
        if loopback:
            spark.check_same_host(part)
    for number, name in enumerate(columns):
        if nulls := sum(part.nulls[number] for part in parts):
            raise BadInput(
                f"the DataFrame, column {name}",
                expected="a value in each row",
                got=f"nulls in {format_count(nulls, 'row')}",
                hint=f'leave such rows out, as by df.dropna(subset=["{name}"]), or fill them',
            )
    return parts


def deal_rows(
    df: spark.DataFrame,
    workers: int,
    *,
    even: bool = False,
    columns: Sequence[str] = (),
    loopback: bool = False,
) -> spark.DataFrame:
    """`df` partitioned so that exactly `workers` partitions have rows.

    It is unchanged if that holds already and, with `even`, no partition has more than twice the
    rows of another. Otherwise its rows are dealt evenly. A small Spark job counts the rows, and
    inspects the Python that runs it. Raises BadInput as `check_pythons` does, for fewer rows than
    workers, and for two columns of one name, which Spark cannot send to Python.
    """
    for name, count in Counter(df.columns).items():
        if count > 1:
            raise BadInput(
                "the DataFrame",
                expected=f"one column {name}",
                got=f"{count} of this name",
                hint="rename or drop the others",
            )
    parts = check_pythons(df, columns, loopback=loopback)
    sizes = [part.rows for part in parts]
    rows, full = sum(sizes), [size for size in sizes if size]
    if not rows:
        raise BadInput("the DataFrame", expected="rows", got="none")
    if rows < workers:
        raise BadInput(
            "workers",
            expected=(
                f"at most {rows}, as the data has {format_count(rows, 'row')}"
                " and each worker needs one"
            ),
            got=workers,
        )
    skewed = even and max(full) > _SKEWED * min(full)
    if len(full) == workers and not skewed and spark.has_partitions(df, len(parts)):
        return df
    return spark.deal(df, workers, sizes)
