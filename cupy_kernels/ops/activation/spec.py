"""Rows of `activation.cu`: functions of one element, and their gradients.

The references restate each formula in float64. A backward reference has the kernel's arguments: the
input, or the output if that is sufficient.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from cupy_kernels.kernel_spec import (
    Kernel,
    Parameter,
    Tolerance,
    over,
    reads,
    scalar,
    writes,
)
from cupy_kernels.types import Wide


def _sigmoid(x: Wide) -> Wide:
    return np.asarray(1 / (1 + np.exp(-x)))


def _channel(values: Wide, x: Wide) -> Wide:
    """The channel's value for each element of a flat x."""
    return values[np.arange(x.size) % values.size]


def _power(x: Wide, power: float, scale: float, shift: float) -> Wide:
    return np.asarray((shift + scale * x) ** float(power))


FORWARD: dict[str, Callable[..., Any]] = {
    "relu": lambda x, slope: np.where(x > 0, x, slope * x),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "elu": lambda x, alpha: np.where(x > 0, x, alpha * (np.exp(np.minimum(x, 0)) - 1)),
    "swish": lambda x, beta: x * _sigmoid(beta * x),
    "bnll": lambda x: np.logaddexp(0, x),
    "power": _power,
    "exp": lambda x, inner, outer: np.exp(inner * x + outer),
    "log": lambda x, scale, shift, factor: factor * np.log(shift + scale * x),
    "abs": np.abs,
    "clip": lambda x, low, high: np.minimum(np.maximum(x, low), high),
    "threshold": lambda x, limit: x > limit,
}

# By the input x (or the output y), the factor of dy.
DERIVATIVE: dict[str, tuple[str, Callable[..., Any]]] = {
    "relu": ("x", lambda x, slope: np.where(x > 0, 1, slope)),
    "sigmoid": ("y", lambda y: y * (1 - y)),
    "tanh": ("y", lambda y: 1 - y**2),
    "elu": ("y", lambda y, alpha: np.where(y > 0, 1, y + alpha)),
    "swish": ("x", lambda x, beta: _sigmoid(beta * x) * (1 + beta * x * _sigmoid(-beta * x))),
    "bnll": ("x", _sigmoid),
    "power": (
        "x",
        lambda x, power, scale, shift: (
            power * scale * _power(x, power - 1, scale, shift)
            if power * scale
            else np.zeros_like(x)
        ),
    ),
    "exp": ("y", lambda y, inner: inner * y),
    "log": ("x", lambda x, scale, shift, factor: factor * scale / (shift + scale * x)),
    "abs": ("x", np.sign),
    "clip": ("x", lambda x, low, high: (x >= low) & (x <= high)),
}

_SETTINGS: dict[str, tuple[str, ...]] = {
    "relu": ("slope",),
    "elu": ("alpha",),
    "swish": ("beta",),
    "power": ("power", "scale", "shift"),
    "exp": ("inner", "outer"),
    "log": ("scale", "shift", "factor"),
    "clip": ("low", "high"),
    "threshold": ("limit",),
}


def _floats(names: tuple[str, ...]) -> tuple[Parameter, ...]:
    return tuple(scalar(name, "f4") for name in names)


def _forward(name: str) -> Kernel:
    names = _SETTINGS.get(name, ())

    def evaluate(x: Wide, **others: Any) -> dict[str, Any]:
        return {"y": FORWARD[name](x, *(others[setting] for setting in names))}

    return Kernel(
        f"{name}_forward",
        "activation.cu",
        (reads("x", "n"), writes("y", "n"), *_floats(names), scalar("n")),
        over("n"),
        evaluate,
        bytes_each=8,
        tolerance=Tolerance(2e-6, 1e-6),
        in_place=(("x", "y"),),
    )


def _backward(name: str) -> Kernel:
    seen, derivative = DERIVATIVE[name]
    # The derivative in terms of the output of base^(...) does not depend on the shift.
    names = ("inner",) if name == "exp" else _SETTINGS.get(name, ())

    def evaluate(dy: Wide, **others: Any) -> dict[str, Any]:
        return {"dx": dy * derivative(others[seen], *(others[setting] for setting in names))}

    return Kernel(
        f"{name}_backward",
        "activation.cu",
        (reads("dy", "n"), reads(seen, "n"), writes("dx", "n"), *_floats(names), scalar("n")),
        over("n"),
        evaluate,
        bytes_each=12,
        tolerance=Tolerance(4e-6, 1e-6),
        in_place=(("dy", "dx"),),
    )


def _prelu_forward(x: Wide, slope: Wide, **_: Any) -> dict[str, Any]:
    return {"y": np.where(x > 0, x, _channel(slope, x) * x)}


def _prelu_backward(dy: Wide, x: Wide, slope: Wide, **_: Any) -> dict[str, Any]:
    return {"dx": np.where(x > 0, dy, _channel(slope, x) * dy)}


def _prelu_slope_terms(dy: Wide, x: Wide, **_: Any) -> dict[str, Any]:
    return {"terms": np.where(x > 0, 0, dy * x)}


ROWS = (
    *(_forward(name) for name in FORWARD),
    *(_backward(name) for name in DERIVATIVE),
    Kernel(
        "prelu_forward",
        "activation.cu",
        (
            reads("x", "n"),
            reads("slope", "channels"),
            writes("y", "n"),
            scalar("channels", "i4"),
            scalar("n"),
        ),
        over("n"),
        _prelu_forward,
        bytes_each=8,
        in_place=(("x", "y"),),
    ),
    Kernel(
        "prelu_backward",
        "activation.cu",
        (
            reads("dy", "n"),
            reads("x", "n"),
            reads("slope", "channels"),
            writes("dx", "n"),
            scalar("channels", "i4"),
            scalar("n"),
        ),
        over("n"),
        _prelu_backward,
        bytes_each=12,
        in_place=(("dy", "dx"),),
    ),
    Kernel(
        "prelu_slope_terms",
        "activation.cu",
        (reads("dy", "n"), reads("x", "n"), writes("terms", "n"), scalar("n")),
        over("n"),
        _prelu_slope_terms,
        bytes_each=12,
    ),
)
