"""Convolution on the host.

Chellapilla et al. 2006: unroll the input's windows into a matrix, and leave the arithmetic to GEMM.
Channels-last, a window's rows are contiguous runs of kw*c floats. The matrix is built a block of
output lines at a time, so that it stays in the second-level cache between its making and its use;
the backward pass builds it once more rather than to keep it. A 1x1 kernel's windows are the image.

A first layer's windows have short rows, of a few pixels of 1 channel. With a stride of 1 its
matrix is built transposed, with runs of a whole output line; GEMM accepts both.

At the upper and lower edges of a padded image, windows reach into the padding. Output lines with
the same rows of the kernel in the image form a band, and a band leaves the other rows out.

The gradient by the input is the same backwards: GEMM makes a block of the windows' gradients, which
are added to their places in the image.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from cupy_kernels import compilation
from cupy_kernels.ops.convolution import loops
from cupy_kernels.ops.convolution.window import Convolution
from cupy_kernels.types import Array, Kept
from cupy_kernels.workspace import Workspace

_BLOCK = 1 << 17  # floats of unrolled windows at a time: 512 KiB
_SHORT = 8  # floats of a window's row
_SMALL = 1_000_000  # multiplications of a product that OpenBLAS computes without packing it
_FEWEST = 12  # rows of such a product


class _Block(NamedTuple):
    """Output lines [start, stop) of some images, and the kernel's rows that are in the image."""

    images: slice
    lines: tuple[int, int]
    taps: tuple[int, int]

    def of(self, y: Array) -> Array:
        """These lines of y: (images, lines, ow, out)."""
        return y[self.images, slice(*self.lines)]


def forward(
    x: Array,
    weight: Array,
    bias: Array | None,
    shape: Convolution,
    work: Workspace,
    *,
    relu: bool = False,
) -> tuple[Array, Kept]:
    """Convolve x (n, h, w, c) with weight (out, c/group, kh, kw); with `relu`, negatives are 0.

    Returns y (n, oh, ow, out) and the values for `backward`. Both are valid until the next call
    with this workspace, and x must not change until then.
    """
    out = len(weight)
    y = work.take("y", (len(x), *shape.output(*x.shape[1:3]), out))
    kernels = [np.ascontiguousarray(rows.T) for rows in _kernels(weight, shape)]
    for block, windows in _unroll_blocks(x, y.shape, shape, work):
        output, channels = block.of(y), out // shape.group
        rows = output.reshape(-1, out)  # a copy, unless the block is one run of memory
        for g, kernel in enumerate(kernels):
            seen = kernel[_rows(block, kernel.shape[0], shape)]
            _multiply(windows[g], seen, rows[:, g * channels : (g + 1) * channels])
        _finish(rows, bias, relu)
        if not output.flags.c_contiguous:
            np.copyto(output, rows.reshape(output.shape))
    return y, (x,)


def backward(
    dy: Array,
    saved: Kept,
    x_shape: tuple[int, ...],
    weight: Array,
    dweight: Array | None,
    dbias: Array | None,
    shape: Convolution,
    work: Workspace,
    *,
    needs_dx: bool,
) -> Array | None:
    """Write dW (out, c/group, kh, kw) and db (out,); return dx (n, h, w, c) if `needs_dx`.

    After a forward pass with `relu`, dy must already be zero where y is zero.
    """
    n, oh, ow, out = dy.shape
    if dbias is not None:
        ones = np.ones(n * oh, np.float32)
        lines = ones @ dy.reshape(n * oh, ow * out)
        np.sum(lines.reshape(ow, out), axis=0, out=dbias)
    if dweight is not None:
        kh, kw = shape.kernel
        channels = out // shape.group
        total = work.zeros("dkernel", (shape.group, weight[0].size, channels))
        memory = work.take("dpart", total[0].shape)
        for block, windows in _unroll_blocks(saved[0], dy.shape, shape, work):
            rows, seen = block.of(dy).reshape(-1, out), _rows(block, weight[0].size, shape)
            part = memory[seen]
            for g in range(shape.group):
                _multiply(windows[g].T, rows[:, g * channels : (g + 1) * channels], part)
                np.add(total[g, seen], part, out=total[g, seen])
        kernels = total.reshape(shape.group, kh, kw, -1, channels).transpose(0, 4, 3, 1, 2)
        np.copyto(dweight.reshape(kernels.shape), kernels)
    return transpose(dy, x_shape, weight, shape, work) if needs_dx else None


