"""HeLoCo (Al Asif et al. 2026, arXiv 2606.00271): an update that depends on whole tensors.

The delta D of a tensor is turned towards the momentum m, or freed of what opposes it. The result is
G = part*D + along*m, and two numbers for each tensor are all that the fused loops and the kernel
need. They follow from three sums over the tensor, in float64: a product of two float32 is exact
there, and NumPy's order of a sum depends on its length alone, so every host makes the same bits. A
device's arrays are copied to the host for the sums.
"""

from math import sqrt
from typing import NamedTuple

import numpy as np

from cupy_kernels import compilation
from cupy_kernels.backends import as_host
from cupy_kernels.ops.updates.cpu import add_decay
from cupy_kernels.types import BLOCK, Array

_LEAST = 2.0**-63
"""The shortest length that has a direction: the ratio of any two longer ones is a float32."""


class Correction(NamedTuple):
    """The constants of the correction, by the paper's names."""

    c_ok: float
    k_s: float
    k_d: float
    beta_max: float
    kappa: float

    def shares(self, dd: float, dm: float, mm: float) -> tuple[float, float]:
        """The shares of D and of m in G, from the products D.D, D.m and m.m of a tensor."""
        # Without a direction of both there is no angle. One of denormals counts as none: its share
        # would overflow in float32.
        if sqrt(min(dd, mm)) < _LEAST:
            return 1.0, 0.0
        length, ratio = sqrt(dd), sqrt(dd) / sqrt(mm)
        cosine = dm / length / sqrt(mm)
        confidence = length / (length + self.kappa * sqrt(mm))
        if cosine >= self.c_ok:
            return 1.0, 0.0
        if cosine < 0:
            beta = min(-self.k_s * cosine * confidence, self.beta_max)
            return 1.0, -beta * cosine * ratio
        turn = min(self.k_d * (1 - cosine) * confidence, 1.0)
        norm = sqrt((1 - turn) ** 2 + 2 * turn * (1 - turn) * cosine + turn**2)
        return (1 - turn) / norm, turn * ratio / norm


def dot_products(
    weights: Array, gradient: Array, momentum: Array, decay: np.float32, *, l1: bool
) -> tuple[float, float, float]:
    """The products D.D, D.m and m.m of a gradient D, with its decay, and a momentum m."""
    decayed = compilation.plain(add_decay)
    weights, gradient, momentum = map(as_host, (weights, gradient, momentum))
    dd = dm = mm = 0.0
    with np.errstate(all="ignore"):  # what overflows does so in the update as well
        for low in range(0, gradient.size, BLOCK):
            part = slice(low, low + BLOCK)
            d = decayed(gradient[part], weights[part], decay, l1).astype(np.float64)
            m = momentum[part].astype(np.float64)
            dd += float((d * d).sum())
            dm += float((d * m).sum())
            mm += float((m * m).sum())
    return dd, dm, mm
