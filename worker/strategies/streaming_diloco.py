"""Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512): fragments, merged over all workers.

The reports of all workers on a fragment are merged, with Nesterov momentum, while they continue.
"""

from shards.aggregation import Quorum
from worker.strategies.fragments import EMBEDDINGS, Fragments


class StreamingDiLoCo(Fragments, frozen=True, tag="streaming_diloco", kw_only=True):
    """Exchange each dense table every `h` steps; its reports are merged when all workers have sent
    theirs.

    The slowest worker sets the pace of the exchanges: others wait for it before the next exchange
    of the same fragment.
    """

    def quorum(self, workers: int) -> Quorum:
        return Quorum(
            size=None,
            overlap=self.overlap,
            grace=0.0,
            average=self.average,
            mean_tables=(EMBEDDINGS,),
        )
