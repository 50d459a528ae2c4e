"""Rows of `eltwise.cu`: sums, products, quotients and maxima of blobs."""

from typing import Any

import numpy as np

from cupy_kernels.kernel_spec import (
    Kernel,
    changes,
    over,
    reads,
    scalar,
    writes,
)
from cupy_kernels.types import Wide


def _add_scaled(x: Wide, y: Wide, a: Any, b: Any, **_: Any) -> dict[str, Any]:
    return {"y": float(a) * x + (float(b) * y if b else 0)}


def _multiply(a: Wide, b: Wide, **_: Any) -> dict[str, Any]:
    return {"y": a * b}


def _quotient(a: Wide, b: Wide, **_: Any) -> dict[str, Any]:
    return {"y": np.divide(a, b, where=b != 0, out=np.zeros_like(a))}


def _keep_larger(x: Wide, y: Wide, number: int, **others: Any) -> dict[str, Any]:
    greater = (x > y) | (np.isnan(x) & ~np.isnan(y))
    return {"y": np.maximum(x, y), "from": np.where(greater, number, others["from"])}


def _keep_larger_backward(dy: Wide, number: int, **others: Any) -> dict[str, Any]:
    return {"dx": np.where(others["from"] == number, dy, 0)}


ROWS = (
    Kernel(
        "add_scaled",
        "eltwise.cu",
        (reads("x", "n"), changes("y", "n"), scalar("a", "f4"), scalar("b", "f4"), scalar("n")),
        over("n"),
        _add_scaled,
        bytes_each=12,
    ),
    Kernel(
        "multiply",
        "eltwise.cu",
        (reads("a", "n"), reads("b", "n"), writes("y", "n"), scalar("n")),
        over("n"),
        _multiply,
        bytes_each=12,
        in_place=(("a", "y"), ("b", "y")),
    ),
    Kernel(
        "quotient",
        "eltwise.cu",
        (reads("a", "n"), reads("b", "n"), writes("y", "n"), scalar("n")),
        over("n"),
        _quotient,
        bytes_each=12,
        in_place=(("a", "y"), ("b", "y")),
    ),
    Kernel(
        "keep_larger",
        "eltwise.cu",
        (
            reads("x", "n"),
            changes("y", "n"),
            changes("from", "n", "u1"),
            scalar("number", "i4"),
            scalar("n"),
        ),
        over("n"),
        _keep_larger,
        bytes_each=14,
    ),
    Kernel(
        "keep_larger_backward",
        "eltwise.cu",
        (
            reads("dy", "n"),
            reads("from", "n", "u1"),
            writes("dx", "n"),
            scalar("number", "i4"),
            scalar("n"),
        ),
        over("n"),
        _keep_larger_backward,
        bytes_each=9,
        in_place=(("dy", "dx"),),
    ),
)
