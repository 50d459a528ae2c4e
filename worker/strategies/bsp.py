"""Bulk-synchronous training: all workers step from the same weights, the shards apply the mean.

With bound 0 a pull waits until every registered worker's push of the previous step has arrived. The
round is then one update with the mean gradient. It equals one worker with a batch as large as all
batches together, and is the baseline that asynchrony is measured against.

With b backup workers the shards do not wait for the slowest (Chen et al. 2016, arXiv 1604.00981):
a round of W workers is the mean of its first W - b pushes. Later pushes of that round are
acknowledged, counted and dropped, and their workers continue from the new weights. So the same slow
workers' data is dropped again and again.
"""

from typing import ClassVar

from shards.aggregation import Round, ServerHalf
from shards.errors import BadInput
from worker.strategies.base import Base, at_least, check_options


class BSP(Base, frozen=True, tag="bsp", kw_only=True):
    """Push every step, wait for all but `b` workers, average."""

    b: int = 0

    synchronous: ClassVar[bool] = True
    usual_bound: ClassVar[int | None] = 0

    def __post_init__(self) -> None:
        check_options(self, b=at_least(0))

    def for_workers(self, workers: int) -> "BSP":
        if self.b and self.b >= workers:
            raise BadInput("strategy bsp: b", expected=f"fewer than {workers} workers", got=self.b)
        return self

    def server(self, workers: int) -> ServerHalf:
        return ServerHalf(merge=Round(self.b))
