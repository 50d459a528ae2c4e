"""Sums of rows and columns in kernels.

`row_sums` is launched until each row is one number; a column takes at most two launches.
"""

from cupy_kernels.launch import launch
from cupy_kernels.ops.reduction.column_sums_spec import chunks as row_chunks
from cupy_kernels.ops.reduction.spec import Term, chunks
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace


def row_sums(x: Array, term: Term, factor: float, work: Workspace) -> Array:
    sums = work.take("sums", x.shape[:1], x)
    sum_rows(x, None, sums, work, term, factor)
    return sums


def row_sums_backward(dy: Array, x: Array, term: Term, factor: float, work: Workspace) -> Array:
    (rows, width), dx = x.shape, work.take("dx", x.shape, dy)
    sizes = {"rows": rows, "width": width}
    launch("row_sums_backward", dy=dy, x=x, dx=dx, term=int(term), factor=factor, **sizes)
    return dx


def row_largest(x: Array, count: int, work: Workspace) -> tuple[Array, Array]:
    rows, width = x.shape
    positions, values = (work.take(role, (rows, count), x) for role in ("places", "values"))
    launch("row_largest", x=x, places=positions, values=values, rows=rows, width=width, count=count)
    return positions, values


def sum_rows(
    a: Array,
    b: Array | None,
    out: Array,
    work: Workspace,
    term: Term = Term.VALUES,
    factor: float = 1.0,
    scale: Array | None = None,
) -> None:
    """out[r] = factor times the sum of the terms of a[r], or of a[r] * b[r]; (rows, width) each.

    `scale` (1,) is another factor, for numbers that are in device memory.
    """
    (rows, width), stage = a.shape, 0
    while chunks(width) > 1:
        parts = work.take(f"part sums {stage}", (rows, chunks(width)), a)
        _launch(a, b, parts, term, 1.0, None)
        a, b, term, width, stage = parts, None, Term.VALUES, chunks(width), stage + 1
    _launch(a, b, out, term, factor, scale)


def sum_columns(a: Array, b: Array | None, out: Array, work: Workspace) -> None:
    """out[c] = the sum of a[:, c], or of a[:, c] * b[:, c]; matrices (rows, columns)."""
    rows, columns = a.shape
    whole = row_chunks(rows) == 1
    partials = out if whole else work.take("partials", (row_chunks(rows), columns), a)
    launch("column_partials", a=a, b=b, partials=partials, rows=rows, columns=columns)
    if not whole:
        column_totals(partials, out)


def column_totals(partials: Array, out: Array) -> None:
    """out = the sum of the rows of (chunks, columns)."""
    count, columns = partials.shape
    launch(
        "column_totals",
        partials=partials,
        sums=out,
        factor=1.0,
        add=0,
        chunks=count,
        columns=columns,
    )


def _launch(
    a: Array, b: Array | None, sums: Array, term: Term, factor: float, scale: Array | None
) -> None:
    rows, width = a.shape
    numbers = {"term": int(term), "factor": factor, "rows": rows, "width": width}
    launch("row_sums", a=a, b=b, scale=scale, sums=sums, **numbers)
