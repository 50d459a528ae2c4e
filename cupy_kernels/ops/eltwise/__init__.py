"""Sums, products, quotients and maxima of several blobs of one shape, and sums of gradients.

Results are valid until the next call with the same workspace. Each blob's gradient has its own
memory, by the blob's `index`.
"""

from collections.abc import Sequence

from cupy_kernels.backends import pick
from cupy_kernels.ops.eltwise import cpu, gpu
from cupy_kernels.types import Array, Kept
from cupy_kernels.workspace import Workspace


def accumulate(x: Array, total: Array, factor: float = 1.0) -> None:
    """total += factor * x; both have the same size."""
    pick(x, cpu.accumulate, gpu.accumulate)(x, total, factor)


def weighted_sum(parts: Sequence[Array], factors: Sequence[float], work: Workspace) -> Array:
    """The sum of factor * part."""
    return pick(parts[0], cpu.weighted_sum, gpu.weighted_sum)(parts, factors, work)


def weighted_sum_backward(dy: Array, factor: float, index: int, work: Workspace) -> Array:
    """The gradient by one part: factor * dy, and dy itself for a factor of 1."""
    body = pick(dy, cpu.weighted_sum_backward, gpu.weighted_sum_backward)
    return dy if factor == 1.0 else body(dy, factor, index, work)


def product(parts: Sequence[Array], work: Workspace) -> Array:
    """The product of all parts, at least two."""
    return pick(parts[0], cpu.product, gpu.product)(parts, work)


def product_backward(dy: Array, parts: Sequence[Array], index: int, work: Workspace) -> Array:
    """The gradient by one part: dy times all other parts. It divides by none, so zeros are safe."""
    body = pick(dy, cpu.product_backward, gpu.product_backward)
    return body(dy, parts, index, work)


def quotient(a: Array, b: Array, work: Workspace) -> Array:
    """a / b, and 0 where b is 0."""
    return pick(a, cpu.quotient, gpu.quotient)(a, b, work)


def maximum(parts: Sequence[Array], work: Workspace) -> tuple[Array, Kept]:
    """The maximum of up to 256 parts, and the values for `maximum_backward`; the first tie wins."""
    return pick(parts[0], cpu.maximum, gpu.maximum)(parts, work)


def maximum_backward(dy: Array, saved: Kept, index: int, work: Workspace) -> Array:
    """dy where this part was the maximum, 0 elsewhere."""
    return pick(dy, cpu.maximum_backward, gpu.maximum_backward)(dy, saved, index, work)
