"""Activations in kernels: one elementwise launch each way."""

from dataclasses import asdict

from cupy_kernels.launch import launch
from cupy_kernels.ops.activation.functions import Function, Smooth
from cupy_kernels.ops.activation.spec import ROWS
from cupy_kernels.ops.reduction.gpu import sum_columns
from cupy_kernels.types import AnyArray, Array
from cupy_kernels.workspace import Workspace

_KERNELS = {row.name: row for row in ROWS}


def forward(x: Array, function: Function, work: Workspace) -> Array:
    y = work.take("y", x.shape, x)
    _launch(function, "forward", x=x, y=y)
    return y


def backward(dy: Array, x: Array, y: Array, function: Smooth, work: Workspace) -> Array:
    dx = work.take("dx", dy.shape, dy)
    _launch(function, "backward", dy=dy, x=x, y=y, dx=dx)
    return dx


def prelu(x: Array, slope: Array, work: Workspace) -> Array:
    y = work.take("y", x.shape, x)
    launch("prelu_forward", x=x, slope=slope, y=y, channels=slope.size, n=x.size)
    return y


def prelu_backward(
    dy: Array, x: Array, slope: Array, dslope: Array | None, work: Workspace
) -> Array:
    dx = work.take("dx", x.shape, dy)
    if dslope is not None:
        launch("prelu_slope_terms", dy=dy, x=x, terms=dx, n=x.size)
        sum_columns(dx.reshape(-1, slope.size), None, dslope, work)
    launch("prelu_backward", dy=dy, x=x, slope=slope, dx=dx, channels=slope.size, n=x.size)
    return dx


def _launch(function: Function, way: str, **arrays: AnyArray) -> None:
    """Launch the function's kernel with those arrays and fields that it has as parameters."""
    row = _KERNELS[f"{type(function).__name__.lower()}_{way}"]
    offered = {**arrays, **asdict(function), "n": next(iter(arrays.values())).size}
    launch(row, **{p.name: offered[p.name] for p in row.parameters})
