"""Operations by channel: scale and bias; and blobs that are concatenated and split.

Axes are in the order of memory: an image's channels are its last axis. Results are valid until the
next call with the same workspace.
"""

from collections.abc import Sequence

from cupy_kernels.backends import pick
from cupy_kernels.ops.channels import cpu, gpu
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace


def scale(x: Array, factors: Array | None, bias: Array | None, work: Workspace) -> Array:
    """x * factors + bias for x (..., c) and each (c,); either may be missing."""
    return pick(x, cpu.scale, gpu.scale)(x, factors, bias, work)


def scale_backward(
    dy: Array,
    x: Array,
    factors: Array | None,
    dfactors: Array | None,
    dbias: Array | None,
    work: Workspace,
) -> Array:
    """dx (dy itself without factors); writes the gradients of factors and bias, if requested."""
    body = pick(dy, cpu.scale_backward, gpu.scale_backward)
    return body(dy, x, factors, dfactors, dbias, work)


def concatenate(parts: Sequence[Array], axis: int, work: Workspace) -> Array:
    """Blobs joined along an axis; they may differ in size along that axis only."""
    return pick(parts[0], cpu.concatenate, gpu.concatenate)(parts, axis, work)


def split(x: Array, sizes: Sequence[int], axis: int, work: Workspace) -> list[Array]:
    """A blob split along an axis into contiguous blobs of the given sizes, which sum to its own."""
    return pick(x, cpu.split, gpu.split)(x, sizes, axis, work)
