"""Sums, products, quotients and maxima of several blobs of one shape, and sums of gradients.

Results are valid until the next call with the same workspace. Each blob's gradient has its own
memory, by the blob's `index`.
"""

from collections.abc import Sequence

from cupy_kernels.backends import pick
from cupy_kernels.cpu import eltwise as on_host
from cupy_kernels.gpu import eltwise as in_kernels
from cupy_kernels.types import Array, Kept
from cupy_kernels.workspace import Workspace


def accumulate(x: Array, total: Array, factor: float = 1.0) -> None:
    """total += factor * x; both have the same size."""
    pick(x, on_host.accumulate, in_kernels.accumulate)(x, total, factor)


def weighted_sum(parts: Sequence[Array], factors: Sequence[float], work: Workspace) -> Array:
    """The sum of factor * part."""
    return pick(parts[0], on_host.weighted_sum, in_kernels.weighted_sum)(parts, factors, work)


def weighted_sum_backward(dy: Array, factor: float, index: int, work: Workspace) -> Array:
    """The gradient by one part: factor * dy, and dy itself for a factor of 1."""
    body = pick(dy, on_host.weighted_sum_backward, in_kernels.weighted_sum_backward)
    return dy if factor == 1.0 else body(dy, factor, index, work)


def product(parts: Sequence[Array], work: Workspace) -> Array:
    """The product of all parts, at least two."""
    return pick(parts[0], on_host.product, in_kernels.product)(parts, work)


def product_backward(dy: Array, parts: Sequence[Array], index: int, work: Workspace) -> Array:
    """The gradient by one part: dy times all other parts. It divides by none, so zeros are safe."""
    body = pick(dy, on_host.product_backward, in_kernels.product_backward)
    return body(dy, parts, index, work)


def quotient(a: Array, b: Array, work: Workspace) -> Array:
    """a / b, and 0 where b is 0."""
    return pick(a, on_host.quotient, in_kernels.quotient)(a, b, work)


def maximum(parts: Sequence[Array], work: Workspace) -> tuple[Array, Kept]:
    """The maximum of up to 256 parts, and the values for `maximum_backward`; the first tie wins."""
    return pick(parts[0], on_host.maximum, in_kernels.maximum)(parts, work)


def maximum_backward(dy: Array, kept: Kept, index: int, work: Workspace) -> Array:
    """dy where this part was the maximum, 0 elsewhere."""
    return pick(dy, on_host.maximum_backward, in_kernels.maximum_backward)(dy, kept, index, work)
