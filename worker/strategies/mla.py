"""Asynchronous DiLoCo with momentum look-ahead, MLA (MCDC at ICLR 2025, OpenReview 4O8nzTkHPI).

The shards apply each delta D at once, and with it the step that the momentum m would take next, so
that a worker which pulls now begins where the deltas under way will soon lead:

    w -= scale * rate * (momentum * m + D);  m = momentum * m + (1 - momentum) * D

m is a mean of deltas, and not a sum as in Nesterov's rule. The paper pushes at the full rate. Eight
workers then move w too far: on MNIST they ended at the accuracy of a guess.
"""

from shards.aggregation import EACH, ServerHalf
from shards.rules import MomentumLookAhead, Rule
from worker.strategies.base import check_options, explain_scale, positive
from worker.strategies.outer_momentum import PacedWindows


class MLA(PacedWindows, frozen=True, tag="mla", kw_only=True):
    """DiLoCo without rounds: each delta is applied at once, with a step of the momentum ahead.

    `scale` multiplies the outer rate (None: 1/W). `speeds` are steps a second by worker, in any
    unit; a worker not in it is as fast as the fastest. In a text: mla:speeds=worker-0/1+worker-1/2.
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale is not None:
            check_options(self, scale=positive)

    def server(self, workers: int) -> ServerHalf:
        scale = 1 / workers if self.scale is None else self.scale
        rule = MomentumLookAhead(self.momentum)
        return ServerHalf(merge=EACH, rule=rule, rate=self.outer_lr, scale=scale)

    def notices(self, workers: int, rule: Rule) -> tuple[str, ...]:
        texts = super().notices(workers, rule)
        if workers == 1 or self.scale is not None:
            return texts
        return explain_scale(self, workers), *texts
