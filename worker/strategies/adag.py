"""Accumulated gradient normalisation, ADAG (Hermans et al. 2017, arXiv 1710.02368).

    at first:   pull w;  x = w
    each step:  x -= rate * gradient at x
    at the end of a window:  push (w - x) / window          the shards: w -= (w - x) / window

A contribution is as large as one step, whatever the length of the window, so a longer window does
not make the shards' steps larger; it makes them better directed.
"""

import numpy as np

from shards.aggregation import ServerHalf
from shards.rules import Rule
from worker.strategies.base import Floats, Local, Windowed, check_options, positive, window_steps


class ADAG(Windowed, frozen=True, tag="adag", kw_only=True):
    """Take `window` local steps, push their mean; the shards count it with `scale`, by default 1 or
    with W > window workers window / W.
    """

    window: int = 12
    scale: float | None = None

    def __post_init__(self) -> None:
        check_options(self, window=window_steps)
        if self.scale is not None:
            check_options(self, scale=positive)

    @property
    def window_steps(self) -> int:
        return self.window

    def server(self, workers: int) -> ServerHalf:
        scale = min(1.0, self.window / workers) if self.scale is None else self.scale
        return ServerHalf(rate=1.0, scale=scale)

    def notices(self, workers: int, rule: Rule) -> tuple[str, ...]:
        inherited = super().notices(workers, rule)
        if self.scale is not None or workers <= self.window:
            return inherited
        scaled = (
            f"strategy {self.name}: each push counts {self.window}/{workers}, because the pushes of"
            f" {workers} workers add up to more than one window of {self.window} steps, and a rate"
            f" tuned for one worker may diverge; {self.name}:scale=1 keeps it as it is"
        )
        return scaled, *inherited

    def contribution(self, local: Local) -> Floats:
        delta = super().contribution(local)
        delta /= np.float32(local.steps)
        return delta
