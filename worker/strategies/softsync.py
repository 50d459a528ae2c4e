"""n-softsync (Zhang et al. 2016, arXiv 1511.05950).

    each step:  pull w;  g = gradient at w;  push g

The shards collect W/n gradients of the W workers and apply their mean, at the rate divided by n. A
gradient is then about n updates old, so n = 1 is close to a synchronous mean, and n = W is
asynchronous training at a rate divided by the staleness.
"""

from shards.aggregation import Buffer, ServerHalf
from shards.errors import BadInput
from worker.strategies.base import Base, at_least, check_options


class Softsync(Base, frozen=True, tag="softsync", kw_only=True):
    """Push every step; the shards apply the mean of every W/n pushes at rate/n."""

    n: int = 1

    def __post_init__(self) -> None:
        check_options(self, n=at_least(1))

    @property
    def plain(self) -> bool:
        return True

    def for_workers(self, workers: int) -> "Softsync":
        if self.n > workers:
            raise BadInput(
                "strategy softsync: n", expected=f"at most {workers} workers", got=self.n
            )
        return self

    def server(self, workers: int) -> ServerHalf:
        return ServerHalf(merge=Buffer(max(1, workers // self.n)), scale=1 / self.n)
