"""Bulk-synchronous training: all workers step from the same weights, the shards apply the mean.

With bound 0 a pull waits until every registered worker's push of the previous step has arrived. The
round is then one update with the mean gradient (a shard's `Merge.ROUND`). It equals one worker with
a batch as large as all batches together, and is the baseline that asynchrony is measured against.
"""

from typing import ClassVar

from shards.errors import BadInput
from shards.spec import Merge
from worker.strategies.base import Base


class BSP(Base, frozen=True, tag="bsp", kw_only=True):
    """Push every step, wait for all, average."""

    merge: ClassVar[Merge] = Merge.ROUND

    def check(self, bound: int | None, prefetch: bool) -> None:
        if bound != 0 or prefetch:
            raise BadInput(
                "strategy bsp: expected staleness bound 0 and no prefetch,"
                f" got {'no bound' if bound is None else bound}"
                f"{' with prefetch' if prefetch else ''}"
            )
