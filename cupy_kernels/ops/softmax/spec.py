"""Rows of `softmax.cu`: softmax, its loss with the gradient, label conversion and accuracy."""

from dataclasses import replace
from typing import Any

import numpy as np

from cupy_kernels.kernel_spec import (
    EXACT,
    MOST_BLOCKS,
    Dim3,
    Geometry,
    Kernel,
    Sizes,
    Tolerance,
    one_block,
    over,
    reads,
    scalar,
    warps_over,
    writes,
)
from cupy_kernels.ops.softmax import reference
from cupy_kernels.types import Wide

SMALLEST = float(np.finfo(np.float32).tiny)
NOTHING_IGNORED = -(2**63)
"""The value of `ignored` if no label is ignored."""

MOST_KEPT = 40_000
"""Floats of a row that `softmax_loss_wide` keeps in shared memory."""

NO_CLASS = -(2**62)
"""The result of `labels_from_floats` for a label that is not whole."""


def _blocks(sizes: Sizes) -> Dim3:
    return min(sizes["rows"], MOST_BLOCKS), 1, 1


def _softmax_forward(x: Wide, k: int, **_: Any) -> dict[str, Any]:
    return {"p": reference.softmax(x.reshape(-1, k)) if x.size else x}


def _softmax_backward(dy: Wide, p: Wide, k: int, **_: Any) -> dict[str, Any]:
    return {"dx": reference.softmax_backward(dy.reshape(-1, k), p.reshape(-1, k))}


def _softmax_loss(
    x: Wide, labels: Any, scale: Wide, ignored: int, rows: int, k: int, **_: Any
) -> dict[str, Any]:
    losses, dx = np.zeros(rows), np.zeros((rows, k))
    for row, label in enumerate(labels):
        if label == ignored:
            continue
        if not 0 <= label < k:
            losses[row], dx[row] = np.nan, np.nan
            continue
        p = reference.softmax(x.reshape(rows, k)[row])
        losses[row] = -np.log(max(p[label], SMALLEST))
        dx[row] = scale[0] * (p - (np.arange(k) == label))
    return {"losses": losses, "dx": dx}


def _loss_scale(labels: Any, ignored: int, **_: Any) -> dict[str, Any]:
    return {"scale": [1 / max(int(np.count_nonzero(labels != ignored)), 1)]}


def _top_k_hits(
    scores: Wide, labels: Any, ignored: int, k: int, top_k: int, **_: Any
) -> dict[str, Any]:
    def verdict(row: Wide, label: int) -> float:
        if label == ignored:
            return 2
        return reference.accuracy(row[None], np.array([label]), None, top_k) if label < k else 0

    rows = scores.reshape(-1, k)
    return {"hits": [verdict(row, label) for row, label in zip(rows, labels, strict=True)]}


def _labels_from_floats(x: Wide, **_: Any) -> dict[str, Any]:
    return {"labels": [int(v) if v == np.trunc(v) and abs(v) < 9e18 else NO_CLASS for v in x]}


def _share(hits: Any) -> float:
    counted = hits[hits != 2]
    return float(np.mean(counted)) if counted.size else 0.0


def _hit_share(hits: Any, **_: Any) -> dict[str, Any]:
    return {"share": [_share(hits)]}


def _class_shares(hits: Any, labels: Any, k: int, **_: Any) -> dict[str, Any]:
    return {"shares": [_share(hits[labels == label]) for label in range(k)]}


_LOSS = (
    reads("x", "rows*k"),
    reads("labels", "rows", "i8"),
    reads("scale", "1"),
    writes("losses", "rows"),
    writes("dx", "rows*k"),
    scalar("ignored"),
    scalar("rows"),
    scalar("k", "i4"),
)
_CLOSE = Tolerance(1e-5, 1e-6)

ROWS = (
    Kernel(
        "softmax_forward",
        "softmax.cu",
        (reads("x", "rows*k"), writes("p", "rows*k"), scalar("rows"), scalar("k", "i4")),
        warps_over("rows"),
        _softmax_forward,
        bytes_each=8,
        tolerance=_CLOSE,
        in_place=(("x", "p"),),
    ),
    Kernel(
        "softmax_backward",
        "softmax.cu",
        (
            reads("dy", "rows*k"),
            reads("p", "rows*k"),
            writes("dx", "rows*k"),
            scalar("rows"),
            scalar("k", "i4"),
        ),
        warps_over("rows"),
        _softmax_backward,
        bytes_each=12,
        tolerance=_CLOSE,
        in_place=(("dy", "dx"),),
    ),
    Kernel(
        "softmax_loss",
        "softmax.cu",
        _LOSS,
        warps_over("rows"),
        _softmax_loss,
        bytes_each=8,
        tolerance=_CLOSE,
    ),
    Kernel(
        "softmax_loss_wide",
        "softmax.cu",
        tuple(replace(p, align=16) if p.name in {"x", "dx"} else p for p in _LOSS),
        Geometry((512, 1, 1), _blocks, lambda s: 4 * max(1, min(s["k"], MOST_KEPT))),
        _softmax_loss,
        bytes_each=8,
        tolerance=_CLOSE,
    ),
    Kernel(
        "loss_scale",
        "softmax.cu",
        (
            reads("labels", "rows", "i8"),
            writes("scale", "1"),
            scalar("ignored"),
            scalar("rows"),
        ),
        one_block(),
        _loss_scale,
        bytes_each=8,
    ),
    Kernel(
        "top_k_hits",
        "softmax.cu",
        (
            reads("scores", "rows*k"),
            reads("labels", "rows", "i8"),
            writes("hits", "rows", "u1"),
            scalar("ignored"),
            scalar("rows"),
            scalar("k", "i4"),
            scalar("top_k", "i4"),
        ),
        warps_over("rows"),
        _top_k_hits,
        bytes_each=4,
        tolerance=EXACT,
    ),
    Kernel(
        "labels_from_floats",
        "softmax.cu",
        (reads("x", "n"), writes("labels", "n", "i8"), scalar("n")),
        over("n"),
        _labels_from_floats,
        bytes_each=12,
        tolerance=EXACT,
    ),
    Kernel(
        "hit_share",
        "softmax.cu",
        (reads("hits", "rows", "u1"), writes("share", "1"), scalar("rows")),
        one_block(),
        _hit_share,
        bytes_each=1,
    ),
    Kernel(
        "class_shares",
        "softmax.cu",
        (
            reads("hits", "rows", "u1"),
            reads("labels", "rows", "i8"),
            writes("shares", "k"),
            scalar("rows"),
            scalar("k", "i4"),
        ),
        Geometry((256, 1, 1), lambda sizes: (min(sizes["k"], MOST_BLOCKS), 1, 1)),
        _class_shares,
        bytes_each=9,
    ),
)
