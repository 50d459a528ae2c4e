"""Softmax, its loss and accuracy on the host.

Caffe sums in float32; here sums are in float64, which costs nothing at these sizes.
"""

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.types import AnyArray, Array, Kept, Labels, Wide
from cupy_kernels.workspace import Workspace

SMALLEST = float(np.finfo(np.float32).tiny)


def softmax(x: Array, work: Workspace) -> Array:
    """The probabilities for scores (..., k), of the same shape, valid until the next call."""
    p = work.take("p", x.shape)
    np.subtract(x, x.max(axis=-1, keepdims=True), out=p)
    np.exp(p, out=p)
    np.divide(p, p.sum(axis=-1, keepdims=True), out=p)
    return p


def softmax_backward(dy: Array, p: Array, work: Workspace) -> Array:
    """dx = p * (dy - sum(dy * p)), the sum over the last axis."""
    dx = work.take("dx", p.shape)
    np.multiply(dy, p, out=dx)
    inner = dx.sum(axis=-1, keepdims=True)
    np.subtract(dy, inner, out=dx)
    return np.multiply(dx, p, out=dx)


def whole_labels(
    values: AnyArray,
    classes: int,
    ignored: int | None,
    work: Workspace,  # noqa: ARG001  # as kernels take it
) -> Labels:
    """Labels of any type as int64.

    Each must be whole and in [0, classes), unless it is the ignored one. An invalid label raises
    ValueError on the host, with the limits and the label. Kernels do not check; an invalid label
    makes the loss NaN.
    """
    with np.errstate(invalid="ignore"):  # what is no number differs from what it is cast to
        labels = values.astype(np.int64)
    wrong = (labels != values) | (labels < 0) | (labels >= classes)
    if ignored is not None:
        wrong &= labels != ignored
    if wrong.any():
        raise ValueError(f"in [0, {classes}), got {values[wrong][0]}")
    return labels


def cross_entropy(
    x: Array, labels: Labels, ignored: int | None, divisor: float | None, work: Workspace
) -> tuple[AnyArray, Kept]:
    """The loss of scores x, without axes, and the values for `cross_entropy_backward`."""
    p, counted = softmax(x, work), _mask_ignored(labels, ignored)
    safe = np.where(counted, labels, 0)
    chosen = np.maximum(p[np.arange(len(p)), safe], np.float32(SMALLEST))
    losses: Wide = -np.log(chosen.astype(np.float64))
    number = max(1.0, np.count_nonzero(counted) if divisor is None else divisor)
    return np.asarray(losses[counted].sum() / number), (p, safe, counted, number)


def cross_entropy_backward(saved: Kept, weight: float, work: Workspace) -> Array:
    """`weight` times the gradient by the scores."""
    p, labels, counted, divisor = saved
    dx = work.take("dx", p.shape)
    np.copyto(dx, p)
    dx[np.arange(len(p)), labels] -= 1.0
    dx[~counted] = 0.0
    return np.multiply(dx, np.float32(weight / divisor), out=dx)


def accuracy(
    scores: Array,
    labels: Labels,
    ignored: int | None,
    top_k: int,
    work: Workspace,  # noqa: ARG001  # as kernels take it
) -> AnyArray:
    """The share of the counted rows with the true class among the `top_k` best, without axes.

    A class with the same score as the true one counts as better.
    """
    counted = _mask_ignored(labels, ignored)
    good = hits(scores[counted], labels[counted], top_k)
    return np.asarray(np.float32(np.count_nonzero(good) / max(1, len(good))))


def class_accuracies(
    scores: Array,
    labels: Labels,
    ignored: int | None,
    top_k: int,
    work: Workspace,  # noqa: ARG001  # as kernels take it
) -> Array:
    """`accuracy` by true class: (classes,), 0 for a class without rows."""
    counted = _mask_ignored(labels, ignored)
    scores, labels, classes = scores[counted], labels[counted], scores.shape[1]
    good = hits(scores, labels, top_k)
    counts = np.bincount(labels, minlength=classes)
    right = np.bincount(labels[good], minlength=classes)
    return (right / np.maximum(counts, 1)).astype(np.float32)


def hits(scores: Array, labels: Labels, top_k: int) -> NDArray[np.bool_]:
    """True where the true class is among the `top_k` best of (m, k), as (m,) bool; a tie misses."""
    true_scores = scores[np.arange(len(labels)), labels]
    at_least = np.count_nonzero(scores >= true_scores[:, None], axis=1)
    return np.asarray(at_least <= top_k)


def _mask_ignored(labels: Labels, ignored: int | None) -> NDArray[np.bool_]:
    return np.ones(len(labels), np.bool_) if ignored is None else labels != ignored
