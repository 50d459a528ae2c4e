"""Local SGD (Stich 2019, arXiv 1805.09767): parallel runs, averaged now and then.

    at first:   pull w;  x = w
    each step:  x -= rate * gradient at x
    each h steps:  push w - x          the shards: w -= mean of all workers' w - x

So w becomes the mean of the workers' weights. With h = 1 it is synchronous SGD.
"""

from typing import ClassVar

from shards.aggregation import Round, ServerHalf
from worker.strategies.base import Windowed, check_options, window_steps


class LocalSGD(Windowed, frozen=True, tag="local_sgd", kw_only=True):
    """Take `h` local steps, then average the weights of all workers."""

    h: int = 10

    synchronous: ClassVar[bool] = True
    usual_bound: ClassVar[int | None] = 0

    def __post_init__(self) -> None:
        check_options(self, h=window_steps)

    @property
    def window_steps(self) -> int:
        return self.h

    def server(self, workers: int) -> ServerHalf:
        return ServerHalf(merge=Round(), rate=1.0)
