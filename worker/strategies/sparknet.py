"""SparkNet (Moritz et al. 2015, arXiv 1511.06051): local SGD with Caffe's solver.

    at first:   pull w;  x = w
    each step:  v = momentum * v + rate * gradient at x;  x -= v
    each tau steps:  push w - x          the shards: w -= mean of all workers' w - x

The momentum v stays with its worker from window to window, and is never averaged. The paper reads
each window from a random place of the worker's data; here the worker's rows are shuffled, so tau
consecutive batches are such a window.
"""

from typing import ClassVar

from shards.aggregation import Round, ServerHalf
from shards.rules import Momentum, Rule
from worker.strategies.base import Windowed, check_options, share, window_steps


class SparkNet(Windowed, frozen=True, tag="sparknet", kw_only=True):
    """Take `tau` local steps with momentum, then average the weights of all workers."""

    tau: int = 10
    momentum: float = 0.9

    synchronous: ClassVar[bool] = True
    usual_bound: ClassVar[int | None] = 0
    keeps: ClassVar[tuple[str, ...]] = Momentum.slot_names

    def __post_init__(self) -> None:
        check_options(self, tau=window_steps, momentum=share)

    @property
    def window_steps(self) -> int:
        return self.tau

    def inner_rule(self) -> Rule:
        return Momentum(self.momentum)

    def server(self, workers: int) -> ServerHalf:
        return ServerHalf(merge=Round(), rate=1.0)
