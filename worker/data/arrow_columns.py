"""Columns of Arrow batches as the arrays that a net reads (worker/data/columns.py)."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shards.errors import BadInput
from worker.data import arrow_images
from worker.data.columns import ColumnKind, ColumnSpec


def read_columns(
    batch: Any,
    columns: Sequence[ColumnSpec],
    where: str,
    *,
    first_row: int = 0,
    classes: int | None = None,
) -> dict[str, NDArray[Any]]:
    """The columns of an Arrow batch as arrays, rows first; `where` names the batch in errors.

    An image is uint8 or float32 (rows, c, h, w), a label int64 (rows,), and other columns float32.
    Labels outside [0, classes) are refused.
    """
    arrays: dict[str, NDArray[Any]] = {}
    for column in columns:
        name = column.find(batch.schema.names, where)
        label = f"{where}, column {name}"
        if column.kind is ColumnKind.IMAGE:
            arrays[column.name] = _images(batch, name, column.shape, where, first_row)
        elif column.kind is ColumnKind.LABEL:
            arrays[column.name] = arrow_images.labels_as_int64(
                batch.column(name), label, classes=classes, first_row=first_row
            )
        else:
            flat = arrow_images.number_rows(batch.column(name), label, first_row)
            arrays[column.name] = _reshape_rows(flat, column.shape, label, first_row)
    return arrays


def _images(
    batch: Any, name: str, shape: tuple[int, ...] | None, where: str, first_row: int
) -> NDArray[Any]:
    """The pixels of a batch; they must fit `shape`, unless the net takes no images but vectors."""
    label = f"{where}, column {name}"
    size = prod(shape) if shape is not None else None
    flat = arrow_images.pixel_rows(batch.column(name), label, size, first_row)
    declared = arrow_images.read_declared_shape(
        batch, where, first_row
    ) or arrow_images.read_nested_shape(batch.column(name))
    if shape is None:
        shape = arrow_images.row_shape(flat, label, declared)
    elif len(shape) == 3 and declared not in {None, shape}:
        raise BadInput(f"{label}: row {first_row}", expected=f"images of {shape}", got=declared)
    images: NDArray[Any] = flat.reshape(-1, *shape)
    return images


def _reshape_rows(
    flat: NDArray[np.float32], shape: tuple[int, ...] | None, where: str, first_row: int
) -> NDArray[np.float32]:
    if shape is None:
        return flat if flat.shape[1] > 1 else flat.reshape(-1)
    if flat.shape[1] != prod(shape):
        raise BadInput(
            f"{where}: row {first_row}", expected=f"{prod(shape)} values", got=flat.shape[1]
        )
    return flat.reshape(-1, *shape)
