"""The reference for the inner product: float64, by simple loops, from the formula.

It shares no code with the fast versions, and its gradients are checked against finite differences.
"""

import numpy as np

from cupy_kernels.types import Wide


def inner_product(x: Wide, weight: Wide, bias: Wide | None) -> Wide:
    """y = x W^T + b."""
    y = np.einsum("mk,ok->mo", x, weight)
    return np.asarray(y if bias is None else y + bias)


def inner_product_backward(dy: Wide, x: Wide, weight: Wide) -> tuple[Wide, Wide, Wide]:
    """(dx, dW, db) = (dy W, dy^T x, sum of dy)."""
    return np.einsum("mo,ok->mk", dy, weight), np.einsum("mo,mk->ok", dy, x), dy.sum(axis=0)