def transpose(
    y: Array, x_shape: tuple[int, ...], weight: Array, shape: Convolution, work: Workspace
) -> Array:
    """The transpose of the convolution, x (n, h, w, c) for y (n, oh, ow, out): its gradient by x.

    The result is valid until the next call with this workspace.
    """
    out, channels = y.shape[-1] // shape.group, x_shape[-1] // shape.group
    kernels = _kernels(weight, shape)
    if _copies_nothing(shape):
        x = work.take("dx", x_shape)
        rows, into = y.reshape(-1, y.shape[-1]), x.reshape(-1, x_shape[-1])
        for g, kernel in enumerate(kernels):
            part = into[:, g * channels : (g + 1) * channels]
            _multiply(rows[:, g * out : (g + 1) * out], kernel, part)
        return x
    x, size = work.zeros("dx", x_shape), kernels[0].shape[1]
    blocks = _blocks(y.shape, x_shape[1], shape, size)
    memory = _memory(blocks, y.shape[2], size, shape, work)
    for block in blocks:
        rows, seen = block.of(y).reshape(-1, y.shape[-1]), _rows(block, size, shape)
        for g, kernel in enumerate(kernels):
            columns = _columns(memory, len(rows), seen)
            _multiply(rows[:, g * out : (g + 1) * out], kernel[:, seen], columns)
            _fold(columns, x, g * channels, block, shape)
    return x


