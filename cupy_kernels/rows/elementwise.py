"""Rows of `elementwise.cu`: activations."""

from typing import Any

from cupy_kernels import reference
from cupy_kernels.kernel import Kernel, over, reads, scalar, writes


def relu(x: Any, slope: Any, **_: Any) -> dict[str, Any]:
    return {"y": reference.relu(x, float(slope))}


def relu_backward(dy: Any, x: Any, slope: Any, **_: Any) -> dict[str, Any]:
    return {"dx": reference.relu_backward(dy, x, float(slope))}


ROWS = (
    Kernel(
        "relu",
        "elementwise.cu",
        (reads("x", "n"), writes("y", "n"), scalar("slope", "f4"), scalar("n")),
        over("n"),
        relu,
        bytes_each=8,
        in_place=(("x", "y"),),
    ),
    Kernel(
        "relu_backward",
        "elementwise.cu",
        (reads("dy", "n"), reads("x", "n"), writes("dx", "n"), scalar("slope", "f4"), scalar("n")),
        over("n"),
        relu_backward,
        bytes_each=12,
        in_place=(("dy", "dx"),),
    ),
)
