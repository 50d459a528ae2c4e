"""FedBuff (Nguyen et al. 2022, arXiv 2106.06639).

    at first:   pull w;  x = w
    each step:  x -= rate * gradient at x
    at the end of a window:  push w - x          the shards: s += (w - x) / sqrt(1 + t)
    at the k-th push:  w -= outer_lr * s / k;  s = 0

t is the staleness of the push: the updates, of k pushes each, since the worker read w. When the
last worker leaves, the shards apply what the buffer holds.
"""

from shards.aggregation import Buffer, ServerHalf
from worker.strategies.base import Windowed, at_least, check_options, positive, window_steps


class FedBuff(Windowed, frozen=True, tag="fedbuff", kw_only=True):
    """Take `window` local steps, push their delta; the shards apply `k` deltas at a time."""

    k: int = 10
    outer_lr: float = 1.0
    window: int = 10

    def __post_init__(self) -> None:
        check_options(self, k=at_least(1), outer_lr=positive, window=window_steps)

    @property
    def window_steps(self) -> int:
        return self.window

    def server(self, workers: int) -> ServerHalf:
        return ServerHalf(merge=Buffer(self.k), weigh="inverse_root", rate=self.outer_lr)
