"""DiLoCo (Douillard et al. 2023, arXiv 2311.08105).

    at first:   pull w;  x = w
    each step:  x by AdamW; its moments stay with their worker
    each h steps:  push w - x          the shards: Nesterov momentum with the mean of all w - x

The outer rate and momentum are 0.7 and 0.9 unless given. They suit hundreds of local steps; after
only a few, w moves too far, because each delta is small and always points the same way.
"""

from typing import ClassVar, Self

from shards.aggregation import Round, ServerHalf
from shards.errors import BadInput
from shards.rules import AdamW, Nesterov, Rule
from worker.strategies.base import (
    Floats,
    Local,
    Windowed,
    at_least,
    check_options,
    positive,
    share,
    window_steps,
)


class DiLoCo(Windowed, frozen=True, tag="diloco", kw_only=True):
    """Take `h` local steps of AdamW; the shards follow the mean delta with Nesterov momentum.

    `inner_lr` is the rate of the local steps (None: the job's), `weight_decay` AdamW's. A round of
    W workers is the mean of its first W - `b` deltas, as in BSP with backup workers; later ones are
    dropped.
    """

    h: int = 500
    outer_lr: float = 0.7
    momentum: float = 0.9
    inner_lr: float | None = None
    weight_decay: float = 0.1
    b: int = 0

    synchronous: ClassVar[bool] = True
    usual_bound: ClassVar[int | None] = 0
    keeps: ClassVar[tuple[str, ...]] = AdamW.slot_names

    def __post_init__(self) -> None:
        check_options(
            self,
            h=window_steps,
            outer_lr=positive,
            momentum=share,
            weight_decay=share,
            b=at_least(0),
        )
        if self.inner_lr is not None:
            check_options(self, inner_lr=positive)

    def for_workers(self, workers: int) -> Self:
        if self.b and self.b >= workers:
            raise BadInput(
                "strategy diloco: b", expected=f"fewer than {workers} workers", got=self.b
            )
        return self

    @property
    def own_rate(self) -> bool:
        return self.inner_lr is not None

    @property
    def window_steps(self) -> int:
        return self.h

    def inner_rule(self) -> Rule:
        return AdamW(weight_decay=self.weight_decay)

    def local_step(self, local: Local, gradient: Floats, rate: float) -> None:
        inner = rate if self.inner_lr is None else self.inner_lr
        super().local_step(local, gradient, inner)

    def server(self, workers: int) -> ServerHalf:
        return ServerHalf(merge=Round(self.b), rule=Nesterov(self.momentum), rate=self.outer_lr)
