"""The inner product in kernels: a convolution of single pixels.

Those kernels cannot read a transposed weight, (k, out) in memory; it uses the plain product.
"""

from cupy_kernels.launch import launch
from cupy_kernels.ops.convolution import gpu as convolution
from cupy_kernels.ops.convolution.window import Convolution
from cupy_kernels.ops.reduction.gpu import sum_columns
from cupy_kernels.types import Array, Precision
from cupy_kernels.workspace import Workspace


def forward(
    x: Array,
    weight: Array,
    bias: Array | None,
    work: Workspace,
    precision: Precision = Precision.FP32,
    *,
    relu: bool = False,
) -> Array:
    (m, k), out = x.shape, len(weight)
    if weight.flags.c_contiguous:
        y, _ = convolution.forward(
            _pixels(x), _filters(weight), bias, _shape(precision), work, relu=relu
        )
        return y.reshape(m, out)
    y = work.take("y", (m, out), x)
    _product(x, (k, 1), weight.T, (out, 1), y, k)
    if bias is not None:
        launch("scale_forward", x=y, scale=None, bias=bias, y=y, rows=m, columns=out)
    if relu:
        launch("relu_forward", x=y, y=y, slope=0.0, n=y.size)
    return y


def backward(
    dy: Array,
    x: Array,
    weight: Array,
    dweight: Array | None,
    dbias: Array | None,
    work: Workspace,
    precision: Precision = Precision.FP32,
    *,
    needs_dx: bool,
) -> Array | None:
    (m, k), out = x.shape, len(weight)
    if weight.flags.c_contiguous:
        into = None if dweight is None else _filters(dweight)
        shape, pixels = _shape(precision), (m, 1, 1, k)
        dx = convolution.backward(
            *(_pixels(dy), (_pixels(x), _filters(weight), 0), pixels, _filters(weight)),
            *(into, dbias, shape, work),
            needs_dx=needs_dx,
        )
        return None if dx is None else dx.reshape(m, k)
    if dbias is not None:
        sum_columns(dy, None, dbias, work)
    if dweight is not None:
        _product(x, (1, k), dy, (out, 1), dweight.T, m)
    if not needs_dx:
        return None
    dx = work.take("dx", (m, k), dy)
    _product(dy, (out, 1), weight.T, (1, out), dx, out)
    return dx


def _pixels(matrix: Array) -> Array:
    rows, channels = matrix.shape
    return matrix.reshape(rows, 1, 1, channels)


def _filters(matrix: Array) -> Array:
    return matrix.reshape(*matrix.shape, 1, 1)


def _shape(precision: Precision) -> Convolution:
    return Convolution((1, 1), precision=precision)


def _product(
    a: Array, a_steps: tuple[int, int], b: Array, b_steps: tuple[int, int], y: Array, depth: int
) -> None:
    """y[i, j] = sum over k of a[i, k] b[k, j]; each matrix has its own (row step, column step)."""
    rows, columns = y.shape
    launch(
        "strided_product",
        a=a,
        b=b,
        y=y,
        rows=rows,
        columns=columns,
        depth=depth,
        a_row=a_steps[0],
        a_step=a_steps[1],
        b_step=b_steps[0],
        b_column=b_steps[1],
        y_row=columns,
    )
