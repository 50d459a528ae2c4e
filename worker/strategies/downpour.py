"""Downpour SGD (Dean et al. 2012).

A worker fetches the weights every `n_fetch` steps and pushes its accumulated gradients every
`n_push` steps; between fetches it also applies each gradient to its own copy of the weights:

    every n_fetch steps:  w <- the shards' weights
    each step:            g = gradient at w;  sum += g;  w -= rate * g   (if w is used again)
    every n_push steps:   push sum;  sum = 0          the shards: w -= scale * rate * sum

The shards apply each push as it arrives. Only fetches pass the staleness gate, so each requests the
clock of the last step that its weights will serve: the staleness bound then holds for the steps in
between, too. Warm start: one worker takes the first `warm_steps` alone, so that the others never
push gradients of untrained weights.
"""

import numpy as np
from msgspec import structs

from shards import argument_checks
from shards.messages import MAX_STEPS
from worker.strategies.base import Asynchronous, Floats, Local


class Downpour(Asynchronous, frozen=True, tag="downpour", kw_only=True):
    """Accumulate `n_push` steps, fetch every `n_fetch`; asynchronous up to the bound."""

    n_push: int = 1
    n_fetch: int = 1
    warm_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least, most in (
            ("n_push", 1, MAX_STEPS),
            ("n_fetch", 1, None),
            ("warm_steps", 0, None),
        ):
            value = argument_checks.whole(name, getattr(self, name), least, most)
            structs.force_setattr(self, name, value)

    @property
    def push_period(self) -> int:
        return self.n_push

    @property
    def fetch_period(self) -> int:
        return self.n_fetch

    @property
    def warm_up(self) -> int:
        return self.warm_steps

    @property
    def plain(self) -> bool:
        return self.n_push == self.n_fetch == 1

    def local_step(self, local: Local, gradient: Floats, rate: float) -> None:
        if self.n_fetch > 1:
            step = np.float32(rate) * local.multipliers * gradient
            for buffer in local.buffers:
                step[buffer] = gradient[buffer]
            local.weights = np.subtract(local.weights, step, step)  # never into the pulled array
        super().local_step(local, gradient, rate)
