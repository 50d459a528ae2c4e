"""Rows of `image_layout.cu`: blobs converted between channels-first and channels-last."""

from typing import Any

from cupy_kernels.kernel_spec import Dim3, Geometry, Kernel, Sizes, Tolerance, reads, scalar, writes

MOST_IMAGES = 2**16 - 1  # of a grid's third dimension


def _tiles(sizes: Sizes) -> Dim3:
    across, down = (-(-sizes[name] // 32) for name in ("columns", "rows"))
    return across, down, min(sizes["n"], MOST_IMAGES)


def _transpose(
    x: Any, mean: Any, scale: Any, n: int, rows: int, columns: int, **_: Any
) -> dict[str, Any]:
    images = x.reshape(n, rows, columns).astype(float)
    centred = images if mean is None else images - mean[:, None]
    return {"y": (centred * float(scale)).transpose(0, 2, 1)}


def _row(name: str, dtype: str, bytes_each: float) -> Kernel:
    return Kernel(
        name,
        "image_layout.cu",
        (
            reads("x", "n*rows*columns", dtype),
            writes("y", "n*rows*columns"),
            reads("mean", "rows", optional=True),
            scalar("scale", "f4"),
            scalar("n"),
            scalar("rows"),
            scalar("columns"),
        ),
        Geometry((32, 8, 1), _tiles),
        _transpose,
        bytes_each=bytes_each,
        tolerance=Tolerance(1e-6, 1e-7),
    )


ROWS = (_row("transpose_floats", "f4", 8), _row("transpose_bytes", "u1", 5))
