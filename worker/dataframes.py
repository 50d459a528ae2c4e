"""Checks of a DataFrame before training starts: its columns, its Python, its rows.

Every worker trains on one partition. A worker without rows would never register, and the schedule
would run at the pace of the remaining workers. So partitions are counted first, and rows are
redistributed if a worker would have none.
"""

from math import prod

from shards.errors import BadInput
from worker import arrow_images, spark
from worker.arrow_images import SHAPE_COLUMNS, Shape, pixel_column, row_shape

_SKEWED = 2  # the largest allowed ratio of rows between two partitions


def check_columns(df: spark.DataFrame) -> None:
    """Raise BadInput unless `df` has columns of pixels and labels, of types that can hold them."""
    where = "the DataFrame"
    pixels = pixel_column(df.columns, where)
    if "label" not in df.columns:
        raise BadInput(f"{where}: expected a column label, got {', '.join(df.columns)}")
    kinds = spark.column_types(df, {pixels, "label"})
    arrow_images.check_pixel_type(kinds[pixels], f"{where}, column {pixels}")
    arrow_images.check_label_type(kinds["label"], f"{where}, column label")


def first_shape(df: spark.DataFrame, stated: Shape | None, *, image: bool) -> Shape:
    """(channels, height, width) of the rows of `df`, by its first row.

    It is the shape in the columns; else the shape that the net has `stated`, if the row has as many
    values; else the default of worker/arrow_images.py. `image` is whether the net needs an image.
    """
    where = "the DataFrame"
    name = pixel_column(df.columns, where)
    declared = set(SHAPE_COLUMNS) <= set(df.columns)
    row = df.select(name, *(SHAPE_COLUMNS if declared else ())).head()
    if row is None:
        raise BadInput(f"{where}: expected rows, got none")
    values, *extents = row
    if any(value is None for value in extents):
        got = ", ".join(map(str, extents))
        raise BadInput(f"{where}: expected channels, height and width in the first row, got {got}")
    flat = arrow_images.pixel_rows(arrow_images.one_row(values), f"{where}, column {name}")
    if not declared and stated is not None and prod(stated) == flat.shape[1]:
        return stated
    return row_shape(flat, f"{where}, column {name}", extents or None, image=image)


def dealt(df: spark.DataFrame, workers: int, *, even: bool = False) -> spark.DataFrame:
    """`df` partitioned so that exactly `workers` partitions have rows.

    It is unchanged if that holds already and, with `even`, no partition has more than twice the
    rows of another. Otherwise its rows are dealt evenly. A small Spark job counts the rows, and
    inspects the Python that runs it. Raises BadInput for a Python that cannot run workers, and for
    fewer rows than workers.
    """
    parts = spark.survey(df)
    for part in parts:
        spark.check_python(part)
    sizes = [part.rows for part in parts]
    rows, full = sum(sizes), [size for size in sizes if size]
    if not rows:
        raise BadInput("the DataFrame: expected rows, got none")
    if rows < workers:
        raise BadInput(
            f"workers: expected at most {rows}, as the data has {rows} rows and each worker needs"
            f" one, got {workers}"
        )
    skewed = even and max(full) > _SKEWED * min(full)
    if len(full) == workers and not skewed and spark.has_partitions(df, len(parts)):
        return df
    return spark.deal(df, workers, sizes)
