"""DiLoCo (Douillard et al. 2023, arXiv 2311.08105).

each h steps of AdamW:  push w - x     the shards: Nesterov momentum with the mean of all w - x
"""

from typing import ClassVar, Self

from shards.aggregation import Round, ServerHalf
from shards.errors import BadInput
from shards.rules import Nesterov
from worker.strategies.base import at_least, check_options
from worker.strategies.outer_momentum import OuterMomentum


class DiLoCo(OuterMomentum, frozen=True, tag="diloco", kw_only=True):
    """Take `h` local steps of AdamW; the shards follow the mean delta with Nesterov momentum.

    `inner_lr` is the rate of the local steps (None: the job's), `weight_decay` AdamW's. A round of
    W workers is the mean of its first W - `b` deltas, as in BSP with backup workers; later ones are
    dropped.
    """

    b: int = 0

    synchronous: ClassVar[bool] = True
    usual_bound: ClassVar[int | None] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self, b=at_least(0))

    def for_workers(self, workers: int) -> Self:
        if self.b and self.b >= workers:
            raise BadInput(
                "strategy diloco: b", expected=f"fewer than {workers} workers", got=self.b
            )
        return self

    def server(self, workers: int) -> ServerHalf:
        return ServerHalf(merge=Round(self.b), rule=Nesterov(self.momentum), rate=self.outer_lr)
