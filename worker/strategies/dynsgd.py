"""DynSGD (Jiang et al. 2017).

    at first:   pull w;  x = w
    each step:  x -= rate * gradient at x
    at the end of a window:  push w - x          the shards: w -= (w - x) / (t + 1)

t is the staleness of the push. A delta that no other worker's preceded counts in full.
"""

from shards.aggregation import ServerHalf
from worker.strategies.base import Windowed, check_options, window_steps


class DynSGD(Windowed, frozen=True, tag="dynsgd", kw_only=True):
    """Take `window` local steps, push their delta; the older it is, the less it counts."""

    window: int = 5

    def __post_init__(self) -> None:
        check_options(self, window=window_steps)

    @property
    def window_steps(self) -> int:
        return self.window

    def server(self, workers: int) -> ServerHalf:
        return ServerHalf(weigh="inverse_plus_one", rate=1.0)
