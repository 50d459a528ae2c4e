"""Convolution on the host.

Chellapilla et al. 2006: unroll the input's windows into a matrix, and leave the arithmetic to GEMM.
Channels-last, a window's rows are contiguous runs of kw*c floats. The matrix is built a block of
output lines at a time, so that it stays in the second-level cache between its making and its use;
the backward pass builds it once more rather than to keep it. A 1x1 kernel's windows are the image.

A first layer's windows have short rows, of a few pixels of 1 channel. With a stride of 1 its
matrix is built transposed, with runs of a whole output line; GEMM accepts both.

The gradient by the input is the same backwards: GEMM makes a block of the windows' gradients, which
are added to their places in the image.
"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import numpy as np

from cupy_kernels.conv_shapes import Convolution
from cupy_kernels.cpu import loops
from cupy_kernels.types import Array, Kept
from cupy_kernels.workspace import Workspace

_BLOCK = 1 << 17  # floats of unrolled windows at a time: 512 KiB
_SHORT = 8  # floats of a window's row


class _Block(NamedTuple):
    """Output lines [start, stop) of some images."""

    images: slice
    lines: tuple[int, int]

    def of(self, y: Array) -> Array:
        """These lines of y (n, oh, ow, out) as rows."""
        return y[self.images, slice(*self.lines)].reshape(-1, y.shape[-1])


def forward(
    x: Array,
    weight: Array,
    bias: Array | None,
    shape: Convolution,
    work: Workspace,
    *,
    relu: bool,
) -> tuple[Array, Kept]:
    out = len(weight)
    y = work.take("y", (len(x), *shape.output(*x.shape[1:3]), out))
    kernels = [np.ascontiguousarray(rows.T) for rows in _kernels(weight, shape)]
    for block, windows in _unrolled(x, y.shape, shape, work):
        rows, each = block.of(y), out // shape.group
        for g, kernel in enumerate(kernels):
            np.matmul(windows[g], kernel, out=rows[:, g * each : (g + 1) * each])
        _finish(rows, bias, relu)
    return y, (x,)


def backward(
    dy: Array,
    kept: Kept,
    x_shape: tuple[int, ...],
    weight: Array,
    dweight: Array | None,
    dbias: Array | None,
    shape: Convolution,
    work: Workspace,
    *,
    wanted: bool,
) -> Array | None:
    n, oh, ow, out = dy.shape
    if dbias is not None:
        ones = np.ones(n * oh, np.float32)
        lines = ones @ dy.reshape(n * oh, ow * out)
        np.sum(lines.reshape(ow, out), axis=0, out=dbias)
    if dweight is not None:
        kh, kw = shape.kernel
        each = out // shape.group
        total = work.zeros("dkernel", (shape.group, weight[0].size, each))
        part = work.take("dpart", total[0].shape)
        for block, windows in _unrolled(kept[0], dy.shape, shape, work):
            rows = block.of(dy)
            for g in range(shape.group):
                np.matmul(windows[g].T, rows[:, g * each : (g + 1) * each], out=part)
                np.add(total[g], part, out=total[g])
        kernels = total.reshape(shape.group, kh, kw, -1, each).transpose(0, 4, 3, 1, 2)
        np.copyto(dweight.reshape(kernels.shape), kernels)
    return transposed(dy, x_shape, weight, shape, work) if wanted else None


def transposed(
    y: Array, x_shape: tuple[int, ...], weight: Array, shape: Convolution, work: Workspace
) -> Array:
    out, each = y.shape[-1] // shape.group, x_shape[-1] // shape.group
    kernels = _kernels(weight, shape)
    if _copies_nothing(shape):
        x = work.take("dx", x_shape)
        rows, into = y.reshape(-1, y.shape[-1]), x.reshape(-1, x_shape[-1])
        for g, kernel in enumerate(kernels):
            part = into[:, g * each : (g + 1) * each]
            np.matmul(rows[:, g * out : (g + 1) * out], kernel, out=part)
        return x
    x, size = work.zeros("dx", x_shape), kernels[0].shape[1]
    memory = work.take("columns", (_most_rows(y.shape, size), size))
    for block in _blocks(y.shape, size):
        rows = block.of(y)
        for g, kernel in enumerate(kernels):
            columns = memory[: len(rows)]
            np.matmul(rows[:, g * out : (g + 1) * out], kernel, out=columns)
            _fold(columns, x[block.images], g * each, block.lines, shape)
    return x


def _finish(rows: Array, bias: Array | None, relu: bool) -> None:
    if loops.COMPILED:
        loops.finish(rows, np.zeros(0, np.float32) if bias is None else bias, relu)
        return
    if bias is not None:
        np.add(rows, bias, out=rows)
    if relu:
        np.maximum(rows, np.float32(0.0), out=rows)


def _kernels(weight: Array, shape: Convolution) -> list[Array]:
    """For each group, the kernels as rows: (out/group, kh*kw*c/group)."""
    rows = np.ascontiguousarray(weight.transpose(0, 2, 3, 1)).reshape(len(weight), -1)
    return np.split(rows, shape.group)


def _unrolled(
    x: Array, y_shape: tuple[int, ...], shape: Convolution, work: Workspace
) -> Iterator[tuple[_Block, list[Array]]]:
    """Each block of the output, and for each group its windows: (rows, kh*kw*c/group).

    The windows are valid until the next block.
    """
    each = x.shape[-1] // shape.group
    if _copies_nothing(shape):
        rows = x.reshape(-1, x.shape[-1])
        whole = _Block(slice(0, len(x)), (0, y_shape[1]))
        yield whole, [rows[:, g * each : (g + 1) * each] for g in range(shape.group)]
        return
    size = shape.kernel[0] * shape.kernel[1] * each
    if shape.kernel[1] * each < _SHORT and shape.stride == (1, 1) and shape.group == 1:
        yield from _transposed_windows(x, y_shape, shape, work)
        return
    memory = work.take("columns", (shape.group, _most_rows(y_shape, size * shape.group), size))
    for block in _blocks(y_shape, size * shape.group):
        count = (block.images.stop - block.images.start) * (block.lines[1] - block.lines[0])
        columns = memory[:, : count * y_shape[2]]
        for g in range(shape.group):
            _unroll(x[block.images], g * each, block.lines, shape, columns[g])
        yield block, [*columns]


def _transposed_windows(
    x: Array, y_shape: tuple[int, ...], shape: Convolution, work: Workspace
) -> Iterator[tuple[_Block, list[Array]]]:
    n, h, w, c = x.shape
    ph, pw = shape.pad
    planes = work.zeros("planes", (c, n, h + 2 * ph, w + 2 * pw))
    np.copyto(planes[:, :, ph : ph + h, pw : pw + w], x.transpose(3, 0, 1, 2))
    sc, sn, sy, sx = planes.strides
    strides = (sy * shape.dilation[0], sx * shape.dilation[1], sc, sn, sy, sx)
    size, (_, _, ow, _) = shape.kernel[0] * shape.kernel[1] * c, y_shape
    memory = work.take("columns", (size * _most_rows(y_shape, size),))
    for block in _blocks(y_shape, size):
        start, stop = block.lines
        source = planes[:, block.images, start:]
        sizes = (*shape.kernel, c, source.shape[1], stop - start, ow)
        columns = memory[: prod(sizes)]
        seen = np.lib.stride_tricks.as_strided(source, sizes, strides, writeable=False)
        np.copyto(columns.reshape(sizes), seen)
        yield block, [columns.reshape(size, -1).T]


def _copies_nothing(shape: Convolution) -> bool:
    return shape.kernel == (1, 1) == shape.stride and shape.pad == (0, 0)


def _blocks(y_shape: tuple[int, ...], size: int) -> Iterator[_Block]:
    """Blocks of the output, with windows of `size` floats: some lines of one image, or images."""
    n, oh, ow, _ = y_shape
    lines = max(1, _BLOCK // (ow * size))
    if lines < oh:
        for image in range(n):
            for start in range(0, oh, lines):
                yield _Block(slice(image, image + 1), (start, min(start + lines, oh)))
        return
    images = lines // oh
    for start in range(0, n, images):
        yield _Block(slice(start, min(start + images, n)), (0, oh))


def _most_rows(y_shape: tuple[int, ...], size: int) -> int:
    """The rows of the largest block."""
    n, oh, ow, _ = y_shape
    lines = max(1, _BLOCK // (ow * size))
    return ow * (lines if lines < oh else oh * min(n, lines // oh))


def _unroll(
    x: Array, first: int, lines: tuple[int, int], shape: Convolution, columns: Array
) -> None:
    """Copy the windows of some lines of each image, from channel `first` on, as rows."""
    windows = _windows(columns, len(x), lines, shape)
    if loops.COMPILED:
        loops.unroll(x, first, _rule(shape), lines, windows)
        return
    windows.fill(0)
    for seen, source in _taps(windows, first, lines, x.shape, shape):
        windows[seen] = x[source]


def _fold(columns: Array, x: Array, first: int, lines: tuple[int, int], shape: Convolution) -> None:
    """Add the rows to the places in x that `_unroll` copies them from."""
    windows = _windows(columns, len(x), lines, shape)
    if loops.COMPILED:
        loops.fold(windows, first, _rule(shape), lines, x)
        return
    for seen, target in _taps(windows, first, lines, x.shape, shape):
        x[target] += windows[seen]


def _windows(columns: Array, n: int, lines: tuple[int, int], shape: Convolution) -> Array:
    """Rows as (n, lines, ow, kh, kw, channels)."""
    count = lines[1] - lines[0]
    each = columns.shape[1] // (shape.kernel[0] * shape.kernel[1])
    return columns.reshape(n, count, len(columns) // (n * count), *shape.kernel, each)


def _rule(shape: Convolution) -> loops.Rule:
    return (*shape.kernel, *shape.stride, *shape.pad, *shape.dilation)


def _taps(
    windows: Array, first: int, lines: tuple[int, int], size: tuple[int, ...], shape: Convolution
) -> Iterator[tuple[tuple[slice | int, ...], tuple[slice, ...]]]:
    """For each place in the kernel: which windows have it in the image, and where in the image."""
    channels = slice(first, first + windows.shape[-1])
    for i, j in np.ndindex(*shape.kernel):
        down = _reach(lines[0], lines[1], i, 0, size[1], shape)
        across = _reach(0, windows.shape[2], j, 1, size[2], shape)
        if down and across:
            everywhere = slice(None)
            yield (
                (everywhere, down[0], across[0], i, j),
                (everywhere, down[1], across[1], channels),
            )


def _reach(
    start: int, stop: int, tap: int, axis: int, size: int, shape: Convolution
) -> tuple[slice, slice] | None:
    """The places in [start, stop), from start on, with a tap in the image; and its places there."""
    stride, offset = shape.stride[axis], tap * shape.dilation[axis] - shape.pad[axis]
    low = max(start, -(offset // stride))
    high = min(stop, (size - 1 - offset) // stride + 1)
    if low >= high:
        return None
    source = slice(low * stride + offset, (high - 1) * stride + offset + 1, stride)
    return slice(low - start, high - start), source
