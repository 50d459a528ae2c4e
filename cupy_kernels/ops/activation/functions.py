"""The elementwise functions of a network, as values; `activation` computes them.

A function's kernel has the name of the class, and its fields as parameters.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Relu:
    """x above 0, slope * x elsewhere."""

    slope: float = 0.0


@dataclass(frozen=True)
class Sigmoid:
    """1 / (1 + e^-x)."""


@dataclass(frozen=True)
class Tanh:
    """The hyperbolic tangent."""


@dataclass(frozen=True)
class Elu:
    """x above 0, alpha * (e^x - 1) elsewhere, for an alpha of at least 0 (Clevert et al. 2016)."""

    alpha: float = 1.0


@dataclass(frozen=True)
class Swish:
    """x / (1 + e^(-beta x)) (Ramachandran et al. 2017)."""

    beta: float = 1.0


@dataclass(frozen=True)
class Bnll:
    """log(1 + e^x), without overflow."""


@dataclass(frozen=True)
class Power:
    """(shift + scale * x)^power."""

    power: float = 1.0
    scale: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True)
class Exp:
    """e^(inner * x + outer); a base b is inner = scale * ln b, outer = shift * ln b."""

    inner: float = 1.0
    outer: float = 0.0


@dataclass(frozen=True)
class Log:
    """factor * ln(shift + scale * x); a base b is factor = 1 / ln b."""

    scale: float = 1.0
    shift: float = 0.0
    factor: float = 1.0


@dataclass(frozen=True)
class Abs:
    """The absolute value; its gradient at 0 is 0."""


@dataclass(frozen=True)
class Clip:
    """x limited to [low, high]; the gradient is dy within, both ends included."""

    low: float
    high: float


@dataclass(frozen=True)
class Threshold:
    """1 above the limit, 0 elsewhere; it has no gradient."""

    limit: float = 0.0


Smooth = Relu | Sigmoid | Tanh | Elu | Swish | Bnll | Power | Exp | Log | Abs | Clip
Function = Smooth | Threshold
