"""Accumulated gradient normalisation, ADAG (Hermans et al. 2017, arXiv 1710.02368).

    at first:   pull w;  x = w
    each step:  x -= rate * gradient at x
    at the end of a window:  push (w - x) / window          the shards: w -= (w - x) / window

A contribution is as large as one step, whatever the length of the window, so a longer window does
not make the shards' steps larger; it makes them better directed.
"""

import numpy as np

from shards.aggregation import ServerHalf
from worker.strategies.base import Floats, Local, Windowed, at_least, check_options


class ADAG(Windowed, frozen=True, tag="adag", kw_only=True):
    """Take `window` local steps, push their mean."""

    window: int = 12

    def __post_init__(self) -> None:
        check_options(self, window=at_least(1))

    @property
    def window_steps(self) -> int:
        return self.window

    def server(self, workers: int) -> ServerHalf:
        return ServerHalf(rate=1.0)

    def contribution(self, local: Local) -> Floats:
        delta = super().contribution(local)
        delta /= np.float32(local.steps)
        return delta
