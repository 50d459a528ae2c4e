"""Asynchronous DiLoCo with delayed Nesterov (Liu et al. 2024, arXiv 2401.09135).

The shards apply each delta D at once, at an N-th of the rate, and the momentum at every N-th:

    w -= rate * D / N;  s += D
    each N-th push:  m = momentum * m + s / N;  w -= rate * momentum * m;  s = 0

N is the number of workers, so over a round of pushes the deltas move w by `rate` times their mean.
Applying each at the full rate, and their mean through the momentum as well, counts them twice and
diverges.
"""

from msgspec import structs

from shards.aggregation import EACH, ServerHalf
from shards.rules import DelayedNesterov
from worker.strategies.base import at_least, check_options
from worker.strategies.outer_momentum import PacedWindows


class AsyncDiLoCo(PacedWindows, frozen=True, tag="async_diloco", kw_only=True):
    """DiLoCo without rounds: each delta is applied at once, the momentum every `n` (None: W).

    `speeds` are steps a second by worker, in any unit; a worker not in it is as fast as the
    fastest. In a text: async_diloco:speeds=worker-0/1+worker-1/2.
    """

    n: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n is not None:
            check_options(self, n=at_least(1))

    def for_workers(self, workers: int) -> "AsyncDiLoCo":
        return structs.replace(self, n=workers) if self.n is None else self

    def server(self, workers: int) -> ServerHalf:
        rule = DelayedNesterov(self.momentum, workers if self.n is None else self.n)
        return ServerHalf(merge=EACH, rule=rule, rate=self.outer_lr)
