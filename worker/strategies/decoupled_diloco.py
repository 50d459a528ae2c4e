"""Decoupled DiLoCo (arXiv 2604.21428): fragments, merged without waiting for slow workers.

The first `k` reports on a fragment make a quorum. More may come within a grace period, which ends
before a worker needs the merged fragment; a later one is dropped, and its worker gets the fragment.
"""

from typing import Self

from shards import argument_checks
from shards.aggregation import Quorum
from shards.errors import BadInput
from worker.strategies.base import at_least, check_options
from worker.strategies.fragments import EMBEDDINGS, Fragments


class DecoupledDiLoCo(Fragments, frozen=True, tag="decoupled_diloco", kw_only=True):
    """Exchange each dense table every `h` steps; its reports are merged when `k` have come.

    `grace` is the share of the time that is left until a worker needs the merged table in which
    more reports may come. `speeds` are steps a second by worker, in any unit; a worker not in it is
    as fast as the fastest. In a text: decoupled_diloco:speeds=worker-0/1+worker-1/2.
    """

    k: int = 1
    grace: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self, k=at_least(1), grace=argument_checks.number_to_1)

    def for_workers(self, workers: int) -> Self:
        if self.k > workers:
            raise BadInput(
                f"strategy {self.name}: k", expected=f"at most {workers} workers", got=self.k
            )
        return self

    def quorum(self, workers: int) -> Quorum:
        return Quorum(
            size=self.k,
            overlap=self.overlap,
            grace=self.grace,
            average=self.average,
            mean_tables=(EMBEDDINGS,),
        )
