"""Pooling on the host: one compiled pass, or in NumPy one pass for each cell of the window.

A maximum's position is kept as a uint8 offset in its window, uint16 for windows of more than 256
cells.
"""

import math

import numpy as np
from numpy.typing import NDArray

from cupy_kernels import compilation
from cupy_kernels.ops.dropout.cpu import words
from cupy_kernels.ops.dropout.rng_keys import WORD, RngKey
from cupy_kernels.ops.pooling import loops
from cupy_kernels.ops.pooling.window import Pooling
from cupy_kernels.types import AnyArray, Array, Kept
from cupy_kernels.workspace import Workspace


def max_forward(x: Array, shape: Pooling, work: Workspace) -> tuple[Array, Kept]:
    """Returns y (n, oh, ow, c) for x (n, h, w, c), and the positions for `max_backward`."""
    n, h, w, c = x.shape
    output = shape.output(h, w)
    cells = shape.kernel[0] * shape.kernel[1]
    y = work.take("y", (n, *output, c))
    kind = np.uint8 if cells <= 256 else np.uint16
    where: NDArray[np.integer] = work.take_as(f"where{kind.__name__}", y.shape, kind)
    if compilation.COMPILED:
        loops.max_pool(x, _rule(shape), y, where)
        return y, (where,)
    wide = _widen(x, output, shape, -np.inf, work)
    better = work.take_as("better", y.shape, np.bool_)
    offset = work.take_as(f"offset{kind.__name__}", y.shape, kind)
    for cell in range(cells):
        value = _cell(wide, cell, output, shape)
        if cell == 0:
            np.copyto(y, value)
            where.fill(0)
            continue
        np.greater(value, y, out=better)
        np.maximum(value, y, out=y)
        # Cells are visited in rising order, so the highest cell that was better is the maximum's.
        np.multiply(better, kind(cell), out=offset)
        np.maximum(where, offset, out=where)
    return y, (where,)


def max_backward(
    dy: Array, where: Kept, x_shape: tuple[int, ...], shape: Pooling, work: Workspace
) -> Array:
    """dx (n, h, w, c): each gradient is added at the position of its maximum."""
    return _to_places(dy, where[0], x_shape, shape, work)


def _to_places(
    dy: Array, where: AnyArray, x_shape: tuple[int, ...], shape: Pooling, work: Workspace
) -> Array:
    """dx: each gradient, added to the cell of its window that `where` names."""
    if compilation.COMPILED:
        dx = work.zeros("dx", x_shape)
        loops.max_pool_backward(dy, where, _rule(shape), dx)
        return dx
    output = shape.output(*x_shape[1:3])
    wide = work.zeros("dwide", _wide_shape(x_shape, output, shape))
    chosen = work.take_as("better", dy.shape, np.bool_)
    part = work.take("dpart", dy.shape)
    for cell in range(shape.kernel[0] * shape.kernel[1]):
        np.equal(where, cell, out=chosen)
        np.multiply(dy, chosen, out=part)
        target = _cell(wide, cell, output, shape)
        np.add(target, part, out=target)
    return _narrow(wide, x_shape, shape, work)


def stochastic_forward(
    x: Array, shape: Pooling, draw: RngKey, work: Workspace
) -> tuple[Array, Kept]:
    """Returns y (n, oh, ow, c) for x without negative values, and the places for the backward pass.

    One element of each window, with a probability proportional to its value (Zeiler and Fergus
    2013). Window i takes the word of element i in `draw` (see `dropout`), so both implementations
    draw the same elements. There is no padding.
    """
    n, h, w, c = x.shape
    output = shape.output(h, w)
    wide = _widen(x, output, shape, 0.0, work)
    cells = np.stack([_cell(wide, k, output, shape) for k in range(math.prod(shape.kernel))])
    y = work.take("y", (n, *output, c))
    reached = np.cumsum(cells, axis=0)
    limit = words(y.size, draw).reshape(y.shape) / WORD * reached[-1]
    where = np.argmax(reached > limit, axis=0)
    np.copyto(y, np.take_along_axis(cells, where[None], axis=0)[0])
    return y, (where,)


