"""The update rules in float64 NumPy, as a reference for the loops and the CUDA kernels.

Each function takes float64 arrays and plain numbers, with the weight decay already added to `grad`,
and returns the new weights and slots; nothing is changed in place. Formulas follow the papers and
Caffe's documentation, and are written for clarity, not for speed.
"""

from collections.abc import Callable
from math import sqrt

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Slots = tuple[Doubles, ...]


def add_decay(grad: Doubles, weights: Doubles, decay: float, l1: bool) -> Doubles:
    """The gradient of loss + decay * penalty: half the sum of squares, or of absolute values."""
    return grad + decay * (np.sign(weights) if l1 else weights)


def sgd(weights: Doubles, grad: Doubles, _: Slots, rate: float, __: int) -> tuple[Doubles, Slots]:
    return weights - rate * grad, ()


def momentum(
    weights: Doubles, grad: Doubles, slots: Slots, rate: float, _: int, *, momentum: float
) -> tuple[Doubles, Slots]:
    velocity = momentum * slots[0] + rate * grad
    return weights - velocity, (velocity,)


def nesterov(
    weights: Doubles, grad: Doubles, slots: Slots, rate: float, _: int, *, momentum: float
) -> tuple[Doubles, Slots]:
    """The step looks ahead: it corrects by the momentum's change (Sutskever et al. 2013)."""
    velocity = momentum * slots[0] + rate * grad
    return weights - velocity - momentum * (velocity - slots[0]), (velocity,)


def adagrad(
    weights: Doubles, grad: Doubles, slots: Slots, rate: float, _: int, *, delta: float
) -> tuple[Doubles, Slots]:
    total = slots[0] + grad**2
    return weights - rate * grad / (np.sqrt(total) + delta), (total,)


def rmsprop(
    weights: Doubles,
    grad: Doubles,
    slots: Slots,
    rate: float,
    _: int,
    *,
    decay_rate: float,
    delta: float,
) -> tuple[Doubles, Slots]:
    mean = decay_rate * slots[0] + (1 - decay_rate) * grad**2
    return weights - rate * grad / (np.sqrt(mean) + delta), (mean,)


def adadelta(
    weights: Doubles,
    grad: Doubles,
    slots: Slots,
    rate: float,
    _: int,
    *,
    momentum: float,
    delta: float,
) -> tuple[Doubles, Slots]:
    mean = momentum * slots[0] + (1 - momentum) * grad**2
    step = grad * np.sqrt(slots[1] + delta) / np.sqrt(mean + delta)
    return weights - rate * step, (mean, momentum * slots[1] + (1 - momentum) * step**2)


def adam(
    weights: Doubles,
    grad: Doubles,
    slots: Slots,
    rate: float,
    count: int,
    *,
    beta1: float,
    beta2: float,
    delta: float,
) -> tuple[Doubles, Slots]:
    mean = beta1 * slots[0] + (1 - beta1) * grad
    square = beta2 * slots[1] + (1 - beta2) * grad**2
    corrected = rate * sqrt(1 - beta2**count) / (1 - beta1**count)
    return weights - corrected * mean / (np.sqrt(square) + delta), (mean, square)


def adamw(
    weights: Doubles,
    grad: Doubles,
    slots: Slots,
    rate: float,
    count: int,
    *,
    beta1: float,
    beta2: float,
    delta: float,
    weight_decay: float,
) -> tuple[Doubles, Slots]:
    """The decay is not part of the gradient, so the moments do not see it."""
    shares = {"beta1": beta1, "beta2": beta2}
    new, slots = adam(weights, grad, slots, rate, count, **shares, delta=delta)
    return new - rate * weight_decay * weights, slots


def delayed_nesterov(
    weights: Doubles,
    grad: Doubles,
    slots: Slots,
    rate: float,
    count: int,
    *,
    momentum: float,
    n: int,
) -> tuple[Doubles, Slots]:
    """Liu et al. 2024."""
    mean, total = slots[0], slots[1] + grad
    weights = weights - rate * grad / n
    if count % n:
        return weights, (mean, total)
    mean = momentum * mean + total / n
    return weights - rate * momentum * mean, (mean, np.zeros_like(total))


def mla(
    weights: Doubles, grad: Doubles, slots: Slots, rate: float, _: int, *, momentum: float
) -> tuple[Doubles, Slots]:
    """Momentum look-ahead: MCDC at ICLR 2025, OpenReview 4O8nzTkHPI."""
    ahead = momentum * slots[0]
    return weights - rate * (ahead + grad), (ahead + (1 - momentum) * grad,)


def heloco(
    weights: Doubles, grad: Doubles, slots: Slots, rate: float, _: int, *, momentum: float
) -> tuple[Doubles, Slots]:
    """The step of Al Asif et al. 2026, of a gradient that is corrected already."""
    mean = momentum * slots[0] + (1 - momentum) * grad
    return weights - rate * (grad + momentum * mean), (mean,)


def dc_asgd(
    weights: Doubles, grad: Doubles, slots: Slots, rate: float, _: int, *, strength: float
) -> tuple[Doubles, Slots]:
    """Zheng et al. 2017; the slot holds the weights that `grad` was computed from."""
    new = weights - rate * (grad + strength * grad**2 * (weights - slots[0]))
    return new, (new,)


def dc_asgd_adaptive(
    weights: Doubles,
    grad: Doubles,
    slots: Slots,
    rate: float,
    _: int,
    *,
    mean: float,
    strength: float,
    delta: float,
) -> tuple[Doubles, Slots]:
    """Delay compensation; its strength falls with the mean of the gradient's square (ibid.)."""
    square = mean * slots[1] + (1 - mean) * grad**2
    pull: Doubles = strength / np.sqrt(square + delta)
    new = weights - rate * (grad + pull * grad**2 * (weights - slots[0]))
    return new, (new, square)


REFERENCES: dict[str, Callable[..., tuple[Doubles, Slots]]] = {
    "sgd": sgd,
    "momentum": momentum,
    "nesterov": nesterov,
    "adagrad": adagrad,
    "rmsprop": rmsprop,
    "adadelta": adadelta,
    "adam": adam,
    "adamw": adamw,
    "delayed_nesterov": delayed_nesterov,
    "mla": mla,
    "heloco": heloco,
    "dc_asgd": dc_asgd,
    "dc_asgd_adaptive": dc_asgd_adaptive,
}
