"""Rows of `reduction.cu`: sums along rows, and the largest values of each row."""

from enum import IntEnum
from typing import Any

import numpy as np

from cupy_kernels.kernel_spec import (
    EXACT,
    Kernel,
    Sizes,
    Tolerance,
    over,
    reads,
    scalar,
    warps_over,
    writes,
)
from cupy_kernels.types import Wide

CHUNK = 1024
"""The number of elements that one launch of `row_sums` adds up."""


class Term(IntEnum):
    """The terms of a sum: each x, its absolute value, or its square."""

    VALUES = 0
    MAGNITUDES = 1
    SQUARES = 2


_TERMS = (lambda x: x, np.abs, np.square)
_SLOPES = (np.ones_like, np.sign, lambda x: 2 * x)


def chunks(width: int) -> int:
    """The number of sums that `row_sums` makes of a row."""
    return max(1, -(-width // CHUNK))


def _sums(sizes: Sizes) -> int:
    return sizes["rows"] * chunks(sizes["width"])


def _row_sums(
    a: Wide, b: Wide | None, scale: Wide | None, term: int, factor: Any, **shape: int
) -> dict[str, Any]:
    rows, width = shape["rows"], shape["width"]
    times = float(factor) * (1 if scale is None else scale[0])
    terms = _TERMS[int(term)](a) if b is None else a * b
    wide = np.zeros((rows, chunks(width) * CHUNK))
    wide[:, :width] = terms.reshape(rows, width)
    return {"sums": times * wide.reshape(-1, CHUNK).sum(axis=1)}


def _row_sums_backward(
    dy: Wide, x: Wide, term: int, factor: Any, width: int, **_: Any
) -> dict[str, Any]:
    return {"dx": float(factor) * np.repeat(dy, width) * _SLOPES[int(term)](x)}


def _row_largest(x: Wide, rows: int, width: int, count: int, **_: Any) -> dict[str, Any]:
    """A stable sort by falling value, of equal values the last place first, NaN at the end."""
    matrix = x.reshape(rows, width)
    order = np.lexsort((-np.arange(width) + np.zeros((rows, 1)), -matrix))[:, :count]
    return {"places": order, "values": np.take_along_axis(matrix, order, axis=1)}


ROWS = (
    Kernel(
        "row_sums",
        "reduction.cu",
        (
            reads("a", "rows*width"),
            reads("b", "rows*width", optional=True),
            reads("scale", "1", optional=True),
            writes("sums", _sums),
            scalar("term", "i4"),
            scalar("factor", "f4"),
            scalar("rows"),
            scalar("width"),
        ),
        warps_over(_sums),
        _row_sums,
        bytes_each=4,
        tolerance=Tolerance(1e-5, 1e-5),
    ),
    Kernel(
        "row_sums_backward",
        "reduction.cu",
        (
            reads("dy", "rows"),
            reads("x", "rows*width"),
            writes("dx", "rows*width"),
            scalar("term", "i4"),
            scalar("factor", "f4"),
            scalar("rows"),
            scalar("width"),
        ),
        over("rows*width"),
        _row_sums_backward,
        bytes_each=8,
        tolerance=Tolerance(1e-6, 0),
        in_place=(("x", "dx"),),
    ),
    Kernel(
        "row_largest",
        "reduction.cu",
        (
            reads("x", "rows*width"),
            writes("places", "rows*count"),
            writes("values", "rows*count"),
            scalar("rows"),
            scalar("width", "i4"),
            scalar("count", "i4"),
        ),
        warps_over("rows"),
        _row_largest,
        bytes_each=4,
        tolerance=EXACT,
    ),
)