def stochastic_backward(
    dy: Array, where: Kept, x_shape: tuple[int, ...], shape: Pooling, work: Workspace
) -> Array:
    """dx (n, h, w, c): each gradient is added at the drawn element."""
    return _to_places(dy, where[0], x_shape, shape, work)


def average_forward(x: Array, shape: Pooling, work: Workspace) -> Array:
    """Returns y (n, oh, ow, c) for x (n, h, w, c)."""
    n, h, w, c = x.shape
    output = shape.output(h, w)
    y, shares = work.zeros("y", (n, *output, c)), _shares((h, w), output, shape)
    if compilation.COMPILED:
        loops.average_pool(x, _rule(shape), shares[:, :, 0], y)
        return y
    wide = _widen(x, output, shape, 0.0, work)
    for cell in range(shape.kernel[0] * shape.kernel[1]):
        np.add(y, _cell(wide, cell, output, shape), out=y)
    return np.multiply(y, shares, out=y)


def average_backward(dy: Array, x_shape: tuple[int, ...], shape: Pooling, work: Workspace) -> Array:
    """dx (n, h, w, c): each gradient is spread evenly over its window."""
    _, h, w, _ = x_shape
    output = shape.output(h, w)
    shares = _shares((h, w), output, shape)
    if compilation.COMPILED:
        dx = work.zeros("dx", x_shape)
        loops.average_pool_backward(dy, _rule(shape), shares[:, :, 0], dx)
        return dx
    share = np.multiply(dy, shares, out=work.take("share", dy.shape))
    wide = work.zeros("dwide", _wide_shape(x_shape, output, shape))
    for cell in range(shape.kernel[0] * shape.kernel[1]):
        target = _cell(wide, cell, output, shape)
        np.add(target, share, out=target)
    return _narrow(wide, x_shape, shape, work)


def _rule(shape: Pooling) -> loops.Rule:
    return (*shape.kernel, *shape.stride, *shape.pad)


def _wide_shape(
    x_shape: tuple[int, ...], output: tuple[int, int], shape: Pooling
) -> tuple[int, int, int, int]:
    """The shape of the padded image, extended to the end of the last window."""
    n, h, w, c = x_shape
    tall, broad = (
        max((count - 1) * stride + kernel, size + pad)
        for count, stride, kernel, size, pad in zip(
            output, shape.stride, shape.kernel, (h, w), shape.pad, strict=True
        )
    )
    return n, tall, broad, c


def _widen(
    x: Array, output: tuple[int, int], shape: Pooling, fill: float, work: Workspace
) -> Array:
    wide_shape = _wide_shape(x.shape, output, shape)
    if wide_shape == x.shape:
        return x
    _, h, w, _ = x.shape
    ph, pw = shape.pad
    wide = work.take("wide", wide_shape)
    wide.fill(fill)
    wide[:, ph : ph + h, pw : pw + w] = x
    return wide


def _narrow(wide: Array, x_shape: tuple[int, ...], shape: Pooling, work: Workspace) -> Array:
    if wide.shape == x_shape:
        return wide
    _, h, w, _ = x_shape
    ph, pw = shape.pad
    dx = work.take("dx", x_shape)
    np.copyto(dx, wide[:, ph : ph + h, pw : pw + w])
    return dx


def _cell(wide: Array, cell: int, output: tuple[int, int], shape: Pooling) -> Array:
    """The view of `wide` with one cell, numbered in reading order, of every window."""
    i, j = divmod(cell, shape.kernel[1])
    (oh, ow), (sh, sw) = output, shape.stride
    return wide[:, i : i + (oh - 1) * sh + 1 : sh, j : j + (ow - 1) * sw + 1 : sw]


def _shares(size: tuple[int, int], output: tuple[int, int], shape: Pooling) -> Array:
    """1 / cells of each window, as (oh, ow, 1); cells in the padding count, those past it don't."""
    counts = []
    for axis in (0, 1):
        start = np.arange(output[axis]) * shape.stride[axis]
        edge = size[axis] + 2 * shape.pad[axis]
        counts.append(np.minimum(start + shape.kernel[axis], edge) - start)
    return (1.0 / np.outer(*counts)).astype(np.float32)[:, :, None]
