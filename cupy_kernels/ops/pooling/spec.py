"""Rows of `pooling.cu`. The references convert blobs to channels-first for `reference.pooling`."""

from typing import Any

import numpy as np

from cupy_kernels.kernel_spec import (
    Dim3,
    Geometry,
    Kernel,
    Parameter,
    Sizes,
    Tolerance,
    reads,
    scalar,
    writes,
)
from cupy_kernels.ops.dropout.spec import RANDOM_KEY, draw_words
from cupy_kernels.ops.pooling import reference
from cupy_kernels.types import Wide

NUMBERS = ("h", "w", "c", "oh", "ow", "kh", "kw", "sh", "sw", "ph", "pw")
"""The integers that describe a pooling: sizes, kernel, stride, padding; the batch `n` precedes."""

MOST_ROWS = 2**20


def _rows(image_rows: str) -> Geometry:
    def grid(sizes: Sizes) -> Dim3:
        return min(sizes["n"] * sizes[image_rows], MOST_ROWS), 1, 1

    return Geometry((128, 1, 1), grid)


def _to_nchw(blob: Wide, n: int, h: int, w: int, c: int) -> Wide:
    return blob[: n * h * w * c].reshape(n, h, w, c).transpose(0, 3, 1, 2)


def _share(mode: str, x: Wide, a: dict[str, Any]) -> tuple[Wide, Wide]:
    """`reference.pooling` for a launch; it rounds down if that gives the launch's output size."""
    pairs = [(a["k" + d], a["s" + d], a["p" + d]) for d in "hw"]
    kernel, stride, pad = ((first, second) for first, second in zip(*pairs, strict=True))
    size = (a["h"], a["w"])
    up = reference.count_windows(size, kernel, stride, pad, True) == (a["oh"], a["ow"])
    return reference.pooling(x, mode, kernel, stride, pad, up)


def _max_forward(x: Wide, **a: Any) -> dict[str, Any]:
    image = _to_nchw(x, a["n"], a["h"], a["w"], a["c"])
    y, share = _share("max", image, a)
    flat = share.reshape(*y.shape, a["h"] * a["w"]).argmax(axis=-1)
    p, q = np.ogrid[: a["oh"], : a["ow"]]
    rows, columns = flat // a["w"], flat % a["w"]
    cells = (rows - p * a["sh"] + a["ph"]) * a["kw"] + columns - q * a["sw"] + a["pw"]
    return {"y": y.transpose(0, 2, 3, 1), "where": cells.transpose(0, 2, 3, 1)}


def _max_backward(dy: Wide, where: Any, **a: Any) -> dict[str, Any]:
    """Each gradient, added to the cell that `where` names."""
    n, h, w, c = (a[name] for name in ("n", "h", "w", "c"))
    cells = where.reshape(n, a["oh"], a["ow"], c).astype(np.int64)
    m, p, q, k = np.indices(cells.shape)
    rows = p * a["sh"] - a["ph"] + cells // a["kw"]
    columns = q * a["sw"] - a["pw"] + cells % a["kw"]
    dx = np.zeros((n, h, w, c))
    np.add.at(dx, (m, rows, columns, k), dy.reshape(cells.shape))
    return {"dx": dx}


def _average_forward(x: Wide, **a: Any) -> dict[str, Any]:
    y, _ = _share("average", _to_nchw(x, a["n"], a["h"], a["w"], a["c"]), a)
    return {"y": y.transpose(0, 2, 3, 1)}


def _average_backward(dy: Wide, **a: Any) -> dict[str, Any]:
    blank = np.zeros((a["n"], a["c"], a["h"], a["w"]))
    _, share = _share("average", blank, a)
    dx = reference.pooling_backward(_to_nchw(dy, a["n"], a["oh"], a["ow"], a["c"]), share)
    return {"dx": dx.transpose(0, 2, 3, 1)}


def _stochastic_forward(
    x: Wide, step: Any, seed: Any, layer: Any, n: int, **a: Any
) -> dict[str, Any]:
    """Window by window; the words are dropout's."""
    shape = (n, a["oh"], a["ow"], a["c"])
    words = draw_words(int(np.prod(shape)), int(step[0]), int(layer), int(seed)).reshape(shape)
    images = x.reshape(n, a["h"], a["w"], a["c"])
    y, where = np.zeros(shape), np.zeros(shape)
    for m, p, q, k in np.ndindex(shape):
        rows, columns = p * a["sh"] + np.arange(a["kh"]), q * a["sw"] + np.arange(a["kw"])
        cells = np.zeros((a["kh"], a["kw"]))
        inside = np.ix_(rows < a["h"], columns < a["w"])
        cells[inside] = images[m, :, :, k][np.ix_(rows[rows < a["h"]], columns[columns < a["w"]])]
        reached = np.cumsum(cells)
        above = np.flatnonzero(reached > words[m, p, q, k] / 2**32 * reached[-1])
        where[m, p, q, k] = above[0] if above.size else 0
        y[m, p, q, k] = cells.flat[int(where[m, p, q, k])]
    return {"y": y, "where": where}


IMAGE, POOLED = "n*h*w*c", "n*oh*ow*c"
_SCALARS: tuple[Parameter, ...] = (scalar("n"), *(scalar(name, "i4") for name in NUMBERS))
_SUMS = Tolerance(1e-6, 2e-6)


def _max_pair(suffix: str, offset: str) -> tuple[Kernel, Kernel]:
    size = np.dtype(offset).itemsize
    return (
        Kernel(
            f"max_pool_forward{suffix}",
            "pooling.cu",
            (
                reads("x", IMAGE, align=16),
                writes("y", POOLED, align=16),
                writes("where", POOLED, offset, align=4),
                *_SCALARS,
            ),
            _rows("oh"),
            _max_forward,
            bytes_each=20 + size,
            tolerance=Tolerance(0, 0),
        ),
        Kernel(
            f"max_pool_backward{suffix}",
            "pooling.cu",
            (
                reads("dy", POOLED, align=16),
                reads("where", POOLED, offset, align=4),
                writes("dx", IMAGE, align=16),
                *_SCALARS,
            ),
            _rows("h"),
            _max_backward,
            bytes_each=20 + size,
            tolerance=_SUMS,
        ),
    )


ROWS = (
    *_max_pair("", "u1"),
    *_max_pair("_wide", "u2"),
    Kernel(
        "average_pool_forward",
        "pooling.cu",
        (reads("x", IMAGE, align=16), writes("y", POOLED, align=16), *_SCALARS),
        _rows("oh"),
        _average_forward,
        bytes_each=20,
        tolerance=_SUMS,
    ),
    Kernel(
        "average_pool_backward",
        "pooling.cu",
        (reads("dy", POOLED, align=16), writes("dx", IMAGE, align=16), *_SCALARS),
        _rows("h"),
        _average_backward,
        bytes_each=20,
        tolerance=_SUMS,
    ),
    Kernel(
        "stochastic_pool_forward",
        "pooling.cu",
        (
            reads("x", IMAGE),
            writes("y", POOLED),
            writes("where", POOLED, "u2"),
            *RANDOM_KEY,
            *_SCALARS,
        ),
        _rows("oh"),
        _stochastic_forward,
        bytes_each=22,
        tolerance=Tolerance(0, 0),
    ),
)
