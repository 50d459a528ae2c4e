"""The reference for softmax, its loss and accuracy: float64, by simple loops, from the formula.

It shares no code with the fast versions, and its gradients are checked against finite differences.
"""

import numpy as np

from cupy_kernels.types import Labels, Wide


def softmax(x: Wide) -> Wide:
    """exp(x_k) / sum exp(x_j) over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def softmax_backward(dy: Wide, p: Wide) -> Wide:
    """dx_i = sum_j dy_j dp_j/dx_i with dp_j/dx_i = p_j (delta_ij - p_i)."""
    diagonal = np.einsum("...j,ji->...ji", p, np.eye(p.shape[-1]))
    jacobian = diagonal - p[..., :, None] * p[..., None, :]
    return np.asarray(np.einsum("...j,...ji->...i", dy, jacobian))


def cross_entropy(x: Wide, labels: Labels, ignored: int | None, divisor: float) -> float:
    """-sum log softmax(x)[label] / divisor over the rows with a label that is not ignored."""
    rows = [m for m, label in enumerate(labels) if label != ignored]
    return float(sum(-np.log(softmax(x[m])[labels[m]]) for m in rows) / divisor)


def cross_entropy_backward(x: Wide, labels: Labels, ignored: int | None, divisor: float) -> Wide:
    """(softmax(x) - onehot(label)) / divisor; a row of zeros if the label is ignored."""
    dx = np.zeros_like(x)
    for m, label in enumerate(labels):
        if label != ignored:
            dx[m] = (softmax(x[m]) - np.eye(x.shape[1])[label]) / divisor
    return dx


def accuracy(scores: Wide, labels: Labels, ignored: int | None, top_k: int) -> float:
    """The share of rows where fewer than top_k *other* classes score at least the true one's."""
    counted = [(row, label) for row, label in zip(scores, labels, strict=True) if label != ignored]
    good = [sum(row[k] >= row[t] for k in range(len(row)) if k != t) < top_k for row, t in counted]
    return float(np.mean(good)) if good else 0.0
