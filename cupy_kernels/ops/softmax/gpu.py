"""Softmax, its loss and accuracy in kernels.

The loss's kernel writes the gradient as well, in the same pass over the scores.
"""

from math import prod
from typing import Any

import numpy as np

from cupy_kernels.launch import launch
from cupy_kernels.ops.reduction.gpu import sum_rows
from cupy_kernels.ops.softmax.spec import NOTHING_IGNORED
from cupy_kernels.types import AnyArray, Array, Kept, Labels
from cupy_kernels.workspace import Workspace

WIDE = 1024
"""From this number of classes on, each row of scores has its own block."""


def softmax(x: Array, work: Workspace) -> Array:
    p = work.take("p", x.shape, x)
    launch("softmax_forward", x=x, p=p, **_matrix(x))
    return p


def softmax_backward(dy: Array, p: Array, work: Workspace) -> Array:
    dx = work.take("dx", p.shape, p)
    launch("softmax_backward", dy=dy, p=p, dx=dx, **_matrix(p))
    return dx


def whole_labels(
    values: AnyArray,
    classes: int,  # noqa: ARG001  # as the host takes it
    ignored: int | None,  # noqa: ARG001
    work: Workspace,
) -> Labels:
    if values.dtype == np.int64:
        return values
    labels = work.take_as("labels", values.shape, np.int64, values)
    launch("labels_from_floats", x=values, labels=labels, n=values.size)
    return labels


def cross_entropy(
    x: Array, labels: Labels, ignored: int | None, divisor: float | None, work: Workspace
) -> tuple[AnyArray, Kept]:
    rows, k = x.shape
    losses, dx = work.take("losses", (1, rows), x), work.take("dx", x.shape, x)
    scale = loss_scale(labels, ignored, divisor, x, work)
    launch(
        "softmax_loss_wide" if k >= WIDE else "softmax_loss",
        x=x,
        labels=labels,
        scale=scale,
        losses=losses,
        dx=dx,
        ignored=number_of_ignored(ignored),
        rows=rows,
        k=k,
    )
    return sum_scaled(losses, scale, work), (dx,)


def loss_scale(
    labels: Labels, ignored: int | None, divisor: float | None, like: Array, work: Workspace
) -> Array:
    """1 / divisor, and at most 1, in device memory; None divides by the labels that count."""
    if divisor is not None or ignored is None:
        return fill_scale(labels.size if divisor is None else divisor, like, work)
    scale = work.take("scale", (1,), like)
    launch("loss_scale", labels=labels, scale=scale, ignored=ignored, rows=labels.size)
    return scale


def fill_scale(divisor: float, like: Array, work: Workspace) -> Array:
    """1 / divisor, and at most 1, in device memory."""
    scale = work.take("scale", (1,), like)
    scale.fill(1 / max(divisor, 1))
    return scale


def sum_scaled(losses: Array, scale: Array, work: Workspace) -> AnyArray:
    """The sum of all losses times the scale, without axes."""
    total = work.take("total", (1,), losses)
    sum_rows(losses.reshape(1, -1), None, total, work, scale=scale)
    return total.reshape(())


def cross_entropy_backward(saved: Kept, weight: float, work: Workspace) -> Array:
    dx: Array = saved[0]
    if weight == 1.0:
        return dx
    scaled = work.take("scaled", dx.shape, dx)
    launch("add_scaled", x=dx, y=scaled, a=weight, b=0.0, n=dx.size)
    return scaled


def accuracy(
    scores: Array, labels: Labels, ignored: int | None, top_k: int, work: Workspace
) -> AnyArray:
    share = work.take("share", (1,), scores)
    hits = _hits(scores, labels, ignored, top_k, work)
    launch("hit_share", hits=hits, share=share, rows=len(scores))
    return share.reshape(())


def class_accuracies(
    scores: Array, labels: Labels, ignored: int | None, top_k: int, work: Workspace
) -> Array:
    rows, k = scores.shape
    shares = work.take("shares", (k,), scores)
    hits = _hits(scores, labels, ignored, top_k, work)
    launch("class_shares", hits=hits, labels=labels, shares=shares, rows=rows, k=k)
    return shares


def _hits(
    scores: Array, labels: Labels, ignored: int | None, top_k: int, work: Workspace
) -> AnyArray:
    rows, k = scores.shape
    hits = work.take_as("hits", (rows,), np.uint8, scores)
    launch(
        "top_k_hits",
        scores=scores,
        labels=labels,
        hits=hits,
        ignored=number_of_ignored(ignored),
        rows=rows,
        k=k,
        top_k=top_k,
    )
    return hits


def number_of_ignored(label: int | None) -> int:
    """The label that kernels ignore; one that no row has if none is ignored."""
    return NOTHING_IGNORED if label is None else label


def _matrix(x: Array) -> dict[str, Any]:
    return {"rows": prod(x.shape[:-1]), "k": x.shape[-1]}
