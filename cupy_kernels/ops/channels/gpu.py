"""Scale and bias by channel, and moved columns, in kernels."""

from collections.abc import Sequence
from itertools import accumulate
from math import prod

from cupy_kernels.launch import launch
from cupy_kernels.ops.reduction.gpu import sum_columns
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace


def scale(x: Array, factors: Array | None, bias: Array | None, work: Workspace) -> Array:
    y, columns = work.take("y", x.shape, x), x.shape[-1]
    rows = x.size // columns
    launch("scale_forward", x=x, scale=factors, bias=bias, y=y, rows=rows, columns=columns)
    return y


def scale_backward(
    dy: Array,
    x: Array,
    factors: Array | None,
    dfactors: Array | None,
    dbias: Array | None,
    work: Workspace,
) -> Array:
    columns = dy.shape[-1]
    seen = dy.reshape(-1, columns)
    if dbias is not None:
        sum_columns(seen, None, dbias, work)
    if dfactors is not None:
        sum_columns(seen, x.reshape(-1, columns), dfactors, work)
    if factors is None:
        return dy
    dx = work.take("dx", dy.shape, dy)
    launch("scale_backward", dy=dy, scale=factors, dx=dx, rows=len(seen), columns=columns)
    return dx


def concatenate(parts: Sequence[Array], axis: int, work: Workspace) -> Array:
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    y = work.take("y", tuple(shape), parts[0])
    rows, columns = prod(shape[:axis]), prod(shape[axis:])
    first = 0
    for part in parts:
        width = prod(part.shape[axis:])
        _copy(part, (width, 0), y, (columns, first), rows, width)
        first += width
    return y


def split(x: Array, sizes: Sequence[int], axis: int, work: Workspace) -> list[Array]:
    rows, columns, rest = prod(x.shape[:axis]), prod(x.shape[axis:]), prod(x.shape[axis + 1 :])
    parts = []
    for number, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        part = work.take(f"part{number}", (*x.shape[:axis], size, *x.shape[axis + 1 :]), x)
        width = size * rest
        _copy(x, (columns, end * rest - width), part, (width, 0), rows, width)
        parts.append(part)
    return parts


def _copy(
    x: Array, start: tuple[int, int], y: Array, end: tuple[int, int], rows: int, width: int
) -> None:
    """`width` columns of each row; `start` and `end` are (columns, first column)."""
    launch(
        "copy_columns",
        x=x,
        y=y,
        rows=rows,
        width=width,
        x_columns=start[0],
        x_first=start[1],
        y_columns=end[0],
        y_first=end[1],
    )
