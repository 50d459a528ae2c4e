"""Reductions along the rows of matrices (rows, width): sums of terms, and the largest values.

Results are valid until the next call with the same workspace.
"""

from enum import IntEnum

from cupy_kernels.backends import pick
from cupy_kernels.ops.reduction import cpu, gpu
from cupy_kernels.ops.reduction.spec import MAGNITUDES, SQUARES, VALUES
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace


class Term(IntEnum):
    """The terms of a sum: each x, its absolute value, or its square."""

    VALUES = VALUES
    MAGNITUDES = MAGNITUDES
    SQUARES = SQUARES


def row_sums(x: Array, term: Term, factor: float, work: Workspace) -> Array:
    """(rows,): factor times the sum of each row's terms."""
    return pick(x, cpu.row_sums, gpu.row_sums)(x, term, factor, work)


def row_sums_backward(dy: Array, x: Array, term: Term, factor: float, work: Workspace) -> Array:
    """dx (rows, width) for dy (rows,); the derivative of a magnitude at 0 is 0."""
    body = pick(dy, cpu.row_sums_backward, gpu.row_sums_backward)
    return body(dy, x, term, factor, work)


def row_largest(x: Array, count: int, work: Workspace) -> tuple[Array, Array]:
    """(places, values) of the `count` largest of each row, (rows, count) each, as float32.

    The largest is first. Of equal values the last place is first. NaN is below all numbers.
    """
    return pick(x, cpu.row_largest, gpu.row_largest)(x, count, work)
