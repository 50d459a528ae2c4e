"""Softmax over the last axis, the cross-entropy loss on it, and accuracy.

p = exp(x - max x) / sum exp(x - max x). Loss = -sum log(max(p[label], FLT_MIN)) / divisor, and its
gradient by x is (p - onehot(label)) / divisor, zero where the label is ignored. The divisor is a
number, or, given as None, the rows that count, and never below 1. Scores are (rows, classes),
labels (rows,) of int64; results of no axes stay where the scores are until somebody reads them.
"""

from cupy_kernels.backends import pick
from cupy_kernels.cpu import softmax as on_host
from cupy_kernels.gpu import softmax as in_kernels
from cupy_kernels.types import AnyArray, Array, Kept, Labels
from cupy_kernels.workspace import Workspace


def softmax(x: Array, work: Workspace) -> Array:
    """(..., k) in, probabilities of the same shape out, valid until the next call."""
    return pick(x, on_host.softmax, in_kernels.softmax)(x, work)


def softmax_backward(dy: Array, p: Array, work: Workspace) -> Array:
    """dx = p * (dy - sum(dy * p)), the sum over the last axis."""
    return pick(dy, on_host.softmax_backward, in_kernels.softmax_backward)(dy, p, work)


def whole_labels(values: AnyArray, classes: int, ignored: int | None, work: Workspace) -> Labels:
    """Labels of any type as int64.

    Each must be whole and in [0, classes), unless it is the ignored one. On the host one that is
    not raises ValueError. In kernels nobody looks: it makes the loss NaN.
    """
    body = pick(values, on_host.whole_labels, in_kernels.whole_labels)
    return body(values, classes, ignored, work)


def cross_entropy(
    x: Array, labels: Labels, ignored: int | None, divisor: float | None, work: Workspace
) -> tuple[AnyArray, Kept]:
    """The loss of scores x, of no axes, and what `cross_entropy_backward` wants."""
    body = pick(x, on_host.cross_entropy, in_kernels.cross_entropy)
    return body(x, labels, ignored, divisor, work)


def cross_entropy_backward(like: Array, kept: Kept, weight: float, work: Workspace) -> Array:
    """`weight` times the gradient by the scores, which `like` is an array of."""
    body = pick(like, on_host.cross_entropy_backward, in_kernels.cross_entropy_backward)
    return body(kept, weight, work)


def accuracy(
    scores: Array, labels: Labels, ignored: int | None, top_k: int, work: Workspace
) -> AnyArray:
    """The share, of no axes, of the counted rows whose true class is among the `top_k` best.

    A class that scores as much as the true one is taken to be better.
    """
    body = pick(scores, on_host.accuracy, in_kernels.accuracy)
    return body(scores, labels, ignored, top_k, work)


def class_accuracies(
    scores: Array, labels: Labels, ignored: int | None, top_k: int, work: Workspace
) -> Array:
    """The same by true class: (classes,), 0 where a class has no rows."""
    body = pick(scores, on_host.class_accuracies, in_kernels.class_accuracies)
    return body(scores, labels, ignored, top_k, work)