def _multiply(a: Array, b: Array, out: Array) -> None:
    """out = a @ b, a part of the rows at a time where OpenBLAS is then up to a quarter faster."""
    count = _parts(len(a), a.shape[1] * b.shape[1])
    sizes = (count, len(a) // count)
    np.matmul(a.reshape(*sizes, a.shape[1]), b, out=out.reshape(*sizes, b.shape[1]))


@lru_cache(256)
def _parts(rows: int, multiplications: int) -> int:
    """The fewest equal parts of rows, each of few `multiplications`; 1 if they were too thin."""
    thin = max(1, rows // _FEWEST)
    small = (
        n for n in range(1, thin + 1) if rows % n == 0 and rows // n * multiplications <= _SMALL
    )
    return next(small, 1)


def _finish(rows: Array, bias: Array | None, relu: bool) -> None:
    if compilation.COMPILED:
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


def _unroll_blocks(
    x: Array, y_shape: tuple[int, ...], shape: Convolution, work: Workspace
) -> Iterator[tuple[_Block, list[Array]]]:
    """Each block of the output, and for each group its windows: (rows, taps*kw*c/group).

    The windows are valid until the next block.
    """
    channels = x.shape[-1] // shape.group
    if _copies_nothing(shape):
        rows = x.reshape(-1, x.shape[-1])
        whole = _Block(slice(0, len(x)), (0, y_shape[1]), (0, 1))
        yield whole, [rows[:, g * channels : (g + 1) * channels] for g in range(shape.group)]
        return
    size = shape.kernel[0] * shape.kernel[1] * channels
    blocks = _blocks(y_shape, x.shape[1], shape, size * shape.group)
    memory = _memory(blocks, y_shape[2], size * shape.group, shape, work)
    if shape.kernel[1] * channels < _SHORT and shape.stride == (1, 1) and shape.group == 1:
        yield from _transpose_windows(x, y_shape[2], blocks, shape, memory, work)
        return
    for block in blocks:
        seen = _rows(block, size, shape)
        count = _lines(block) * y_shape[2]
        columns = _columns(memory, shape.group * count, seen)
        windows = np.split(columns, shape.group)
        for g in range(shape.group):
            _unroll(x, g * channels, block, shape, windows[g])
        yield block, windows


def _transpose_windows(
    x: Array,
    ow: int,
    blocks: list[_Block],
    shape: Convolution,
    memory: Array,
    work: Workspace,
) -> Iterator[tuple[_Block, list[Array]]]:
    n, h, w, c = x.shape
    pad = shape.pad[1]
    planes = work.zeros("planes", (c, n, h, w + 2 * pad))
    np.copyto(planes[:, :, :, pad : pad + w], x.transpose(3, 0, 1, 2))
    sc, sn, sy, sx = planes.strides
    strides = (sy * shape.dilation[0], sx * shape.dilation[1], sc, sn, sy, sx)
    for block in blocks:
        (start, stop), (first, last) = block.lines, block.taps
        source = planes[:, block.images, start - shape.pad[0] + first * shape.dilation[0] :]
        sizes = (last - first, shape.kernel[1], c, source.shape[1], stop - start, ow)
        columns = memory[: prod(sizes)]
        seen = np.lib.stride_tricks.as_strided(source, sizes, strides, writeable=False)
        np.copyto(columns.reshape(sizes), seen)
        yield block, [columns.reshape(prod(sizes[:3]), prod(sizes[3:])).T]


def _copies_nothing(shape: Convolution) -> bool:
    return shape.kernel == (1, 1) == shape.stride and shape.pad == (0, 0)


def _bands(oh: int, h: int, shape: Convolution) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Output lines [start, stop) in a row, and the kernel's rows [first, last) in the image."""
    tops = np.arange(oh) * shape.stride[0] - shape.pad[0]
    step = shape.dilation[0]
    first = np.clip(-(tops // step), 0, shape.kernel[0])
    last = np.clip(-((tops - h) // step), first, shape.kernel[0])
    taps = [*zip(first.tolist(), last.tolist(), strict=True)]
    starts = [line for line in range(oh) if line == 0 or taps[line] != taps[line - 1]]
    return [
        ((start, stop), taps[start]) for start, stop in zip(starts, [*starts[1:], oh], strict=True)
    ]


@lru_cache(64)
def _blocks(y_shape: tuple[int, ...], h: int, shape: Convolution, size: int) -> list[_Block]:
    """Blocks of the output, with whole windows of `size` floats: lines of one image, or images."""
    n, oh, ow, _ = y_shape
    blocks = []
    for (start, stop), taps in _bands(oh, h, shape):
        floats = max(1, ow * size * (taps[1] - taps[0]) // shape.kernel[0])
        most, count = max(1, _BLOCK // floats), stop - start
        lines = -(-count // -(-count // most))  # as even as they come
        images = max(1, most // count)
        blocks += [
            _Block(slice(image, min(image + images, n)), (line, min(line + lines, stop)), taps)
            for image in range(0, n, images)
            for line in range(start, stop, lines)
        ]
    return blocks


def _lines(block: _Block) -> int:
    """The lines of all its images."""
    images: int = block.images.stop - block.images.start
    return images * (block.lines[1] - block.lines[0])


def _rows(block: _Block, size: int, shape: Convolution) -> slice:
    """The part of a window of `size` floats that the block has."""
    tap_size = size // shape.kernel[0]
    return slice(block.taps[0] * tap_size, block.taps[1] * tap_size)


def _memory(blocks: list[_Block], ow: int, size: int, shape: Convolution, work: Workspace) -> Array:
    """Memory for the windows of any of the blocks; a whole window has `size` floats."""
    lengths = (_rows(block, size, shape) for block in blocks)
    most = max(
        _lines(block) * (seen.stop - seen.start)
        for block, seen in zip(blocks, lengths, strict=True)
    )
    return work.take("columns", (most * ow,))


def _columns(memory: Array, count: int, seen: slice) -> Array:
    length = seen.stop - seen.start
    return memory[: count * length].reshape(count, length)


def _unroll(x: Array, first: int, block: _Block, shape: Convolution, columns: Array) -> None:
    """Copy the windows of a block as rows, from channel `first` on."""
    part, windows = x[block.images], _windows(columns, block, shape)
    if compilation.COMPILED:
        loops.unroll(part, first, _rule(block, shape), block.lines, windows)
        return
    windows.fill(0)
    for seen, source in _taps(windows, first, block, x.shape, shape):
        windows[seen] = part[source]


def _fold(columns: Array, x: Array, first: int, block: _Block, shape: Convolution) -> None:
    """Add the rows to the places in x that `_unroll` copies them from."""
    part, windows = x[block.images], _windows(columns, block, shape)
    if compilation.COMPILED:
        loops.fold(windows, first, _rule(block, shape), block.lines, part)
        return
    for seen, target in _taps(windows, first, block, x.shape, shape):
        part[target] += windows[seen]


def _windows(columns: Array, block: _Block, shape: Convolution) -> Array:
    """Rows as (n, lines, ow, taps, kw, channels)."""
    n, count = block.images.stop - block.images.start, block.lines[1] - block.lines[0]
    taps = block.taps[1] - block.taps[0]
    channels = columns.shape[1] // max(1, taps * shape.kernel[1])
    return columns.reshape(n, count, len(columns) // (n * count), taps, shape.kernel[1], channels)


def _rule(block: _Block, shape: Convolution) -> loops.Rule:
    """The rule of the window that has the kernel's rows of the block alone."""
    first, last = block.taps
    kernel, pad = (last - first, shape.kernel[1]), shape.pad[0] - first * shape.dilation[0]
    return (*kernel, *shape.stride, pad, shape.pad[1], *shape.dilation)


def _taps(
    windows: Array, first: int, block: _Block, size: tuple[int, ...], shape: Convolution
) -> Iterator[tuple[tuple[slice | int, ...], tuple[slice, ...]]]:
    """For each place in the kernel: which windows have it in the image, and where in the image."""
    channels = slice(first, first + windows.shape[-1])
    for i, j in np.ndindex(*windows.shape[3:5]):
        down = _reach(*block.lines, block.taps[0] + i, 0, size[1], shape)
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
