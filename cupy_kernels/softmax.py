"""Softmax over the last axis, the cross-entropy loss on it, and accuracy.

p = exp(x - max x) / sum exp(x - max x). Loss = -sum log(max(p[label], FLT_MIN)) / divisor, and its
gradient by x is (p - onehot(label)) / divisor, zero where the label is ignored. Caffe reduces in
float32; the sums here run in float64, which costs nothing at these sizes.
"""

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.types import Array, Labels, Wide
from cupy_kernels.workspace import Workspace

SMALLEST = float(np.finfo(np.float32).tiny)


def softmax(x: Array, work: Workspace) -> Array:
    """(..., k) in, probabilities of the same shape out, valid until the next call."""
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


def cross_entropy(p: Array, labels: Labels, counted: NDArray[np.bool_] | None) -> float:
    """The summed loss of p (m, k) at labels (m,); `counted` (m,) bool leaves some rows out."""
    chosen = np.maximum(p[np.arange(len(labels)), labels], np.float32(SMALLEST))
    losses: Wide = -np.log(chosen.astype(np.float64))
    return float(losses.sum() if counted is None else losses[counted].sum())


def cross_entropy_backward(
    p: Array, labels: Labels, counted: NDArray[np.bool_] | None, scale: float, work: Workspace
) -> Array:
    """scale * (p - onehot(labels)) as (m, k); rows that are not counted are zero."""
    dx = work.take("dx", p.shape)
    np.copyto(dx, p)
    dx[np.arange(len(labels)), labels] -= 1.0
    if counted is not None:
        dx[~counted] = 0.0
    return np.multiply(dx, np.float32(scale), out=dx)


def hits(scores: Array, labels: Labels, top_k: int) -> NDArray[np.bool_]:
    """(m,) bool: is the true class among the `top_k` best of (m, k)? A tie counts against it."""
    own = scores[np.arange(len(labels)), labels]
    at_least = np.count_nonzero(scores >= own[:, None], axis=1)
    return np.asarray(at_least <= top_k)
