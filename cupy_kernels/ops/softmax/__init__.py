"""Softmax over the last axis, the cross-entropy loss on it, and accuracy.

p = exp(x - max x) / sum exp(x - max x). Loss = -sum log(max(p[label], FLT_MIN)) / divisor, and its
gradient by x is (p - onehot(label)) / divisor, zero where the label is ignored. The divisor is a
number, or, for None, the number of rows that count, and at least 1. Scores are (rows, classes),
labels (rows,) of int64. Scalar results are arrays without axes on the device of the scores.
"""

from cupy_kernels.backends import pick
from cupy_kernels.ops.softmax import cpu, gpu
from cupy_kernels.types import AnyArray, Array, Kept, Labels
from cupy_kernels.workspace import Workspace


def softmax(x: Array, work: Workspace) -> Array:
    """The probabilities for scores (..., k), of the same shape, valid until the next call."""
    return pick(x, cpu.softmax, gpu.softmax)(x, work)


def softmax_backward(dy: Array, p: Array, work: Workspace) -> Array:
    """dx = p * (dy - sum(dy * p)), the sum over the last axis."""
    return pick(dy, cpu.softmax_backward, gpu.softmax_backward)(dy, p, work)


def whole_labels(values: AnyArray, classes: int, ignored: int | None, work: Workspace) -> Labels:
    """Labels of any type as int64.

    Each must be whole and in [0, classes), unless it is the ignored one. An invalid label raises
    ValueError on the host, with the limits and the label. Kernels do not check; an invalid label
    makes the loss NaN.
    """
    body = pick(values, cpu.whole_labels, gpu.whole_labels)
    return body(values, classes, ignored, work)


def cross_entropy(
    x: Array, labels: Labels, ignored: int | None, divisor: float | None, work: Workspace
) -> tuple[AnyArray, Kept]:
    """The loss of scores x, without axes, and the values for `cross_entropy_backward`."""
    body = pick(x, cpu.cross_entropy, gpu.cross_entropy)
    return body(x, labels, ignored, divisor, work)


def cross_entropy_backward(like: Array, saved: Kept, weight: float, work: Workspace) -> Array:
    """`weight` times the gradient by the scores; `like` is any array on their device."""
    body = pick(like, cpu.cross_entropy_backward, gpu.cross_entropy_backward)
    return body(saved, weight, work)


def accuracy(
    scores: Array, labels: Labels, ignored: int | None, top_k: int, work: Workspace
) -> AnyArray:
    """The share of the counted rows with the true class among the `top_k` best, without axes.

    A class with the same score as the true one counts as better.
    """
    body = pick(scores, cpu.accuracy, gpu.accuracy)
    return body(scores, labels, ignored, top_k, work)


def class_accuracies(
    scores: Array, labels: Labels, ignored: int | None, top_k: int, work: Workspace
) -> Array:
    """`accuracy` by true class: (classes,), 0 for a class without rows."""
    body = pick(scores, cpu.class_accuracies, gpu.class_accuracies)
    return body(scores, labels, ignored, top_k, work)
