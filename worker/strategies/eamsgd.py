"""Elastic averaging momentum SGD (Zhang, Choromanska and LeCun 2015).

    each step:  v = momentum * v - rate * gradient at x + momentum * v;  x += v
    each tau steps:  pull c;  e = alpha * (x - c);  x -= e;  push -e          the shards: c += e

It is EASGD with Nesterov's momentum in the local steps; the momentum never leaves its worker.
"""

from typing import ClassVar

import numpy as np

from worker.strategies.base import Floats, Local, check_options, share
from worker.strategies.easgd import EASGD


class EAMSGD(EASGD, frozen=True, tag="eamsgd", kw_only=True):
    """EASGD with local steps of Nesterov momentum."""

    momentum: float = 0.99

    takes_optimizer: ClassVar[bool] = False
    keeps: ClassVar[tuple[str, ...]] = ("weights", "x", "v")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self, momentum=share)

    def local_step(self, local: Local, gradient: Floats, rate: float) -> None:
        momentum, v = np.float32(self.momentum), local.slot("v")
        if "x" not in local.slots:
            local.slots["x"] = local.pulled.copy()
        x = local.slots["x"]
        local.add_decay(gradient)
        for buffer in local.buffers:
            x[buffer] -= gradient[buffer]
        gradient *= np.float32(rate) * local.multipliers
        v *= momentum
        v -= gradient
        x += v
        if "force" in local.slots:
            x += local.slots.pop("force")
        ahead = local.own()  # the next gradient is computed at x + momentum * v
        np.multiply(v, momentum, ahead)
        ahead += x
        local.weights = ahead

    def _position(self, local: Local) -> Floats:
        return local.slots["x"]
